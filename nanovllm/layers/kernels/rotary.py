"""Rotary embedding of q and k, after an RMSNorm of each head where the model has one, in one kernel.

Legend: T packed tokens, H query heads, K kv heads, D head dim.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.kernels.pdl import let_next_start, pdl_options, wait_for_previous


@triton.jit
def _rotate_heads(
    x_ptr,  # this token's heads, [num_heads, D]
    out_ptr,
    weight_ptr,
    cos_sin_ptr,  # this token's
    first_head,
    num_heads,
    eps,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    offset = head[:, None] * (2 * HALF) + pair[None, :]
    inside = (head < num_heads)[:, None]
    same = tl.zeros((HEADS, 1), tl.int32) + pair[None, :]  # loaded for each head: where x lies, without an exchange
    if NORM:
        weight1 = tl.load(weight_ptr + same)
        weight2 = tl.load(weight_ptr + HALF + same)
    wait_for_previous(PDL)
    cos = tl.load(cos_sin_ptr + same)
    sin = tl.load(cos_sin_ptr + HALF + same)
    x1 = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        weight1, weight2 = weight1.to(tl.float32), weight2.to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)
        # rounded where torch rounds: after the norm and after the weight
        x1 = ((x1 * scale[:, None]).to(dtype).to(tl.float32) * weight1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale[:, None]).to(dtype).to(tl.float32) * weight2).to(dtype).to(tl.float32)
    tl.store(out_ptr + offset, (x1 * cos - x2 * sin).to(dtype), mask=inside)
    tl.store(out_ptr + offset + HALF, (x2 * cos + x1 * sin).to(dtype), mask=inside)


@triton.jit
def _qk_norm_rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    q_stride_t,
    k_stride_t,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)  # HEADS heads of q, or, after those, of k
    cos_sin_ptr += token * (2 * HALF)
    num_q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if group < num_q_groups:
        _rotate_heads(
            q_ptr + token * q_stride_t, q_out_ptr + token * (NUM_HEADS * 2 * HALF), q_weight_ptr, cos_sin_ptr,
            group * HEADS, NUM_HEADS, eps, HALF, HEADS, NORM, PDL,
        )  # fmt: skip
    else:
        _rotate_heads(
            k_ptr + token * k_stride_t, k_out_ptr + token * (NUM_KV_HEADS * 2 * HALF), k_weight_ptr, cos_sin_ptr,
            (group - num_q_groups) * HEADS, NUM_KV_HEADS, eps, HALF, HEADS, NORM, PDL,
        )  # fmt: skip


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D] and k [T, K, D], each head RMS-normed where weights [D] are given, then turned (rotate half).

    `cos_sin` fp32 [T, D]: D/2 cosines, then D/2 sines, of each token. q and k may be views of the qkv product; the
    results are contiguous, in q's dtype. Hot: once per layer.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert (q_weight is None) == (k_weight is None), "both heads are normed, or none"
    assert q.stride()[1:] == k.stride()[1:] == (head_dim, 1), "the heads of a token must lie together"
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens:
        heads = min(8, triton.next_power_of_2(num_heads))
        grid = (num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
        _qk_norm_rope_kernel[grid](
            q,
            k,
            q_out,
            k_out,
            q_weight,
            k_weight,
            cos_sin,
            q.stride(0),
            k.stride(0),
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HEADS=heads,
            NORM=q_weight is not None,
            num_warps=2,
            **pdl_options(q.device),
        )
    return q_out, k_out
