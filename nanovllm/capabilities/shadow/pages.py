"""ShadowPages: which pages of the shadow hold which blocks. See capabilities/shadow/shadow_spec.py."""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.kvcache.block_pool import Block
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import PageFill


class Fills(NamedTuple):
    """Pages that a step fills: from blocks on the GPU, and from streamed ones, by block_id."""

    resident: list[PageFill]
    streamed: dict[int, int]


@dataclass(slots=True)
class _Pages:
    """Pages of a running sequence's full blocks."""

    num_blocks: int = 0  # the first ones, which all have pages
    filled: list[int] = field(default_factory=list)
    being_filled: list[int] = field(default_factory=list)  # by the step that was planned last


class ShadowPages:
    """Gives pages to the full blocks of running sequences, as far as there are pages.

    A page keeps its block when the sequence ends, so that a prefix hit finds it. It goes to another block only once no
    sequence owns its own: the one used least recently goes first.
    """

    def __init__(self, num_pages: int) -> None:
        # Least recently used first. A block that has been allocated anew has forgotten its page
        self._blocks: OrderedDict[int, Block | None] = OrderedDict.fromkeys(range(num_pages))
        self._may_find = True  # False: all pages are those of owned blocks
        self._pages: dict[int, _Pages] = {}  # by seq_id

    def __len__(self) -> int:
        return len(self._blocks)

    def fill(
        self, seq: Sequence, num_blocks: int, blocks: Seq[Block], gpu_block: Callable[[Block], int | None], fills: Fills
    ) -> None:
        """Give pages to those of a sequence's `num_blocks` full blocks that lack one, and add them to `fills`.

        `blocks`: all there are. `gpu_block`: where a block is before the step; -1: it is streamed; None: neither.
        """
        pages = self._pages.setdefault(seq.seq_id, _Pages())
        pages.filled += pages.being_filled
        pages.being_filled.clear()
        for number in range(pages.num_blocks, num_blocks):
            block = blocks[seq.block_table[number]]
            if block.page >= 0:
                (pages.being_filled if block.block_id in fills.streamed else pages.filled).append(block.page)
            elif (source := gpu_block(block)) is None or (page := self._take()) is None:
                break
            else:
                block.page, self._blocks[page] = page, block
                if source >= 0:
                    fills.resident.append(PageFill(source, page))
                    pages.filled.append(page)
                else:
                    fills.streamed[block.block_id] = page
                    pages.being_filled.append(page)
            pages.num_blocks = number + 1

    def _take(self) -> int | None:
        """Find a page whose block no sequence owns, and take it away."""
        for _ in range(len(self._blocks) if self._may_find else 0):
            page, block = next(iter(self._blocks.items()))
            self._blocks.move_to_end(page)
            if block is None or block.page != page or not block.ref_count:
                if block is not None and block.page == page:
                    block.page = -1
                return page
        self._may_find = False
        return None

    def filled(self, seq: Sequence) -> list[int]:
        """Return the pages of a running sequence that drafts can read in the step being planned, in order."""
        return self._pages[seq.seq_id].filled

    def is_filling(self, seq: Sequence) -> bool:
        return bool(self._pages[seq.seq_id].being_filled)

    def has_pages(self, seq: Sequence) -> bool:
        return seq.seq_id in self._pages and self._pages[seq.seq_id].num_blocks > 0

    def forget(self, seq: Sequence) -> None:
        """The sequence no longer runs."""
        pages = self._pages.pop(seq.seq_id, _Pages())
        for page in (*pages.filled, *pages.being_filled):
            self._blocks.move_to_end(page)
        self._may_find = True

    @property
    def num_used(self) -> int:
        """Count the pages that hold a block."""
        return sum(block is not None and block.page == page for page, block in list(self._blocks.items()))
