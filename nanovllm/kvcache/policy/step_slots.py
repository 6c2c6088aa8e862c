"""StepSlots: which block has which slot in the step being planned, and the moves that this requires.

What always holds:
- A block that is being written, or that the step uses (`pin`), keeps its slot. Any other block can be evicted, once
  its dirty tokens have been copied out to CPU memory.
- `residency` changes whenever a block that a running sequence has already filled gets or loses a slot.
"""

from collections.abc import Iterable

from nanovllm.core.step_plan import KVMoves, SlotCopy, SlotLoad, SlotOffload
from nanovllm.kvcache.policy.block_pool import BlockPool
from nanovllm.kvcache.policy.missing_keys import MissingKeys
from nanovllm.kvcache.policy.slot_ring import HybridBlock, SlotRing


class StepSlots:
    def __init__(self, ring: SlotRing, pool: BlockPool, block_size: int) -> None:
        self.ring = ring
        self.pool = pool
        self.block_size = block_size
        self.residency = 0
        self._pinned: list[HybridBlock] = []  # in this step
        self._kept: list[HybridBlock] = []  # filled by guesses that proved right, not copied out yet
        self._begin_moves()

    def _begin_moves(self) -> None:
        self._flushes: list[SlotOffload] = []
        self._loads: list[SlotLoad] = []
        self._copies: list[SlotCopy] = []
        self._offloads: list[SlotOffload] = []
        self._taken_slots: list[int] = []

    def begin_step(self) -> None:
        for block in self._pinned:
            block.pinned_in_step = False
            if not block.num_tokens:  # it got nothing but guesses, and none of them was right
                self.ring.free_slot_of(block)
            elif not block.being_written:
                self.ring.update_state(block)
        self._pinned.clear()
        self._begin_moves()

    def moves(self, missing: MissingKeys) -> KVMoves:
        """All moves of the step. `missing`: how the keys without a slot are attended to."""
        return KVMoves(
            tuple(self._flushes),
            tuple(self._loads),
            tuple(self._copies),
            tuple(self._offloads),
            missing.streamed,
            missing.cpu_spans,
            tuple(self._taken_slots),
        )

    # -- pins and owners -----------------------------------------------------------------------------------------

    def pin(self, block: HybridBlock) -> None:
        """Keep the block in its slot, now or once it gets one, until the next step is planned."""
        if block.pinned_in_step:
            return
        block.pinned_in_step = True
        self._pinned.append(block)
        if not block.being_written:
            self.ring.update_state(block)

    def add_running_owner(self, block: HybridBlock) -> None:
        """One more running sequence owns the block."""
        block.num_running += 1
        if block.num_running == 1:
            self.ring.update_state(block)

    def remove_running_owner(self, block: HybridBlock) -> None:
        """One running sequence fewer owns the block."""
        block.num_running -= 1
        assert block.num_running >= 0, f"block {block.block_id} lost more running owners than it had"
        if block.num_running == 0:
            self.ring.update_state(block)

    # -- moves ---------------------------------------------------------------------------------------------------

    def allocate_slots(self, blocks: list[HybridBlock], evicted_first: Iterable[HybridBlock]) -> None:
        """Give slots to `blocks`, which are pinned, and load their tokens from CPU memory if they have any.

        `evicted_first`: blocks to evict before others that running sequences read.
        """
        slots = {block.ring_slot: None for block in evicted_first if block.ring_slot in self.ring.read_slots}
        for block in blocks:
            ring_slot = self.ring.find_slot(block, slots)
            assert ring_slot is not None, f"no slot for block {block.block_id}; the caller must check num_available"
            slots.pop(ring_slot, None)
            self._reassign_slot(ring_slot, block)
            self._taken_slots.append(ring_slot)
            if block.num_tokens:
                self._loads.append(SlotLoad(block.block_id, ring_slot, block.num_tokens))

    def _reassign_slot(self, ring_slot: int, block: HybridBlock) -> None:
        """Evict what is in the slot and put `block` there."""
        held = self.ring.blocks[ring_slot]
        if held is not None:
            self._evict(ring_slot, held)
        self.ring.assign_slot(ring_slot, block)

    def _evict(self, ring_slot: int, block: HybridBlock) -> None:
        """Evict the block from its slot. Its dirty tokens are copied out first, unless nothing can ever need them.

        Nothing can if no sequence owns the block and it is redundant: no prompt can match it, or another block holds
        the same grains. Short requests with a common prefix leave many such blocks, and each copy would delay the next
        owner of the slot.
        """
        self.ring.free_slot_of(block)
        self.residency += block.num_running > 0
        if not block.is_dirty:
            return
        if block.ref_count == 0 and self.pool.is_redundant(block):
            self.pool.discard(block)
            return
        start, end = block.num_offloaded_tokens, block.num_tokens
        self._flushes.append(SlotOffload(ring_slot, block.block_id, start, end))
        block.num_offloaded_tokens = end

    def load_missing(self, missing: list[HybridBlock], unread_slots: Iterable[int]) -> bool:
        """Load missing blocks into slots that no scheduled sequence reads, as far as there are such slots.

        They stay resident after the step. `unread_slots`: slots with blocks of running sequences that are not
        scheduled. Returns whether any block was loaded.
        """
        slots = iter(unread_slots)
        for i, block in enumerate(missing):
            ring_slot = self.ring.find_unread_slot(block)
            if ring_slot is None:
                ring_slot = next(slots, None)
            if ring_slot is None:
                return i > 0
            self._reassign_slot(ring_slot, block)
            self.residency += 1
            self._loads.append(SlotLoad(block.block_id, ring_slot, self.block_size))
        return bool(missing)

    def swap_in(self, block: HybridBlock) -> None:
        """Load a full block into a slot. If running sequences read all slots, one of their blocks is evicted."""
        ring_slot = self.ring.find_unread_slot(block)
        if ring_slot is None:
            ring_slot = next(iter(self.ring.read_slots), None)
        if ring_slot is None:
            return
        self._reassign_slot(ring_slot, block)
        self.residency += 1
        self._loads.append(SlotLoad(block.block_id, ring_slot, self.block_size))

    def copy_prefix(self, source: HybridBlock, block: HybridBlock, num_tokens: int, *, keeps_source: bool) -> None:
        """Copy the first tokens of `source`, from its slot or from CPU memory, into the slot of `block`.

        `keeps_source`: whether its slot may be pinned. If not, the source is evicted and loaded from CPU memory.
        """
        if source.ring_slot >= 0 and not source.is_pinned and not keeps_source:
            self._evict(source.ring_slot, source)
        if source.ring_slot >= 0:
            self.pin(source)
            self._copies.append(SlotCopy(source.ring_slot, block.ring_slot, num_tokens))
        else:
            self._loads.append(SlotLoad(source.block_id, block.ring_slot, num_tokens))

    def write_tokens(self, block: HybridBlock, num_tokens: int) -> None:
        """Record that the block will hold min(num_tokens, block_size) tokens, and copy it out if that fills it."""
        block.num_tokens = min(num_tokens, self.block_size)
        block.being_written = block.num_tokens < self.block_size
        if not block.being_written:
            start = block.num_offloaded_tokens
            self._offloads.append(SlotOffload(block.ring_slot, block.block_id, start, self.block_size))
            block.num_offloaded_tokens = self.block_size

    def keep_written(self, block: HybridBlock, num_tokens: int) -> None:
        """Record that the block holds `num_tokens` tokens, because a guess that the last step wrote has proved right.

        If that fills it, the next step copies it out.
        """
        assert block.ring_slot >= 0, f"block {block.block_id} has lost its slot and the guesses in it"
        block.num_tokens = num_tokens
        block.being_written = num_tokens < self.block_size
        if not block.being_written:
            self._kept.append(block)
        self.ring.update_state(block)

    def copy_out_kept(self) -> None:
        """Copy out the blocks that `keep_written` has filled, unless an eviction has done so, or none reads them.

        A full block is dirty for no other reason. So a block that has another owner by now is left alone.
        """
        for block in self._kept:
            if block.num_running and block.is_dirty and block.num_tokens == self.block_size:
                start, end = block.num_offloaded_tokens, block.num_tokens
                self._flushes.append(SlotOffload(block.ring_slot, block.block_id, start, end))
                block.num_offloaded_tokens = end
        self._kept.clear()

    def stop_writing(self, block: HybridBlock) -> None:
        block.being_written = False
        self.ring.update_state(block)
