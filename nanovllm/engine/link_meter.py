"""LinkMeter: how much of the link's bandwidth streamed decode steps use."""

import time
from collections.abc import Callable
from typing import Any

from nanovllm.core.step_plan import StepPlan


class LinkMeter:
    """The rate at which streamed decode steps load blocks: the bytes they load, divided by the time they take.

    A step's time runs from the arrival of the previous step's tokens on the host to the arrival of its own. It counts
    only if both are decode steps that stream: then it contains no prefill, and work that overlaps two steps is counted
    once. The time includes moments in which the link is idle, even those in which the caller waits between two steps,
    because the figure is meant to show how much of the link decoding uses in practice. Measuring adds no wait, because
    the host reads the tokens anyway.
    """

    def __init__(self, block_bytes: int, block_size: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._block_bytes, self._block_size, self._now_s = block_bytes, block_size, now_s
        self._num_bytes = 0
        self._seconds = 0.0
        self._last_end_s: float | None = None  # when the step before ended, if it was a decode step that streams

    def step_ended(self, plan: StepPlan) -> None:
        """Called for every step, in order, when its tokens have arrived. Hot."""
        if not (plan.is_decode and plan.moves.streamed):
            self._last_end_s = None
            return
        end_s = self._now_s()
        if self._last_end_s is not None:
            num_tokens = sum(group.num_tokens(self._block_size) for group in plan.moves.streamed)
            num_tokens += sum(load.num_tokens for load in plan.moves.loads)
            self._num_bytes += self._block_bytes * num_tokens // self._block_size
            self._seconds += end_s - self._last_end_s
        self._last_end_s = end_s

    def pause(self) -> None:
        """The engine has run out of requests. Do not count the time until the next step."""
        self._last_end_s = None

    def stats(self, link_byte_per_s: float | None) -> dict[str, Any]:
        """load_byte_per_s: None until two streamed decode steps have run in a row. link_share: its fraction of
        `link_byte_per_s`, None if either is None.
        """
        achieved = self._num_bytes / self._seconds if self._seconds else None
        share = achieved / link_byte_per_s if achieved and link_byte_per_s else None
        return {"load_byte_per_s": achieved, "link_share": share}
