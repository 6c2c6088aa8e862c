"""Linear layers with few input rows, which are bound by reading the weight.

One kernel serves both plain layers and the first half of a gated MLP with its activation. A program owns BLOCK_N output
features of all rows, so the weight is read once, 16 bytes per thread, for any M. Its warps are placed side by side
along K: a thread reads the same columns of each of its weight rows, so it loads `x` once for all of them. Each thread
sums in fp32, and the program adds up the sums at the end; K is not split and there are no atomics. A row's result is
the same in every run, but may differ between values of M, because the compiler may choose another thread layout.

The first step along K, often the only one, loads its part of the weight before waiting for the kernel that computes `x`
(kernels/launch.py). Loading early keeps the memory busy while one kernel ends and the next begins.
Legend: M rows, N output features, K input features; a pack is the 16 bytes that a thread loads at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import ACTIVATIONS, gated
from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

_PACKS_IN_FLIGHT = 4  # packs that a thread loads in one step, over all its rows: 16 registers


class Tile(NamedTuple):
    """Output features and warps of a program, and how many steps along K after the first are in flight at once.

    With num_stages 1 loads go to registers, with more they go through shared memory.
    """

    block_n: int
    num_warps: int
    num_stages: int


DEFAULT_TILE = Tile(1, 4, 1)  # the fastest, or at most 9% slower, for every layer of four models on an H200


@triton.jit
def _load_weight(ptr, row, pack, VEC: tl.constexpr, NUM_PACKS: tl.constexpr, EVEN: tl.constexpr):
    """Load [1, BLOCK_N, STEP, VEC]. A weight is used once per step and should not evict `x` from the caches."""
    ptrs = ptr + (row * NUM_PACKS + pack) * VEC + tl.arange(0, VEC)[None, None, None, :]
    if EVEN:
        return tl.load(ptrs, eviction_policy="evict_first")
    return tl.load(ptrs, mask=pack < NUM_PACKS, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_x(x_row, pack, is_row, VEC: tl.constexpr, NUM_PACKS: tl.constexpr):
    """Load x [M, 1, STEP, VEC] in fp32."""
    is_x = is_row[:, :, None, None] & (pack < NUM_PACKS)
    ptrs = x_row + pack * VEC + tl.arange(0, VEC)[None, None, None, :]
    return tl.load(ptrs, mask=is_x, other=0.0).to(tl.float32)


@triton.jit
def _finish(sums, bias_ptr, row, is_feature, dtype, BIAS: tl.constexpr):
    """Add up sums [M, BLOCK_N, STEP] -> [M, BLOCK_N], with the bias, rounded like the output of a linear layer."""
    total = tl.sum(sums, 2)
    if BIAS:
        total += tl.load(bias_ptr + row, mask=is_feature, other=0.0).to(tl.float32)
    return total.to(dtype)


@triton.jit
def _small_linear_kernel(
    x_ptr,
    weight_ptr,  # [N, K]; if gated [2 * N, K], with the gate's rows before the up's
    bias_ptr,
    out_ptr,
    x_stride,  # in packs, from one row to the next
    num_rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,  # steps along K, after the first, whose loads are in flight together
    STEP: tl.constexpr,  # packs of a row that the program loads at once
    NUM_PACKS: tl.constexpr,  # packs of a row
    VEC: tl.constexpr,  # elements of a pack
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    EVEN: tl.constexpr = NUM_PACKS % STEP == 0
    m = tl.arange(0, BLOCK_M)[:, None]
    feature = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    is_row, is_feature = m < num_rows, feature < N
    # Tensors of a step are [M, BLOCK_N, STEP, VEC]. Programs past the last feature read it again, and store nothing.
    row = tl.minimum(feature, N - 1).to(tl.int64)[:, :, None, None]
    # Keep the stride an explicit multiple of VEC, so that Triton chooses the same thread layout for every M.
    x_row = x_ptr + (m * x_stride * VEC)[:, :, None, None]
    pack = tl.arange(0, STEP)[None, None, :, None]
    weight = _load_weight(weight_ptr, row, pack, VEC, NUM_PACKS, EVEN)
    if GATED:
        up_weight = _load_weight(weight_ptr, row + N, pack, VEC, NUM_PACKS, EVEN)
    wait_for_previous(PDL)  # before this only weights may be read; other kernels use x and out
    x = _load_x(x_row, pack, is_row, VEC, NUM_PACKS)
    sums = tl.sum(weight.to(tl.float32) * x, 3)
    if GATED:
        up_sums = tl.sum(up_weight.to(tl.float32) * x, 3)
    for start in tl.range(STEP, NUM_PACKS, STEP, num_stages=STAGES):
        weight = _load_weight(weight_ptr, row, start + pack, VEC, NUM_PACKS, EVEN)
        if GATED:
            up_weight = _load_weight(weight_ptr, row + N, start + pack, VEC, NUM_PACKS, EVEN)
        x = _load_x(x_row, start + pack, is_row, VEC, NUM_PACKS)
        sums += tl.sum(weight.to(tl.float32) * x, 3)
        if GATED:
            up_sums += tl.sum(up_weight.to(tl.float32) * x, 3)
    dtype = out_ptr.dtype.element_ty
    out = _finish(sums, bias_ptr, feature, is_feature, dtype, BIAS)
    if GATED:
        up = _finish(up_sums, bias_ptr, N + feature, is_feature, dtype, BIAS).to(tl.float32)
        gate = out.to(tl.float32)
        out = gated(gate, up, dtype, ACTIVATION).to(dtype)
    tl.store(out_ptr + m * N + feature, out, mask=is_row & is_feature)


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """F.linear for few rows: x [M, K], weight [N, K], bias [N] -> [M, N]. Hot: several times per layer.

    `dtype`: of the result; x's dtype by default. A router wants its sums in fp32.
    """
    return _run(x, weight, bias, weight.shape[0], tile, dtype)


def small_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """activation(first half) * second half of F.linear: x [M, K], weight [2 * N, K], bias [2 * N] -> [M, N]. Hot."""
    return _run(x, weight, bias, weight.shape[0] // 2, tile, activation=activation)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_features: int,
    tile: Tile | None,
    dtype: torch.dtype | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    num_rows, size = x.shape
    vec = 16 // weight.element_size()
    assert weight.is_contiguous() and x.stride(1) == 1 and size % vec == 0, (
        "rows must be contiguous and consist of whole packs"
    )
    assert num_rows <= 1 or x.stride(0) % vec == 0, "the stride between rows must be a whole number of packs"
    out = torch.empty((num_rows, num_features), dtype=dtype or x.dtype, device=x.device)
    if num_rows:
        block_n, num_warps, num_stages = tile or DEFAULT_TILE
        num_packs = size // vec
        packs_per_thread = min(max(1, _PACKS_IN_FLIGHT // block_n), triton.cdiv(num_packs, 32 * num_warps))
        on_grid(_small_linear_kernel, (triton.cdiv(num_features, block_n),))(
            x,
            weight,
            bias,
            out,
            x.stride(0) // vec,
            num_rows,
            num_features,
            BLOCK_M=triton.next_power_of_2(num_rows),
            BLOCK_N=block_n,
            STAGES=num_stages,
            STEP=32 * num_warps * triton.next_power_of_2(packs_per_thread),
            NUM_PACKS=num_packs,
            VEC=vec,
            GATED=num_features != weight.shape[0],
            ACTIVATION=ACTIVATIONS[activation],
            BIAS=bias is not None,
            num_warps=num_warps,
            **pdl_options(x.device),
        )
    return out
