"""StepSlots: which block has which slot in the step being planned, and the moves that this requires.

What always holds:
- A block that is being written, or that the step uses (`pin`), keeps its slot. Any other block can be evicted, once
  its dirty tokens have been copied out to CPU memory.
- `residency` changes whenever a block that a running sequence has filled gets or loses a slot.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

from nanovllm.kvcache.block_pool import Block, BlockPool
from nanovllm.kvcache.missing_keys import MissingKeys
from nanovllm.plan.step_plan import KVMoves, SlotCopy, SlotLoad, SlotOffload, StepPayload


@dataclass(slots=True)
class HybridBlock(Block):
    """A CPU block and its GPU copy.

    The first `num_offloaded_tokens` of its `num_tokens` tokens are in CPU memory. If the block has a `ring_slot`, all
    its tokens are in the slot; if not, the two numbers are equal.
    """

    ring_slot: int = -1
    num_tokens: int = 0
    num_offloaded_tokens: int = 0
    num_running: int = 0  # running sequences that own the block
    is_kept: bool = False  # evicted only if no other block can be evicted
    being_written: bool = False  # the newest block of a running sequence, which must keep its slot
    pinned_in_step: bool = False  # the step being planned needs the block in its slot

    @property
    def is_dirty(self) -> bool:
        return self.num_tokens > self.num_offloaded_tokens

    @property
    def is_pinned(self) -> bool:
        """True if the block must not be evicted from its slot."""
        return self.being_written or self.pinned_in_step

    def forget(self) -> None:
        Block.forget(self)  # not super(): with slots=True the decorator makes a new class
        assert self.ring_slot == -1, f"block {self.block_id} is forgotten while it is in slot {self.ring_slot}"
        self.num_tokens = self.num_offloaded_tokens = 0
        self.is_kept = False


class SlotRing:
    """The slots by state, so that finding one to use takes constant time.

    A slot is one of five:
    - free: it holds no block;
    - idle: it holds a block that no running sequence owns;
    - read: it holds a block that a running sequence owns;
    - kept: it holds a block that a running sequence owns and that drafts need (HybridBlock.is_kept);
    - pinned: it holds a block that must not be evicted.

    Of the slots that are taken, block i prefers slot i % num_slots, its home. Blocks that are contiguous in CPU memory
    therefore tend to be contiguous on the GPU, too, and one copy can transfer them (Run in offload_engine.py). The home
    does not affect which idle block loses its slot: the least recently used.
    """

    def __init__(self, num_slots: int) -> None:
        self.blocks: list[HybridBlock | None] = [None] * num_slots
        # Each state lists its slots in the order in which they entered it; the oldest slot is used first.
        self.free_slots: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        self.idle_slots: OrderedDict[int, None] = OrderedDict()
        self.read_slots: OrderedDict[int, None] = OrderedDict()
        self.kept_slots: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_available(self) -> int:
        """Number of slots that are free or can be made free by an eviction."""
        return len(self.free_slots) + len(self.idle_slots) + len(self.read_slots) + len(self.kept_slots)

    def find_unread_slots(self, blocks: Seq[HybridBlock]) -> list[int]:
        """Choose slots that no running sequence reads. If there are too few, only the first of `blocks` get a slot.

        Free slots are taken first, then the least recently used idle slots. Among the slots that are taken, a block
        gets its home if possible. The other blocks get the other slots in ascending order.
        """
        count = min(len(blocks), len(self.free_slots) + len(self.idle_slots))
        if not count:
            return []
        homes = [block.block_id % len(self.blocks) for block in blocks[:count]]
        if count <= len(self.free_slots):
            taken = {home for home in homes if home in self.free_slots}
            others = (ring_slot for ring_slot in self.free_slots if ring_slot not in taken)
            taken.update(list(islice(others, count - len(taken))))
        else:
            taken = {*self.free_slots, *islice(self.idle_slots, count - len(self.free_slots))}
        ring_slots = []
        for home in homes:
            ring_slots.append(home if home in taken else -1)
            taken.discard(home)
        rest = iter(sorted(taken))
        return [next(rest) if ring_slot < 0 else ring_slot for ring_slot in ring_slots]

    def slots_without(self, read_ids: Collection[int]) -> list[int]:
        """Return the slots of blocks that running sequences own, except the blocks with these ids."""
        held = ((ring_slot, self.blocks[ring_slot]) for ring_slot in (*self.read_slots, *self.kept_slots))
        return [ring_slot for ring_slot, block in held if block is not None and block.block_id not in read_ids]

    def find_read_slot(self, block: HybridBlock, preferred: Collection[int] = ()) -> int | None:
        """Choose a slot for `block` among the slots that running sequences read, if possible a `preferred` slot."""
        home = block.block_id % len(self.blocks)
        if preferred:
            return home if home in preferred else next(iter(preferred))
        return home if home in self.read_slots else next(iter(self.read_slots or self.kept_slots), None)

    def assign_slot(self, ring_slot: int, block: HybridBlock) -> None:
        assert self.blocks[ring_slot] is None and block.ring_slot == -1, (
            f"slot {ring_slot} is in use, or block {block.block_id} has a slot"
        )
        self.blocks[ring_slot] = block
        block.ring_slot = ring_slot
        del self.free_slots[ring_slot]
        self.update_state(block)

    def free_slot_of(self, block: HybridBlock) -> None:
        ring_slot = block.ring_slot
        if ring_slot >= 0:
            self.blocks[ring_slot] = None
            block.ring_slot = -1
            for state in (self.idle_slots, self.read_slots, self.kept_slots):
                state.pop(ring_slot, None)
            self.free_slots[ring_slot] = None

    def update_state(self, block: HybridBlock) -> None:
        """Move the block's slot to the right state after the block's pins or its running owners have changed."""
        if block.ring_slot < 0:
            return
        new = self._state(block)
        for state in (self.idle_slots, self.read_slots, self.kept_slots):
            if state is new:
                state.setdefault(block.ring_slot)
            else:
                state.pop(block.ring_slot, None)

    def _state(self, block: HybridBlock) -> OrderedDict[int, None] | None:
        if block.is_pinned:
            return None
        if not block.num_running:
            return self.idle_slots
        return self.kept_slots if block.is_kept else self.read_slots


class StepSlots:
    def __init__(self, ring: SlotRing, pool: BlockPool, block_size: int) -> None:
        self.ring = ring
        self.pool = pool
        self.block_size = block_size
        self.residency = 0
        self._pinned: list[HybridBlock] = []  # blocks pinned in this step
        self._accepted: list[HybridBlock] = []  # filled by accepted draft tokens, not copied out yet
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
            if not block.num_tokens:  # it held only draft tokens, and none was accepted
                self.ring.free_slot_of(block)
            elif not block.being_written:
                self.ring.update_state(block)
        self._pinned.clear()
        self._begin_moves()

    def slot_before_step(self, block: HybridBlock) -> int | None:
        """Return the slot that a full block has before and during the step, -1 if none, or None if the step loads the
        block.
        """
        if any(load.ring_slot == block.ring_slot for load in self._loads):
            return None
        return block.ring_slot

    def moves(self, missing: MissingKeys, payloads: tuple[StepPayload, ...] = ()) -> KVMoves:
        """Return all moves of the step. `missing`: how the keys without a slot are attended to."""
        return KVMoves(
            tuple(self._flushes),
            tuple(self._loads),
            tuple(self._copies),
            tuple(self._offloads),
            missing.streamed,
            missing.cpu_spans,
            tuple(self._taken_slots),
            payloads,
        )

    # -- pins and owners -----------------------------------------------------------------------------------------

    def pin(self, block: HybridBlock) -> None:
        """Pin the block to its slot, or to the slot that it will get, until the next step is planned."""
        if block.pinned_in_step:
            return
        block.pinned_in_step = True
        self._pinned.append(block)
        if not block.being_written:
            self.ring.update_state(block)

    def add_running_owner(self, block: HybridBlock) -> None:
        """Count one more running sequence as an owner of the block."""
        block.num_running += 1
        if block.num_running == 1:
            self.ring.update_state(block)

    def remove_running_owner(self, block: HybridBlock) -> None:
        """Count one running sequence fewer as an owner of the block."""
        block.num_running -= 1
        assert block.num_running >= 0, f"block {block.block_id} lost more running owners than it had"
        if block.num_running == 0:
            self.ring.update_state(block)

    # -- moves ---------------------------------------------------------------------------------------------------

    def allocate_slots(self, blocks: list[HybridBlock], evicted_first: Iterable[HybridBlock]) -> None:
        """Give slots to `blocks`, which are pinned, and load their tokens from CPU memory if they have any.

        `evicted_first`: blocks to evict before others that running sequences read.
        """
        unread = self.ring.find_unread_slots(blocks)
        preferred: dict[int, None] = {}
        if len(unread) < len(blocks):
            preferred = {b.ring_slot: None for b in evicted_first if b.ring_slot in self.ring.read_slots}
        for i, block in enumerate(blocks):
            ring_slot = unread[i] if i < len(unread) else self.ring.find_read_slot(block, preferred)
            assert ring_slot is not None, f"no slot for block {block.block_id}; the caller must check num_available"
            preferred.pop(ring_slot, None)
            self._reassign_slot(ring_slot, block)
            self._taken_slots.append(ring_slot)
            if block.num_tokens:
                self._loads.append(SlotLoad(block.block_id, ring_slot, block.num_tokens))

    def _reassign_slot(self, ring_slot: int, block: HybridBlock) -> None:
        """Evict the slot's block and give the slot to `block`."""
        held = self.ring.blocks[ring_slot]
        if held is not None:
            self._evict(ring_slot, held)
        self.ring.assign_slot(ring_slot, block)

    def _evict(self, ring_slot: int, block: HybridBlock) -> None:
        """Evict the block from its slot. Its dirty tokens are copied out first, unless they can never be needed.

        They can never be needed if no sequence owns the block and it is redundant: no prompt can match the block, or
        another block holds the same grains. Short requests with a common prefix leave many such blocks, and each copy
        would delay the slot's next owner.
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
        """Load missing blocks into slots that no scheduled sequence reads, until none are left.

        The loaded blocks stay resident after the step. `unread_slots`: slots with blocks of running sequences that are
        not scheduled. Returns True if a block was loaded.
        """
        ring_slots = self.ring.find_unread_slots(missing)
        if len(ring_slots) < len(missing):
            ring_slots += islice(unread_slots, len(missing) - len(ring_slots))
        for block, ring_slot in zip(missing, ring_slots, strict=False):
            self._reassign_slot(ring_slot, block)
            self.residency += 1
            self._loads.append(SlotLoad(block.block_id, ring_slot, self.block_size))
        return bool(ring_slots)

    def swap_in(self, blocks: Iterable[HybridBlock]) -> None:
        """Load full blocks that have no slot. If running sequences read all slots, some of their blocks are evicted."""
        for block in blocks:
            if block.ring_slot >= 0:
                continue
            ring_slot = next(iter(self.ring.find_unread_slots([block]) or self.ring.read_slots), None)
            if ring_slot is None:
                return
            self._reassign_slot(ring_slot, block)
            self.residency += 1
            self._loads.append(SlotLoad(block.block_id, ring_slot, self.block_size))

    def copy_prefix(self, source: HybridBlock, block: HybridBlock, num_tokens: int, *, keeps_source: bool) -> None:
        """Copy the first tokens of `source`, from its slot or from CPU memory, into the slot of `block`.

        `keeps_source`: the source's slot may be pinned. If not, the source is evicted and loaded from CPU memory.
        """
        if source.ring_slot >= 0 and not source.is_pinned and not keeps_source:
            self._evict(source.ring_slot, source)
        if source.ring_slot >= 0:
            self.pin(source)
            self._copies.append(SlotCopy(source.ring_slot, block.ring_slot, num_tokens))
        else:
            self._loads.append(SlotLoad(source.block_id, block.ring_slot, num_tokens))

    def write_tokens(self, block: HybridBlock, num_tokens: int) -> None:
        """Record that the block will hold min(num_tokens, block_size) tokens, and copy the block out if it is then
        full.
        """
        block.num_tokens = min(num_tokens, self.block_size)
        block.being_written = block.num_tokens < self.block_size
        if not block.being_written:
            start = block.num_offloaded_tokens
            self._offloads.append(SlotOffload(block.ring_slot, block.block_id, start, self.block_size))
            block.num_offloaded_tokens = self.block_size

    def record_accepted(self, block: HybridBlock, num_tokens: int) -> None:
        """Record that the block holds `num_tokens` tokens, because a draft token of the last step was accepted.

        If the block is then full, the next step copies it out.
        """
        assert block.ring_slot >= 0, f"block {block.block_id} has lost its slot and the draft tokens in it"
        block.num_tokens = num_tokens
        block.being_written = num_tokens < self.block_size
        if not block.being_written:
            self._accepted.append(block)
        self.ring.update_state(block)

    def copy_out_accepted(self) -> None:
        """Copy out the blocks that `record_accepted` has filled, unless an eviction has done so, or no sequence owns
        them.

        A full block is dirty for no other reason. So a block that has another owner by now is left alone.
        """
        for block in self._accepted:
            if block.num_running and block.is_dirty and block.num_tokens == self.block_size:
                start, end = block.num_offloaded_tokens, block.num_tokens
                self._flushes.append(SlotOffload(block.ring_slot, block.block_id, start, end))
                block.num_offloaded_tokens = end
        self._accepted.clear()

    def stop_writing(self, block: HybridBlock) -> None:
        block.being_written = False
        self.ring.update_state(block)
