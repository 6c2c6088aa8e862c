"""SlotRing: the GPU slots with offload, and which CPU block each of them holds a copy of."""

from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.kvcache.prefix_index import Block


@dataclass(slots=True)
class HybridBlock(Block):
    """A CPU block and its GPU copy.

    Of its `num_tokens` tokens the first `num_offloaded_tokens` are in CPU memory; all of them are in `ring_slot`, if
    it has one. Without a slot, both are equal.
    """

    ring_slot: int = -1
    num_tokens: int = 0
    num_offloaded_tokens: int = 0
    being_written: bool = False  # newest block of a running sequence: keeps its slot
    used_in_step: int = -1  # keeps its slot for this step

    @property
    def is_dirty(self) -> bool:
        return self.num_tokens > self.num_offloaded_tokens

    def forget(self) -> None:
        Block.forget(self)  # slots=True makes a new class, which super() would miss
        assert self.ring_slot == -1, f"block {self.block_id} is forgotten while slot {self.ring_slot} holds it"
        self.num_tokens = self.num_offloaded_tokens = 0


class SlotRing:
    """Slots are given out in turn (`hand`), so that blocks written one after another lie one after another."""

    def __init__(self, num_slots: int) -> None:
        self.blocks: list[HybridBlock | None] = [None] * num_slots
        self.hand = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def find(self, accept: Callable[[HybridBlock | None], bool]) -> int | None:
        """The next slot whose content `accept` gives up, or None."""
        for i in range(len(self.blocks)):
            ring_slot = (self.hand + i) % len(self.blocks)
            if accept(self.blocks[ring_slot]):
                return ring_slot
        return None

    def put(self, ring_slot: int, block: HybridBlock) -> None:
        assert self.blocks[ring_slot] is None and block.ring_slot == -1, f"slot {ring_slot} is taken"
        self.blocks[ring_slot] = block
        block.ring_slot = ring_slot
        self.hand = (ring_slot + 1) % len(self.blocks)

    def clear(self, block: HybridBlock) -> None:
        if block.ring_slot >= 0:
            self.blocks[block.ring_slot] = None
            block.ring_slot = -1
