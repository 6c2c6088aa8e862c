"""Histories: where the full blocks of each running sequence are, and the groups in which missing ones are streamed.

Most steps neither fill a block nor move a full one, so both are cached until something changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from nanovllm.core.sequence import Sequence
from nanovllm.core.step_plan import StreamedGroup
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
    def __init__(self, blocks: list[HybridBlock], slots: StepSlots, block_size: int, group_blocks: int) -> None:
        self._blocks, self._slots = blocks, slots
        self._block_size, self._group_blocks = block_size, group_blocks
        self._known: dict[int, History] = {}  # by seq_id
        self._last_rows: list[History] = []  # arguments and result of the last streamed_groups call
        self._last_groups: tuple[StreamedGroup, ...] = ()

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

    def streamed_groups(self, rows: list[History]) -> tuple[StreamedGroup, ...]:
        """What a step of these sequences streams, in CPU memory order, so that contiguous blocks share a copy."""
        if self._last_rows == rows:
            return self._last_groups
        size = self._group_blocks
        streamed = sorted({block.block_id for history in rows for block in history.missing})
        place = {block_id: divmod(i, size) for i, block_id in enumerate(streamed)}  # (group, index in it)
        starts = range(0, len(streamed), size)
        tables: list[list[tuple[int, ...]]] = [[()] * len(rows) for _ in starts]
        for row, history in enumerate(rows):
            for group, places in groupby(sorted(place[block.block_id] for block in history.missing), itemgetter(0)):
                tables[group][row] = tuple([i for _, i in places])
        groups = [
            StreamedGroup(tuple(streamed[start : start + size]), tuple(table))
            for start, table in zip(starts, tables, strict=True)
        ]
        self._last_rows, self._last_groups = rows, tuple(groups)
        return self._last_groups

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
