"""What streamed decode steps get of the link."""

import time
from collections.abc import Callable
from typing import Any

from nanovllm.core.step_plan import StepPlan


class LinkMeter:
    """The rate at which streamed decode steps bring in blocks: the bytes they load, over the time they take.

    A step's time is that between its tokens' arrival on the host and those of the step before. It counts only where
    both are decode steps that stream, so that no prefill is in it and work of one step that runs during another is
    counted once. Everything in it counts: the share of the link says what decoding makes of it, idle moments and
    a caller that waits between two steps included. Nothing is waited for; the host has the tokens anyway.
    """

    def __init__(self, block_bytes: int, block_size: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._block_bytes, self._block_size, self._now_s = block_bytes, block_size, now_s
        self._num_bytes = 0
        self._seconds = 0.0
        self._last_end_s: float | None = None  # of the step before, if it was one that streams

    def step_ended(self, plan: StepPlan) -> None:
        """Called for every step, in order, when its tokens are there. Hot."""
        if not (plan.is_decode and plan.moves.streamed):
            self._last_end_s = None
            return
        end_s = self._now_s()
        if self._last_end_s is not None:
            num_blocks = sum(len(group.cpu_block_ids) for group in plan.moves.streamed)
            num_tokens = num_blocks * self._block_size + sum(load.num_tokens for load in plan.moves.loads)
            self._num_bytes += self._block_bytes * num_tokens // self._block_size
            self._seconds += end_s - self._last_end_s
        self._last_end_s = end_s

    def pause(self) -> None:
        """The engine has nothing to do; the time until the next step is nobody's."""
        self._last_end_s = None

    def stats(self, link_byte_per_s: float | None) -> dict[str, Any]:
        """load_byte_per_s: None before the second streamed decode step. link_share: of `link_byte_per_s`."""
        achieved = self._num_bytes / self._seconds if self._seconds else None
        share = achieved / link_byte_per_s if achieved and link_byte_per_s else None
        return {"load_byte_per_s": achieved, "link_share": share}
