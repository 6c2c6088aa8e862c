"""Merge attention results: two or three of them, or the parts of the programs that shared a sequence's keys.

Legend: T packed query tokens, H query heads, D head dim, S splits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import LOG2_E, let_next_start, on_grid, pdl_options, wait_for_previous

MAX_SPLITS = 128
MERGE_SIZES = (8, 32, MAX_SPLITS)  # splits that a merge kernel has room for; one kernel is compiled for each size
BLOCK_TOKENS = 16  # per program; fewer would need more variants of the kernel and save nothing
LSE_STRIDES = [f"{name}_lse_stride_{dim}" for name in ("a", "b", "c", "merged") for dim in "ht"]


@triton.jit
def _load_part(out_ptr, lse_ptr, stride_t, stride_h, lse_stride_h, lse_stride_t, head, token, dim, in_token, in_cell):
    out = tl.load(out_ptr + token[:, None] * stride_t + head * stride_h + dim[None, :], mask=in_cell, other=0.0)
    lse = tl.load(lse_ptr + head * lse_stride_h + token * lse_stride_t, mask=in_token, other=0.0)
    return out.to(tl.float32), lse


@triton.jit
def _merge_two(a_out, a_lse, b_out, b_lse):
    top = tl.maximum(a_lse, b_lse)
    top = tl.where(top == float("-inf"), 0.0, top)  # if neither saw a key, avoid inf - inf
    a_sum, b_sum = tl.exp(a_lse - top), tl.exp(b_lse - top)
    total = a_sum + b_sum
    b_weight = b_sum / tl.where(total == 0.0, 1.0, total)
    # The fused multiply-add is explicit, so that the rounding is the same for two and for three parts.
    out = tl.fma(b_out, b_weight[:, None], a_out * (1.0 - b_weight)[:, None])
    return out, top + tl.log(total)


# The values vary from call to call; compile once for all of them
@triton.jit(do_not_specialize=["num_tokens", *LSE_STRIDES])
def _merge_kernel(
    a_out_ptr,
    a_lse_ptr,
    b_out_ptr,
    b_lse_ptr,
    c_out_ptr,
    c_lse_ptr,
    merged_out_ptr,
    merged_lse_ptr,
    num_tokens,
    a_stride_t,
    a_stride_h,
    a_lse_stride_h,
    a_lse_stride_t,
    b_stride_t,
    b_stride_h,
    b_lse_stride_h,
    b_lse_stride_t,
    c_stride_t,
    c_stride_h,
    c_lse_stride_h,
    c_lse_stride_t,
    merged_stride_t,
    merged_stride_h,
    merged_lse_stride_h,
    merged_lse_stride_t,
    NUM_PARTS: tl.constexpr,  # 2 if c is not used
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    in_token = token < num_tokens
    in_cell = in_token[:, None] & (dim < D)[None, :]
    out, lse = _load_part(
        a_out_ptr, a_lse_ptr, a_stride_t, a_stride_h, a_lse_stride_h, a_lse_stride_t,
        head, token, dim, in_token, in_cell,
    )  # fmt: skip
    b_out, b_lse = _load_part(
        b_out_ptr, b_lse_ptr, b_stride_t, b_stride_h, b_lse_stride_h, b_lse_stride_t,
        head, token, dim, in_token, in_cell,
    )  # fmt: skip
    out, lse = _merge_two(out, lse, b_out, b_lse)
    if NUM_PARTS == 3:
        c_out, c_lse = _load_part(
            c_out_ptr, c_lse_ptr, c_stride_t, c_stride_h, c_lse_stride_h, c_lse_stride_t,
            head, token, dim, in_token, in_cell,
        )  # fmt: skip
        out, lse = _merge_two(out, lse, c_out, c_lse)
    tl.debug_barrier()  # several threads may load a cell; wait for all of them before any overwrites it
    merged_ptrs = merged_out_ptr + token[:, None] * merged_stride_t + head * merged_stride_h + dim[None, :]
    tl.store(merged_ptrs, out.to(merged_out_ptr.dtype.element_ty), mask=in_cell)
    tl.store(merged_lse_ptr + head * merged_lse_stride_h + token * merged_lse_stride_t, lse, mask=in_token)


def merge_into(out_THD: torch.Tensor, lse_HT: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Merge two or three parts, `(out, lse)` each, into `out_THD` and `lse_HT`: attention over the keys of all parts.

    The result may overwrite a part, because each program reads its cells before it writes them. The merge is computed
    in fp32 for all dtypes, and in the same order as in attention/base.py. A part that saw no key (lse -inf,
    out 0) changes nothing. Hot: once per merge.
    """
    assert 2 <= len(parts) <= 3, f"the kernel merges two or three parts, not {len(parts)}"
    num_tokens, num_heads, head_dim = out_THD.shape
    if num_tokens == 0:
        return
    tensors, strides = [], []
    for part_out_THD, part_lse_HT in (*parts, *parts[: 3 - len(parts)], (out_THD, lse_HT)):
        assert part_out_THD.stride(2) == 1, "the elements of a head must be contiguous"
        tensors += [part_out_THD, part_lse_HT]
        strides += [*part_out_THD.stride()[:2], *part_lse_HT.stride()]
    on_grid(_merge_kernel, (triton.cdiv(num_tokens, BLOCK_TOKENS), num_heads))(
        *tensors,
        num_tokens,
        *strides,
        NUM_PARTS=len(parts),
        D=head_dim,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
        **pdl_options(out_THD.device),
    )


@triton.jit
def head_mask(is_row, dim, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask of the cells of a tile [rows, BLOCK_D] that exist; [rows, 1] if every column exists."""
    is_cell = is_row[:, None]
    if D != BLOCK_D:
        is_cell = is_cell & (dim < D)[None, :]
    return is_cell


@triton.jit
def begin_softmax(sinks_ptr, head, inside, split, ROWS: tl.constexpr):
    """Sum and maximum, in base 2, of ROWS rows before their first key. A sink counts like a key that has no value, in
    the first split alone.
    """
    row_sum = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        row_sum = tl.where(split == 0, 1.0, row_sum)
        row_max = tl.where(split == 0, sink, row_max)
    return row_sum, row_max


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    part_out_ptr,  # [T * H, S, D] fp32
    part_lse_ptr,  # [T * H, S] fp32
    out_ptr,  # [T * H, D]
    lse_ptr,  # [T * H]
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


def merge_splits(
    part_out_THSD: torch.Tensor,
    part_lse_THS: torch.Tensor,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
) -> None:
    """Merge the parts of each row into `out_THD` and `lse_TH`. All are contiguous. Hot: once per layer."""
    num_tokens, num_heads, num_splits, head_dim = part_out_THSD.shape
    assert num_splits <= MAX_SPLITS, f"{num_splits} splits, more than {MAX_SPLITS}"
    block_d = triton.next_power_of_2(head_dim)
    block_s = next(size for size in MERGE_SIZES if num_splits <= size)
    on_grid(_merge_splits_kernel, (num_tokens * num_heads,))(
        part_out_THSD,
        part_lse_THS,
        out_THD,
        lse_TH,
        num_splits,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_S=block_s,
        num_warps=4 if block_s * block_d <= 2**14 else 16,  # at most 128 fp32 values per thread
        **pdl_options(out_THD.device),
    )


def launch_merge_variants(q_THD: torch.Tensor) -> None:
    """Launch every variant of the kernel, on parts of one query with arbitrary values."""
    _, num_heads, head_dim = q_THD.shape
    for num_splits in MERGE_SIZES:
        part_out_THSD = q_THD.new_zeros((1, num_heads, num_splits, head_dim), dtype=torch.float32)
        part_lse_THS = part_out_THSD.new_zeros((1, num_heads, num_splits))
        merge_splits(part_out_THSD, part_lse_THS, torch.empty_like(q_THD[:1]), part_lse_THS.new_empty((1, num_heads)))
