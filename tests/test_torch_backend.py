"""The torch backend against a naive fp64 softmax."""

import pytest
import torch

from nanovllm.attention import torch_backend
from nanovllm.attention.base import HostTables, PagedBatch, PartialAttention
from nanovllm.attention.torch_backend import TorchBackend, flash_attn_with_lse

GROUPS = [(1, 1), (2, 1), (6, 2), (4, 1), (7, 1), (8, 1), (4, 4)]  # query heads, kv heads


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> PartialAttention:
    """One softmax in fp64 over the whole score matrix; keys repeated for the heads that share them."""
    num_queries, num_heads, _ = q.shape
    num_keys = k.shape[0]
    k, v = (x.double().repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    score = torch.einsum("thd,shd->hts", q.double(), k) * scale
    if causal:
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
        score = score.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(score, -1) if num_keys else torch.full((num_heads, num_queries), float("-inf")).double()
    weight = torch.exp(score - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return PartialAttention(torch.einsum("hts,shd->thd", weight, v), lse)


def make_qkv(num_queries: int, num_keys: int, heads: tuple[int, int], head_dim: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    return (
        torch.randn(tokens, num_heads, head_dim, generator=generator).to(dtype)
        for tokens, num_heads in ((num_queries, heads[0]), (num_keys, heads[1]), (num_keys, heads[1]))
    )


def assert_matches(got: PartialAttention, want: PartialAttention, tolerance: float = 2e-6):
    torch.testing.assert_close(got.out_THD.double(), want.out_THD, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.lse_HT.double(), want.lse_HT, atol=tolerance, rtol=tolerance)
    assert got.lse_HT.dtype == torch.float32


@pytest.fixture(params=["fused", "tiled"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to run a dense block: torch's fused CPU kernel, and the tiled one of other devices, many tiles."""
    if request.param == "tiled":
        monkeypatch.setattr(torch_backend, "_attend_fused_cpu", torch_backend._attend_tiled)
        monkeypatch.setattr(torch_backend, "SCORE_TILE_BYTES", 4 * 5 * 8 * 40)
    return request.param


@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [(1, 1), (1, 37), (5, 5), (33, 33), (7, 40), (40, 7), (3, 0)])
def test_flash_attn_with_lse_matches_naive(lens: tuple[int, int], causal: bool, heads: tuple[int, int], kernel: str):
    q, k, v = make_qkv(*lens, heads, 24)
    got = flash_attn_with_lse(q, k, v, causal=causal)
    assert_matches(got, naive(q, k, v, 24**-0.5, causal))
    assert got.out_THD.shape == q.shape


@pytest.mark.parametrize("head_dim", [1, 40, 128, 320])
def test_flash_attn_with_lse_any_head_dim_and_scale(head_dim: int, kernel: str):
    q, k, v = make_qkv(9, 20, (6, 2), head_dim)
    assert_matches(flash_attn_with_lse(q, k, v, scale=0.3 / head_dim), naive(q, k, v, 0.3 / head_dim, False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_flash_attn_with_lse_precisions(dtype: torch.dtype, kernel: str):
    q, k, v = make_qkv(33, 80, (6, 2), 64, dtype)
    got = flash_attn_with_lse(q, k, v, causal=True)
    assert got.out_THD.dtype == dtype
    assert_matches(got, naive(q, k, v, 64**-0.5, True), 2e-6 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps)


def make_paged(lens: list[tuple[int, int]], block_size: int, heads: tuple[int, int], order: str, causal: bool):
    """A batch of sequences (query_len, context_len) over one paged cache, and each sequence's q, k, v."""
    backend = TorchBackend()
    needed = [-(-context_len // block_size) for _, context_len in lens]
    num_blocks = sum(needed) + 3
    generator = torch.Generator().manual_seed(0)
    ids = {
        "adjacent": list(range(num_blocks)),
        "reversed": list(range(num_blocks))[::-1],
        "random": torch.randperm(num_blocks, generator=generator).tolist(),
        "runs": [i ^ 4 if i ^ 4 < num_blocks else i for i in range(num_blocks)],
    }[order]
    cache = torch.full((2, num_blocks, block_size, heads[1], 16), float("nan"))
    sequences, tables = [], []
    for (query_len, context_len), num in zip(lens, needed, strict=True):
        table, ids = ids[:num], ids[num:]
        q, k, v = make_qkv(query_len, context_len, heads, 16)
        cells = torch.tensor([table[t // block_size] * block_size + t % block_size for t in range(context_len)])
        backend.store(k, v, cache[0], cache[1], cells.long())
        sequences.append((q, k, v))
        tables.append([*table, 0])  # longer than needed
    query_lens, context_lens = zip(*lens, strict=True)
    width = max(map(len, tables))
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        causal=causal,
        host=HostTables(query_lens, context_lens, tables),
    )
    return sequences, cache, batch


@pytest.mark.parametrize("order", ["adjacent", "reversed", "random", "runs"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(6, 2), (7, 1)])
@pytest.mark.parametrize("min_view_tokens", [0, torch_backend.MIN_VIEW_TOKENS])
def test_attend_paged_matches_naive(
    order: str, causal: bool, heads: tuple[int, int], min_view_tokens: int, monkeypatch: pytest.MonkeyPatch
):
    """Decodes, chunks, whole prompts and sequences without keys in one batch, around the block edge."""
    monkeypatch.setattr(torch_backend, "MIN_VIEW_TOKENS", min_view_tokens)
    lens = [(1, 1), (1, 50), (5, 8), (8, 8), (9, 9), (7, 65), (16, 64), (1, 8), (17, 17)]
    if not causal:
        lens[2:2] = [(3, 0), (1, 0), (9, 4)]
    sequences, cache, batch = make_paged(lens, 8, heads, order, causal)
    q = torch.cat([q for q, _, _ in sequences])
    got = TorchBackend().attend(q, cache[0], cache[1], batch, 0.25)
    wants = [naive(q, k, v, 0.25, causal) for q, k, v in sequences]
    want = PartialAttention(torch.cat([w.out_THD for w in wants]), torch.cat([w.lse_HT for w in wants], dim=1))
    assert_matches(got, want)


@pytest.mark.parametrize("min_view_tokens", [0, 16, 24, 10**9])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 63, 64])
@pytest.mark.parametrize("table", [[5, 6, 7, 1, 9, 2, 3, 4], [8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_history_spans_cover_every_token_once(
    table: list[int], num_tokens: int, min_view_tokens: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch_backend, "GATHER_BYTES", 20 * 4)  # 20 tokens: the bound of a gather
    spans = list(torch_backend._history_spans(table, torch.empty(10, 8, 1, 1), num_tokens, min_view_tokens))
    assert [token for first, last in spans for token in range(first, last)] == list(range(num_tokens))
    for first, last in spans:
        blocks = table[first // 8 : -(-last // 8)]
        adjacent = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        assert adjacent or last - first <= 20


def test_attend_reads_adjacent_blocks_without_copy():
    cache = torch.randn(6, 8, 1, 4)
    view = torch_backend._read(cache, [4, 2, 3, 4, 0], 9, 30)
    assert view.data_ptr() == cache[2, 1].data_ptr() and torch.equal(view, cache.flatten(0, 1)[17:38])


def test_attend_without_host_tables_asserts():
    _, cache, batch = make_paged([(1, 5)], 8, (1, 1), "adjacent", True)
    no_host = PagedBatch(**{**vars(batch), "host": None})
    with pytest.raises(AssertionError, match="host"):
        TorchBackend().attend(torch.zeros(1, 1, 16), cache[0], cache[1], no_host, 1.0)


def test_store_skips_minus_one():
    cache = torch.zeros(2, 3, 4, 2, 5)
    k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    TorchBackend().store(k, v, cache[0], cache[1], torch.tensor([9, -1, 0]))
    flat = cache.flatten(1, 2)
    assert torch.equal(flat[0, 9], k[0]) and torch.equal(flat[0, 0], k[2]) and torch.equal(flat[1, 9], v[0])
    assert flat.count_nonzero() == 2 * 2 * 10
