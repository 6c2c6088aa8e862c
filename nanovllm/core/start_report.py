"""StartReport: tells the engine about its ranks once they have started."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """Rank 0's report on its start-up."""

    needs_rope_lens: bool  # whether the keys of a sequence can depend on the length of its prompt
    link_byte_per_s: float | None  # host to device, measured; None without offload and on a CPU
    phases: str  # how long each phase took, for the log
