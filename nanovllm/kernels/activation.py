"""The gated activation of the MLP, fused."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_previous


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    wait_for_previous(PDL)
    gate = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # round where torch rounds
    tl.store(out_ptr + token * SIZE + column, (silu * up).to(dtype), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension: [T, 2 * size] -> [T, size]. Hot: once per layer."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1, "the last dimension must be contiguous"
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(size))
        grid = (num_tokens, triton.cdiv(size, block))
        on_grid(_silu_and_mul_kernel, grid)(
            x, out, x.stride(0), SIZE=size, BLOCK=block, num_warps=4, **pdl_options(x.device)
        )
    return out
