"""KVCacheManager: the scheduler's interface to the KV cache, with or without offload.

A manager decides which sequence owns which block. It works on integers only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple

from nanovllm.core.cpu_split import FollowingSplit
from nanovllm.core.sequence import Sequence
from nanovllm.core.step_plan import KVMoves

# Fraction of the blocks that admission leaves free, so that running sequences can grow for a while. Without it a newly
# admitted sequence is soon preempted when the others need their next blocks, and must compute its prompt again.
WATERMARK = 0.03


class PagedKeys(NamedTuple):
    """The keys of one sequence that are in GPU blocks during a step. With offload, its other keys are streamed.

    `block_table` holds gpu_block_ids; SequenceStep says in which order.
    """

    block_table: tuple[int, ...]
    num_paged_keys: int


class KVCacheManager(ABC):
    """For each step the scheduler calls begin_step first and finish_step last.

    In between it calls can_admit and admit for each waiting sequence that may start, then num_placeable and place for
    each sequence that runs in the step. It may call preempt and free at any point between the two.
    """

    cpu_split: FollowingSplit | None = None  # how missing keys are divided; None if the CPU attends to none

    @abstractmethod
    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError if the request could not run even alone."""

    def begin_step(self, running: Seq[Sequence]) -> None:  # noqa: B027  # only a manager with per-step state needs it
        """Start planning a step for the `running` sequences, and drop all that a failed step may have left behind."""

    @abstractmethod
    def num_known_tokens(self, seq: Sequence) -> int:
        """Count the tokens of a waiting sequence that would count as computed if it were admitted now."""

    @abstractmethod
    def can_admit(self, seq: Sequence) -> bool:
        """Return True if there is room for a waiting sequence to start now."""

    @abstractmethod
    def admit(self, seq: Sequence) -> None:
        """Give a waiting sequence its blocks.

        Prefix hits count as computed: they set num_computed_tokens and, on the first admission, num_hit_tokens.
        """

    @abstractmethod
    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        """Count how many of the sequence's next `num_tokens` tokens fit into this step, possibly 0."""

    @abstractmethod
    def place(self, seq: Sequence, num_tokens: int, num_guesses: int = 0) -> None:
        """Give the sequence's next `num_tokens` tokens a place in this step. Does not change num_computed_tokens.

        The last `num_guesses` of them get room only. They count for nothing until `accept`.
        """

    @abstractmethod
    def accept(self, seq: Sequence) -> None:
        """Count the next guess of a running sequence's last step as computed, because it has proved right.

        Called before the next step is planned.
        """

    def num_missing_tokens(self, seq: Sequence) -> int:
        """Count the keys of a sequence that are not on the GPU; 0 if it does not run."""
        return 0

    def misses_keys(self, seq: Sequence) -> bool:
        """Return True if some keys of a running sequence are not on the GPU."""
        return self.num_missing_tokens(seq) > 0

    @abstractmethod
    def preempt(self, seq: Sequence) -> None:
        """Take away a running sequence's room. If that loses tokens, num_computed_tokens is set back accordingly."""

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """End the sequence. Prompts can still match its full grains until their blocks are allocated again."""

    @abstractmethod
    def finish_step(self, placed: Seq[tuple[Sequence, int]]) -> tuple[list[PagedKeys], KVMoves]:
        """Finish planning the step: return each placed sequence's paged keys, and all moves of the step.

        With offload this also loads missing blocks into unread slots, counts hits and misses, and releases the blocks
        that the step copies from.
        """

    @abstractmethod
    def check_integrity(self, sequences: Seq[Sequence]) -> None:
        """Assert that every block has the right owners. `sequences` are all unfinished ones."""

    @abstractmethod
    def block_states(self) -> bytes:
        """Return the BlockState of every block, one byte each.

        Any thread may call it at any time, without a lock. The result may show some blocks before and others after a
        change, so an implementation only reads, and relies on nothing that must be consistent between two blocks.
        """

    @abstractmethod
    def stats(self) -> dict[str, float | None]:
        """Counters for LLM.stats()."""
