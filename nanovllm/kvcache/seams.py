"""Seams: the interfaces through which the KV cache managers call capabilities. What is absent does nothing.

A Companion is state that follows the blocks and the sequences of the KV cache, such as pages of packed keys. It has two
halves. The half in this module decides, in integers: the manager tells it what happens to sequences, and it adds its
decisions to the plan of a step, as a payload for the whole step or for a sequence. The other half (runner/seams.py) has
the memory on each rank, and executes the payloads. A manager has all of its companions in `Companions`, which calls
them in the order that start-up has given.

A KeySplitter divides the keys that a step misses between the link and attention on the CPU.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol, TypeAlias

from nanovllm.kvcache.block_pool import Block, BlockPool, PrefixMatch
from nanovllm.kvcache.snapshots import Snapshots
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import LayerTimes, SequencePayload, StepPayload, StepPlan

# Returns the gpu_block_id that holds a full block before and during the step, -1 if the block is not on the GPU, or
# None if the step loads the block into a slot in which it stays
GpuBlockOf: TypeAlias = Callable[[Block], int | None]


class Resumption(NamedTuple):
    """Blocks with which a preempted sequence continues, of which the last may not be full, and their tokens."""

    block_ids: list[int]
    num_tokens: int


class Companion:
    snapshots: Snapshots | None = None  # where prefix hits end, or None if a hit may end after any grain
    streams_all = False  # True if `plan_step` needs all missing blocks of the step on the GPU for a while
    pool: BlockPool

    def join(self, pool: BlockPool) -> None:
        """Follow the blocks of this pool. Called once, by the manager."""
        self.pool = pool

    def begin_step(self) -> None:
        """Drop leftovers of a failed step."""

    def resumption(self, seq: Sequence, match: PrefixMatch) -> Resumption | None:
        """Find the blocks with which a preempted sequence resumes, or return None to start from `match`."""
        return None

    def admit(self, seq: Sequence, match: PrefixMatch, *, is_resumed: bool) -> None:
        """Called when the sequence has been given the blocks of its resumption or of `match`, which
        count as computed.
        """

    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        """Count how many of the sequence's next `num_tokens` tokens the companion has room for, at least one."""
        return num_tokens

    def copy_prefix(self, source: Block, target: Block, num_tokens: int) -> None:
        """Called when the step copies the first `num_tokens` tokens of a block to another block."""

    def keep_prefix(self, seq: Sequence, num_tokens: int, chunk_end: int) -> bool:
        """Make the sequence's first `num_tokens` tokens, which end in the chunk that was just placed, a prefix that
        other prompts can hit. `chunk_end`: the sequence's number of tokens after the chunk. Returns False if there is
        no room for what a hit needs.
        """
        return False

    def preempt(self, seq: Sequence) -> None:
        """Called before the running sequence loses its blocks. `forget` follows."""

    def forget(self, seq: Sequence) -> None:
        """Called when the sequence no longer runs or, if it has no blocks, no longer waits."""

    def plan_step(self, placed: Seq[tuple[Sequence, int]], gpu_block: GpuBlockOf) -> StepPayload | None:
        """Decide what the step does besides running its sequences. `placed`: sequences and their
        numbers of new tokens.
        """
        return None

    def can_draft(self, seq: Sequence) -> bool:
        """Return True if the ranks can draft for a placed sequence. Called after `plan_step`."""
        return True

    def plan_sequence(
        self, seq: Sequence, num_tokens: int, num_guesses: int, gpu_block: GpuBlockOf, *, has_drafts: bool
    ) -> SequencePayload | None:
        """Decide what the step does for a sequence with `num_tokens` new tokens, which end with the draft tokens.
        Called once for each placed sequence, after `plan_step`. `has_drafts`: the ranks draft for the sequence.
        """
        return None

    def stats(self) -> dict[str, float | None]:
        """Counters for LLM.stats()."""
        return {}


class Companions:
    """The companions of a manager, called like a single companion."""

    def __init__(self, companions: Seq[Companion] = ()) -> None:
        self._all = tuple(companions)
        found = (companion.snapshots for companion in self._all if companion.snapshots is not None)
        self.snapshots = next(found, None)

    def __iter__(self) -> Iterator[Companion]:
        return iter(self._all)

    def join(self, pool: BlockPool) -> None:
        for companion in self._all:
            companion.join(pool)

    def begin_step(self) -> None:
        for companion in self._all:
            companion.begin_step()

    def resumption(self, seq: Sequence, match: PrefixMatch) -> Resumption | None:
        found = (companion.resumption(seq, match) for companion in self._all)
        return next((resumption for resumption in found if resumption is not None), None)

    def admit(self, seq: Sequence, match: PrefixMatch, *, is_resumed: bool) -> None:
        for companion in self._all:
            companion.admit(seq, match, is_resumed=is_resumed)

    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        return min([companion.num_placeable(seq, num_tokens) for companion in self._all], default=num_tokens)

    def copy_prefix(self, source: Block, target: Block, num_tokens: int) -> None:
        for companion in self._all:
            companion.copy_prefix(source, target, num_tokens)

    def keep_prefix(self, seq: Sequence, num_tokens: int, chunk_end: int) -> bool:
        """Return False if a companion has no room, or if no companion needs anything at the end of a hit."""
        asked = [companion for companion in self._all if companion.snapshots is not None]
        return bool(asked) and all(companion.keep_prefix(seq, num_tokens, chunk_end) for companion in asked)

    def preempt(self, seq: Sequence) -> None:
        for companion in self._all:
            companion.preempt(seq)

    def forget(self, seq: Sequence) -> None:
        for companion in self._all:
            companion.forget(seq)

    def plan_step(self, placed: Seq[tuple[Sequence, int]], gpu_block: GpuBlockOf) -> tuple[StepPayload, ...]:
        payloads = [companion.plan_step(placed, gpu_block) for companion in self._all]
        return tuple([payload for payload in payloads if payload is not None])

    @property
    def streams_all(self) -> bool:
        return any(companion.streams_all for companion in self._all)

    def can_draft(self, seq: Sequence) -> bool:
        return all(companion.can_draft(seq) for companion in self._all)

    def plan_sequence(
        self, seq: Sequence, num_tokens: int, num_guesses: int, gpu_block: GpuBlockOf, *, has_drafts: bool
    ) -> tuple[SequencePayload, ...]:
        """Collect the payloads of a sequence. Hot: once per sequence and step."""
        if not self._all:
            return ()
        payloads = [
            companion.plan_sequence(seq, num_tokens, num_guesses, gpu_block, has_drafts=has_drafts)
            for companion in self._all
        ]
        return tuple([payload for payload in payloads if payload is not None])

    def stats(self) -> dict[str, float | None]:
        return {name: value for companion in self._all for name, value in companion.stats().items()}


# -- attention on the CPU --------------------------------------------------------------------------------------------


class StepSplit(Protocol):
    """Divides a step's missing keys between the link and the CPU. Never modified, because it is
    compared by identity.
    """

    def takes_part(self, num_queries: Seq[int]) -> bool:
        """Return True if the CPU may attend in a step whose sequences have these numbers of queries."""
        ...

    def cpu_token_s(self, num_queries: int) -> float:
        """Return the seconds in which the CPU attends to one token with `num_queries` queries."""
        ...

    def num_cpu_tokens(self, token_costs_s: Seq[float], block_size: int) -> int:
        """Plan how many tokens, counted from the end of the row of blocks, the CPU attends to.

        `token_costs_s`: for each block, the CPU's seconds for one of its tokens, for all sequences that read the block.
        """
        ...


class KeySplitter(Protocol):
    """Chooses the StepSplit of each step, and may learn from the times of steps."""

    @property
    def now(self) -> StepSplit:
        """The split of the next step."""
        ...

    @property
    def cpu_byte_per_s(self) -> float | None:
        """The rate at which the CPU attends while the link is busy, or None if unknown. For display."""

    def step_ended(self, plan: StepPlan, times: LayerTimes | None) -> None:
        """Learn from a step. `times` is None if no layer was timed. Hot."""


class StreamAll:
    """Streams every missing key: the split of a step in which the CPU does not attend, and the splitter without CPU
    attention.
    """

    cpu_byte_per_s = None

    def takes_part(self, num_queries: Seq[int]) -> bool:
        return False

    def cpu_token_s(self, num_queries: int) -> float:
        return 0.0

    def num_cpu_tokens(self, token_costs_s: Seq[float], block_size: int) -> int:
        return 0

    @property
    def now(self) -> StepSplit:
        return self

    def step_ended(self, plan: StepPlan, times: LayerTimes | None) -> None:
        pass


STREAM_ALL = StreamAll()
