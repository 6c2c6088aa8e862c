"""Fused kernels of the layers: RMSNorm (alone or with the preceding residual addition), the gated activation, and
everything between the qkv product and attention. Each rounds where the plain torch function that it replaces rounds.

Legend: T packed tokens, H query heads, K kv heads, D head dim, N blocks of a cache, P tokens per block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import ACTIVATIONS, gated
from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

# From this many tokens on, starting programs dominates the time: use fewer programs with more heads each
MANY_TOKENS = 1024


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + token * SIZE + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + token * SIZE + column, x, mask=inside)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    normed = (x * scale).to(weight.dtype).to(tl.float32)  # round where torch rounds
    tl.store(out_ptr + token * SIZE + column, (normed * weight.to(tl.float32)).to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; [T, size], rows may be strided. Hot: per layer."""
    normed, _ = _run_rms_norm(x, None, weight, eps)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), with the sum rounded to x's dtype; [T, size]. Hot: twice per layer."""
    return _run_rms_norm(x, residual, weight, eps)


def _run_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, size = x.shape
    assert x.stride(1) == 1 and (residual is None or residual.is_contiguous()), "the last dimension must be contiguous"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if num_tokens:
        block = triton.next_power_of_2(size)
        on_grid(_rms_norm_kernel, (num_tokens,))(
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            ADD=residual is not None,
            num_warps=min(16, max(1, block // 512)),
            **pdl_options(x.device),
        )
    return out, total


@triton.jit
def _normed(x, weight, eps, dtype: tl.constexpr, SIZE: tl.constexpr):
    """Norm x in fp32 and round where torch rounds: before the weight, to its dtype, and after it."""
    normed = (x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)).to(weight.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype)


@triton.jit
def _norm_add_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scalar_ptr,
    next_weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = sum_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if next_weight_ptr is not None:
        next_weight = tl.load(next_weight_ptr + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    total = (residual + _normed(x, weight, eps, dtype, SIZE).to(tl.float32)).to(dtype)
    if scalar_ptr is not None:
        total = (total.to(tl.float32) * tl.load(scalar_ptr).to(tl.float32)).to(dtype)
    tl.store(sum_ptr + token * SIZE + column, total, mask=inside)
    if next_weight_ptr is not None:
        normed = _normed(total.to(tl.float32), next_weight, eps, dtype, SIZE)
        tl.store(out_ptr + token * SIZE + column, normed, mask=inside)


def norm_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    scalar: torch.Tensor | None,
    next_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm of the sum, the sum), [T, size] each, of the residual and the norm of x, times `scalar` [1] if
    it is given. Without `next_weight` the first is the sum, too. Hot: several times per layer.
    """
    num_tokens, size = x.shape
    assert x.stride(1) == 1 and residual.is_contiguous(), "the last dimension must be contiguous"
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = total if next_weight is None else torch.empty_like(total)
    if num_tokens:
        block = triton.next_power_of_2(size)
        on_grid(_norm_add_norm_kernel, (num_tokens,))(
            x,
            residual,
            weight,
            scalar,
            next_weight,
            out,
            total,
            x.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **pdl_options(x.device),
        )
    return out, total


@triton.jit
def _act_and_mul_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    wait_for_previous(PDL)
    gate = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + token * SIZE + column, gated(gate, up, dtype, ACTIVATION).to(dtype), mask=inside)


def act_and_mul(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(first half) * second half of the last dimension: [T, 2 * size] -> [T, size]. Hot: once per layer."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1, "the last dimension must be contiguous"
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(size))
        grid = (num_tokens, triton.cdiv(size, block))
        on_grid(_act_and_mul_kernel, grid)(
            x,
            out,
            x.stride(0),
            SIZE=size,
            BLOCK=block,
            ACTIVATION=ACTIVATIONS[activation],
            num_warps=4,
            **pdl_options(x.device),
        )
    return out


@triton.jit
def _sigmoid_and_mul_kernel(
    gate_ptr, x_ptr, out_ptr, gate_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    wait_for_previous(PDL)
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    sigmoid = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # round where torch rounds
    tl.store(out_ptr + token * SIZE + column, (sigmoid * x).to(dtype), mask=inside)


def sigmoid_and_mul(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """sigmoid(gate) * x: [T, size] each, where the rows of `gate` may be strided. Hot: once per layer."""
    num_tokens, size = x.shape
    assert gate.stride(1) == 1 and x.is_contiguous(), "the last dimension must be contiguous"
    out = torch.empty_like(x)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(size))
        on_grid(_sigmoid_and_mul_kernel, (num_tokens, triton.cdiv(size, block)))(
            gate, x, out, gate.stride(0), SIZE=size, BLOCK=block, num_warps=4, **pdl_options(x.device)
        )
    return out


@triton.jit
def _softcap_kernel(x_ptr, stride, cap, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    wait_for_previous(PDL)
    place = x_ptr + row * stride + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tanh = 2.0 / (1.0 + tl.exp(x * (-2.0 / cap))) - 1.0
    tl.store(place, (cap * tanh).to(x_ptr.dtype.element_ty), mask=inside)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Replace x [S, N] by cap * tanh(x / cap), in place. Hot: once per step."""
    num_rows, size = x.shape
    assert x.stride(1) == 1, "the last dimension must be contiguous"
    if num_rows:
        grid = (num_rows, triton.cdiv(size, 1024))
        on_grid(_softcap_kernel, grid)(x, x.stride(0), cap, SIZE=size, BLOCK=1024, num_warps=4, **pdl_options(x.device))
    return x


@triton.jit
def _select_columns_kernel(
    x_ptr, order_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    source = tl.load(order_ptr + column, mask=inside, other=0)  # at rest, as weights are
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * x_stride + source, mask=inside, other=0.0)
    tl.store(out_ptr + row * SIZE + column, x, mask=inside)


def select_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x[:, order], with `order` int32 [K]: [T, K] -> [T, K]. Hot: several times per layer."""
    num_rows, size = len(x), len(order)
    assert x.stride(1) == 1 and x.shape[1] == size, "each column has a place"
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(1024, triton.next_power_of_2(size))
        on_grid(_select_columns_kernel, (num_rows, triton.cdiv(size, block)))(
            x, order, out, x.stride(0), SIZE=size, BLOCK=block, num_warps=4, **pdl_options(x.device)
        )
    return out


@triton.jit
def _is_cell(head, num_heads, pair, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Mask of the cells of a tile of half heads that exist: [heads, BLOCK_HALF], or [heads, 1] if every pair exists."""
    inside = (head < num_heads)[:, None]
    if HALF != BLOCK_HALF:
        inside = inside & (pair < HALF)[None, :]
    return inside


@triton.jit
def _load_pairs(ptr, pair, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    if HALF == BLOCK_HALF:
        values = tl.load(ptr + pair)
    else:
        values = tl.load(ptr + pair, mask=pair < HALF, other=0.0)
    return values


@triton.jit
def _norm_rotate(
    x_ptr,  # the token's heads, [num_heads, D]
    weight_ptr,
    cos_sin_ptr,  # the token's cosines and sines, [D]
    first_head,
    num_heads,
    eps,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and rotate heads first_head .. first_head + HEADS - 1. Returns both halves, each [HEADS, BLOCK_HALF]."""
    head = first_head + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    offset = head[:, None] * (2 * HALF) + pair[None, :]
    inside = _is_cell(head, num_heads, pair, HALF, BLOCK_HALF)
    # Load weights, cos and sin once per head, so that each thread already holds the values for its part of x.
    same = tl.zeros((HEADS, 1), tl.int32) + pair[None, :]
    if NORM:
        weight1 = _load_pairs(weight_ptr, same, HALF, BLOCK_HALF)
        weight2 = _load_pairs(weight_ptr + HALF, same, HALF, BLOCK_HALF)
    wait_for_previous(PDL)
    cos = _load_pairs(cos_sin_ptr, same, HALF, BLOCK_HALF)
    sin = _load_pairs(cos_sin_ptr + HALF, same, HALF, BLOCK_HALF)
    x1 = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)
        # Round where torch rounds: after the norm and after the weight.
        x1, x2 = (x1 * scale[:, None]).to(weight1.dtype), (x2 * scale[:, None]).to(weight2.dtype)
        x1 = (x1.to(tl.float32) * weight1.to(tl.float32)).to(dtype).to(tl.float32)
        x2 = (x2.to(tl.float32) * weight2.to(tl.float32)).to(dtype).to(tl.float32)
    return (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)


@triton.jit
def _store_heads(
    out_ptr, x1, x2, first_head, num_heads, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, HEADS: tl.constexpr
):
    head = first_head + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    offset = head[:, None] * (2 * HALF) + pair[None, :]
    inside = _is_cell(head, num_heads, pair, HALF, BLOCK_HALF)
    tl.store(out_ptr + offset, x1, mask=inside)
    tl.store(out_ptr + offset + HALF, x2, mask=inside)


@triton.jit
def _norm_rotate_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    qkv_stride_t,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # the next power of two
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_V: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // (q_groups + 2 * kv_groups)).to(tl.int64)
    # A group has HEADS heads. The groups of q come first, then the groups of k, then the groups of v.
    group = tl.program_id(0) % (q_groups + 2 * kv_groups)
    cos_sin_ptr += token * (2 * HALF)
    kv_row: tl.constexpr = NUM_KV_HEADS * 2 * HALF
    if group < q_groups:
        x1, x2 = _norm_rotate(
            q_ptr + token * qkv_stride_t, q_weight_ptr, cos_sin_ptr, group * HEADS, NUM_HEADS, eps,
            q_out_ptr.dtype.element_ty, HALF, BLOCK_HALF, HEADS, NORM, PDL,
        )  # fmt: skip
        q_out_ptr += token * (NUM_HEADS * 2 * HALF)
        _store_heads(q_out_ptr, x1, x2, group * HEADS, NUM_HEADS, HALF, BLOCK_HALF, HEADS)
    elif group < q_groups + kv_groups:
        first_head = (group - q_groups) * HEADS
        x1, x2 = _norm_rotate(
            k_ptr + token * qkv_stride_t, k_weight_ptr, cos_sin_ptr, first_head, NUM_KV_HEADS, eps,
            k_cache_ptr.dtype.element_ty, HALF, BLOCK_HALF, HEADS, NORM, PDL,
        )  # fmt: skip
        cell = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if cell >= 0:
            k_cache_ptr += cell * kv_row
            _store_heads(k_cache_ptr, x1, x2, first_head, NUM_KV_HEADS, HALF, BLOCK_HALF, HEADS)
    else:
        wait_for_previous(PDL)
        first_head = (group - q_groups - kv_groups) * HEADS
        cell = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if cell >= 0 and NORM_V:
            head, pair = first_head + tl.arange(0, HEADS), tl.arange(0, BLOCK_HALF)
            inside = _is_cell(head, NUM_KV_HEADS, pair, HALF, BLOCK_HALF)
            v_head = v_ptr + token * qkv_stride_t + head[:, None] * (2 * HALF) + pair[None, :]
            v1 = tl.load(v_head, mask=inside, other=0.0).to(tl.float32)
            v2 = tl.load(v_head + HALF, mask=inside, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(v1 * v1, 1) + tl.sum(v2 * v2, 1)) / (2 * HALF) + eps)[:, None]
            v1, v2 = (v1 * scale).to(v_cache_ptr.dtype.element_ty), (v2 * scale).to(v_cache_ptr.dtype.element_ty)
            v_cache_ptr += cell * kv_row
            _store_heads(v_cache_ptr, v1, v2, first_head, NUM_KV_HEADS, HALF, BLOCK_HALF, HEADS)
        elif cell >= 0:
            element = tl.arange(0, HEADS * 2 * BLOCK_HALF)
            offset = first_head * 2 * HALF + element
            inside = offset < kv_row
            if HALF != BLOCK_HALF:
                inside = inside & (element < HEADS * 2 * HALF)
            v = tl.load(v_ptr + token * qkv_stride_t + offset, mask=inside)
            tl.store(v_cache_ptr + cell * kv_row + offset, v, mask=inside)


def norm_rotate_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    many_tokens: int = MANY_TOKENS,
    *,
    norms_v: bool = False,
) -> torch.Tensor:
    """Norm each head of q [T, H, D] and k [T, K, D] if weights [D] are given, rotate it (rotate half), store k and v.
    With `norms_v`, norm each head of v [T, K, D] without a weight. k and v may be the same.

    Returns q, contiguous. k and v [T, K, D] of token t go into cell `slot_mapping_T[t]` of the caches, or are not
    stored if `slot_mapping_T[t]` is -1. q, k and v must be views of one qkv product. `cos_sin`, fp32 [T, D], has for
    each token D/2 cosines and then D/2 sines. Hot: once per layer.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert (q_weight is None) == (k_weight is None), "q and k must both have a norm, or neither"
    assert q.stride() == k.stride() == v.stride() and q.stride()[1:] == (head_dim, 1), (
        "q, k and v must be views of one product"
    )
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    assert k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous(), "a layer's cache must be contiguous"
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens:
        most = min(16 if num_tokens >= many_tokens else 8, max(1, 4096 // head_dim))  # for the registers
        heads = min(most, triton.next_power_of_2(num_heads))
        groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
        on_grid(_norm_rotate_store_kernel, (num_tokens * groups,))(
            q,
            k,
            v,
            q_out,
            k_cache_NPKD,
            v_cache_NPKD,
            q_weight,
            k_weight,
            cos_sin,
            slot_mapping_T,
            q.stride(0),
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
            HEADS=heads,
            NORM=q_weight is not None,
            NORM_V=norms_v,
            num_warps=2,
            **pdl_options(q.device),
        )
    return q_out


@triton.jit
def _choose_experts_kernel(
    logits_ptr,
    row_stride,
    expert_factors_ptr,
    experts_ptr,
    weights_ptr,
    logit_factor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    logits = tl.load(logits_ptr + token * row_stride + expert, mask=expert < NUM_EXPERTS, other=-float("inf"))
    shares = tl.exp((logits - tl.max(logits, 0)) * logit_factor)
    shares /= tl.sum(shares, 0)
    chosen = tl.zeros((BLOCK_CHOSEN,), tl.int64)
    weights = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        weight, best = tl.max(shares, 0, return_indices=True)
        best = tl.minimum(best, NUM_EXPERTS - 1)  # with NaN among the logits, no expert may be found
        chosen = tl.where(place == i, best, chosen)
        weights = tl.where(place == i, weight, weights)
        shares = tl.where(expert == best, -1.0, shares)
    if NORM:
        weights /= tl.sum(weights, 0)
    if expert_factors_ptr is not None:
        weights *= tl.load(expert_factors_ptr + chosen).to(tl.float32)
    tl.store(experts_ptr + token * NUM_CHOSEN + place, chosen, mask=place < NUM_CHOSEN)
    tl.store(weights_ptr + token * NUM_CHOSEN + place, weights, mask=place < NUM_CHOSEN)


def choose_experts(
    logits: torch.Tensor,
    num_chosen: int,
    norms: bool,
    logit_factor: float = 1.0,
    expert_factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the largest logits, fp32 [T, E] with any stride between rows. Returns the experts, int64
    [T, C], and their softmax probabilities, fp32 [T, C], which with `norms` add up to 1. Hot: once per layer.

    The logits are multiplied by `logit_factor`, which is positive, and the results by `expert_factors` [E].
    """
    num_tokens, num_experts = logits.shape
    experts = torch.empty((num_tokens, num_chosen), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits.device)
    if num_tokens:
        on_grid(_choose_experts_kernel, (num_tokens,))(
            logits,
            logits.stride(0),
            expert_factors,
            experts,
            weights,
            logit_factor,
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            BLOCK=triton.next_power_of_2(num_experts),
            BLOCK_CHOSEN=triton.next_power_of_2(num_chosen),
            NORM=norms,
            num_warps=1,
            **pdl_options(logits.device),
        )
    return experts, weights
