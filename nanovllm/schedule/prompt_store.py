"""PromptStore: K and V of prompts outside of memory, as the scheduler and the step loop use them.

The base class stores nothing. A store has a half on each rank (RankStore in runner/companion_memory.py), which gets
what `next_moves` returns.
"""

from typing import Any

from nanovllm.plan.sequence import Sequence


class PromptStore:
    num_waiting = 0  # sequences that wait for a load, or have not been taken back after it
    num_pending = 0  # pieces that the slowest rank still has to write

    def wait_for_load(self, seq: Sequence) -> bool:
        """Begin to wait for a load if the store has more of a prompt than memory. Otherwise return False."""
        return False

    def take_ready(self) -> list[Sequence]:
        """Return the sequences whose loads have ended, and that have not been returned before."""
        return []

    def forget(self, seq: Sequence) -> bool:
        """Drop a sequence that was aborted. Returns True if the sequence waited here."""
        return False

    def may_overtake(self, seq: Sequence) -> bool:
        """Return False if an older sequence waits for blocks to load into: no other sequence may take them first."""
        return True

    def store(self, seq: Sequence) -> None:
        """Store what a running sequence has computed. Called when the first token after its prompt has arrived, and
        when the sequence ends.
        """

    @property
    def holders(self) -> list[Sequence]:
        """The owners of blocks that are being loaded."""
        return []

    def next_moves(self) -> Any | None:
        """Take in what the ranks have loaded, and return what they are to move next, or None if there is nothing.

        Called when all planned steps have been launched.
        """
        return None

    def stats(self) -> dict[str, float | None]:
        """Counters for LLM.stats()."""
        return {}

    def close(self) -> None:
        """Called after the ranks have ended."""
