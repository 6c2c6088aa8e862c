"""ShadowPages: a page goes with the content of its block, and is read once it has been filled."""

from nanovllm.capabilities.shadow.pages import Fills, ShadowPages
from nanovllm.kvcache.block_pool import Block
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import PageFill
from nanovllm.sampling_params import SamplingParams


def make_sequence(seq_id: int, block_table: list[int]) -> Sequence:
    seq = Sequence(seq_id, [1, 2, 3], SamplingParams(), seed=0)
    seq.block_table = block_table
    return seq


def fill(pages: ShadowPages, seq: Sequence, blocks: list[Block], fills: Fills, gpu_block_id: int | None = 7) -> None:
    pages.fill(seq, len(seq.block_table), blocks, lambda block: gpu_block_id, fills)


def test_page_is_found_until_its_block_gets_other_tokens() -> None:
    pages, blocks = ShadowPages(3), [Block(i, ref_count=1) for i in range(3)]
    first, second = make_sequence(0, [0, 1]), make_sequence(1, [0, 2])
    fill(pages, first, blocks, fills := Fills([], {}))
    assert fills.resident == [PageFill(7, 0), PageFill(7, 1)] and pages.filled(first) == [0, 1]
    pages.forget(first)
    fill(pages, second, blocks, fills := Fills([], {}))
    assert fills.resident == [PageFill(7, 2)] and pages.filled(second) == [0, 2]
    pages.forget(second)
    blocks[0].forget()
    fill(pages, first, blocks, fills := Fills([], {}))
    assert fills.resident == [PageFill(7, 0)] and pages.filled(first) == [0, 1]


def test_page_of_a_streamed_block_is_read_from_the_next_step_on() -> None:
    pages, blocks = ShadowPages(2), [Block(0, ref_count=2)]
    first, second = make_sequence(0, [0]), make_sequence(1, [0])
    fills = Fills([], {})
    for seq in (first, second):  # both read the block that this step streams
        fill(pages, seq, blocks, fills, gpu_block_id=-1)
        assert fills == Fills([], {0: 0}) and pages.is_filling(seq) and not pages.filled(seq)
    for seq in (first, second):
        fill(pages, seq, blocks, fills := Fills([], {}))
        assert fills == Fills([], {}) and not pages.is_filling(seq) and pages.filled(seq) == [0]


def test_blocks_are_left_out_from_the_first_without_a_page_on() -> None:
    pages, blocks = ShadowPages(1), [Block(i, ref_count=1) for i in range(2)]
    first, second = make_sequence(0, [0]), make_sequence(1, [1])
    fill(pages, first, blocks, fills := Fills([], {}), gpu_block_id=None)
    assert fills == Fills([], {}) and not pages.has_pages(first)
    fill(pages, first, blocks, Fills([], {}))
    fill(pages, second, blocks, fills := Fills([], {}))
    assert fills == Fills([], {}) and not pages.has_pages(second) and pages.num_used == 1
    pages.forget(first)
    blocks[0].ref_count = 0
    fill(pages, second, blocks, fills := Fills([], {}))
    assert fills.resident == [PageFill(7, 0)] and blocks[0].page == -1 and pages.num_used == 1
