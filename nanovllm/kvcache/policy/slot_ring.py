"""SlotRing: the GPU slots with offload, which CPU block each of them holds a copy of, and which can be given up."""

from collections import OrderedDict
from dataclasses import dataclass

from nanovllm.kvcache.policy.prefix_index import Block


@dataclass(slots=True)
class HybridBlock(Block):
    """A CPU block and its GPU copy.

    Of its `num_tokens` tokens the first `num_offloaded_tokens` are in CPU memory; all of them are in `ring_slot`, if
    it has one. Without a slot, both are equal.
    """

    ring_slot: int = -1
    num_tokens: int = 0
    num_offloaded_tokens: int = 0
    num_running: int = 0  # running sequences that own it
    being_written: bool = False  # newest block of a running sequence: keeps its slot
    kept_in_step: bool = False  # the step that is being planned needs the slot

    @property
    def is_dirty(self) -> bool:
        return self.num_tokens > self.num_offloaded_tokens

    @property
    def keeps_slot(self) -> bool:
        return self.being_written or self.kept_in_step

    def forget(self) -> None:
        Block.forget(self)  # slots=True makes a new class, which super() would miss
        assert self.ring_slot == -1, f"block {self.block_id} is forgotten while slot {self.ring_slot} holds it"
        self.num_tokens = self.num_offloaded_tokens = 0


class SlotRing:
    """Each slot is in one of four states, and finding one to give up takes the same time however many there are:
    `free`; `idle`, with a block that no running sequence owns; `read`, with one that running sequences own; or kept.

    A block goes to the slot of its own number, counted around the ring, where that can be had. So blocks that are
    neighbours in CPU memory tend to be neighbours on the GPU, and are copied together (copy_runs.py).
    """

    def __init__(self, num_slots: int) -> None:
        self.blocks: list[HybridBlock | None] = [None] * num_slots
        # In the order in which the slots came into each state, which is the order in which they are given up
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.read: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_givable(self) -> int:
        """Slots that can be given up."""
        return len(self.free) + len(self.idle) + len(self.read)

    def find_unread(self, block: HybridBlock) -> int | None:
        """A slot for `block` whose content no running sequence reads."""
        home = block.block_id % len(self.blocks)
        held = self.blocks[home]
        if held is None or (home in self.idle and not held.is_dirty):
            return home
        return next(iter(self.free or self.idle), None)

    def find(self, block: HybridBlock) -> int | None:
        """A slot for `block` that can be given up; one that running sequences read only if nothing else is left."""
        ring_slot = self.find_unread(block)
        if ring_slot is not None:
            return ring_slot
        home = block.block_id % len(self.blocks)
        return home if home in self.read else next(iter(self.read), None)

    def put(self, ring_slot: int, block: HybridBlock) -> None:
        assert self.blocks[ring_slot] is None and block.ring_slot == -1, f"slot {ring_slot} is taken"
        self.blocks[ring_slot] = block
        block.ring_slot = ring_slot
        del self.free[ring_slot]
        self.update(block)

    def clear(self, block: HybridBlock) -> None:
        ring_slot = block.ring_slot
        if ring_slot >= 0:
            self.blocks[ring_slot] = None
            block.ring_slot = -1
            self.idle.pop(ring_slot, None)
            self.read.pop(ring_slot, None)
            self.free[ring_slot] = None

    def update(self, block: HybridBlock) -> None:
        """Whether the block keeps its slot, or is owned by a running sequence, may have changed."""
        if block.ring_slot < 0:
            return
        new = self._state(block)
        for state in (self.idle, self.read):
            if state is new:
                state.setdefault(block.ring_slot)
            else:
                state.pop(block.ring_slot, None)

    def _state(self, block: HybridBlock) -> OrderedDict[int, None] | None:
        if block.keeps_slot:
            return None
        return self.read if block.num_running else self.idle

    def check_integrity(self) -> None:
        for ring_slot, held in enumerate(self.blocks):
            assert held is None or held.ring_slot == ring_slot, f"slot {ring_slot} and its block disagree"
            expected = self.free if held is None else self._state(held)
            for state in (self.free, self.idle, self.read):
                assert (ring_slot in state) == (state is expected), f"slot {ring_slot} is in the wrong state"
