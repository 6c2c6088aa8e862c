"""The results of a step that may still be running: sampled tokens, and the log-probabilities that requests asked for.

Log-probabilities are computed in chunks, whose memory does not grow with the number of tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.core.cpu_split import LayerTimes
from nanovllm.core.outputs import NO_LOGPROBS, PositionLogprobs, StepLogprobs
from nanovllm.core.step_plan import StepPlan
from nanovllm.device.cuda import pinned_view
from nanovllm.kvcache.transfer.streams import Streams, TimedPiece
from nanovllm.runner.inputs import copy_to_device

_CHUNK_BYTES = 32 << 20  # fp32 logits that are read at once


class LogprobTensors(NamedTuple):
    """PositionLogprobs as tensors, on the device or in pinned memory."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def numpy(self) -> PositionLogprobs:
        return PositionLogprobs(*(tensor.numpy() for tensor in self))


def sampled_logprobs(plan: StepPlan, logits: torch.Tensor, tokens: torch.Tensor) -> LogprobTensors | None:
    """Compute those of the sampled tokens, int64 [S], from the logits [S, vocab_size]; None if nobody asks for them."""
    asking = [step.num_logprobs for step in plan.sequences if step.sampling is not None]
    if all(num_logprobs is None for num_logprobs in asking):
        return None
    num_rows = [step.num_sampled for step in plan.sequences if step.sampling is not None]
    rows = np.flatnonzero(np.repeat([num_logprobs is not None for num_logprobs in asking], num_rows))
    num_top = max(num_logprobs or 0 for num_logprobs in asking)
    (on_device,) = copy_to_device([rows], logits.device)
    chunks = (_compute(logits[chunk], tokens[chunk], num_top) for chunk in on_device.split(_num_rows(logits.shape[1])))
    return _joined(chunks)


def prompt_logprobs(
    plan: StepPlan, hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
) -> LogprobTensors | None:
    """Compute those of the prompt tokens that the step scores, from its hidden states [T, hidden_size]; None if none.

    Every rank must call it, because computing logits is a collective.
    """
    scores = [(step, step.scores) for step in plan.sequences if step.scores is not None]
    if not scores:
        return None
    first_tokens = np.cumsum([0, *(step.num_tokens for step in plan.sequences)])
    starts = [first for first, step in zip(first_tokens, plan.sequences, strict=False) if step.scores is not None]
    rows = [
        first + score.start + np.arange(len(score.target_ids)) for first, (_, score) in zip(starts, scores, strict=True)
    ]
    targets = np.concatenate([score.target_ids for _, score in scores])
    num_top = max(score.num_logprobs for _, score in scores)
    row_ids, target_ids = copy_to_device([np.concatenate(rows), targets], hidden.device)
    size = _num_rows(vocab_size)
    chunks = zip(row_ids.split(size), target_ids.split(size), strict=True)
    return _joined(_compute(compute_logits(hidden[chunk]), ids, num_top) for chunk, ids in chunks)


def _num_rows(vocab_size: int) -> int:
    return max(1, _CHUNK_BYTES // (4 * vocab_size))


def _compute(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """logits [N, vocab_size] of any float type, token_ids int64 [N]. Waits for nothing."""
    values = logits.float()
    log_total = values.logsumexp(dim=-1, keepdim=True)
    # An invalid token's request is about to end. While kernels are only compiled, tokens can be anything.
    own = values.gather(1, token_ids.clamp(0, values.shape[1] - 1)[:, None])
    ranks = (values > own).sum(dim=-1) + 1
    top = values.topk(min(num_top, values.shape[1]), dim=-1)
    return LogprobTensors(token_ids, (own - log_total)[:, 0], ranks, top.indices, top.values - log_total)


def _joined(chunks: Iterator[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


class StepEnd:
    """The moment in which the GPU has done what was enqueued so far. On a CPU, where everything runs at once: now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:
            self._now_s = time.perf_counter()

    def is_over(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "StepEnd") -> float:
        """On the GPU's clock. Call it when both are over."""
        if self._event is None or earlier._event is None:
            return self._now_s - earlier._now_s
        return earlier._event.elapsed_time(self._event) / 1000


class StepTimes(NamedTuple):
    """The pieces of a step that are timed: groups that are streamed, and the CPU's attention in a layer."""

    streams: Streams
    link: Sequence[TimedPiece]
    cpu: Sequence[TimedPiece]

    def layer_times(self) -> LayerTimes:
        """Call it when the step is done."""
        link, cpu = (
            [
                (piece.num_tokens, s)
                for piece in timed
                if (s := self.streams.seconds(piece.start, piece.end)) is not None
            ]
            for timed in (self.link, self.cpu)
        )
        num_tokens, seconds = zip(*link, strict=True) if link else ((), ())
        return LayerTimes(
            (fmean(num_tokens), fmean(seconds)) if link else None, fmean(s for _, s in cpu) if cpu else None
        )


class StepResult:
    def __init__(
        self,
        tokens: torch.Tensor,
        sampled: LogprobTensors | None = None,
        prompt: LogprobTensors | None = None,
        end_before: StepEnd | None = None,
        times: StepTimes | None = None,
    ) -> None:
        """Enqueues the copies to the host. `sampled` and `prompt`: as in StepLogprobs. `end_before`: of the step that
        was launched before this one; None if there was none.
        """
        self._tokens = _to_host(tokens)
        self._sampled = None if sampled is None else LogprobTensors(*map(_to_host, sampled))
        self._prompt = None if prompt is None else LogprobTensors(*map(_to_host, prompt))
        self.end, self._end_before, self._times = StepEnd(tokens.device), end_before, times

    def is_done(self) -> bool:
        return self.end.is_over()

    def token_ids(self) -> list[int]:
        """One id per sampling sequence of the plan. Waits for the step."""
        self.end.wait()
        return self._tokens.tolist()

    def seconds(self) -> float | None:
        """See LaunchedStep. Call it after `token_ids`, which waits for the step."""
        return None if self._end_before is None else self.end.seconds_since(self._end_before)

    def layer_times(self) -> LayerTimes | None:
        """See LaunchedStep."""
        return None if self._times is None else self._times.layer_times()

    def logprobs(self) -> StepLogprobs:
        """Call it after `token_ids`, which waits for the step."""
        if self._sampled is None and self._prompt is None:
            return NO_LOGPROBS
        return StepLogprobs(self._sampled and self._sampled.numpy(), self._prompt and self._prompt.numpy())


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, which is on its way; on a CPU the tensor itself.

    A kernel writes it. A copy would wait for the copy engine, which may be busy for milliseconds with blocks that are
    copied out.
    """
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    if host.numel():
        torch.mul(tensor, 1, out=pinned_view(host, tensor.device))
    return host
