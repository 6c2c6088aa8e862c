"""Histories: where the full blocks of each running sequence are, and how a step attends to those that are missing.

Most steps neither fill a block nor move a full one, so both are cached until something changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nanovllm.core.cpu_split import CpuSplit, FollowingSplit
from nanovllm.core.sequence import Sequence
from nanovllm.kvcache.policy.missing_keys import MissingKeys, divide_missing
from nanovllm.kvcache.policy.slot_ring import HybridBlock
from nanovllm.kvcache.policy.step_slots import StepSlots


@dataclass(frozen=True, eq=False, slots=True)
class History:
    """Where the full blocks of a sequence are. Never modified: when anything changes, a new object replaces it."""

    residency: int  # StepSlots.residency when it was made
    num_blocks: int
    # Slots of the resident blocks, in ascending order, because prefill kernels read contiguous slots together
    ring_slots: tuple[int, ...]
    missing: tuple[HybridBlock, ...]  # the blocks without a slot


class Histories:
    def __init__(
        self,
        blocks: list[HybridBlock],
        slots: StepSlots,
        block_size: int,
        group_blocks: int,
        split: FollowingSplit | None,
    ) -> None:
        self._blocks, self._slots = blocks, slots
        self._block_size, self._group_blocks, self._split = block_size, group_blocks, split
        self._known: dict[int, History] = {}  # by seq_id
        # The last missing_keys call: arguments, split and result
        self._last_rows: tuple[list[History], list[int]] = [], []
        self._last_split: CpuSplit | None = None
        self._last_missing = MissingKeys()

    def find(self, seq: Sequence) -> History:
        """Where the blocks are that precede the one with the sequence's first new token. All of them are full."""
        known = self._known.get(seq.seq_id)
        num_blocks, residency = seq.num_computed_tokens // self._block_size, self._slots.residency
        if known is None or known.residency != residency:
            known = History(residency, 0, (), ())
        elif known.num_blocks == num_blocks:
            return known
        new = [self._blocks[block_id] for block_id in seq.block_table[known.num_blocks : num_blocks]]
        ring_slots = sorted([*known.ring_slots, *(block.ring_slot for block in new if block.ring_slot >= 0)])
        missing = tuple([block for block in new if block.ring_slot < 0])
        history = History(residency, num_blocks, tuple(ring_slots), known.missing + missing)
        self._known[seq.seq_id] = history
        return history

    def forget(self, seq: Sequence) -> None:
        """Drop what is cached for a sequence that no longer runs."""
        self._known.pop(seq.seq_id, None)

    def missing_keys(self, rows: list[History], num_queries: list[int]) -> MissingKeys:
        """How a step of these sequences, with so many new tokens each, attends to the blocks that they miss."""
        split = None if self._split is None else self._split.now
        if self._last_rows != (rows, num_queries) or self._last_split is not split:
            missing = [[block.block_id for block in history.missing] for history in rows]
            self._last_rows, self._last_split = (rows, num_queries), split
            self._last_missing = divide_missing(
                missing, num_queries, block_size=self._block_size, group_blocks=self._group_blocks, split=split
            )
        return self._last_missing

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        for seq in running:
            history = self._known.get(seq.seq_id)
            if history is None or history.residency != self._slots.residency:
                continue  # out of date; find() would replace it
            blocks = [self._blocks[block_id] for block_id in seq.block_table[: history.num_blocks]]
            ring_slots = tuple(sorted(block.ring_slot for block in blocks if block.ring_slot >= 0))
            missing = tuple(block for block in blocks if block.ring_slot < 0)
            expected = history.ring_slots, history.missing
            assert (ring_slots, missing) == expected, f"the history of sequence {seq.seq_id} is out of date"
