"""LinkMeter: what decode steps that miss blocks get of the link, and of the CPU."""

import time
from collections.abc import Callable

from nanovllm.core.step_plan import StepPlan


class LinkMeter:
    """The rates at which decode steps that miss blocks bring in their keys: the bytes that cross the link, and those
    that the CPU attends to, divided by the time that the steps take.

    A step's time runs from the arrival of the previous step's tokens on the host to the arrival of its own. It counts
    only if both are decode steps that miss blocks: then it contains no prefill, and work that overlaps two steps is
    counted once. The time includes moments in which the link is idle, even those in which the caller waits between two
    steps, because the figure is meant to show how much of the link decoding uses in practice. Measuring adds no wait,
    because the host reads the tokens anyway.
    """

    def __init__(self, block_bytes: int, block_size: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._block_bytes, self._block_size, self._now_s = block_bytes, block_size, now_s
        self._num_link_tokens = self._num_cpu_tokens = 0
        self._seconds = 0.0
        self._last_end_s: float | None = None  # when the step before ended, if it was a decode step that misses blocks

    def step_ended(self, plan: StepPlan) -> None:
        """Called for every step, in order, when its tokens have arrived. Hot."""
        moves = plan.moves
        if not (plan.is_decode and moves.brings_in_keys):
            self._last_end_s = None
            return
        end_s = self._now_s()
        if self._last_end_s is not None:
            self._num_link_tokens += sum(group.num_tokens(self._block_size) for group in moves.streamed)
            self._num_link_tokens += sum(load.num_tokens for load in moves.loads)
            self._num_cpu_tokens += sum(span.end - span.start for spans in moves.cpu_spans for span in spans)
            self._seconds += end_s - self._last_end_s
        self._last_end_s = end_s

    def pause(self) -> None:
        """The engine has run out of requests. Do not count the time until the next step."""
        self._last_end_s = None

    def stats(self, link_byte_per_s: float | None) -> dict[str, float | None]:
        """load_byte_per_s: over the link. cpu_load_byte_per_s: by the CPU. Both are None until two decode steps that
        miss blocks have run in a row. link_share: load_byte_per_s / `link_byte_per_s`, None if either is None.
        """
        if not self._seconds:
            return {"load_byte_per_s": None, "cpu_load_byte_per_s": None, "link_share": None}
        token_bytes_per_s = self._block_bytes / self._block_size / self._seconds
        loaded = self._num_link_tokens * token_bytes_per_s
        return {
            "load_byte_per_s": loaded,
            "cpu_load_byte_per_s": self._num_cpu_tokens * token_bytes_per_s,
            "link_share": loaded / link_byte_per_s if link_byte_per_s else None,
        }
