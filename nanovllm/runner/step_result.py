"""The sampled tokens of a step that may still be running, and the log-probabilities that requests asked for."""

import torch

from nanovllm.core.logprobs import NO_LOGPROBS, StepLogprobs
from nanovllm.runner.logprobs import LogprobTensors


class StepResult:
    def __init__(
        self, tokens: torch.Tensor, sampled: LogprobTensors | None = None, prompt: LogprobTensors | None = None
    ) -> None:
        """Enqueues the copies to the host. `sampled` and `prompt`: as in StepLogprobs."""
        self._tokens = _to_host(tokens)
        self._sampled = None if sampled is None else LogprobTensors(*map(_to_host, sampled))
        self._prompt = None if prompt is None else LogprobTensors(*map(_to_host, prompt))
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def token_ids(self) -> list[int]:
        """One id per sampling sequence of the plan. Waits for the step."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.tolist()

    def logprobs(self) -> StepLogprobs:
        """Call it after `token_ids`, which waits for the step."""
        if self._sampled is None and self._prompt is None:
            return NO_LOGPROBS
        return StepLogprobs(self._sampled and self._sampled.numpy(), self._prompt and self._prompt.numpy())


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, which is on its way; on a CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
