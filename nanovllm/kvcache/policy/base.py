"""KVCacheManager: who owns which block. Integers only; the scheduler's one interface to both kinds of cache."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.core.sequence import Sequence
from nanovllm.core.step_plan import KVMoves


@dataclass(frozen=True)
class PagedKeys:
    """The paged keys of one sequence in a step: blocks on the GPU and the tokens they hold for it."""

    block_table: tuple[int, ...]
    context_len: int


class KVCacheManager(ABC):
    """Calls come in this order, step by step: begin_step, then for each sequence (can_admit, admit,) num_placeable,
    place; preempt and free between them; plan_step last.
    """

    @abstractmethod
    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError when the request could never run, even alone."""

    @abstractmethod
    def begin_step(self, running: Seq[Sequence]) -> None:
        """A new step is planned; `running` hold what they must not lose."""

    @abstractmethod
    def can_admit(self, seq: Sequence) -> bool:
        """Whether a waiting sequence has room to start now."""

    @abstractmethod
    def admit(self, seq: Sequence) -> None:
        """Give a waiting sequence its blocks; prefix hits set num_cached_tokens (and num_hit_tokens the first time)."""

    @abstractmethod
    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens have room in this step; 0: none."""

    @abstractmethod
    def place(self, seq: Sequence, num_tokens: int) -> None:
        """This step writes the next `num_tokens` tokens of the sequence. Does not move num_cached_tokens."""

    @abstractmethod
    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's room; what it loses is visible in num_cached_tokens."""

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """The sequence ends; its full grains stay findable until their blocks are needed."""

    @abstractmethod
    def plan_step(self, placed: Seq[tuple[Sequence, int]]) -> tuple[list[PagedKeys], KVMoves]:
        """Where each placed sequence's keys are, and what must move. Ends the step."""

    @abstractmethod
    def check_integrity(self, sequences: Seq[Sequence]) -> None:
        """Assert that no block is lost or owned wrongly; `sequences` are all unfinished ones."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Counters for LLM.stats()."""
