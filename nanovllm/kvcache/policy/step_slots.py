"""StepSlots: which block has which slot in the step being planned, and the moves that this takes.

What always holds:
- A block that is being written keeps its slot, and so does one that the step uses (`keep`); any other slot can be
  given up, after what CPU memory lacks of its content is copied out.
- `residency` changes whenever a block that a running sequence has already filled gets or loses a slot.
"""

from collections.abc import Iterable

from nanovllm.core.step_plan import KVMoves, SlotCopy, SlotLoad, SlotOffload, StreamedGroup
from nanovllm.kvcache.policy.block_pool import BlockPool
from nanovllm.kvcache.policy.slot_ring import HybridBlock, SlotRing


class StepSlots:
    def __init__(self, ring: SlotRing, pool: BlockPool, block_size: int) -> None:
        self.ring = ring
        self.pool = pool
        self.block_size = block_size
        self.residency = 0
        self._kept: list[HybridBlock] = []  # by this step
        self._begin_moves()

    def _begin_moves(self) -> None:
        self._flushes: list[SlotOffload] = []
        self._loads: list[SlotLoad] = []
        self._copies: list[SlotCopy] = []
        self._offloads: list[SlotOffload] = []
        self._taken_slots: list[int] = []

    def begin_step(self) -> None:
        for block in self._kept:
            block.kept_in_step = False
            if not block.being_written:
                self.ring.update(block)
        self._kept.clear()
        self._begin_moves()

    def moves(self, groups: tuple[StreamedGroup, ...]) -> KVMoves:
        """All moves of the step, of which `groups` are streamed."""
        return KVMoves(
            tuple(self._flushes),
            tuple(self._loads),
            tuple(self._copies),
            tuple(self._offloads),
            groups,
            tuple(self._taken_slots),
        )

    # -- who keeps a slot ----------------------------------------------------------------------------------------

    def keep(self, block: HybridBlock) -> None:
        """The step uses the block: its slot, if it has or gets one, is not given up."""
        if block.kept_in_step:
            return
        block.kept_in_step = True
        self._kept.append(block)
        if not block.being_written:
            self.ring.update(block)

    def begin_running(self, block: HybridBlock) -> None:
        """One more running sequence owns the block."""
        block.num_running += 1
        if block.num_running == 1:
            self.ring.update(block)

    def end_running(self, block: HybridBlock) -> None:
        """One running sequence less owns the block."""
        block.num_running -= 1
        assert block.num_running >= 0, f"block {block.block_id} is given back by more sequences than run"
        if block.num_running == 0:
            self.ring.update(block)

    # -- moves ---------------------------------------------------------------------------------------------------

    def take(self, block: HybridBlock) -> None:
        """Give a slot to `block`, which is kept. What CPU memory has of the block is loaded."""
        ring_slot = self.ring.find(block)
        assert ring_slot is not None, "no slot to give up; the caller did not ask first"
        self._replace(ring_slot, block)
        self._taken_slots.append(ring_slot)
        if block.num_tokens:
            self._loads.append(SlotLoad(block.block_id, ring_slot, block.num_tokens))

    def _replace(self, ring_slot: int, block: HybridBlock) -> None:
        held = self.ring.blocks[ring_slot]
        if held is not None:
            self._empty(ring_slot, held)
        self.ring.put(ring_slot, block)

    def _empty(self, ring_slot: int, block: HybridBlock) -> None:
        """Give up a slot's content; what CPU memory lacks of it is copied out first, if it is worth keeping.

        It is not when no sequence owns the block and no prompt can match it, or another block holds the same grains.
        Short requests that begin alike leave many such blocks, and each copy would delay the next owner of the slot.
        """
        self.ring.clear(block)
        self.residency += block.num_running > 0
        if not block.is_dirty:
            return
        if block.ref_count == 0 and self.pool.is_redundant(block):
            self.pool.discard(block)
            return
        start, end = block.num_offloaded_tokens, block.num_tokens
        self._flushes.append(SlotOffload(ring_slot, block.block_id, start, end))
        block.num_offloaded_tokens = end

    def fill_unread(self, missing: list[HybridBlock], unread_slots: Iterable[int]) -> bool:
        """Load missing blocks, to stay, into slots whose content no scheduled sequence reads; whether there were any.

        unread_slots: those with blocks of running sequences that are not scheduled.
        """
        slots = iter(unread_slots)
        for i, block in enumerate(missing):
            ring_slot = self.ring.find_unread(block)
            if ring_slot is None:
                ring_slot = next(slots, None)
            if ring_slot is None:
                return i > 0
            self._replace(ring_slot, block)
            self.residency += 1
            self._loads.append(SlotLoad(block.block_id, ring_slot, self.block_size))
        return bool(missing)

    def copy(self, source: HybridBlock, block: HybridBlock, num_tokens: int) -> None:
        """The first tokens of `source` into the slot of `block`, from wherever they are."""
        if source.ring_slot >= 0:
            self.keep(source)
            self._copies.append(SlotCopy(source.ring_slot, block.ring_slot, num_tokens))
        else:
            self._loads.append(SlotLoad(source.block_id, block.ring_slot, num_tokens))

    def write(self, block: HybridBlock, num_tokens: int) -> None:
        """The block holds `num_tokens` tokens after this step; a full one is copied out."""
        block.num_tokens = min(num_tokens, self.block_size)
        block.being_written = block.num_tokens < self.block_size
        if not block.being_written:
            start = block.num_offloaded_tokens
            self._offloads.append(SlotOffload(block.ring_slot, block.block_id, start, self.block_size))
            block.num_offloaded_tokens = self.block_size

    def stop_writing(self, block: HybridBlock) -> None:
        block.being_written = False
        self.ring.update(block)
