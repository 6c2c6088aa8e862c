"""SequenceKV: every token in one span, adjacent blocks not copied."""

import itertools

import torch

from nanovllm.attention.torch_backend import SequenceKV


def make_kv(table: list[int]) -> SequenceKV:
    return SequenceKV(torch.randn(10, 8, 1, 1), torch.randn(10, 8, 1, 1), table, torch.tensor(table, dtype=torch.int32))


def test_spans_cover_every_token_once():
    tables = [5, 6, 7, 1, 9, 2, 3, 4], [8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8]
    for table, num_tokens, min_view_tokens in itertools.product(tables, (0, 1, 7, 8, 9, 63, 64), (0, 16, 24, 10**9)):
        spans = list(make_kv(table).spans(num_tokens, min_view_tokens, gather_bytes=20 * 4))  # the size of 20 tokens
        assert [token for first, last in spans for token in range(first, last)] == list(range(num_tokens))
        for first, last in spans:
            blocks = table[first // 8 : -(-last // 8)]
            adjacent = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
            assert adjacent or last - first <= 20


def test_read_returns_the_tokens_in_order():
    table = [4, 2, 3, 7, 0]
    kv = make_kv(table)
    for first, last in [(0, 1), (9, 30), (8, 32), (0, 40), (30, 37)]:
        k, v = kv.read(first, last)
        cells = [table[token // 8] * 8 + token % 8 for token in range(first, last)]
        assert torch.equal(k, kv.k_cache_NPKD.flatten(0, 1)[cells])
        assert torch.equal(v, kv.v_cache_NPKD.flatten(0, 1)[cells])
    k, v = kv.read(9, 24)  # adjacent blocks, which are not copied
    assert k.data_ptr() == kv.k_cache_NPKD[2, 1].data_ptr() and v.data_ptr() == kv.v_cache_NPKD[2, 1].data_ptr()


def test_adjacent_end():
    for first, last, end in [(0, 40, 8), (3, 5, 5), (8, 40, 24), (15, 40, 24), (9, 20, 20)]:
        assert make_kv([4, 2, 3, 7, 0]).adjacent_end(first, last) == end
