import ctypes
import re

import pytest
import torch
from cpu_attention_cases import POOL_TOKENS, Case, row_spans

from nanovllm.cpu_attention.instruction_sets import SOURCE
from nanovllm.cpu_attention.job import TILE_TOKENS, AttentionJob, CJob, TokenSpan, divide, joined


def test_joined_spans_that_follow_each_other_become_one() -> None:
    spans = [TokenSpan(*span) for span in ((0, 4), (4, 4), (8, 1), (10, 2), (4, 3), (7, 2))]
    assert list(joined(spans)) == [(0, 9), (10, 2), (4, 5)]
    assert list(joined([])) == []


@pytest.mark.parametrize("num_threads", [1, 3, 14])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1000, 131072])
def test_divide_covers_every_token_once(num_threads: int, num_tokens: int) -> None:
    rows = [row_spans(2, (5, num_tokens), (10**6, 77)), row_spans(1), row_spans(3, (10**7, num_tokens))]
    chunks, row_ranges = divide(rows, num_threads)
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
    chunks, _ = divide([row_spans(1, (0, 131072))], 14)
    sizes = [chunk.num_tokens for chunk in chunks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 1024 and sizes[-14:] == [TILE_TOKENS] * 14


def test_divide_few_tokens_among_all_threads() -> None:
    chunks, _ = divide([row_spans(1, (0, 14 * TILE_TOKENS))], 14)
    assert len(chunks) == 14


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    ],
)
def test_job_that_is_inconsistent_is_refused(change: dict[str, object], message: str) -> None:
    job = Case([row_spans(2, (0, 1))]).job
    names = ("k_cache", "v_cache", "q_THD", "out_THD", "lse_HT", "rows", "scale")
    arguments = {name: getattr(job, name) for name in names} | {"num_threads": 2}
    AttentionJob(**arguments)
    with pytest.raises(AssertionError, match=message):
        AttentionJob(**arguments | change)


def test_c_job_is_laid_out_as_in_the_source() -> None:
    body = re.search(r"struct Job \{(.*?)\n\n", SOURCE.read_text(), re.S)
    assert body is not None
    code = re.sub(r"//.*", "", body[1])
    names = [re.sub(r".*[\s*]", "", name) for line in code.split(";") for name in line.strip().split(",") if name]
    assert names == [name for name, _ in CJob._fields_]
    assert ctypes.sizeof(CJob) == 8 * len(names)
    assert int(re.search(r"int TILE = (\d+)", SOURCE.read_text())[1]) == TILE_TOKENS
