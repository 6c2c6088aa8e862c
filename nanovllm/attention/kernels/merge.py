"""Merge of two attention results, fused: one read of both, one write.

Legend: T packed query tokens, H query heads, D head dim.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.kernels.pdl import let_next_start, pdl_options, wait_for_previous

LSE_STRIDES = ["a_lse_stride_h", "a_lse_stride_t", "b_lse_stride_h", "b_lse_stride_t"]


@triton.jit(do_not_specialize=["num_tokens", *LSE_STRIDES])  # they vary: one compilation for all
def _merge_kernel(
    a_out_ptr,
    a_lse_ptr,
    b_out_ptr,
    b_lse_ptr,
    num_tokens,
    a_stride_t,
    a_stride_h,
    b_stride_t,
    b_stride_h,
    a_lse_stride_h,
    a_lse_stride_t,
    b_lse_stride_h,
    b_lse_stride_t,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    head = tl.program_id(1)
    inside = token < num_tokens
    a_lse_ptrs = a_lse_ptr + head * a_lse_stride_h + token * a_lse_stride_t
    a_lse = tl.load(a_lse_ptrs, mask=inside, other=0.0)
    b_lse = tl.load(b_lse_ptr + head * b_lse_stride_h + token * b_lse_stride_t, mask=inside, other=0.0)
    top = tl.maximum(a_lse, b_lse)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither saw a key: no inf - inf
    a_sum, b_sum = tl.exp(a_lse - top), tl.exp(b_lse - top)
    total = a_sum + b_sum
    b_weight = b_sum / tl.where(total == 0.0, 1.0, total)

    dim = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (dim < D)[None, :]
    a_ptrs = a_out_ptr + token[:, None] * a_stride_t + head * a_stride_h + dim[None, :]
    b_ptrs = b_out_ptr + token[:, None] * b_stride_t + head * b_stride_h + dim[None, :]
    a = tl.load(a_ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)
    merged = a * (1.0 - b_weight)[:, None] + b * b_weight[:, None]
    tl.debug_barrier()  # threads may load the same cell of `a`: all have, before any overwrites it
    tl.store(a_ptrs, merged.to(a_out_ptr.dtype.element_ty), mask=mask)
    tl.store(a_lse_ptrs, top + tl.log(total), mask=inside)


def merge_into(
    a_out_THD: torch.Tensor, a_lse_HT: torch.Tensor, b_out_THD: torch.Tensor, b_lse_HT: torch.Tensor
) -> None:
    """Attention over the union of two disjoint sets of keys, written into `a`. Hot: once per streamed part.

    See attention/merge.py for the formula. A part that saw no key (lse -inf, out 0) leaves the other as it is.
    """
    num_tokens, num_heads, head_dim = a_out_THD.shape
    assert a_out_THD.stride(2) == b_out_THD.stride(2) == 1, "the elements of a head must lie together"
    if num_tokens == 0:
        return
    block_t = min(16, triton.next_power_of_2(num_tokens))
    _merge_kernel[(triton.cdiv(num_tokens, block_t), num_heads)](
        a_out_THD,
        a_lse_HT,
        b_out_THD,
        b_lse_HT,
        num_tokens,
        *a_out_THD.stride()[:2],
        *b_out_THD.stride()[:2],
        *a_lse_HT.stride(),
        *b_lse_HT.stride(),
        D=head_dim,
        BLOCK_T=block_t,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
        **pdl_options(a_out_THD.device),
    )
