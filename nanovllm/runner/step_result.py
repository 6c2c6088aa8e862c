"""The results of a step that may still be running: sampled tokens, and the log-probabilities that requests asked for.

Log-probabilities are computed in chunks, whose memory does not grow with the number of tokens.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from nanovllm.device.cuda import pinned_view
from nanovllm.offload.streams import TimedPieces
from nanovllm.plan.outputs import NO_LOGPROBS, PositionLogprobs, StepLogprobs
from nanovllm.plan.step_plan import LayerTimes
from nanovllm.runner.inputs import LogprobInputs

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


def sampled_logprobs(asked: LogprobInputs, logits: torch.Tensor, tokens: torch.Tensor) -> LogprobTensors:
    """Compute log-probabilities of the sampled tokens, int64 [S], from the logits [S, vocab_size]."""
    chunks = asked.rows.split(_num_rows(logits.shape[1]))
    return _joined(_compute(logits[rows], tokens[rows], asked.num_top) for rows in chunks)


def prompt_logprobs(
    asked: LogprobInputs, hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
) -> LogprobTensors:
    """Compute log-probabilities of the prompt tokens that the step scores, from its hidden states [T, hidden_size].

    Every rank must call this function, because computing logits is a collective.
    """
    assert asked.token_ids is not None, "prompt tokens are known"
    chunks = (column.split(_num_rows(vocab_size)) for column in (asked.rows, asked.token_ids))
    return _joined(
        _compute(compute_logits(hidden[rows]), ids, asked.num_top) for rows, ids in zip(*chunks, strict=True)
    )


def _num_rows(vocab_size: int) -> int:
    return max(1, _CHUNK_BYTES // (4 * vocab_size))


def _compute(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """logits [N, vocab_size] of any float type, token_ids int64 [N]. Does not wait for the device."""
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
    """The moment when the GPU has finished what was enqueued so far. On a CPU, where work runs when enqueued: now."""

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
        """Return the seconds between the two ends on the GPU's clock. Both must be over."""
        if self._event is None or earlier._event is None:
            return self._now_s - earlier._now_s
        return earlier._event.elapsed_time(self._event) / 1000


class StepResult:
    def __init__(
        self,
        tokens: torch.Tensor,
        sampled: LogprobTensors | None = None,
        prompt: LogprobTensors | None = None,
        end_before: StepEnd | None = None,
        timed: TimedPieces | None = None,
    ) -> None:
        """Enqueues the copies to the host. `sampled` and `prompt`: as in StepLogprobs. `end_before`: the end of the
        previous step, or None if there was none.
        """
        self._tokens = _to_host(tokens)
        self._sampled = None if sampled is None else LogprobTensors(*map(_to_host, sampled))
        self._prompt = None if prompt is None else LogprobTensors(*map(_to_host, prompt))
        self.end, self._end_before, self._timed = StepEnd(tokens.device), end_before, timed

    def is_done(self) -> bool:
        return self.end.is_over()

    def token_ids(self) -> list[int]:
        """Return one id per sampling sequence of the plan. Waits for the step."""
        self.end.wait()
        return self._tokens.tolist()

    def seconds(self) -> float | None:
        """See LaunchedStep. Call it after `token_ids`, which waits for the step."""
        return None if self._end_before is None else self.end.seconds_since(self._end_before)

    def layer_times(self) -> LayerTimes | None:
        """See LaunchedStep."""
        return None if self._timed is None else self._timed.layer_times()

    def logprobs(self) -> StepLogprobs:
        """Return the log-probabilities. Call this after `token_ids`, which waits for the step."""
        if self._sampled is None and self._prompt is None:
            return NO_LOGPROBS
        return StepLogprobs(self._sampled and self._sampled.numpy(), self._prompt and self._prompt.numpy())


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start an asynchronous copy to pinned memory. CPU tensors are returned unchanged.

    A kernel makes the copy, because the copy engine may be busy for milliseconds copying out blocks.
    """
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    if host.numel():
        torch.mul(tensor, 1, out=pinned_view(host, tensor.device))
    return host
