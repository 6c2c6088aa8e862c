"""StepSlots: which block has which slot in the step being planned, and the moves that this takes.

What always holds:
- A block that is being written keeps its slot, and so does one that the step uses (`keep`); any other slot can be
  given up, after what CPU memory lacks of its content is copied out.
- `num_givable` counts the slots that can be given up, while blocks are kept, written and dropped.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from nanovllm.engine.batch import KVMoves, SlotCopy, SlotLoad, SlotOffload, StreamedGroup
from nanovllm.engine.sequence import Sequence
from nanovllm.kvcache.block_pool import BlockPool
from nanovllm.kvcache.slot_ring import HybridBlock, SlotRing


class StepSlots:
    def __init__(self, ring: SlotRing, pool: BlockPool, block_size: int) -> None:
        self.ring = ring
        self.pool = pool
        self.block_size = block_size
        self.num_givable = 0
        self._step = 0
        self._begin_moves()
        self._running: Seq[Sequence] = ()
        self._wanted_ids: set[int] | None = None  # blocks of running sequences; made when a slot must be given up

    def _begin_moves(self) -> None:
        self._flushes: list[SlotOffload] = []
        self._loads: list[SlotLoad] = []
        self._copies: list[SlotCopy] = []
        self._offloads: list[SlotOffload] = []
        self._taken_slots: list[int] = []

    def begin_step(self, running: Seq[Sequence]) -> None:
        self._step += 1
        self._begin_moves()
        self._running = running
        self._wanted_ids = None
        self.num_givable = self._count_givable()

    def _count_givable(self) -> int:
        return sum(map(self.can_give_up, self.ring.blocks))

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

    def can_give_up(self, block: HybridBlock | None) -> bool:
        return block is None or not (block.being_written or block.used_in_step == self._step)

    def keep(self, block: HybridBlock) -> None:
        """The step uses the block: its slot, if it has or gets one, is not given up."""
        if block.ring_slot >= 0 and self.can_give_up(block):
            self.num_givable -= 1
        block.used_in_step = self._step

    def keep_all(self, blocks: Iterable[HybridBlock]) -> None:
        """The same for what the step reads, once every sequence has been placed and nothing is counted any more."""
        givable = self._count_givable()
        assert self.num_givable == givable, f"{self.num_givable} slots counted, {givable} to give up"
        for block in blocks:
            block.used_in_step = self._step

    def want(self, seq: Sequence) -> None:
        """A sequence runs that `begin_step` was not told of, or has grown."""
        if self._wanted_ids is not None:
            self._wanted_ids.update(seq.block_table)

    def _is_unwanted(self, block: HybridBlock | None) -> bool:
        """Free, or holding what no running sequence reads."""
        if self._wanted_ids is None:
            self._wanted_ids = {block_id for seq in self._running for block_id in seq.block_table}
        return block is None or (self.can_give_up(block) and block.block_id not in self._wanted_ids)

    # -- moves ---------------------------------------------------------------------------------------------------

    def take(self, block: HybridBlock) -> None:
        """A slot for `block`, which is kept: a free one, else one nobody reads, else one that is streamed from now on.

        What CPU memory has of the block is loaded.
        """
        ring_slot = self.ring.find(lambda held: held is None)
        if ring_slot is None:
            ring_slot = self.ring.find(self._is_unwanted)
        if ring_slot is None:
            ring_slot = self.ring.find(self.can_give_up)
        assert ring_slot is not None, "no slot to give up; the caller did not ask first"
        self._empty(ring_slot)
        self.ring.put(ring_slot, block)
        self.num_givable -= 1
        self._taken_slots.append(ring_slot)
        if block.num_tokens:
            self._loads.append(SlotLoad(block.block_id, ring_slot, block.num_tokens))

    def _empty(self, ring_slot: int) -> None:
        """Give up a slot's content; what CPU memory lacks of it is copied out first, if it is worth keeping.

        It is not when no sequence owns the block and no prompt can match it, or another block holds the same grains.
        Short requests that begin alike leave many such blocks, and each copy would delay the next owner of the slot.
        """
        block = self.ring.blocks[ring_slot]
        if block is None:
            return
        self.ring.clear(block)
        if not block.is_dirty:
            return
        if block.ref_count == 0 and self.pool.is_redundant(block):
            self.pool.discard(block)
            return
        start, end = block.num_offloaded_tokens, block.num_tokens
        self._flushes.append(SlotOffload(ring_slot, block.block_id, start, end))
        block.num_offloaded_tokens = end

    def fill_idle(self, missing: list[HybridBlock]) -> list[HybridBlock]:
        """Load missing blocks into slots that no scheduled sequence reads, to stay; returns those left to stream."""
        for i, block in enumerate(missing):
            ring_slot = self.ring.find(self.can_give_up)
            if ring_slot is None:
                return missing[i:]
            self._empty(ring_slot)
            self.ring.put(ring_slot, block)
            self._loads.append(SlotLoad(block.block_id, ring_slot, self.block_size))
        return []

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
        was_kept = not self.can_give_up(block)
        block.being_written = False
        self.num_givable += was_kept and self.can_give_up(block)
