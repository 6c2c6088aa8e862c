"""SlotRing: the GPU slots used with offload, which CPU block each slot holds a copy of, and which can be evicted."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from nanovllm.kvcache.policy.prefix_index import Block


@dataclass(slots=True)
class HybridBlock(Block):
    """A CPU block and its GPU copy.

    The first `num_offloaded_tokens` of its `num_tokens` tokens are in CPU memory. If the block has a `ring_slot`, all
    its tokens are there; if not, the two numbers are equal.
    """

    ring_slot: int = -1
    num_tokens: int = 0
    num_offloaded_tokens: int = 0
    num_running: int = 0  # running sequences that own it
    is_kept: bool = False  # evicted only when no other block can be
    being_written: bool = False  # the newest block of a running sequence, which must keep its slot
    pinned_in_step: bool = False  # the step being planned needs the block in its slot

    @property
    def is_dirty(self) -> bool:
        return self.num_tokens > self.num_offloaded_tokens

    @property
    def is_pinned(self) -> bool:
        """Whether the block must not be evicted from its slot."""
        return self.being_written or self.pinned_in_step

    def forget(self) -> None:
        Block.forget(self)  # not super(): with slots=True the decorator makes a new class
        assert self.ring_slot == -1, f"block {self.block_id} is forgotten while it is in slot {self.ring_slot}"
        self.num_tokens = self.num_offloaded_tokens = 0
        self.is_kept = False


class SlotRing:
    """The slots by state, so that finding one to use takes constant time.

    A slot is in one of five states:
    - free: it holds no block;
    - idle: it holds a block that no running sequence owns;
    - read: it holds a block that a running sequence owns;
    - kept: likewise, and drafts need the block (HybridBlock.is_kept);
    - pinned: it holds a block that must not be evicted.

    Block i prefers slot i % num_slots, its home. Blocks that are contiguous in CPU memory therefore tend to be
    contiguous on the GPU too, and one copy can move them (copy_runs.py).
    """

    def __init__(self, num_slots: int) -> None:
        self.blocks: list[HybridBlock | None] = [None] * num_slots
        # Each lists its slots in the order in which they entered the state; the oldest is used first.
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

    def find_unread_slot(self, block: HybridBlock) -> int | None:
        """Choose a slot for `block` that no running sequence reads: its home if possible, else a free or idle slot."""
        home = block.block_id % len(self.blocks)
        held = self.blocks[home]
        if held is None or (home in self.idle_slots and not held.is_dirty):
            return home
        return next(iter(self.free_slots or self.idle_slots), None)

    def find_slot(self, block: HybridBlock, preferred: Collection[int] = ()) -> int | None:
        """Choose a slot for `block`. Evicting a block that running sequences read is the last resort. Among those,
        `preferred` slots come first.
        """
        ring_slot = self.find_unread_slot(block)
        if ring_slot is not None:
            return ring_slot
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

    def check_integrity(self) -> None:
        for ring_slot, held in enumerate(self.blocks):
            assert held is None or held.ring_slot == ring_slot, (
                f"the block in slot {ring_slot} says it is in slot {held.ring_slot}"
            )
            expected = self.free_slots if held is None else self._state(held)
            for state in (self.free_slots, self.idle_slots, self.read_slots, self.kept_slots):
                assert (ring_slot in state) == (state is expected), f"slot {ring_slot} is in the wrong state"
