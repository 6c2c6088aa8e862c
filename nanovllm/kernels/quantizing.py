"""Quantize on a GPU. `quantize_weight` writes rows of a weight that is quantized while it is loaded. `quantize_rows`
writes rows of x in e4m3, so that cuBLAS can multiply the codes of x and of a weight. `rms_norm_and_quantize` and
`act_and_quantize` do so for rows that they compute, which are never written in 16 bits. Codes have the order of packed
weights (packed_values.py).

Legend: M rows, N output features, K input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.activation import ACTIVATIONS, gated
from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous
from nanovllm.kernels.packed_values import Packed, scale_row
from nanovllm.kernels.packed_words import BLOCK_WORDS, E4M3, SLICE

MAX_E4M3 = tl.constexpr(448.0)
MIN_E4M3_RANGE = tl.constexpr(2.0**-100)  # lower bound of the largest value of a group
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# -- weights that are quantized while they are loaded ------------------------------------------------------------


@triton.jit
def _e4m3_codes(x):
    """Convert fp32 numbers below 464 to codes, rounding to nearest even; larger numbers and NaN get the code of NaN.
    Some GPUs have no instruction for this.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43F00000)  # 480 has the code of NaN
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal codes are multiples of 2^-9, as are the fp32 numbers from 2^14 on
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 2.0**14).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)  # below 2^-6


@triton.jit(  # compile once for all weights of a model
    do_not_specialize=["first_row", "num_rows", "row_words", "tile_stride", "first_column", "num_columns"]
)
def _quantize_weight_kernel(
    values_ptr,
    codes_ptr,
    scales_ptr,
    first_row,  # row of the weight
    num_rows,  # rows of the values
    row_words,
    tile_stride,
    row_stride,
    first_column,  # column of the values
    num_columns,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # words at a time
):
    CODES: tl.constexpr = 4  # codes of a word
    row, word, code = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, CODES)
    first_of_word = word // BLOCK_WORDS * (BLOCK_WORDS * CODES) + word % BLOCK_WORDS * 2
    column = first_of_word[None, :, None] + (code // 2 * SLICE + code % 2)[None, None, :]
    place = (code // 2 * (32 // CODES) + code % 2 * 16)[None, None, :]  # bit position in a word
    is_row, size = row < num_rows, row_words * CODES
    values = values_ptr + row.to(tl.int64)[:, None, None] * num_columns + column

    # The bits of non-negative numbers have the order of the numbers, with NaN above all others
    largest = tl.zeros((ROWS,), tl.int32)
    for offset in tl.range(0, num_columns, WORDS * CODES):
        is_there = is_row[:, None, None] & (offset + column < num_columns)
        x = tl.load(values + offset, mask=is_there, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), 1))
    bits = (largest.to(tl.float32, bitcast=True) * (1 / MAX_E4M3)).to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7FC00000)  # from 2^-126 to NaN
    weight_row = first_row + row.to(tl.int64)
    scale = bits.to(tl.float32, bitcast=True)
    tl.store(scale_row(scales_ptr, weight_row, tile_stride, row_stride, 1), scale, mask=is_row)

    for offset in tl.range(0, size, WORDS * CODES):
        is_there = is_row[:, None, None] & (offset + column < size)
        x = tl.load(values + first_column + offset, mask=is_there, other=0.0).to(tl.float32)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None, None], x.shape))
        stored = (offset // CODES + word)[None, :]
        words = tl.sum(_e4m3_codes(x) << place, 2)
        tl.store(
            codes_ptr + weight_row[:, None] * row_words + stored, words, mask=is_row[:, None] & (stored < row_words)
        )


def quantize_weight(values: torch.Tensor, weight: Packed, first_row: int, first_column: int) -> None:
    """Quantize `values` [n, k] to e4m3 into the weight's rows from `first_row` on, taking the weight's number of
    columns from `first_column` on. All columns of `values` share a scale. The results equal `quantize` in
    models/quantized_weights.py, which defines the format.
    """
    assert weight.scales is not None and values.is_contiguous()
    assert weight.kind == E4M3.value and weight.scale_rows == 1 and weight.group_size == weight.num_columns
    num_rows = 2
    on_grid(_quantize_weight_kernel, (triton.cdiv(len(values), num_rows),))(
        values,
        weight.codes,
        weight.scales,
        first_row,
        len(values),
        weight.codes.shape[1],
        *weight.scales.stride()[:2],
        first_column,
        values.shape[1],
        ROWS=num_rows,
        WORDS=256,
    )


# -- activations in fp8 ------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])  # compile once for all numbers of rows
def _quantize_kernel(
    x_ptr,
    codes_ptr,  # two codes in 16 bits
    scales_ptr,
    x_stride,
    num_rows,
    scale_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 64 columns, at a time
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    is_row = row < num_rows
    NUM_BLOCKS: tl.constexpr = GROUP // (2 * SLICE)
    block, in_slice = tl.arange(0, BLOCKS)[None, :, None], tl.arange(0, SLICE)[None, None, :]
    of_row, first = row.to(tl.int64)[:, None, None], group * GROUP
    largest = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, NUM_BLOCKS, BLOCKS):
        is_there = is_row[:, None, None] & (start + block < NUM_BLOCKS)
        x = x_ptr + of_row * x_stride + first + (start + block) * (2 * SLICE) + in_slice
        low, high = tl.load(x, mask=is_there, other=0.0), tl.load(x + SLICE, mask=is_there, other=0.0)
        both = tl.maximum(tl.abs(low.to(tl.float32)), tl.abs(high.to(tl.float32)))
        largest = tl.maximum(largest, tl.max(tl.max(both, 2), 1))
    largest = tl.maximum(largest, MIN_E4M3_RANGE)
    factor = tl.div_rn(MAX_E4M3, largest)[:, None, None]
    tl.store(scales_ptr + group * scale_stride + row, tl.div_rn(largest, MAX_E4M3), mask=is_row)
    for start in tl.range(0, NUM_BLOCKS, BLOCKS):
        is_there = is_row[:, None, None] & (start + block < NUM_BLOCKS)
        x = x_ptr + of_row * x_stride + first + (start + block) * (2 * SLICE) + in_slice
        low = tl.load(x, mask=is_there, other=0.0).to(tl.float32) * factor
        high = tl.load(x + SLICE, mask=is_there, other=0.0).to(tl.float32) * factor
        codes = codes_ptr + of_row * (K // 2) + first // 2 + (start + block) * SLICE + in_slice
        tl.store(codes, _e4m3_pair(low, high), mask=is_there)


@triton.jit
def _e4m3_pair(low, high):
    """The codes of two fp32 numbers in an int16. Triton's own conversion takes codes of neighbours apart again, and the
    assembler of CUDA 12.8 moves that ahead of their computation.
    """
    if _INTERPRETED:
        pair = (_e4m3_codes(low) | (_e4m3_codes(high) << 8)).to(tl.int16)
    else:
        asm: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
        pair = tl.inline_asm_elementwise(asm, "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1)
    return pair


def new_codes(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate codes for x [M, K] in e4m3, [M', K], and scales fp32 [M', K / group_size] with adjacent rows contiguous,
    as cuBLAS wants them. M' is the next multiple of 4.
    """
    num_rows, num_groups = triton.cdiv(len(x), 4) * 4, x.shape[1] // group_size
    codes = torch.empty((num_rows, x.shape[1]), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_groups, num_rows), dtype=torch.float32, device=x.device)
    return codes, scales.t() if num_groups > 1 else scales.view(num_rows, 1)


def quantize_rows(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [M, K] to e4m3, with a scale for each row and group of columns. Hot: several times per layer.

    Returns codes in the order of a packed weight, and scales, both with the shapes of `new_codes`; the padding rows are
    arbitrary. The largest value of a group becomes the largest in e4m3. A row with NaN or infinities becomes NaN.
    """
    assert x.stride(1) == 1 and group_size % (2 * SLICE.value) == 0, "the kernel reads whole blocks in order"
    (codes, scales), num_blocks = new_codes(x, group_size), group_size // (2 * SLICE.value)
    block_rows, blocks = (16, num_blocks) if num_blocks <= 2 else (1, min(64, triton.next_power_of_2(num_blocks)))
    on_grid(_quantize_kernel, (triton.cdiv(len(x), block_rows), scales.shape[1]))(
        x,
        codes.view(torch.int16),
        scales,
        x.stride(0),
        len(x),
        len(scales),
        K=x.shape[1],
        GROUP=group_size,
        ROWS=block_rows,
        BLOCKS=blocks,
        **pdl_options(x.device),
    )
    return codes, scales


@triton.jit
def _store_row(low, high, codes_ptr, scale_ptr, inside):
    """Quantize a row, given as pairs of fp32 numbers that share 16 bits, as `_quantize_kernel` does."""
    largest = tl.maximum(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0), MIN_E4M3_RANGE)
    factor = tl.div_rn(MAX_E4M3, largest)
    tl.store(scale_ptr, tl.div_rn(largest, MAX_E4M3))
    tl.store(codes_ptr, _e4m3_pair(low * factor, high * factor), mask=inside)


@triton.jit
def _first_of_pair(pair):
    """Column of the first number of a pair; the second is a slice further."""
    return pair // SLICE * (2 * SLICE) + pair % SLICE


@triton.jit
def _sum_with_residual(x_ptr, residual_ptr, sum_ptr, at, inside, ADD: tl.constexpr):
    """x, or with ADD x + residual, rounded to x's dtype and stored."""
    x = tl.load(x_ptr, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + at, x, mask=inside)
    return x.to(tl.float32)


@triton.jit
def _rms_norm_and_quantize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    codes_ptr,  # two codes in 16 bits
    scales_ptr,
    sum_ptr,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # the next power of two
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    inside, column = pair < SIZE // 2, _first_of_pair(pair)
    low_weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    high_weight = tl.load(weight_ptr + SLICE + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    dtype = x_ptr.dtype.element_ty
    x_ptr, at = x_ptr + token * x_stride + column, token * SIZE + column
    low = _sum_with_residual(x_ptr, residual_ptr, sum_ptr, at, inside, ADD)
    high = _sum_with_residual(x_ptr + SLICE, residual_ptr, sum_ptr, at + SLICE, inside, ADD)
    scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 0) / SIZE + eps)
    # Round where the norm rounds (fused.py): after the norm and after the weight
    low, high = (low * scale).to(low_weight.dtype), (high * scale).to(high_weight.dtype)
    low = (low.to(tl.float32) * low_weight.to(tl.float32)).to(dtype).to(tl.float32)
    high = (high.to(tl.float32) * high_weight.to(tl.float32)).to(dtype).to(tl.float32)
    _store_row(low, high, codes_ptr + token * (SIZE // 2) + pair, scales_ptr + token, inside)


def rms_norm_and_quantize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `quantize_rows` returns for the norm of x [M, K], or of x + residual, with a scale for each row; and
    x + residual, or x. Hot: twice per layer.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1 and size % (2 * SLICE.value) == 0, "the kernel reads whole blocks in order"
    assert residual is None or residual.is_contiguous()
    (codes, scales), total = new_codes(x, size), x if residual is None else torch.empty_like(residual)
    if num_rows:
        pairs = triton.next_power_of_2(size // 2)
        on_grid(_rms_norm_and_quantize_kernel, (num_rows,))(
            x,
            residual,
            weight,
            codes.view(torch.int16),
            scales,
            total,
            x.stride(0),
            eps,
            SIZE=size,
            PAIRS=pairs,
            ADD=residual is not None,
            num_warps=min(16, max(1, pairs // 256)),
            **pdl_options(x.device),
        )
    return codes, scales, total


@triton.jit
def _gated(gate_ptr, up_ptr, inside, ACTIVATION: tl.constexpr):
    """activation(gate) * up, rounded where `act_and_mul` of fused.py rounds."""
    dtype = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr, mask=inside, other=0.0).to(tl.float32)
    return gated(gate, up, dtype, ACTIVATION).to(dtype).to(tl.float32)


@triton.jit
def _act_and_quantize_kernel(
    x_ptr,
    codes_ptr,  # two codes in 16 bits
    scales_ptr,
    x_stride,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # the next power of two
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    inside = pair < SIZE // 2
    gate_ptr = x_ptr + token * x_stride + _first_of_pair(pair)
    wait_for_previous(PDL)
    low = _gated(gate_ptr, gate_ptr + SIZE, inside, ACTIVATION)
    high = _gated(gate_ptr + SLICE, gate_ptr + SIZE + SLICE, inside, ACTIVATION)
    _store_row(low, high, codes_ptr + token * (SIZE // 2) + pair, scales_ptr + token, inside)


def act_and_quantize(x: torch.Tensor, activation: str = "silu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `quantize_rows` returns for activation(first half) * second half of x [M, 2 * K], with a scale for
    each row. Hot: once per layer.
    """
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1 and size % (2 * SLICE.value) == 0, "the kernel reads whole blocks in order"
    codes, scales = new_codes(x[:, :size], size)
    if num_rows:
        pairs = triton.next_power_of_2(size // 2)
        on_grid(_act_and_quantize_kernel, (num_rows,))(
            x,
            codes.view(torch.int16),
            scales,
            x.stride(0),
            SIZE=size,
            PAIRS=pairs,
            ACTIVATION=ACTIVATIONS[activation],
            num_warps=min(32, max(1, pairs // 512)),  # up to 16 pairs in the registers of a thread
            **pdl_options(x.device),
        )
    return codes, scales
