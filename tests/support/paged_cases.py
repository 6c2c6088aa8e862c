"""Paged batches at random, and naive attention to compare with. Shapes as in nanovllm/attention/base.py."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention


class PagedCase(NamedTuple):
    """A batch over one paged cache, and each sequence's own q, k, v."""

    q_THD: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: PagedBatch
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    sinks_H: torch.Tensor | None = None

    def attend(self, backend: AttentionBackend, scale: float) -> PartialAttention:
        return backend.attend(self.q_THD, self.k_cache, self.v_cache, self.batch, scale, self.sinks_H)

    def naive(self, scale: float, dtype: torch.dtype = torch.float64) -> PartialAttention:
        mask = self.batch.causal, dtype, self.batch.window, self.sinks_H
        parts = [naive(q, k, v, scale, *mask) for q, k, v in self.sequences]
        return PartialAttention(torch.cat([p.out_THD for p in parts]), torch.cat([p.lse_HT for p in parts], dim=1))


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    dtype: torch.dtype = torch.float64,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> PartialAttention:
    """One softmax over the whole score matrix in `dtype`; keys repeated for the heads that share them. A sink is one
    more column of scores, whose value is 0.
    """
    num_queries, num_heads, _ = q.shape
    num_keys = k.shape[0]
    q, k, v = (x.to(dtype).repeat_interleave(num_heads // x.shape[1], dim=1).transpose(0, 1) for x in (q, k, v))
    score = (q @ k.transpose(1, 2)) * scale
    if causal:
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).triu(num_keys - num_queries + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(num_keys - num_queries - window)
        score = score.masked_fill(hidden, float("-inf"))
    if sinks_H is not None:
        score = torch.cat((score, sinks_H.to(dtype)[:, None, None].expand(-1, num_queries, 1)), dim=2)
        v = torch.cat((v, v.new_zeros(num_heads, 1, v.shape[2])), dim=1)
    if score.shape[2] == 0:
        return PartialAttention(torch.zeros_like(q.transpose(0, 1)), score.new_full(score.shape[:2], float("-inf")))
    lse = torch.logsumexp(score, -1)
    weight = torch.exp(score - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1))
    return PartialAttention((weight @ v).transpose(0, 1), lse)


def make_qkv(
    num_queries: int,
    num_keys: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    mean_value: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values vary by 1 about a mean, drawn for each head and dim, of the size `mean_value`."""
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    q, k, v = (
        torch.randn(num_tokens, num_heads, head_dim, generator=generator)
        for num_tokens, num_heads in ((num_queries, heads[0]), (num_keys, heads[1]), (num_keys, heads[1]))
    )
    v += mean_value * torch.randn(heads[1], head_dim, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def make_paged(
    lens: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    *,
    causal: bool,
    order: str = "random",
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    unwritten: float = float("nan"),
    mean_value: float = 0.0,
    window: int | None = None,
    sinks: Sequence[float] = (),
) -> PagedCase:
    """Sequences of (query_len, context_len). Cells that no token was written to hold `unwritten`.

    With `window`, only the keys that a query sees are written, and up to 127 before them, which kernels may read. Heads
    have the `sinks` in turn, if there are any.
    """
    needed = [-(-context_len // block_size) for _, context_len in lens]
    num_blocks = sum(needed) + 3
    free = {
        "adjacent": list(range(num_blocks)),
        "reversed": list(range(num_blocks))[::-1],
        "random": torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist(),
        "runs": [i ^ 4 if i ^ 4 < num_blocks else i for i in range(num_blocks)],
    }[order]
    caches = torch.full((2, num_blocks, block_size, heads[1], head_dim), unwritten, dtype=dtype)
    sequences, tables = [], []
    for (query_len, context_len), num in zip(lens, needed, strict=True):
        table, free = free[:num], free[num:]
        q, k, v = make_qkv(query_len, context_len, heads, head_dim, dtype, mean_value)
        unseen = 0 if window is None else max(0, context_len - query_len - window + 1) // 128 * 128
        cells = [table[t // block_size] * block_size + t % block_size for t in range(unseen, context_len)]
        for cache, x in ((caches[0], k), (caches[1], v)):
            cache.flatten(0, 1)[cells] = x[unseen:]
        sequences.append(tuple(x.to(device) for x in (q, k, v)))
        tables.append([*table, 0])  # longer than needed
    query_lens, context_lens = zip(*lens, strict=True)
    width = max(map(len, tables))
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=device),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        causal=causal,
        host=HostTables(query_lens, context_lens, tables),
        window=window,
    )
    sinks_H = torch.tensor([sinks[head % len(sinks)] for head in range(heads[0])], device=device) if sinks else None
    q_THD = torch.cat([q for q, _, _ in sequences])
    return PagedCase(q_THD, caches[0].to(device), caches[1].to(device), batch, sequences, sinks_H)


def assert_matches(got: PartialAttention, want: PartialAttention, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.out_THD.double(), want.out_THD.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.lse_HT.double(), want.lse_HT.double(), atol=tolerance, rtol=tolerance)
    assert got.lse_HT.dtype == torch.float32


def assert_as_good_as_plain_torch(got: PartialAttention, case: PagedCase, scale: float) -> None:
    """fp32: as exact as fp32 is. Below: error at most twice that of plain torch in the same precision."""
    want = case.naive(scale)
    dtype = case.q_THD.dtype
    assert got.out_THD.dtype == dtype and got.lse_HT.dtype == torch.float32
    assert got.out_THD.shape == case.q_THD.shape and got.lse_HT.shape == want.lse_HT.shape
    if dtype == torch.float32:
        assert_matches(got, want, 5e-6)
        return
    plain = case.naive(scale, dtype).out_THD
    allowed = 2 * (plain.double() - want.out_THD).abs().max() + 1e-5
    assert not got.out_THD.isnan().any()
    error = (got.out_THD.double() - want.out_THD).abs().max()
    assert error <= allowed, f"error {error:.2e}, plain torch {allowed / 2:.2e}"
    torch.testing.assert_close(got.lse_HT.double(), want.lse_HT, atol=2e-3, rtol=1e-4)
