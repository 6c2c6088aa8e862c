"""PromptStore: a store of prompts' K and V outside of memory, as the scheduler and the step loop use it.

The base class stores nothing. Each rank has the other half of a store (RankStore in runner/companion_memory.py), which
executes the moves that `next_moves` returns.
"""

from typing import Any

from nanovllm.plan.sequence import Sequence


class PromptStore:
    num_waiting = 0  # sequences that wait for a load, or that `take_ready` has not returned yet
    num_pending = 0  # pieces that the slowest rank still has to write

    def wait_for_load(self, seq: Sequence) -> bool:
        """Begin to wait for a load if the store has more of a prompt than memory. Otherwise return False."""
        return False

    def take_ready(self) -> list[Sequence]:
        """Return the sequences whose loads have ended, and that have not been returned before."""
        return []

    def forget(self, seq: Sequence) -> bool:
        """Drop a sequence that was aborted. Returns True if the sequence was waiting for a load."""
        return False

    def may_overtake(self, seq: Sequence) -> bool:
        """Return False if an older sequence waits for blocks to load into: no other sequence may take them first."""
        return True

    def store(self, seq: Sequence) -> None:
        """Store the computed K and V of a running sequence. Called when the first token of the answer has arrived, and
        when the sequence ends.
        """

    @property
    def holders(self) -> list[Sequence]:
        """Return the owners of blocks that are being loaded."""
        return []

    def next_moves(self) -> Any | None:
        """Process the loads that the ranks have ended, and return the next moves of the ranks, or None without moves.

        Called when all planned steps have been launched.
        """
        return None

    def stats(self) -> dict[str, float | None]:
        """Return counters for LLM.stats()."""
        return {}

    def close(self) -> None:
        """Release the store. Called after the ranks have ended."""
