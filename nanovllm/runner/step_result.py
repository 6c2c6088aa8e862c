"""The sampled tokens of a step that may still be running."""

import torch


class StepResult:
    def __init__(self, tokens: torch.Tensor) -> None:
        self._host = tokens
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def token_ids(self) -> list[int]:
        """One id per sampling sequence of the plan. Waits for the step."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
