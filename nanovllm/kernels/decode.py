"""Attention with one query per sequence over a paged cache. Programs share a sequence's keys, to keep every SM busy.

Legend: B sequences (one query each), H query heads, K kv heads, D head dim, N blocks of a cache, P tokens per block,
M columns of a block table, S splits.

One program reads one split of a sequence's keys once, for all the query heads that share them (padded to the 16 rows
of a tensor core). A second kernel merges the splits. Lengths are read on the device, and the grid depends only on the
batch size and S, so a CUDA graph can be replayed with any lengths. S is planned on the host, once per shape.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from nanovllm.device import kernel_target
from nanovllm.kernels.configs import DECODE_PROGRAMS_PER_SM, DecodeConfig, decode_config
from nanovllm.kernels.constants import LN_2, LOG2_E
from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.padding import head_mask
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_previous

MAX_SPLITS = 128
SPLIT_COST_TOKENS = 256  # starting a program and merging its part cost about as much as reading this many keys
SPLIT_GRAIN_TOKENS = 64  # a split consists of whole tiles


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
            inside = start + tl.arange(0, BLOCK_N) < last_key
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
        if MASKED:
            score = tl.where(inside[None, :], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale_log2)  # finite, because every tile has a key
        weight = tl.exp2(score * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(  # do not specialise on arguments that vary from step to step
    do_not_specialize=["table_stride", "num_splits"],
    do_not_specialize_on_alignment=["context_lens_ptr", "block_tables_ptr"],
)
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [B, H, S, D]
    lse_ptr,  # [B, H, S], natural log
    context_lens_ptr,
    block_tables_ptr,
    q_stride_t,
    q_stride_h,
    table_stride,
    num_splits,
    scale_log2,
    PAGE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + sequence)
    split_len = tl.cdiv(tl.cdiv(context_len, num_splits), BLOCK_N) * BLOCK_N
    first_key = tl.minimum(split * split_len, context_len)
    last_key = tl.minimum(first_key + split_len, context_len)
    edge = first_key + (last_key - first_key) // BLOCK_N * BLOCK_N

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    inside = row < GROUP
    is_cell = head_mask(inside, dim, D, BLOCK_D)
    q_ptrs = q_ptr + sequence * q_stride_t + head[:, None] * q_stride_h + dim[None, :]
    q = tl.load(q_ptrs, mask=is_cell, other=0.0)
    table_ptr = block_tables_ptr + sequence * table_stride
    k_ptr += kv_head * D
    v_ptr += kv_head * D
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    acc, row_sum, row_max = _decode_tiles(
        acc, row_sum, row_max, q, k_ptr, v_ptr, table_ptr, first_key, edge, scale_log2,
        PAGE, NUM_KV_HEADS * D, D, BLOCK_D, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, row_sum, row_max = _decode_tiles(
        acc, row_sum, row_max, q, k_ptr, v_ptr, table_ptr, edge, last_key, scale_log2,
        PAGE, NUM_KV_HEADS * D, D, BLOCK_D, BLOCK_N, MASKED=True,
    )  # fmt: skip

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # if this split has no key, out is 0 and lse is -inf
    part = (sequence * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + part[:, None] * D + dim[None, :], out, mask=is_cell)
    tl.store(lse_ptr + part, (row_max + tl.log2(row_sum)) * LN_2, mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    part_out_ptr,  # [B * H, S, D] fp32
    part_lse_ptr,  # [B * H, S] fp32
    out_ptr,  # [B * H, D]
    lse_ptr,  # [B * H]
    num_splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    inside = split < num_splits
    part = row * num_splits + split
    part_lse = tl.load(part_lse_ptr + part, mask=inside, other=float("-inf"))
    top = tl.max(part_lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(part_lse - top)
    total = tl.sum(weight, 0)
    is_cell = head_mask(inside, dim, D, BLOCK_D)
    part_out = tl.load(part_out_ptr + part[:, None] * D + dim[None, :], mask=is_cell, other=0.0)
    out = tl.sum(part_out * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    if D == BLOCK_D:
        tl.store(out_ptr + row * D + dim, out.to(out_ptr.dtype.element_ty))
    else:
        tl.store(out_ptr + row * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)
    tl.store(lse_ptr + row, top + tl.log(total))


@lru_cache(maxsize=4096)
def plan_num_splits(num_rows: int, context_len: int, num_sms: int) -> int:
    """How many programs share the keys of each of `num_rows` (sequence, kv head) pairs with about `context_len` keys.

    Minimises the time of the slowest SM, measured in keys read: waves of programs x keys per program. At most
    MAX_SPLITS.
    """
    programs_per_wave = num_sms * DECODE_PROGRAMS_PER_SM
    num_grains = triton.cdiv(context_len, SPLIT_GRAIN_TOKENS)

    def cost(num_splits: int) -> int:
        waves = triton.cdiv(num_rows * num_splits, programs_per_wave)
        return waves * (triton.cdiv(num_grains, num_splits) * SPLIT_GRAIN_TOKENS + SPLIT_COST_TOKENS)

    return min(range(1, max(1, min(MAX_SPLITS, num_grains)) + 1), key=cost)


def paged_decode(
    q_BHD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    num_splits: int,
    config: DecodeConfig | None = None,
    out_BHD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query per sequence over its `context_lens` keys: `(out [B, H, D], lse [H, B] fp32)`. Hot: once per layer.

    The number of splits affects only speed and rounding; see `plan_num_splits`. `config` None means the device's own.
    The result is written to `out_BHD` (contiguous) if given, else to a new tensor.
    """
    batch_size, num_heads, head_dim = q_BHD.shape
    _, page, num_kv_heads, _ = k_cache_NPKD.shape
    block_d = triton.next_power_of_2(head_dim)
    group = num_heads // num_kv_heads
    num_rows = max(16, triton.next_power_of_2(group))
    if config is None:
        target = kernel_target.target_of(q_BHD.device)
        config = decode_config(target, head_dim, q_BHD.element_size(), num_rows)
    assert page % config.block_n == 0, f"blocks of {page} tokens do not divide into tiles of {config.block_n} keys"
    assert q_BHD.stride(2) == 1 and block_tables.stride(1) == 1, "the last dimension must be contiguous"
    assert k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous(), "a layer's cache must be contiguous"
    if out_BHD is None:
        out_BHD = torch.empty(q_BHD.shape, dtype=q_BHD.dtype, device=q_BHD.device)
    lse_BH = torch.empty((batch_size, num_heads), dtype=torch.float32, device=q_BHD.device)
    part_out, part_lse = out_BHD, lse_BH
    if num_splits > 1:
        part_out = out_BHD.new_empty((batch_size, num_heads, num_splits, head_dim), dtype=torch.float32)
        part_lse = lse_BH.new_empty((batch_size, num_heads, num_splits))
    on_grid(_decode_kernel, (num_splits, num_kv_heads, batch_size))(
        q_BHD,
        k_cache_NPKD,
        v_cache_NPKD,
        part_out,
        part_lse,
        context_lens,
        block_tables,
        q_BHD.stride(0),
        q_BHD.stride(1),
        block_tables.stride(0),
        num_splits,
        scale * LOG2_E.value,
        PAGE=page,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        BLOCK_D=block_d,
        ROWS=num_rows,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(q_BHD.device),
    )
    if num_splits > 1:
        block_s = triton.next_power_of_2(num_splits)
        on_grid(_merge_splits_kernel, (batch_size * num_heads,))(
            part_out,
            part_lse,
            out_BHD,
            lse_BH,
            num_splits,
            D=head_dim,
            BLOCK_D=block_d,
            BLOCK_S=block_s,
            num_warps=4 if block_s * block_d <= 2**14 else 16,  # at most 128 fp32 values per thread
            **pdl_options(q_BHD.device),
        )
    return out_BHD, lse_BH.t()
