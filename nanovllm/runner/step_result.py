"""The sampled tokens of a step that may still be running, and the log-probabilities that requests asked for."""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from nanovllm.core.cpu_split import LayerTimes
from nanovllm.core.logprobs import NO_LOGPROBS, StepLogprobs
from nanovllm.device.pinned_view import pinned_view
from nanovllm.kvcache.transfer.streams import Streams, TimedPiece
from nanovllm.runner.logprobs import LogprobTensors


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
