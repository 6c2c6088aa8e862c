"""ShadowPages: a page goes with the content of its block, and is read once it has been filled."""

from nanovllm.capabilities.shadow.pages import PageFill, ShadowFills, ShadowPages
from nanovllm.kvcache.block_pool import Block, BlockPool
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 4


def make_sequence(seq_id: int, block_table: list[int]) -> Sequence:
    """All of its blocks are full."""
    seq = Sequence(seq_id, [1] * (len(block_table) * BLOCK_SIZE + 1), SamplingParams(), seed=0)
    seq.block_table, seq.num_computed_tokens = block_table, len(block_table) * BLOCK_SIZE
    return seq


def make_pages(num_pages: int, blocks: list[Block], num_sinks: int = 0) -> ShadowPages:
    pages = ShadowPages(num_pages, num_sinks)
    pages.join(BlockPool(blocks, BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=True))
    return pages


def fill(pages: ShadowPages, *sequences: Sequence, gpu_block_id: int | None = 7) -> ShadowFills | None:
    return pages.plan_step([(seq, 0) for seq in sequences], lambda block: gpu_block_id)


def read(pages: ShadowPages, seq: Sequence) -> tuple[int, ...]:
    """The pages that drafts read."""
    return tuple(pages._pages[seq.seq_id].pages) if pages.can_draft(seq) else ()


def resident(*pages: int) -> ShadowFills:
    return ShadowFills(tuple(PageFill(7, page, -1) for page in pages), ())


def num_used(pages: ShadowPages) -> float | None:
    return pages.stats()["num_used_shadow_pages"]


def test_page_is_found_until_its_block_gets_other_tokens() -> None:
    blocks = [Block(i, ref_count=1) for i in range(3)]
    pages = make_pages(3, blocks)
    first, second = make_sequence(0, [0, 1]), make_sequence(1, [0, 2])
    assert fill(pages, first) == resident(0, 1) and read(pages, first) == (0, 1)
    pages.forget(first)
    assert fill(pages, second) == resident(2) and read(pages, second) == (0, 2)
    pages.forget(second)
    blocks[0].forget()
    assert fill(pages, first) == resident(0) and read(pages, first) == (0, 1)


def test_page_of_a_streamed_block_is_read_from_the_next_step_on() -> None:
    pages = make_pages(2, [Block(0, ref_count=2)])
    both = make_sequence(0, [0]), make_sequence(1, [0])
    assert fill(pages, *both, gpu_block_id=-1) == ShadowFills((), (PageFill(0, 0, -1),)) and pages.streams_all
    assert not any(pages.can_draft(seq) or read(pages, seq) for seq in both)
    assert fill(pages, *both) is None and not pages.streams_all
    assert all(pages.can_draft(seq) and read(pages, seq) == (0,) for seq in both)


def test_blocks_are_left_out_from_the_first_without_a_page_on() -> None:
    blocks = [Block(i, ref_count=1) for i in range(2)]
    pages = make_pages(1, blocks)
    first, second = make_sequence(0, [0]), make_sequence(1, [1])
    assert fill(pages, first, gpu_block_id=None) is None and not pages.has_pages(first)
    fill(pages, first)
    assert fill(pages, second) is None and not pages.has_pages(second) and num_used(pages) == 1
    pages.forget(first)
    blocks[0].ref_count = 0
    assert fill(pages, second) == resident(0) and blocks[0].page == -1 and num_used(pages) == 1


def test_spared_blocks_fill_no_pages_until_the_slots_are_too_few() -> None:
    pages = ShadowPages(4, 0, num_spared_blocks=3)
    pages.join(BlockPool([Block(i, ref_count=1) for i in range(4)], BLOCK_SIZE, BLOCK_SIZE, True))
    first, second = make_sequence(0, [0]), make_sequence(1, [1])
    assert fill(pages, first) is None
    assert fill(pages, first, second) == resident(0, 1)
    assert fill(pages, first) is None and read(pages, first) == (0,)


def test_the_first_block_of_a_sequence_has_a_sink_which_other_sequences_share() -> None:
    blocks = [Block(i, ref_count=1) for i in range(5)]
    pages = make_pages(5, blocks, num_sinks=2)
    first, sharing = make_sequence(0, [0, 1]), make_sequence(1, [0, 2])
    assert fill(pages, first, sharing) == ShadowFills((PageFill(7, 0, 0), PageFill(7, 1, -1), PageFill(7, 2, -1)), ())
    assert pages._pages[0].sink == pages._pages[1].sink == 0
    second, third = make_sequence(2, [3]), make_sequence(3, [4])
    assert fill(pages, second, gpu_block_id=-1) == ShadowFills((), (PageFill(3, 3, 1),))
    assert fill(pages, third) == resident(4)  # no sink is left
    pages.forget(second)
    assert blocks[3].sink == 1
    pages.forget(third)
    blocks[3].ref_count = blocks[4].ref_count = 0
    blocks[4].forget()
    assert fill(pages, third) == ShadowFills((PageFill(7, 3, 1),), ()) and blocks[3].sink == blocks[3].page == -1
    assert blocks[0].sink == 0  # its sequences still run
