"""Attention with many queries per sequence over a paged cache: whole prompts, chunks, mixed batches.

Legend: T packed query tokens, B sequences, H query heads, K kv heads, D head dim, N blocks of a cache, P tokens per
block, M columns of a block table, S splits.

One program computes a tile of BLOCK_M rows. A row is a query of one head. In a short chunk, a tile holds HEADS heads
that share keys, which fill it together. The program walks the keys in tiles of BLOCK_N with an online softmax in base
2 (Milakov and Gimelshein 2018; Dao 2022). P is a multiple of BLOCK_N, so a tile lies in one block and needs one look-up
in the block table. Tiles are loaded ahead of their use, by TMA (one bulk copy per tile) or by cp.async (pointers), as
kernels/configs.py chooses for the GPU. Tiles that every query sees completely need no mask. Tiles before the window of
the program's first query are not read. A tile has BLOCK_D columns, D rounded up to a power of two; columns from D on
are zero.

A short chunk has too few tiles of queries to fill a GPU. Over a long history, S programs therefore share the keys of a
tile, in ranges of whole tiles of keys. A second kernel merges their results (kernels/merge.py). S is planned on the
host. Without splits the kernel writes the result itself.

The sums of 128 queries and 512 columns exceed the registers of an SM. PARTS programs then compute the same scores, and
each the sums of its share of the columns of V: computing scores twice takes less time than halving the tile of queries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.device import kernel_target
from nanovllm.kernels.configs import SHORT_QUERY_LEN, PrefillConfig, heads_per_tile, prefill_config
from nanovllm.kernels.launch import LN_2, LOG2_E, on_grid
from nanovllm.kernels.merge import begin_softmax, head_mask, merge_splits


@triton.jit
def _load_tile(
    source,  # with TMA a descriptor, else a pointer to the head's first row
    row,
    place,  # the head's index in the descriptor
    key,  # [BLOCK_N]; with MASKED, rows for keys from context_len on are zero
    context_len,
    ROW: tl.constexpr,  # elements from one row to the next: K * D
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load keys or values of one head, [BLOCK_N, BLOCK_D], starting at `row`."""
    dim = tl.arange(0, BLOCK_D)
    if TMA:
        if D == BLOCK_D:
            tile = source.load([row, place])
        else:
            tile = source.load([row, place, 0]).reshape([BLOCK_N, BLOCK_D])  # columns from D on are out of bounds: zero
        if MASKED:
            tile = tl.where((key < context_len)[:, None], tile, 0.0)
    else:
        ptrs = source + row.to(tl.int64) * ROW + tl.arange(0, BLOCK_N)[:, None] * ROW + dim[None, :]
        if MASKED:
            tile = tl.load(ptrs, mask=head_mask(key < context_len, dim, D, BLOCK_D), other=0.0)
        elif D != BLOCK_D:
            tile = tl.load(ptrs, mask=(dim < D)[None, :], other=0.0)
        else:
            tile = tl.load(ptrs)
    return tile


@triton.jit
def _attend_tiles(
    acc,
    row_sum,
    row_max,
    q,
    k_source,
    v_source,
    table_ptr,
    first_key,
    last_key,
    first_visible,  # [BLOCK_M]: the first key that each row sees, or None without a window
    last_visible,  # [BLOCK_M]: the last key that each row sees
    context_len,
    k_place,
    v_place,
    scale_log2,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add keys first_key .. last_key - 1 to the running softmax of BLOCK_M rows. A tile starts at first_key."""
    next_block = tl.load(table_ptr + first_key // PAGE, mask=first_key < last_key, other=0)
    for start in tl.range(first_key, last_key, BLOCK_N):
        row = next_block * PAGE + start % PAGE
        ahead = start + BLOCK_N  # look up one tile ahead, so that copies of K and V do not wait for a look-up
        next_block = tl.load(table_ptr + ahead // PAGE, mask=ahead < last_key, other=0)
        k = _load_tile(k_source, row, k_place, None, None, ROW, D, BLOCK_D, BLOCK_N, False, TMA)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        key = start + tl.arange(0, BLOCK_N)
        if MASKED:
            score = tl.where(key[None, :] <= last_visible[:, None], score, float("-inf"))
        if first_visible is not None:
            score = tl.where(key[None, :] >= first_visible[:, None], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale_log2)
        shift = new_max
        if MASKED or first_visible is not None:  # some rows may see none of the tile's keys
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(score * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None]
        # Mask V too: values past the context were never written and may be NaN, and 0 * NaN is NaN.
        v = _load_tile(
            v_source, row, v_place, key, context_len, ROW, D // PARTS, BLOCK_D // PARTS, BLOCK_N, MASKED, TMA
        )
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(  # do not specialise on arguments that vary from step to step
    do_not_specialize=["num_tokens", "table_stride", "num_splits", "window"],
    do_not_specialize_on_alignment=["cu_seqlens_q_ptr", "context_lens_ptr", "block_tables_ptr", "sinks_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_source,
    v_source,
    out_ptr,  # [T, H, D]; with splits [T, H, S, D]
    lse_ptr,  # [H, T]; with splits [T, H, S]
    cu_seqlens_q_ptr,
    context_lens_ptr,
    block_tables_ptr,
    sinks_ptr,  # [H], or None
    num_splits,  # None if one program reads all keys of a tile
    window,  # None if queries see all keys before them
    num_tokens,
    q_stride_t,
    q_stride_h,
    table_stride,
    scale_log2,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
):
    first_head, sequence = tl.program_id(1) // PARTS * HEADS, tl.program_id(2)
    first_column = tl.program_id(1) % PARTS * (BLOCK_D // PARTS)
    num_heads = tl.num_programs(1) // PARTS * HEADS
    query_start = tl.load(cu_seqlens_q_ptr + sequence).to(tl.int64)
    query_len = (tl.load(cu_seqlens_q_ptr + sequence + 1) - query_start).to(tl.int32)
    tile, num_tiles, split = tl.program_id(0), tl.num_programs(0), 0
    if num_splits is not None:  # tiles that read the same keys run concurrently
        num_tiles = num_tiles // num_splits
        split = tile // num_tiles
        tile = tile % num_tiles
    first_query = (num_tiles - 1 - tile) * (BLOCK_M // HEADS)  # the tiles with the most keys start first
    if first_query < query_len:
        context_len = tl.load(context_lens_ptr + sequence)
        row = tl.arange(0, BLOCK_M)
        offset, head = row // HEADS, first_head + row % HEADS  # from the tile's start, so that offsets fit into 32 bits
        query = first_query + offset
        first_token = query_start + first_query
        dim = tl.arange(0, BLOCK_D)
        inside = query < query_len
        is_cell = head_mask(inside, dim, D, BLOCK_D)
        q_rows = q_ptr + first_token * q_stride_t + offset * q_stride_t + head * q_stride_h
        q = tl.load(q_rows[:, None] + dim[None, :], mask=is_cell, other=0.0)

        if CAUSAL:
            last_visible = context_len - query_len + query
            num_keys = tl.minimum(context_len, context_len - query_len + first_query + BLOCK_M // HEADS)
            num_seen_by_all = tl.maximum(context_len - query_len + first_query + 1, 0)
        else:
            last_visible = tl.full([BLOCK_M], 0, tl.int32) + context_len - 1
            num_keys = context_len
            num_seen_by_all = context_len
        first_key, last_key = 0, num_keys
        first_visible = None
        if window is not None:
            first_visible = last_visible - window + 1
            seen_by_first = tl.maximum(context_len - query_len + first_query - window + 1, 0)
            first_key = seen_by_first // BLOCK_N * BLOCK_N
        edge = num_seen_by_all // BLOCK_N * BLOCK_N
        if num_splits is not None:
            split_len = tl.cdiv(tl.cdiv(num_keys - first_key, num_splits), BLOCK_N) * BLOCK_N
            first_key = tl.minimum(first_key + split * split_len, num_keys)
            last_key = tl.minimum(first_key + split_len, num_keys)
            edge = tl.minimum(tl.maximum(edge, first_key), last_key)

        table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
        kv_head = first_head // GROUP
        k_place = kv_head * D if D == BLOCK_D else kv_head
        v_place = k_place + first_column
        if not TMA:
            k_source += kv_head * D
            v_source += kv_head * D + first_column
        acc = tl.zeros([BLOCK_M, BLOCK_D // PARTS], tl.float32)
        row_sum, row_max = begin_softmax(sinks_ptr, head, inside, split, BLOCK_M)
        acc, row_sum, row_max = _attend_tiles(
            acc, row_sum, row_max, q, k_source, v_source, table_ptr, first_key, edge, first_visible, last_visible,
            context_len, k_place, v_place, scale_log2, PAGE, ROW, D, BLOCK_D, PARTS, BLOCK_N, MASKED=False, TMA=TMA,
        )  # fmt: skip
        acc, row_sum, row_max = _attend_tiles(
            acc, row_sum, row_max, q, k_source, v_source, table_ptr, edge, last_key, first_visible, last_visible,
            context_len, k_place, v_place, scale_log2, PAGE, ROW, D, BLOCK_D, PARTS, BLOCK_N, MASKED=True, TMA=TMA,
        )  # fmt: skip

        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # if no key was seen, out is 0 and lse is -inf
        out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        lse = (row_max + tl.log2(row_sum)) * LN_2
        if num_splits is None:
            part, num_parts = head, num_heads
            lse_ptrs = lse_ptr + head.to(tl.int64) * num_tokens + first_token + offset
        else:
            part, num_parts = head * num_splits + split, num_heads * num_splits
            lse_ptrs = lse_ptr + first_token * num_parts + offset * num_parts + part
        out_rows = out_ptr + first_token * num_parts * D + (offset * num_parts + part) * D
        column = first_column + tl.arange(0, BLOCK_D // PARTS)
        tl.store(out_rows[:, None] + column[None, :], out, mask=head_mask(inside, column, D, BLOCK_D))
        tl.store(lse_ptrs, lse, mask=inside)  # of all parts the same


def _descriptor(cache_NPKD: torch.Tensor, block_n: int, num_parts: int = 1) -> TensorDescriptor:
    """A TMA descriptor for tiles of `block_n` tokens of one head, BLOCK_D columns wide or a part of them.

    If BLOCK_D is more than D, heads get their own dimension, so that columns beyond a head are out of bounds and not in
    the next head.
    """
    _, _, num_kv_heads, head_dim = cache_NPKD.shape
    block_d = triton.next_power_of_2(head_dim)
    if head_dim == block_d:
        return TensorDescriptor.from_tensor(
            cache_NPKD.view(-1, num_kv_heads * head_dim), [block_n, head_dim // num_parts]
        )
    return TensorDescriptor.from_tensor(cache_NPKD.view(-1, num_kv_heads, head_dim), [block_n, 1, block_d])


def paged_prefill(
    q_THD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    scale: float,
    causal: bool,
    config: PrefillConfig | None = None,
    out_THD: torch.Tensor | None = None,
    num_splits: int = 1,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with packed queries: `(out [T, H, D], lse [H, T] fp32)`. Hot: per layer.

    PagedBatch explains `causal` and `window`, `add_sinks` of attention/base.py explains `sinks_H`.

    Without a `config` the device decides. The result goes to `out_THD` (contiguous) if given, else to a new tensor. The
    number of splits affects only speed and rounding; see `plan_prefill_splits`.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    _, page, num_kv_heads, _ = k_cache_NPKD.shape
    tile_heads = heads_per_tile(num_heads // num_kv_heads, max_query_len)
    if config is None:
        target = kernel_target.target_of(q_THD.device)
        config = prefill_config(target, head_dim, q_THD.element_size(), max_query_len, tile_heads)
    assert config.num_parts == 1 or head_dim == triton.next_power_of_2(head_dim), "parts of a head must be whole tiles"
    assert page % config.block_n == 0, f"blocks of {page} tokens do not divide into tiles of {config.block_n} keys"
    assert q_THD.stride(2) == 1 and block_tables.stride(1) == 1, "the last dimension must be contiguous"
    assert k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous(), "a layer's cache must be contiguous"
    assert window is None or causal, "a window needs the causal mask"
    assert sinks_H is None or (sinks_H.shape == (num_heads,) and sinks_H.is_contiguous()), "one sink for each head"
    if out_THD is None:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_splits == 1:
        part_out = out_THD
        part_lse = lse_HT = torch.empty((num_heads, num_tokens), dtype=torch.float32, device=q_THD.device)
    else:
        part_out = out_THD.new_empty((num_tokens, num_heads, num_splits, head_dim), dtype=torch.float32)
        part_lse = part_out.new_empty((num_tokens, num_heads, num_splits))
        lse_HT = part_out.new_empty((num_tokens, num_heads)).t()
    k_source: Any = k_cache_NPKD
    v_source: Any = v_cache_NPKD
    if config.tma:
        k_source = _descriptor(k_cache_NPKD, config.block_n)
        v_source = _descriptor(v_cache_NPKD, config.block_n, config.num_parts)
    num_tiles = triton.cdiv(max_query_len, config.block_m // tile_heads)
    grid = (num_tiles * num_splits, num_heads // tile_heads * config.num_parts, context_lens.shape[0])
    on_grid(_prefill_kernel, grid)(
        q_THD,
        k_source,
        v_source,
        part_out,
        part_lse,
        cu_seqlens_q,
        context_lens,
        block_tables,
        sinks_H,
        None if num_splits == 1 else num_splits,
        window,
        num_tokens,
        q_THD.stride(0),
        q_THD.stride(1),
        block_tables.stride(0),
        scale * LOG2_E.value,
        PAGE=page,
        GROUP=num_heads // num_kv_heads,
        ROW=num_kv_heads * head_dim,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        PARTS=config.num_parts,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        HEADS=tile_heads,
        CAUSAL=causal,
        TMA=config.tma,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        merge_splits(part_out, part_lse, out_THD, lse_HT.t())
    return out_THD, lse_HT


def launch_prefill_variants(
    q_THD: torch.Tensor, cache_NPKD: torch.Tensor, window: int | None, sinks_H: torch.Tensor | None
) -> None:
    """Launch every variant of the kernel that chunks of up to `len(q_THD)` tokens need, without computing anything.

    Keys outside of the causal part are streamed. They have no sinks, and layers with a window stream none.
    """
    zeros = torch.zeros(2, dtype=torch.int32, device=q_THD.device)
    sequence = zeros, zeros[:1], zeros.view(2, 1)[:1]  # no query, no key, one block
    inputs = q_THD[:1], cache_NPKD, cache_NPKD, *sequence
    for max_query_len, num_splits in ((SHORT_QUERY_LEN, 1), (SHORT_QUERY_LEN, 2), (len(q_THD), 1)):
        paged_prefill(*inputs, max_query_len, 1.0, causal=True, num_splits=num_splits, window=window, sinks_H=sinks_H)
        if window is None:
            paged_prefill(*inputs, max_query_len, 1.0, causal=False, num_splits=num_splits)
