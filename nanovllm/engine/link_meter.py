"""LinkMeter: what decode steps that miss blocks get of the link, and of the CPU."""

from nanovllm.core.step_plan import StepPlan


class LinkMeter:
    """The rates at which decode steps that miss blocks bring in their keys: the bytes that cross the link, and those
    that the CPU attends to, divided by the time that the steps take.

    A step's time runs from the end of the step before to its own. It counts only if both are decode steps that miss
    blocks: then it contains no prefill, and work that overlaps two steps is counted once. The time includes moments in
    which the link is idle, even those in which the caller is busy between two steps, because the figure is meant to
    show how much of the link decoding uses in practice. Only pauses are left out (Engine).
    """

    def __init__(self, block_bytes: int, block_size: int) -> None:
        self._block_bytes, self._block_size = block_bytes, block_size
        self._num_link_tokens = self._num_cpu_tokens = 0
        self._seconds = 0.0
        self._counts_last = False  # whether the step before was a decode step that misses blocks

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        """See StepMeter. Hot."""
        moves = plan.moves
        counts_last, self._counts_last = self._counts_last, plan.is_decode and moves.brings_in_keys
        if counts_last and self._counts_last and seconds is not None:
            self._num_link_tokens += sum(group.num_tokens(self._block_size) for group in moves.streamed)
            self._num_link_tokens += sum(load.num_tokens for load in moves.loads)
            self._num_cpu_tokens += sum(span.end - span.start for spans in moves.cpu_spans for span in spans)
            self._seconds += seconds

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
