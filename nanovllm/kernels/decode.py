"""Attention with one or a few queries per sequence over a paged cache. Programs share a sequence's keys, to keep every
SM busy.

Legend: T packed query tokens, B sequences, H query heads, K kv heads, D head dim, N blocks of a cache, P tokens per
block, M columns of a block table, S splits.

One program reads one split of a sequence's keys once, for a tile of rows. A row is one query of one of the query heads
that share the keys. A tile has at least the 16 rows of a tensor core. If a sequence has more rows than a tile can hold,
several programs read the same split. A second kernel merges the splits (kernels/merge.py). Lengths are read on the
device. The grid depends only on B, S and the most queries that a sequence may have, so a CUDA graph can be replayed
with any lengths. S is planned on the host, once per shape.

With a window, the splits divide the keys from the first key that a row of the tile sees, rounded down to a tile of
keys. Keys before it are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.device import kernel_target
from nanovllm.kernels.configs import DecodeConfig, decode_config, max_decode_rows
from nanovllm.kernels.launch import LN_2, LOG2_E, let_next_start, on_grid, pdl_options, wait_for_previous
from nanovllm.kernels.merge import begin_softmax, head_mask, merge_splits
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES


@triton.jit
def _decode_tiles(
    acc,
    row_sum,
    row_max,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    first_key,
    last_key,
    first_visible,  # [ROWS]: the first key that each row sees, or None without a window
    last_visible,  # [ROWS]: the last key that each row sees, or None if every row sees the last key
    scale_log2,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,  # elements from one token to the next: K * D
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    dim = tl.arange(0, BLOCK_D)
    offset = tl.arange(0, BLOCK_N)[:, None] * ROW + dim[None, :]
    next_block = tl.load(table_ptr + first_key // PAGE, mask=first_key < last_key, other=0)
    for start in tl.range(first_key, last_key, BLOCK_N):
        base = (next_block.to(tl.int64) * PAGE + start % PAGE) * ROW  # a cache can exceed 2^31 elements
        ahead = start + BLOCK_N  # look up one tile ahead, so that copies of K and V do not wait for a look-up
        next_block = tl.load(table_ptr + ahead // PAGE, mask=ahead < last_key, other=0)
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            inside = key < last_key
            is_cell = head_mask(inside, dim, D, BLOCK_D)
            k = tl.load(k_ptr + base + offset, mask=is_cell, other=0.0)
            v = tl.load(v_ptr + base + offset, mask=is_cell, other=0.0)
        elif D != BLOCK_D:
            k = tl.load(k_ptr + base + offset, mask=(dim < D)[None, :], other=0.0)
            v = tl.load(v_ptr + base + offset, mask=(dim < D)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + base + offset)
            v = tl.load(v_ptr + base + offset)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED and last_visible is None:
            score = tl.where(inside[None, :], score, float("-inf"))
        elif MASKED:
            score = tl.where(key[None, :] <= last_visible[:, None], score, float("-inf"))
        if first_visible is not None:
            score = tl.where((start + tl.arange(0, BLOCK_N))[None, :] >= first_visible[:, None], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale_log2)
        shift = new_max  # finite, because every tile has a key
        if (MASKED and last_visible is not None) or first_visible is not None:  # but some rows may see none of its keys
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(score * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(  # do not specialise on arguments that vary from step to step
    do_not_specialize=["table_stride", "num_splits", "window"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "context_lens_ptr", "block_tables_ptr", "sinks_ptr"],
)
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [T, H, S, D]
    lse_ptr,  # [T, H, S], natural log
    cu_seqlens_q_ptr,  # None if every sequence has one query
    context_lens_ptr,
    block_tables_ptr,
    sinks_ptr,  # [H], or None
    q_stride_t,
    q_stride_h,
    table_stride,
    num_splits,
    window,  # None if queries see all keys before them
    scale_log2,
    PAGE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if cu_seqlens_q_ptr is not None:
        first_row = kv_head // NUM_KV_HEADS * ROWS
        kv_head = kv_head % NUM_KV_HEADS
        first_token = tl.load(cu_seqlens_q_ptr + sequence)
        num_queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_token
        if first_row >= num_queries * GROUP:
            return
    context_len = tl.load(context_lens_ptr + sequence)
    first_key = 0
    if window is not None:
        seen_by_first = context_len - window
        if CAUSAL:
            seen_by_first += 1 - num_queries + first_row // GROUP
        first_key = tl.maximum(seen_by_first, 0) // BLOCK_N * BLOCK_N
    split_len = tl.cdiv(tl.cdiv(context_len - first_key, num_splits), BLOCK_N) * BLOCK_N
    first_key = tl.minimum(first_key + split * split_len, context_len)
    last_key = tl.minimum(first_key + split_len, context_len)
    num_unmasked = last_key - first_key
    if CAUSAL:
        num_seen_by_all = context_len - num_queries + first_row // GROUP + 1
        num_unmasked = tl.maximum(tl.minimum(last_key, num_seen_by_all) - first_key, 0)
    edge = first_key + num_unmasked // BLOCK_N * BLOCK_N

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    if cu_seqlens_q_ptr is None:
        token, head, inside = sequence, kv_head * GROUP + row, row < GROUP
    else:
        row += first_row
        query, head, inside = row // GROUP, kv_head * GROUP + row % GROUP, row < num_queries * GROUP
        token = first_token.to(tl.int64) + query
    last_visible = context_len - num_queries + query if CAUSAL else None
    first_visible = None
    if window is not None:
        last = last_visible if CAUSAL else tl.full([ROWS], 0, tl.int32) + context_len - 1
        first_visible = last - window + 1
    is_cell = head_mask(inside, dim, D, BLOCK_D)
    q_rows = q_ptr + token * q_stride_t + head * q_stride_h
    q = tl.load(q_rows[:, None] + dim[None, :], mask=is_cell, other=0.0)
    table_ptr = block_tables_ptr + sequence * table_stride
    k_ptr += kv_head * D
    v_ptr += kv_head * D
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_sum, row_max = begin_softmax(sinks_ptr, head, inside, split, ROWS)
    acc, row_sum, row_max = _decode_tiles(
        acc, row_sum, row_max, q, k_ptr, v_ptr, table_ptr, first_key, edge, first_visible,
        last_visible, scale_log2, PAGE, NUM_KV_HEADS * D, D, BLOCK_D, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, row_sum, row_max = _decode_tiles(
        acc, row_sum, row_max, q, k_ptr, v_ptr, table_ptr, edge, last_key, first_visible,
        last_visible, scale_log2, PAGE, NUM_KV_HEADS * D, D, BLOCK_D, BLOCK_N, MASKED=True,
    )  # fmt: skip

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees no key of this split, out is 0 and lse is -inf
    part = (token * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + part[:, None] * D + dim[None, :], out, mask=is_cell)
    tl.store(lse_ptr + part, (row_max + tl.log2(row_sum)) * LN_2, mask=inside)


def tile_rows(q_THD: torch.Tensor, num_kv_heads: int, max_query_len: int) -> tuple[int, int]:
    """Plan a tile's rows, and how many tiles hold up to `max_query_len` queries of the heads that share keys."""
    _, num_heads, head_dim = q_THD.shape
    num_rows = max_query_len * (num_heads // num_kv_heads)
    tile = max(16, triton.next_power_of_2(num_rows))
    if max_query_len > 1:
        tile = min(tile, max_decode_rows(head_dim, q_THD.element_size()))
    return tile, triton.cdiv(num_rows, tile)


def paged_decode(
    q_THD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    num_splits: int,
    config: DecodeConfig | None = None,
    out_THD: torch.Tensor | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_query_len: int = 1,
    causal: bool = True,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend, one query per sequence, to `context_lens` keys: `(out [T, H, D], lse [H, T] fp32)`. Hot: per layer.

    With `cu_seqlens_q` (int32 [B + 1], on the device) sequences have up to `max_query_len` queries, or none. PagedBatch
    explains `cu_seqlens_q`, `causal` and `window`, `add_sinks` of attention/base.py explains `sinks_H`. Rows that
    belong to no sequence are left unspecified.

    The number of splits affects only speed and rounding; see `plan_num_splits`. Without a `config` the device decides.
    The result is written to `out_THD` (contiguous) if given, else to a new tensor.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    _, page, num_kv_heads, _ = k_cache_NPKD.shape
    rows, num_tiles = tile_rows(q_THD, num_kv_heads, max_query_len)
    if config is None:
        config = decode_config(kernel_target.target_of(q_THD.device), head_dim, q_THD.element_size(), rows)
    assert 1 <= max_query_len <= MAX_DECODE_QUERIES, f"{max_query_len} queries, more than {MAX_DECODE_QUERIES}"
    assert cu_seqlens_q is not None or max_query_len == 1, "several queries per sequence need cu_seqlens_q"
    assert page % config.block_n == 0, f"blocks of {page} tokens do not divide into tiles of {config.block_n} keys"
    assert q_THD.stride(2) == 1 and block_tables.stride(1) == 1, "the last dimension must be contiguous"
    assert k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous(), "a layer's cache must be contiguous"
    assert window is None or causal, "a window needs the causal mask"
    assert sinks_H is None or (sinks_H.shape == (num_heads,) and sinks_H.is_contiguous()), "one sink for each head"
    if out_THD is None:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_TH = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q_THD.device)
    part_out, part_lse = out_THD, lse_TH
    if num_splits > 1:
        part_out = out_THD.new_empty((num_tokens, num_heads, num_splits, head_dim), dtype=torch.float32)
        part_lse = lse_TH.new_empty((num_tokens, num_heads, num_splits))
    on_grid(_decode_kernel, (num_splits, num_kv_heads * num_tiles, len(context_lens)))(
        q_THD,
        k_cache_NPKD,
        v_cache_NPKD,
        part_out,
        part_lse,
        cu_seqlens_q,
        context_lens,
        block_tables,
        sinks_H,
        q_THD.stride(0),
        q_THD.stride(1),
        block_tables.stride(0),
        num_splits,
        window,
        scale * LOG2_E.value,
        PAGE=page,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=rows,
        BLOCK_N=config.block_n,
        CAUSAL=causal and cu_seqlens_q is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(q_THD.device),
    )
    if num_splits > 1:
        merge_splits(part_out, part_lse, out_THD, lse_TH)
    return out_THD, lse_TH.t()
