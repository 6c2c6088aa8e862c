import ctypes
import itertools
import re

import pytest
import torch
from cpu_attention_cases import POOL_TOKENS, Case, mixed_rows, row_spans
from tiers import RUNS_ALL

from nanovllm.capabilities.cpu_attention.build import SOURCES
from nanovllm.capabilities.cpu_attention.job import (
    MAX_SCRATCH_BYTES,
    TILE_TOKENS,
    AttentionJob,
    CJob,
    RowSpans,
    TokenSpan,
    divide,
    joined,
)
from nanovllm.capabilities.cpu_attention.kernels import choose_kernel

NO_BOUND = 10**9
MAX_PARTIAL_ROWS = MAX_SCRATCH_BYTES // (16 * (128 + 2) * 4)  # with 16 heads of 128 dimensions


def test_joined_spans_that_follow_each_other_become_one() -> None:
    spans = [TokenSpan(*span) for span in ((0, 4), (4, 4), (8, 1), (10, 2), (4, 3), (7, 2))]
    assert list(joined(spans)) == [(0, 9), (10, 2), (4, 5)]
    assert list(joined([])) == []


def test_divide_covers_every_token_once() -> None:
    for sizes in itertools.product((1, 3, 14), (1, 63, 64, 65, 1000, 131072), (0, 1, 100, NO_BOUND)):
        check_cover(*sizes)


def check_cover(num_threads: int, num_tokens: int, max_partial_rows: int) -> None:
    rows = [row_spans(2, (5, num_tokens), (10**6, 77)), row_spans(1), row_spans(3, (10**7, num_tokens))]
    chunks, row_ranges = divide(rows, num_threads, max_partial_rows)
    for row, row_range in zip(rows, row_ranges, strict=True):
        its_chunks = chunks[row_range.first_chunk : row_range.first_chunk + row_range.num_chunks]
        assert tuple(joined([TokenSpan(*chunk[:2]) for chunk in its_chunks])) == row.spans
        assert row_range.num_rows == row.num_rows
    assert [row_range.first_row for row_range in row_ranges] == [0, 2, 3]
    partial = 0
    for chunk in chunks:
        assert chunk.partial == partial
        partial += row_ranges[chunk.row_range].num_rows


def test_divide_makes_chunks_smaller_towards_the_end() -> None:
    chunks, _ = divide([row_spans(1, (0, 131072))], 14, MAX_PARTIAL_ROWS)
    sizes = [chunk.num_tokens for chunk in chunks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 1024 and sizes[-14:] == [TILE_TOKENS] * 14


def test_divide_few_tokens_among_all_threads() -> None:
    chunks, _ = divide([row_spans(1, (0, 14 * TILE_TOKENS))], 14, NO_BOUND)
    assert len(chunks) == 14


def num_partial_rows(rows: list[RowSpans]) -> int:
    chunks, row_ranges = divide(rows, 14, MAX_PARTIAL_ROWS)
    return sum(row_ranges[chunk.row_range].num_rows for chunk in chunks)


def test_divide_bounds_the_partial_results() -> None:
    """512 rows and 131,072 tokens took 826 MB."""
    for num_rows, num_tokens in itertools.product((1, 16, 31, 32, 64, 512, 3000), (5000, 131072, 10**6)):
        assert num_partial_rows([row_spans(num_rows, (0, num_tokens))]) <= MAX_PARTIAL_ROWS
        mixed = [row_spans(num_rows, (0, num_tokens), (10**7, 99)), row_spans(1, (10**8, num_tokens)), row_spans(5)]
        if num_rows <= 512:
            assert num_partial_rows(mixed) <= MAX_PARTIAL_ROWS
        at_least = sum(row.num_rows * len(row.spans) for row in mixed)
        assert num_partial_rows(mixed) <= max(MAX_PARTIAL_ROWS, at_least + MAX_PARTIAL_ROWS // 4)


def test_divide_with_too_many_rows_makes_one_chunk_of_each_span() -> None:
    spans = ((0, 131072), (200_000, 5))
    chunks, _ = divide([row_spans(5000, *spans)], 14, MAX_PARTIAL_ROWS)
    assert [chunk[:2] for chunk in chunks] == list(spans)


def test_divide_lengthens_only_the_chunks_of_many_rows() -> None:
    _, row_ranges = divide([row_spans(512, (0, 131072)), row_spans(1, (10**6, 131072))], 14, MAX_PARTIAL_ROWS)
    assert row_ranges[0].num_chunks < 8 and row_ranges[1].num_chunks > 128


def arguments_of(case: Case) -> dict[str, object]:
    names = ("k_cache", "v_cache", "q_THD", "out_THD", "lse_HT", "rows", "scale")
    return {name: getattr(case.job, name) for name in names} | {"num_threads": 2}


@pytest.mark.slow
def test_job_scratch_is_bounded_and_its_results_are_right() -> None:
    kernel = choose_kernel([0, 0])
    for num_rows, num_chunks in [(1, 7), (256, 7), (1024, 3)] + RUNS_ALL * [(4100, 1)]:
        case = Case([row_spans(num_rows, (0, POOL_TOKENS))], num_kv_heads=1, group=16, head_dim=128)
        assert case.job.num_chunks == num_chunks
        num_bytes = 4 * num_rows * num_chunks * 16 * 130
        assert case.job.scratch.nbytes == num_bytes and (num_bytes <= MAX_SCRATCH_BYTES) == (num_rows < 4100)
        kernel.attend(case.job, 1)
        case.check(1)
    kernel.close()


def test_job_uses_the_given_scratch_if_it_is_large_enough() -> None:
    case = Case(mixed_rows(3))
    needed = case.job.scratch.numel()
    kernel = choose_kernel([0, 0])
    for shape, is_reused in (((needed,), True), ((2, needed), True), ((needed - 1,), False), ((0,), False)):
        scratch = torch.full(shape, torch.nan)
        case.job = AttentionJob(**arguments_of(case) | {"scratch": scratch})
        assert (case.job.scratch is scratch) == is_reused and case.job.scratch.numel() >= needed
        case.forget()
        kernel.attend(case.job, 0)
        case.check()
    other = Case(mixed_rows(1), seed=1)
    other.job = AttentionJob(**arguments_of(other) | {"scratch": case.job.scratch})
    assert other.job.scratch is case.job.scratch
    for one, layer in ((case, 1), (other, 0), (case, 0)):
        kernel.attend(one.job, layer)
        one.check(layer)
    kernel.close()


def test_job_that_is_inconsistent_is_refused() -> None:
    arguments = arguments_of(Case([row_spans(2, (0, 1))]))
    AttentionJob(**arguments)
    changes: list[tuple[dict[str, object], str]] = [
        ({"rows": [row_spans(1, (0, 1))]}, "do not add up to 2"),
        ({"rows": [row_spans(2, (0, POOL_TOKENS + 1))]}, f"pool of {POOL_TOKENS} tokens"),
        ({"rows": [row_spans(2, (-1, 2))]}, "span of 2 tokens at -1"),
        ({"rows": [row_spans(2, (3, 0))]}, "span of 0 tokens"),
        ({"out_THD": torch.zeros(2, 4, 64, dtype=torch.bfloat16)}, "one dtype"),
        ({"out_THD": torch.zeros(1, 4, 64)}, "shape of q_THD"),
        ({"lse_HT": torch.zeros(2, 4)}, r"\[H, T\]"),
        ({"lse_HT": torch.zeros(4, 2, dtype=torch.float64)}, "float32"),
        ({"q_THD": torch.zeros(2, 3, 64)}, "heads do not fit"),
        ({"q_THD": torch.zeros(4, 2, 64).transpose(0, 1)}, "contiguous"),
        ({"scratch": torch.zeros(9**6, dtype=torch.float64)}, "scratch must be contiguous float32"),
        ({"scratch": torch.zeros(9**6)[::2]}, "scratch must be contiguous float32"),
    ]
    for change, message in changes:
        with pytest.raises(AssertionError, match=message):
            AttentionJob(**arguments | change)


def test_c_job_is_laid_out_as_in_the_source() -> None:
    body = re.search(r"struct Job \{(.*?)\n\n", (SOURCES / "job.h").read_text(), re.S)
    assert body is not None
    code = re.sub(r"//.*", "", body[1])
    names = [re.sub(r".*[\s*]", "", name) for line in code.split(";") for name in line.strip().split(",") if name]
    assert names == [name for name, _ in CJob._fields_]
    assert ctypes.sizeof(CJob) == 8 * len(names)
    assert int(re.search(r"int TILE = (\d+)", (SOURCES / "vectors.h").read_text())[1]) == TILE_TOKENS
