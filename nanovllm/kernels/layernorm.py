"""RMSNorm, alone and fused with the residual addition before it. A program reads and writes one row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_previous


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
    normed = (x * scale).to(dtype).to(tl.float32)  # round where torch rounds
    tl.store(out_ptr + token * SIZE + column, (normed * weight.to(tl.float32)).to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; [T, size], rows may be strided. Hot: per layer."""
    normed, _ = _run(x, None, weight, eps)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), with the sum rounded to x's dtype; [T, size]. Hot: twice per layer."""
    return _run(x, residual, weight, eps)


def _run(
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
