"""Attention in plain torch: the reference that every other backend is compared with. Runs everywhere.

Legend: T query tokens of one sequence (all packed tokens in `attend`), S its keys, H query heads, K kv heads,
G = H / K query heads per kv head, D head dim, N blocks of a cache, P tokens per block.

Keys are never repeated for the heads that share them, and scores never exist beyond one bounded tile. On CPU torch's
fused kernel does the work: 0.19 TFLOP/s in fp32 on two cores, where tiled bmm and exp reached 0.17.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from nanovllm.attention.base import (
    AttentionBackend,
    PagedBatch,
    PartialAttention,
    RunningMerge,
    add_sinks,
    merge_parts,
)
from nanovllm.utils.arithmetic import ceil_div

GATHER_BYTES = 16 << 20  # default bound on the keys copied together; the values take the same amount


@dataclass(frozen=True)
class SequenceKV:
    """One sequence's keys and values in the caches `[N, P, K, D]`, as contiguous tensors for kernels without block
    tables (M columns). Blocks that are adjacent in the cache are viewed; other blocks are gathered into a copy.
    """

    k_cache_NPKD: torch.Tensor
    v_cache_NPKD: torch.Tensor
    table: Sequence[int]  # on the host
    table_M: torch.Tensor  # `table` on the device

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of tokens first..last-1, `[last - first, K, D]`: views if their blocks are adjacent."""
        block_size = self.k_cache_NPKD.shape[1]
        first_block, last_block = first // block_size, ceil_div(last, block_size)
        block_ids = self.table[first_block:last_block]
        adjacent = all(after == before + 1 for before, after in itertools.pairwise(block_ids))

        def span(cache_NPKD: torch.Tensor) -> torch.Tensor:
            if adjacent:
                blocks = cache_NPKD[block_ids[0] : block_ids[-1] + 1]
            else:
                blocks = cache_NPKD.index_select(0, self.table_M[first_block:last_block])
            return blocks.flatten(0, 1)[first - first_block * block_size : last - first_block * block_size]

        return span(self.k_cache_NPKD), span(self.v_cache_NPKD)

    def adjacent_end(self, first: int, last: int) -> int:
        """Return the end, at most `last`, of the tokens from `first` on that lie in adjacent blocks."""
        block_size = self.k_cache_NPKD.shape[1]
        block_idx, last_block = first // block_size + 1, ceil_div(last, block_size)
        while block_idx < last_block and self.table[block_idx] == self.table[block_idx - 1] + 1:
            block_idx += 1
        return min(block_idx * block_size, last)

    def spans(self, num_tokens: int, min_view_tokens: int, gather_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut tokens 0..num_tokens-1 into spans `[first, last)` to attend to in one call each.

        A run of adjacent blocks with at least `min_view_tokens` tokens is a separate span, which is viewed; shorter
        runs are gathered together, up to `gather_bytes` of keys.
        """
        _, block_size, num_kv_heads, head_dim = self.k_cache_NPKD.shape
        max_gather_tokens = gather_bytes // (num_kv_heads * head_dim * self.k_cache_NPKD.element_size())
        num_blocks = ceil_div(num_tokens, block_size)
        gather_start = run_start = 0  # tokens gather_start..run_start-1 are short runs, waiting to be gathered
        for block_idx in range(1, num_blocks + 1):
            if block_idx < num_blocks and self.table[block_idx] == self.table[block_idx - 1] + 1:
                continue
            run_end = min(block_idx * block_size, num_tokens)
            is_view = run_end - run_start >= min_view_tokens
            if gather_start < run_start and (is_view or run_end - gather_start > max_gather_tokens):
                yield gather_start, run_start
                gather_start = run_start
            if is_view or run_end == num_tokens:
                yield gather_start, run_end
                gather_start = run_end
            run_start = run_end


@dataclass(frozen=True, kw_only=True)
class TorchLimits:
    """Sizes of the pieces that a kernel is called with, and the kernel for a CPU. Tests use smaller sizes."""

    score_tile_bytes: int = 128 << 20  # bound on the scores that exist at once, where torch has no fused kernel
    min_view_tokens: int = 1024  # shorter runs of adjacent blocks are copied: separate calls cost more than the copy
    gather_bytes: int = GATHER_BYTES
    fused_on_cpu: bool = True  # False: tiles of scores, as on every other device


class TorchBackend(AttentionBackend):
    name: ClassVar[str] = "torch"
    runs_in_graphs: ClassVar[bool] = False

    def __init__(self, limits: TorchLimits = TorchLimits()) -> None:
        self.limits = limits

    @classmethod
    def why_unavailable(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        assert batch.host is not None, "the torch backend loops over sequences: it needs PagedBatch.host"
        host = batch.host
        result = _no_key_seen(q_THD)
        start = 0
        for row, (query_len, context_len) in enumerate(zip(host.query_lens, host.context_lens, strict=True)):
            rows = slice(start, start + query_len)
            start += query_len
            if query_len == 0 or context_len == 0:
                continue
            kv = SequenceKV(k_cache_NPKD, v_cache_NPKD, host.block_tables[row], batch.block_tables[row])
            if batch.window is not None and batch.window < context_len:
                part = _attend_window(q_THD[rows], kv, context_len, scale, batch.window, self.limits)
            else:
                part = _attend_sequence(q_THD[rows], kv, context_len, scale, batch.causal, self.limits)
            result.out_THD[rows], result.lse_HT[:, rows] = part
        return result if sinks_H is None else add_sinks(result, sinks_H)

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        return merge_parts(parts, dtype)


def flash_attn_with_lse(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    scale: float | None = None,
    causal: bool = False,
    limits: TorchLimits = TorchLimits(),
) -> PartialAttention:
    """Attention of one sequence's queries over contiguous keys, with the log-sum-exp of the scores.

    Query head h reads kv head h // (H / K). `scale` is 1 / sqrt(D) when None. With `causal` the last query sees the
    last key (aligned at the bottom right); rows above the first key see none: out 0, lse -inf.
    """
    num_queries, num_keys = q_THD.shape[0], k_SKD.shape[0]
    scale = q_THD.shape[2] ** -0.5 if scale is None else scale
    num_seeing = min(num_queries, num_keys) if causal else num_queries * (num_keys > 0)
    if num_seeing == 0:
        return _no_key_seen(q_THD)
    q = q_THD[num_queries - num_seeing :]
    if not causal:
        part = _attend_dense(q, k_SKD, v_SKD, scale, False, limits)
    else:
        cut = num_keys - num_seeing
        part = _attend_dense(q, k_SKD[cut:], v_SKD[cut:], scale, True, limits)
        if cut:
            history = _attend_dense(q, k_SKD[:cut], v_SKD[:cut], scale, False, limits)
            part = merge_parts((history, part), q.dtype)
    if num_seeing == num_queries:
        return part
    result = _no_key_seen(q_THD)
    result.out_THD[-num_seeing:], result.lse_HT[:, -num_seeing:] = part
    return result


def _attend_sequence(
    q_THD: torch.Tensor, kv: SequenceKV, num_keys: int, scale: float, causal: bool, limits: TorchLimits
) -> PartialAttention:
    """Attend to the keys before the causal square, span by span, then to the square. At least one query and one key."""
    num_queries, num_heads, _ = q_THD.shape
    square_len = num_queries if causal and num_queries > 1 else 0
    history_len = num_keys - square_len
    # View a run if copying it costs more than merging one more part
    min_view_tokens = max(limits.min_view_tokens, num_queries * num_heads // kv.k_cache_NPKD.shape[2])
    spans = list(kv.spans(history_len, min_view_tokens, limits.gather_bytes))
    merged = RunningMerge(merge_parts, num_parts=len(spans) + bool(square_len))
    for first, last in spans:
        merged.add(_attend_dense(q_THD, *kv.read(first, last), scale, False, limits))
    if square_len:
        merged.add(_attend_dense(q_THD, *kv.read(history_len, num_keys), scale, True, limits))
    return merged.result()


def _attend_window(
    q_THD: torch.Tensor, kv: SequenceKV, num_keys: int, scale: float, window: int, limits: TorchLimits
) -> PartialAttention:
    """Attend with each query to the last `window` keys up to its own key. Take `window` queries at a time, and read
    only the keys that they see.
    """
    num_queries = len(q_THD)
    result = _no_key_seen(q_THD)
    for start in range(0, num_queries, window):
        rows = slice(start, min(start + window, num_queries))
        last_key = num_keys - num_queries + rows.stop
        first_key = max(0, num_keys - num_queries + start - window + 1)
        k_SKD, v_SKD = kv.read(first_key, last_key)
        part = _attend_tiled(q_THD[rows], k_SKD, v_SKD, scale, True, limits.score_tile_bytes, window)
        result.out_THD[rows], result.lse_HT[:, rows] = part
    return result


def _no_key_seen(q_THD: torch.Tensor) -> PartialAttention:
    lse_HT = q_THD.new_full((q_THD.shape[1], q_THD.shape[0]), float("-inf"), dtype=torch.float32)
    return PartialAttention(torch.zeros_like(q_THD), lse_HT)


def _attend_dense(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, scale: float, causal: bool, limits: TorchLimits
) -> PartialAttention:
    """Attend with every query to every key, or, with `causal`, to a square (S = T). At least one query and one key."""
    assert not causal or q_THD.shape[0] == k_SKD.shape[0], "the causal kernel takes squares"
    if q_THD.device.type == "cpu" and limits.fused_on_cpu:
        return _attend_fused_cpu(q_THD, k_SKD, v_SKD, scale, causal)
    return _attend_tiled(q_THD, k_SKD, v_SKD, scale, causal, limits.score_tile_bytes)


def _attend_fused_cpu(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, scale: float, causal: bool
) -> PartialAttention:
    """Call torch's fused kernel with kv heads as the batch, and each group's heads as heads that share
    keys (stride 0).
    """
    num_queries, num_heads, head_dim = q_THD.shape
    num_keys, num_kv_heads, _ = k_SKD.shape
    group = num_heads // num_kv_heads
    q_KGTD = q_THD.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if num_queries == 1:
        q_KGTD = q_KGTD.transpose(1, 2)  # the group becomes rows of one head, so that its keys are read once
    kv_shape = (num_kv_heads, q_KGTD.shape[1], num_keys, head_dim)
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(kv_shape) for x in (k_SKD, v_SKD))
    out_KGTD, lse_KGT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_KGTD, k, v, 0.0, causal, scale=scale
    )
    if num_queries == 1:
        out_KGTD, lse_KGT = out_KGTD.transpose(1, 2), lse_KGT.transpose(1, 2)
    out_THD = out_KGTD.permute(2, 0, 1, 3).reshape(q_THD.shape)
    return PartialAttention(out_THD, lse_KGT.reshape(num_heads, num_queries).float())


def _attend_tiled(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    scale: float,
    causal: bool,
    tile_bytes: int,
    window: int | None = None,
) -> PartialAttention:
    """Compute the softmax in fp32 (fp64 for fp64 inputs), a tile of queries at a time. With `causal`, the last query
    sees the last key. At least one key for each query.
    """
    num_queries, num_heads, head_dim = q_THD.shape
    num_keys, num_kv_heads, _ = k_SKD.shape
    accumulate = torch.promote_types(q_THD.dtype, torch.float32)
    k_KDS, v_KSD = k_SKD.to(accumulate).permute(1, 2, 0), v_SKD.to(accumulate).transpose(0, 1)
    result = _no_key_seen(q_THD)
    tile = max(1, tile_bytes // (num_heads * num_keys * accumulate.itemsize))
    for start in range(0, num_queries, tile):
        q = q_THD[start : start + tile].to(accumulate) * scale
        q_KRD = q.view(len(q), num_kv_heads, -1, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        score_KTGS = (q_KRD @ k_KDS).view(num_kv_heads, len(q), -1, num_keys)
        if causal:
            own_key = num_keys - num_queries + start  # of the tile's first query
            ones_TS = torch.ones(len(q), num_keys, dtype=torch.bool, device=q.device)
            hidden_TS = ones_TS.triu(own_key + 1)
            if window is not None:
                hidden_TS |= ones_TS.tril(own_key - window)
            score_KTGS.masked_fill_(hidden_TS[:, None], float("-inf"))
        lse_KTG = torch.logsumexp(score_KTGS, dim=-1)
        weight_KRS = score_KTGS.sub_(lse_KTG.unsqueeze(-1)).exp_().flatten(1, 2)
        out_KTGD = (weight_KRS @ v_KSD).view(num_kv_heads, len(q), -1, head_dim)
        result.out_THD[start : start + tile] = out_KTGD.transpose(0, 1).flatten(1, 2)
        result.lse_HT[:, start : start + tile] = lse_KTG.transpose(1, 2).flatten(0, 1)
    return result
