"""ShadowPages: which pages and sinks of the shadow hold which blocks. See plan/shadow_spec.py."""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nanovllm.kvcache.block_pool import Block
from nanovllm.kvcache.seams import Companion, GpuBlockOf
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import SequenceStep
from nanovllm.utils.arithmetic import ceil_div

# Drafts attend to at least this many of the newest keys in full precision, if these keys are on the GPU: most attention
# goes to the newest keys.
EXACT_TOKENS = 128


class PageFill(NamedTuple):
    """A full block whose K and V, in every layer, are quantized into a page of the shadow, and whose first tokens are
    copied to a sink.
    """

    block_id: int  # of the GPU, or of the CPU if the block is streamed
    page: int
    sink: int  # or -1 if only the page is filled


class ShadowFills(NamedTuple):
    """Step payload: the pages that the step fills.

    Fills from blocks on the GPU take effect before any draft. Fills from streamed blocks take effect in each layer,
    after attention over the group that holds the block.
    """

    resident: tuple[PageFill, ...]
    streamed: tuple[PageFill, ...]

    @property
    def acts_by_layer(self) -> bool:
        return bool(self.streamed)


class DraftKeys(NamedTuple):
    """Sequence payload: the keys that a sequence's drafts attend to.

    Full blocks are in pages of the shadow, and the newest keys in `block_table`, in full precision. The last of the
    `num_paged_keys` keys are the keys of the step's new tokens, as in SequenceStep. `sink`: holds the first tokens of
    the first page in 16 bits, or -1.
    """

    sink: int
    pages: tuple[int, ...]
    block_table: tuple[int, ...]  # gpu_block_ids
    num_paged_keys: int

    def in_draft(self, draft: SequenceStep, step: SequenceStep, i: int) -> SequenceStep:
        return draft._replace(block_table=self.block_table, num_paged_keys=self.num_paged_keys - step.num_guesses + i)


@dataclass(slots=True)
class _Pages:
    """Pages of a running sequence's first full blocks, in the order of the blocks."""

    pages: list[int] = field(default_factory=list)
    sink: int = -1  # the first block's sink, or -1
    are_filled: bool = True  # False if the last planned step fills some of the pages after its drafts


class _Places:
    """The pages of the shadow, or its sinks. `name`: the field of Block that holds the number of the place.

    A place keeps its block when the sequence ends, so that a prefix hit finds the place. A place goes to another block
    only once no sequence owns its present block: the least recently used place goes first.
    """

    def __init__(self, name: Literal["page", "sink"], count: int) -> None:
        self._name = name
        # Least recently used first. A block that has been reallocated has forgotten its place
        self._blocks: OrderedDict[int, Block | None] = OrderedDict.fromkeys(range(count))
        self._may_find = True  # False if all places belong to owned blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_used(self) -> int:
        return sum(self._content(place) is not None for place in list(self._blocks))

    def _content(self, place: int) -> Block | None:
        block = self._blocks[place]
        return block if block is not None and getattr(block, self._name) == place else None

    def give(self, block: Block) -> int | None:
        """Give the block a place whose present block no sequence owns."""
        for _ in range(len(self._blocks) if self._may_find else 0):
            place = next(iter(self._blocks))
            self._blocks.move_to_end(place)
            present = self._content(place)
            if present is None or not present.ref_count:
                if present is not None:
                    setattr(present, self._name, -1)
                setattr(block, self._name, place)
                self._blocks[place] = block
                return place
        self._may_find = False
        return None

    def release(self, places: Iterable[int]) -> None:
        """Called when a sequence that used the places has ended."""
        for place in places:
            self._blocks.move_to_end(place)
        self._may_find = True


class ShadowPages(Companion):
    """Gives pages to the full blocks of running sequences, and sinks to their first blocks, until none are left."""

    def __init__(self, num_pages: int, num_sinks: int, num_spared_blocks: int = 0) -> None:
        """While the placed sequences have at most `num_spared_blocks` blocks, which fit into the slots, only sequences
        that have pages get more pages: drafts would hardly gain.
        """
        self.num_spared_blocks = num_spared_blocks
        self._places, self._sinks = _Places("page", num_pages), _Places("sink", num_sinks)
        self._pages: dict[int, _Pages] = {}  # by seq_id
        self._resident: list[PageFill] = []  # fills of the step
        self._streamed: dict[int, PageFill] = {}  # streamed fills of the step, by block_id

    def __len__(self) -> int:
        return len(self._places)

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
        return ShadowFills(tuple(self._resident), tuple(self._streamed.values()))

    def _fill(self, seq: Sequence, num_blocks: int, gpu_block: GpuBlockOf) -> None:
        """Give a page to each of a sequence's first `num_blocks` blocks that lacks one."""
        own = self._pages.setdefault(seq.seq_id, _Pages())
        own.are_filled = True
        for number in range(len(own.pages), num_blocks):
            block = self.pool.blocks[seq.block_table[number]]
            if block.page >= 0:
                own.are_filled &= block.block_id not in self._streamed
            elif (source := gpu_block(block)) is None or (page := self._places.give(block)) is None:
                break
            else:
                sink = self._sinks.give(block) if number == 0 and block.sink < 0 else None
                fill = PageFill(source if source >= 0 else block.block_id, page, -1 if sink is None else sink)
                if source >= 0:
                    self._resident.append(fill)
                else:
                    self._streamed[block.block_id] = fill
                    own.are_filled = False
            own.pages.append(block.page)
            if number == 0:
                own.sink = block.sink

    def can_draft(self, seq: Sequence) -> bool:
        """Return False if the step fills a page that drafts would miss."""
        return self._pages[seq.seq_id].are_filled

    def has_pages(self, seq: Sequence) -> bool:
        return seq.seq_id in self._pages and bool(self._pages[seq.seq_id].pages)

    def plan_sequence(
        self, seq: Sequence, num_tokens: int, num_guesses: int, gpu_block: GpuBlockOf, *, has_drafts: bool
    ) -> DraftKeys | None:
        if not has_drafts:
            return None
        size, start = self.pool.index.block_size, seq.num_computed_tokens
        first, end = start // size, start + num_tokens
        pages, sink = self._pages[seq.seq_id].pages, self._pages[seq.seq_id].sink
        if first and start % size < EXACT_TOKENS:
            before = self.pool.blocks[seq.block_table[first - 1]]
            if gpu_block(before) not in (-1, None):
                first -= 1
                pages = [page for page in pages if page != before.page]
        block_ids = seq.block_table[first : ceil_div(end, size)]
        exact = [gpu_block(self.pool.blocks[block_id]) for block_id in block_ids]
        assert None not in exact, f"sequence {seq.seq_id} drafts in a step that loads its newest block"
        return DraftKeys(sink, tuple(pages), tuple(block_id or 0 for block_id in exact), end - first * size)

    def forget(self, seq: Sequence) -> None:
        own = self._pages.pop(seq.seq_id, None)
        if own is None:
            return
        self._places.release(own.pages)
        self._sinks.release((own.sink,) if own.sink >= 0 else ())

    def stats(self) -> dict[str, float | None]:
        return {"num_shadow_pages": len(self), "num_used_shadow_pages": self._places.num_used}
