"""ShadowPages: which pages of the shadow hold which blocks. See plan/shadow_spec.py."""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.kvcache.block_pool import Block
from nanovllm.kvcache.seams import Companion, GpuBlockOf
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import SequenceStep
from nanovllm.utils.arithmetic import ceil_div

# Drafts attend to at least this many of the newest keys in full precision, if these keys are on the GPU: most attention
# goes to the newest keys.
EXACT_TOKENS = 128


class PageFill(NamedTuple):
    """A full block on the GPU whose K and V, in every layer, are quantized into a page of the shadow."""

    gpu_block_id: int
    page: int


class ShadowFills(NamedTuple):
    """Step payload: the pages that the step fills.

    Fills from blocks on the GPU take effect before any draft. Fills from streamed blocks take effect in each layer,
    after attention over the group that holds the block.
    """

    resident: tuple[PageFill, ...]
    streamed: tuple[tuple[int, int], ...]  # cpu_block_id and page

    @property
    def acts_by_layer(self) -> bool:
        return bool(self.streamed)


class DraftKeys(NamedTuple):
    """Sequence payload: the keys that a sequence's drafts attend to.

    Full blocks are in pages of the shadow, and the newest keys in `block_table`, in full precision. The last of the
    `num_paged_keys` keys are the keys of the step's new tokens, as in SequenceStep.
    """

    pages: tuple[int, ...]
    block_table: tuple[int, ...]  # gpu_block_ids
    num_paged_keys: int

    def in_draft(self, draft: SequenceStep, step: SequenceStep, i: int) -> SequenceStep:
        return draft._replace(block_table=self.block_table, num_paged_keys=self.num_paged_keys - step.num_guesses + i)


@dataclass(slots=True)
class _Pages:
    """Pages of a running sequence's full blocks."""

    num_blocks: int = 0  # the first blocks, which all have pages
    filled: list[int] = field(default_factory=list)
    being_filled: list[int] = field(default_factory=list)  # pages that the last planned step fills


class ShadowPages(Companion):
    """Gives pages to the full blocks of running sequences, until none are left.

    A page keeps its block when the sequence ends, so that a prefix hit finds the page. A page goes to another block
    only once no sequence owns its present block: the least recently used page goes first.
    """

    def __init__(self, num_pages: int, num_spared_blocks: int = 0) -> None:
        """While the placed sequences have at most `num_spared_blocks` blocks, which fit into the slots, only sequences
        that have pages get more pages: drafts would hardly gain.
        """
        self.num_spared_blocks = num_spared_blocks
        # Least recently used first. A block that has been reallocated has forgotten its page
        self._blocks: OrderedDict[int, Block | None] = OrderedDict.fromkeys(range(num_pages))
        self._may_find = True  # False if all pages belong to owned blocks
        self._pages: dict[int, _Pages] = {}  # by seq_id
        self._resident: list[PageFill] = []  # fills of the step
        self._streamed: dict[int, int] = {}  # streamed fills of the step: pages by block_id

    def __len__(self) -> int:
        return len(self._blocks)

    def plan_step(self, placed: Seq[tuple[Sequence, int]], gpu_block: GpuBlockOf) -> ShadowFills | None:
        """Give pages to the full blocks of the step's sequences."""
        self._resident, self._streamed = [], {}
        # Blocks that the step writes, also as hits of other sequences
        size, written = self.pool.index.block_size, set[int]()
        num_blocks = 0
        for seq, num_tokens in placed:
            start = seq.num_computed_tokens
            written.update(seq.block_table[start // size : ceil_div(start + num_tokens, size)])
            num_blocks += ceil_div(seq.num_tokens, size)

        def gpu_block_before(block: Block) -> int | None:
            return None if block.block_id in written else gpu_block(block)

        for seq, _ in placed:
            fills = num_blocks > self.num_spared_blocks or self.has_pages(seq)
            self._fill(seq, seq.num_computed_tokens // size if fills else 0, gpu_block_before)
        self.streams_all = bool(self._streamed)
        if not self._resident and not self._streamed:
            return None
        return ShadowFills(tuple(self._resident), tuple(self._streamed.items()))

    def _fill(self, seq: Sequence, num_blocks: int, gpu_block: GpuBlockOf) -> None:
        """Give a page to each of a sequence's first `num_blocks` blocks that lacks one."""
        pages = self._pages.setdefault(seq.seq_id, _Pages())
        pages.filled += pages.being_filled
        pages.being_filled.clear()
        for number in range(pages.num_blocks, num_blocks):
            block = self.pool.blocks[seq.block_table[number]]
            if block.page >= 0:
                (pages.being_filled if block.block_id in self._streamed else pages.filled).append(block.page)
            elif (source := gpu_block(block)) is None or (page := self._take()) is None:
                break
            else:
                block.page, self._blocks[page] = page, block
                if source >= 0:
                    self._resident.append(PageFill(source, page))
                    pages.filled.append(page)
                else:
                    self._streamed[block.block_id] = page
                    pages.being_filled.append(page)
            pages.num_blocks = number + 1

    def _take(self) -> int | None:
        """Find a page whose block no sequence owns, and take it from the block."""
        for _ in range(len(self._blocks) if self._may_find else 0):
            page, block = next(iter(self._blocks.items()))
            self._blocks.move_to_end(page)
            if block is None or block.page != page or not block.ref_count:
                if block is not None and block.page == page:
                    block.page = -1
                return page
        self._may_find = False
        return None

    def can_draft(self, seq: Sequence) -> bool:
        """Return False if the step fills a page that drafts would miss."""
        return not self._pages[seq.seq_id].being_filled

    def has_pages(self, seq: Sequence) -> bool:
        return seq.seq_id in self._pages and self._pages[seq.seq_id].num_blocks > 0

    def plan_sequence(
        self, seq: Sequence, num_tokens: int, num_guesses: int, gpu_block: GpuBlockOf, *, has_drafts: bool
    ) -> DraftKeys | None:
        if not has_drafts:
            return None
        size, start = self.pool.index.block_size, seq.num_computed_tokens
        first, end = start // size, start + num_tokens
        pages = self._pages[seq.seq_id].filled
        if first and start % size < EXACT_TOKENS:
            before = self.pool.blocks[seq.block_table[first - 1]]
            if gpu_block(before) not in (-1, None):
                first -= 1
                pages = [page for page in pages if page != before.page]
        block_ids = seq.block_table[first : ceil_div(end, size)]
        exact = [gpu_block(self.pool.blocks[block_id]) for block_id in block_ids]
        assert None not in exact, f"sequence {seq.seq_id} drafts in a step that loads its newest block"
        return DraftKeys(tuple(pages), tuple(block_id or 0 for block_id in exact), end - first * size)

    def forget(self, seq: Sequence) -> None:
        pages = self._pages.pop(seq.seq_id, None)
        if pages is None:
            return
        for page in (*pages.filled, *pages.being_filled):
            self._blocks.move_to_end(page)
        self._may_find = True

    def stats(self) -> dict[str, float | None]:
        num_used = sum(block is not None and block.page == page for page, block in list(self._blocks.items()))
        return {"num_shadow_pages": len(self), "num_used_shadow_pages": num_used}
