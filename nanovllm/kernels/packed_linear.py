"""Products with packed weights, and with those of a mixture's experts.

A packed weight (layers/packed_weight.py) consists of int32 words that hold codes of 4 or 8 bits. Groups of `group_size`
columns and `scale_rows` rows share a scale, and integers also a zero: a value is (code - zero) * scale. The weights of
several experts are one weight, with an expert's rows together.

16 words of a row are a block. The codes are arranged so that the tensor cores can use them with few instructions: a
shift and a mask leave two codes of a word in the halves of a register, in the mantissas of two 16-bit numbers, and
these are neighbours in the weight. Word w of a block has, from bit B * s + 16 * h on, the code of column
32 * s + 2 * w + h, for B bits per code, h of 0 and 1, and s from 0 to 16 / B - 1. The 32 columns with the same s are a
slice, which has one scale.

- An integer of 4 bits reads as 16 + code. 8 bits are two such integers.
- The bits of an e4m3 number at the place of those of a bf16 number read as 2^-120 of its value.

There are two kernels for products. For few rows each warp of a program has columns of its own, and their sums are added
at the end; scales and zeros are applied to the sums of a group. For many rows all warps work on one tile, and the
values are computed before they are multiplied; several programs share the columns of a narrow weight. `unpack` writes
the values of some rows, so that cuBLAS can multiply them by many.

Legend: M rows, N output features, K input features; a pair is a row and one of the experts that it has chosen.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KernelTarget
from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

DENSE, INT4, INT8, E4M3 = (tl.constexpr(kind) for kind in range(4))
BLOCK_WORDS, SLICE = (tl.constexpr(size) for size in (16, 32))  # words of a block, columns of a slice
MAX_FEW_ROWS, MAX_BLOCK_M = 16, 128
MAX_SUMMED = 16  # experts of a token
MAX_E4M3 = tl.constexpr(448.0)
MIN_E4M3_RANGE = tl.constexpr(2.0**-100)  # the least that the largest value of a group is taken for
MANY_TILES = 384  # programs that fill a GPU with few warps each
NUM_SMS = 132  # multiprocessors of an H100: columns are split until there are almost so many programs
MIN_SPLIT_COLUMNS, MAX_SPLITS = 512, 8  # fewer columns, or more parts, cost more than they gain
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Packed(NamedTuple):
    """The tensors of a weight [N, K]. A dense one has nothing but values, in `codes`."""

    codes: torch.Tensor  # int32 words [N, K / 8] or [N, K / 4]; dense: the values [N, K]
    scales: torch.Tensor | None = None  # [K / group_size, N / scale_rows]: fp32, or words of `pack_scales`
    kind: int = DENSE.value
    scale_dtype: torch.dtype | None = None  # bf16 or fp16 in words; None is fp32
    scale_rows: int = 1
    group_size: int = 128

    @property
    def scale_type(self) -> tl.dtype:
        return tl.float32 if self.scale_dtype is None else getattr(tl, str(self.scale_dtype).removeprefix("torch."))

    @property
    def num_columns(self) -> int:
        return self.codes.shape[1] * (1 if self.kind == DENSE.value else 8 if self.kind == INT4.value else 4)


def can_pack(num_columns: int, bits: int, group_size: int) -> bool:
    """Return True if rows consist of whole blocks, and groups of whole slices."""
    return num_columns % (BLOCK_WORDS.value * 32 // bits) == 0 and group_size % SLICE.value == 0


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [n, K] -> words int32 [n, K * bits / 32]."""
    slices = codes.reshape(len(codes), -1, 16 // bits, BLOCK_WORDS.value, 2).int()
    places = torch.arange(0, 16, bits, dtype=torch.int32, device=codes.device)[:, None]
    words = (slices.select(4, 0) << places).sum(2, dtype=torch.int32)
    return (words | (slices.select(4, 1) << (places + 16)).sum(2, dtype=torch.int32)).flatten(1)


def pack_scales(scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales in bf16 or fp16 and zeros of integers -> words int32: a scale's bits, and above them what is to be
    subtracted from what the kernels read as a code.
    """
    offsets = zeros.int() + (16 if bits == 4 else 16 * 17)
    return (scales.contiguous().view(torch.int16).int() & 0xFFFF) | (offsets << 16)


# -- codes to numbers --------------------------------------------------------------------------------------------


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """Two numbers in each word [.., n] -> [.., 2 n]."""
    low = words.to(tl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
    both = tl.join(low, high)
    return both.reshape(both.shape[:-2] + [2 * both.shape[-2]])  # noqa: RUF005  # Triton does not know the other form


@triton.jit
def _mask_and_set(words, MASK: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """(words & MASK) | BITS, by one instruction where the compiler would use two."""
    if _INTERPRETED:
        words = (words & MASK) | BITS
    else:
        words = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    return words


@triton.jit
def _nibbles(words, PLACE: tl.constexpr, dtype: tl.constexpr, IS_HIGH: tl.constexpr = False):
    """The 4 bits at PLACE and at PLACE + 16 of words [.., n]: [.., 2 n] in `dtype`, which is bf16 or fp16.

    They read as 16 + bits, or with IS_HIGH, as upper half of a code of 8 bits, as 256 + 16 * bits.
    """
    SHIFT: tl.constexpr = PLACE - (3 if dtype == tl.bfloat16 else 6)
    if SHIFT < 0:
        bits = words << -SHIFT
    else:
        bits = words >> SHIFT
    if dtype == tl.bfloat16:
        if IS_HIGH:
            bits = _mask_and_set(bits, 0x00780078, 0x43804380, "lop3.b32 $0, $1, 0x00780078, 0x43804380, 0xEA;")
        else:
            bits = _mask_and_set(bits, 0x00780078, 0x41804180, "lop3.b32 $0, $1, 0x00780078, 0x41804180, 0xEA;")
    elif IS_HIGH:
        bits = _mask_and_set(bits, 0x03C003C0, 0x5C005C00, "lop3.b32 $0, $1, 0x03C003C0, 0x5C005C00, 0xEA;")
    else:
        bits = _mask_and_set(bits, 0x03C003C0, 0x4C004C00, "lop3.b32 $0, $1, 0x03C003C0, 0x4C004C00, 0xEA;")
    return _halves(bits, dtype)


@triton.jit
def _ones(words, dtype: tl.constexpr):
    """1 for each column of a slice. They seem to depend on the words, so that they get the same layout."""
    if _INTERPRETED:
        ones = words * 0 + (0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00)
    elif dtype == tl.bfloat16:
        ones = tl.inline_asm_elementwise("mov.b32 $0, 0x3F803F80;", "=r,r", [words], tl.int32, is_pure=True, pack=1)
    else:
        ones = tl.inline_asm_elementwise("mov.b32 $0, 0x3C003C00;", "=r,r", [words], tl.int32, is_pure=True, pack=1)
    return _halves(ones, dtype)


@triton.jit
def _small_e4m3(words, PLACE: tl.constexpr, dtype: tl.constexpr):
    """The numbers in the bytes at PLACE and at PLACE + 16, times 2^-120 in bf16, or 2^-8 in fp16."""
    SHIFT: tl.constexpr = PLACE - (4 if dtype == tl.bfloat16 else 7)
    MASK: tl.constexpr = 0x07F007F0 if dtype == tl.bfloat16 else 0x3F803F80
    if SHIFT < 0:
        bits = (words << -SHIFT) & MASK
    else:
        bits = (words >> SHIFT) & MASK
    signs = words << (8 - PLACE)
    if _INTERPRETED:
        bits |= signs & -0x7FFF8000
    else:
        asm: tl.constexpr = "lop3.b32 $0, $1, 0x80008000, $2, 0xEA;"  # (signs & mask) | bits
        bits = tl.inline_asm_elementwise(asm, "=r,r,r", [signs, bits], dtype=tl.int32, is_pure=True, pack=1)
    return _halves(bits, dtype)


@triton.jit
def _enlarged(words, dtype: tl.constexpr):
    """The numbers in words [.., n], times half of the factor by which those in e4m3 are too small: [.., 2 n]. All of it
    at once could overflow.
    """
    if dtype == tl.float16:  # there the scales include all of the factor
        x = _halves(words, dtype)
    elif _INTERPRETED:
        x = (_halves(words, dtype).to(tl.float32) * 2.0**60).to(dtype)
    else:
        asm: tl.constexpr = """{
            .reg .b32 factor, zero;
            mov.b32 factor, 0x5D805D80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, factor, zero;
        }"""
        x = _halves(tl.inline_asm_elementwise(asm, "=r,r", [words], tl.int32, is_pure=True, pack=1), dtype)
    return x


@triton.jit
def _scale(bits, SCALE_DTYPE: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """Scales as they are stored -> fp32. Those of e4m3 numbers include the other half of the factor."""
    if KIND == E4M3:
        scale = bits * (2.0**8 if dtype == tl.float16 else 2.0**60)
    else:
        scale = bits.to(tl.int16).to(SCALE_DTYPE, bitcast=True).to(tl.float32)
    return scale


@triton.jit
def _fma(x, factor, addend):
    """x * factor + addend in 16 bits, for two numbers at a time."""
    if _INTERPRETED:
        x = (x.to(tl.float32) * factor.to(tl.float32) + addend.to(tl.float32)).to(x.dtype)
    elif x.dtype == tl.bfloat16:
        asm: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;"
        x = tl.inline_asm_elementwise(asm, "=r,r,r,r", [x, factor, addend], x.dtype, is_pure=True, pack=2)
    else:
        half_asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;"
        x = tl.inline_asm_elementwise(half_asm, "=r,r,r,r", [x, factor, addend], x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def _differences(words, scale_bits, PART: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """code - zero, or the number in e4m3, for slice PART of a block: [.., n] -> [.., 2 n] in bf16 or fp16. None of them
    is rounded.
    """
    one, none = tl.full((1, 1), 1.0, dtype), tl.zeros((1, 1), dtype)
    if KIND == E4M3:
        factor: tl.constexpr = 2.0**8 if dtype == tl.float16 else 2.0**120
        x = _fma(_small_e4m3(words, 8 * PART, dtype), tl.full((1, 1), factor, dtype), none)
    elif KIND == INT4:
        x = _fma(_nibbles(words, 4 * PART, dtype), one, (-(scale_bits >> 16)).to(tl.float32).to(dtype))
    else:
        x = _fma(_nibbles(words, 8 * PART + 4, dtype, True), one, tl.full((1, 1), -272.0, dtype))
        x = _fma(_nibbles(words, 8 * PART, dtype), one, x)
        x = _fma(x, one, (272 - (scale_bits >> 16)).to(tl.float32).to(dtype))
    return x


@triton.jit
def _values(
    words,
    scale_bits,
    PART: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    dtype: tl.constexpr,
    SCALED: tl.constexpr = True,
):
    """The values of slice PART of a block, rounded to `dtype`: [.., n] -> [.., 2 n]. Without SCALED, numbers in e4m3.

    A scale with more bits than `dtype` is the sum of two numbers.
    """
    read: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    x = _differences(words, scale_bits, PART, KIND, read)
    if SCALED:
        scale = scale_bits if KIND == E4M3 else _scale(scale_bits, SCALE_DTYPE, KIND, dtype)
        if dtype == tl.bfloat16 or (dtype == tl.float16 and dtype == SCALE_DTYPE):
            rounded, rest = scale.to(dtype), tl.zeros((1, 1), dtype)
            if dtype != SCALE_DTYPE:
                rest = _fma(x, (scale - rounded.to(tl.float32)).to(dtype), rest)
            x = _fma(x, rounded, rest)
        else:  # in fp16 small scales would lose bits
            x = x.to(tl.float32) * scale
    return x.to(dtype)


@triton.jit
def _block_values(
    words,
    scales,
    SHARED: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    dtype: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The values of whole blocks, with the columns in order: [rows, n] -> [rows, n * codes of a word]. SHARED columns
    of a block share one of `scales`.
    """
    EACH: tl.constexpr = SHARED // SLICE
    x = _values(words, scales[0], 0, KIND, SCALE_DTYPE, dtype, SCALED)
    second = _values(words, scales[1 // EACH], 1, KIND, SCALE_DTYPE, dtype, SCALED)
    SLICES: tl.constexpr = 4 if KIND == INT4 else 2  # of a block
    if SLICES == 4:
        x = tl.join(x, _values(words, scales[2 // EACH], 2, KIND, SCALE_DTYPE, dtype, SCALED))
        second = tl.join(second, _values(words, scales[3 // EACH], 3, KIND, SCALE_DTYPE, dtype, SCALED))
    x = tl.join(x, second).reshape(words.shape[0], words.shape[1] // BLOCK_WORDS, SLICE, SLICES)
    return x.permute(0, 1, 3, 2).reshape(words.shape[0], words.shape[1] * 2 * SLICES)


# -- products ----------------------------------------------------------------------------------------------------


class FewRowsTile(NamedTuple):
    """Sizes of a program that multiplies 16 rows of the weight by up to `block_m` rows (or pairs)."""

    block_m: int  # 8 or 16
    num_warps: int  # that sum over columns of their own
    num_ahead: int  # blocks of each row that a warp loads ahead


class Tile(NamedTuple):
    """The rows (or pairs) and features that a program multiplies, all warps together."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1  # parts of the columns, whose sums another kernel adds


@triton.jit
def _nothing():
    """A tuple to which others are added; mypy does not look at its length."""
    return ()


@triton.jit
def _load_block(
    low_row,
    high_row,
    scale_row,  # None: no scales are wanted
    chunk,
    scale_chunk,
    group_stride,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Words of a block of each warp's 16 rows, [SPLIT, 2, 8, 4, 4], and scales [SPLIT, 16, 1] for every SHARED columns.
    Past the last block both are 0. `scale_chunk` is `chunk` in the layout of the scales.
    """
    low, high = low_row + chunk * BLOCK_WORDS, high_row + chunk * BLOCK_WORDS
    is_block = chunk * COLUMNS < K
    words = tl.join(_load(low, is_block, EVEN), _load(high, is_block, EVEN))
    words = words.reshape(words.shape[0] // 32, 8, 4, 4, 2).permute(0, 4, 1, 2, 3)
    scales = _nothing()
    if scale_row is not None:
        column = scale_chunk * COLUMNS
        for start in tl.static_range(0, COLUMNS, SHARED):
            scale = tl.load(scale_row + (column + start) // GROUP * group_stride, mask=column < K, other=0)
            scales = scales + (scale,)  # noqa: RUF005  # Triton does not know the other form
    return words, scales


@triton.jit
def _load(ptrs, is_there, EVEN: tl.constexpr):
    if EVEN:
        loaded = tl.load(ptrs, eviction_policy="evict_first")
    else:
        loaded = tl.load(ptrs, mask=is_there, other=0, eviction_policy="evict_first")
    return loaded


@triton.jit
def _weight_operand(numbers):
    """Numbers of a slice [SPLIT, 2, 8, 4, 8] -> [SPLIT, 16, 32]. Each stays in the thread that has it."""
    SPLIT: tl.constexpr = numbers.shape[0]
    return numbers.reshape(SPLIT, 2, 8, 4, 2, 2, 2).permute(0, 1, 2, 5, 3, 4, 6).reshape(SPLIT, 16, 32)


@triton.jit
def _x_operand(words, KIND: tl.constexpr, dtype: tl.constexpr):
    """Words of a slice [SPLIT * 32, 4, rows / 8] -> [SPLIT, 32, rows], with columns in the order of the weight's."""
    SPLIT: tl.constexpr = words.shape[0] // 32
    EIGHTS: tl.constexpr = words.shape[2]
    numbers = _enlarged(words, dtype) if KIND == E4M3 else _halves(words, dtype)
    numbers = numbers.reshape(SPLIT, 8, 4, 2, 2, EIGHTS, 2).permute(0, 4, 2, 3, 6, 5, 1)
    return numbers.reshape(SPLIT, 32, 8 * EIGHTS)


@triton.jit(do_not_specialize=["num_pairs"])  # compile once for all numbers of rows
def _few_products_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    factors_ptr,  # fp32 [pairs], by which the results are multiplied; None: 1
    pairs_ptr,  # int32 [blocks * BLOCK_M]: the pairs of each block, sorted by expert; None: all in order
    experts_ptr,  # of each block, or each pair; num_experts for a block without pairs; None: there is one weight
    out_ptr,
    x_stride,  # in 16 bytes, from one row to the next
    num_pairs,
    num_experts,
    group_stride,  # between the scales of neighbouring groups of columns
    scale_stride,  # between those of neighbouring rows
    N,  # features of the result
    CHOSEN: tl.constexpr,  # pairs of a row of x
    SUMMED: tl.constexpr,  # pairs of a row of the result, each of which is a warp's; 0: nothing is summed
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a block
    SHARED: tl.constexpr,  # columns of a block that have one scale
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,  # the result is silu(first half) * second half
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,  # warps
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply 16 rows of a weight. The tensor cores want them as two times 8, with four threads for a row. So a thread
    loads words 4 * q to 4 * q + 3 of a block of two rows, 16 bytes each. These are its parts of all operands, in both
    layouts: nothing passes through shared memory before the end.
    """
    let_next_start(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    CODES: tl.constexpr = 2 if KIND == DENSE else 8 if KIND == INT4 else 4  # of a word
    STRIDE: tl.constexpr = 1 if SUMMED else SPLIT  # blocks from one of a warp to its next
    STEPS: tl.constexpr = (K // COLUMNS + STRIDE - 1) // STRIDE
    AT_END: tl.constexpr = KIND == E4M3 and GROUP == K  # the scale of a row is applied to its sum
    # Tensors of a step are [lanes, 4 words]. Lane 4 * m + q of a warp has a part of rows m and m + 8.
    lane, warp = tl.arange(0, SPLIT * 32)[:, None], tl.arange(0, SPLIT)[:, None, None]
    part, m = lane // 32, lane % 32 // 4
    word = lane % 4 * 4 + tl.arange(0, 4)[None, :]
    block, in_tile = tl.program_id(1), tl.arange(0, 16)
    ROWS: tl.constexpr = 2 if GATED else 1  # of a feature
    FEATURES: tl.constexpr = 16 // ROWS
    feature = tl.program_id(0) * FEATURES
    row = tl.minimum(feature + in_tile % FEATURES, N - 1) + in_tile // FEATURES * N
    low = tl.minimum(feature + m, N - 1)
    high = low + N if GATED else tl.minimum(feature + m + 8, N - 1)
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    expert, warp_expert = 0, 0
    if experts_ptr is not None:
        wait_for_previous(PDL)  # for the router's choice
        if SUMMED:
            expert = tl.load(experts_ptr + block * SUMMED + tl.minimum(part, SUMMED - 1))
            warp_expert = tl.load(experts_ptr + block * SUMMED + tl.minimum(warp, SUMMED - 1))
        else:
            expert = tl.load(experts_ptr + block).to(tl.int64)
            warp_expert = expert
            if expert >= num_experts:
                return
        if pairs_ptr is not None:
            pair = tl.load(pairs_ptr + pair)
        else:  # a block for each pair, or for each sum
            pair = tl.where(tl.arange(0, BLOCK_M) == 0, block, num_pairs)
    code_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + word
    low_row = code_ptr + (expert * (ROWS * N) + low).to(tl.int64) * (K // CODES)
    high_row = code_ptr + (expert * (ROWS * N) + high).to(tl.int64) * (K // CODES)
    scale_row = None
    if KIND != DENSE:
        weight_row = warp_expert * (ROWS * N) + row[None, :, None] + 0 * warp
        scale_row = scales_ptr + weight_row // SCALE_ROWS * scale_stride
    block_scale_row = None if AT_END else scale_row
    first, scale_first = (0 * part, 0 * warp) if SUMMED else (part, warp)
    queue = _nothing()
    for step in tl.static_range(AHEAD):
        ahead = _load_block(
            low_row,
            high_row,
            block_scale_row,
            step * STRIDE + first,
            step * STRIDE + scale_first,
            group_stride,
            K,
            COLUMNS,
            SHARED,
            GROUP,
            (step + 1) * STRIDE * COLUMNS <= K,
        )
        queue = queue + (ahead,)  # noqa: RUF005
    if experts_ptr is None:
        wait_for_previous(PDL)  # before this only weights may be read; other kernels use x and out
    # Rows of x that do not exist are copies of others
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + word
    x_row = _nothing()
    for i in tl.static_range(BLOCK_M // 8):
        if SUMMED:
            of_x = block * SUMMED + tl.minimum(part, SUMMED - 1)
        elif experts_ptr is None:
            of_x = tl.minimum(block * BLOCK_M + 8 * i + m, num_pairs - 1)
        elif pairs_ptr is None:
            of_x = block + 0 * m
        else:
            of_x = tl.minimum(tl.load(pairs_ptr + block * BLOCK_M + 8 * i + m), num_pairs - 1)
        x_row = x_row + (x_ptr + (of_x // CHOSEN).to(tl.int64) * (4 * x_stride),)  # noqa: RUF005
    sums = tl.zeros((SPLIT, 16, BLOCK_M), tl.float32)
    for step in tl.range(STEPS, num_stages=1, loop_unroll_factor=AHEAD):
        words, scales = queue[0]
        ahead = _load_block(
            low_row,
            high_row,
            block_scale_row,
            (step + AHEAD) * STRIDE + first,
            (step + AHEAD) * STRIDE + scale_first,
            group_stride,
            K,
            COLUMNS,
            SHARED,
            GROUP,
            False,
        )
        queue = queue[1:] + (ahead,)  # noqa: RUF005
        column = tl.minimum((step * STRIDE + first) * COLUMNS, K - COLUMNS)
        for start in tl.static_range(0, COLUMNS, SHARED):
            code_sums = sums if AT_END or KIND == DENSE else tl.zeros_like(sums)
            x_sums = tl.zeros_like(sums)
            for i in tl.static_range(start // SLICE, (start + SHARED) // SLICE):
                x = tl.load(x_row[0] + (column + i * SLICE) // 2)[:, :, None]
                if BLOCK_M == 16:
                    x = tl.join(x.reshape(x.shape[0], 4), tl.load(x_row[1] + (column + i * SLICE) // 2))
                x = _x_operand(x, KIND, dtype)
                if KIND == DENSE:
                    code_sums = tl.dot(_weight_operand(_halves(words, dtype)), x, code_sums)
                elif KIND == E4M3:
                    code_sums = tl.dot(_weight_operand(_small_e4m3(words, 8 * i, dtype)), x, code_sums)
                else:
                    if KIND == INT4:
                        code_sums = tl.dot(_weight_operand(_nibbles(words, 4 * i, dtype)), x, code_sums)
                    else:
                        code_sums = tl.dot(_weight_operand(_nibbles(words, 8 * i, dtype)), x, code_sums)
                        code_sums = tl.dot(_weight_operand(_nibbles(words, 8 * i + 4, dtype, True)), x, code_sums)
                    x_sums = tl.dot(_weight_operand(_ones(words, dtype)), x, x_sums)
            if AT_END or KIND == DENSE:
                sums = code_sums
            else:
                scale_bits = scales[start // SHARED]
                if KIND != E4M3:
                    code_sums -= x_sums * (scale_bits >> 16).to(tl.float32)
                sums += code_sums * _scale(scale_bits, SCALE_DTYPE, KIND, dtype)
    if AT_END:
        sums *= _scale(tl.load(scale_row), SCALE_DTYPE, KIND, dtype)
    if SUMMED:
        sums *= tl.load(factors_ptr + block * SUMMED + warp, mask=warp < SUMMED, other=0.0)
    sums = tl.sum(sums, 0)
    if SUMMED:
        factors_ptr = None
    _finish(sums, row, feature, pair, bias_ptr, factors_ptr, out_ptr, num_pairs, N, GATED, BIAS, dtype)


@triton.jit
def _gated(sums, dtype: tl.constexpr):
    """silu(first half of the rows) * second half, rounded where torch rounds."""
    HALF: tl.constexpr = sums.shape[0] // 2
    sums = sums.to(dtype).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, sums.shape[1])), (1, 2, 0)))
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit(do_not_specialize=["num_pairs"])
def _products_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    factors_ptr,  # these and the others as above
    pairs_ptr,
    experts_ptr,
    out_ptr,  # with several splits: fp32 [splits, pairs, rows of the weight]
    x_stride,
    num_pairs,
    num_experts,
    group_stride,
    scale_stride,
    N,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # that are loaded at once
    SHARED: tl.constexpr,  # of these that have one scale
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,  # parts of the columns, each of which is a program's
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N rows of a weight. Values are computed in the registers from which the tensor cores take them,
    while these multiply those before; x is in shared memory.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    CODES: tl.constexpr = 1 if KIND == DENSE else 8 if KIND == INT4 else 4  # of a word
    AT_END: tl.constexpr = KIND == E4M3 and GROUP == K
    # Programs that share a part of the weight are neighbours, so that they find it in the cache
    block, in_tile = tl.program_id(0), tl.arange(0, BLOCK_N)
    ROWS: tl.constexpr = 2 if GATED else 1  # of a feature
    FEATURES: tl.constexpr = BLOCK_N // ROWS
    feature = tl.program_id(1) * FEATURES
    row = tl.minimum(feature + in_tile % FEATURES, N - 1) + in_tile // FEATURES * N
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_row = row.to(tl.int64)
    if experts_ptr is not None:
        expert = tl.load(experts_ptr + block).to(tl.int64)
        if expert >= num_experts:
            return
        weight_row += expert * (ROWS * N)
        if pairs_ptr is not None:
            pair = tl.load(pairs_ptr + pair)
        else:  # a block for each pair
            pair = tl.where(tl.arange(0, BLOCK_M) == 0, block, num_pairs)
    x_row = tl.minimum(pair, num_pairs - 1) // CHOSEN  # rows that do not exist are copies of others
    x_column = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + tl.arange(0, COLUMNS)[:, None]
    code_row = codes_ptr + weight_row[:, None] * (K // CODES) + tl.arange(0, COLUMNS // CODES)[None, :]
    scale_row = scales_ptr + (weight_row // SCALE_ROWS * scale_stride)[:, None] if KIND != DENSE else 0
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    STEPS: tl.constexpr = (K // COLUMNS + SPLITS - 1) // SPLITS
    first = tl.program_id(2) * STEPS
    for step in tl.range(first, tl.minimum(first + STEPS, K // COLUMNS), num_stages=STAGES):
        values = tl.load(code_row + step * (COLUMNS // CODES))
        x = tl.load(x_column + step * COLUMNS)
        if KIND != DENSE:
            scales = _nothing()
            for start in tl.static_range(0, COLUMNS, SHARED):
                scale_ptr = scale_row + (step * COLUMNS + start) // GROUP * group_stride
                scales = scales + (0 if AT_END else tl.load(scale_ptr),)  # noqa: RUF005
            values = _block_values(values, scales, SHARED, KIND, SCALE_DTYPE, dtype, not AT_END)
        sums = tl.dot(values, x, sums, input_precision="ieee")
    if AT_END:
        sums *= tl.load(scale_row)
    if SPLITS > 1:
        part = (tl.program_id(2).to(tl.int64) * num_pairs + pair) * (ROWS * N)
        is_there = (pair < num_pairs)[None, :] & (feature + in_tile % FEATURES < N)[:, None]
        tl.store(out_ptr + part[None, :] + row[:, None], sums, mask=is_there)
    else:
        _finish(sums, row, feature, pair, bias_ptr, factors_ptr, out_ptr, num_pairs, N, GATED, BIAS, dtype)


@triton.jit
def _finish(
    sums,
    row,
    feature,
    pair,
    bias_ptr,
    factors_ptr,
    out_ptr,
    num_pairs,
    N,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Store the results for the sums of rows of the weight and of pairs [BLOCK_N, BLOCK_M]."""
    FEATURES: tl.constexpr = sums.shape[0] // (2 if GATED else 1)
    if BIAS:
        sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    if GATED:
        sums = _gated(sums, dtype)
    if factors_ptr is not None:
        sums *= tl.load(factors_ptr + pair, mask=pair < num_pairs, other=0.0)[None, :]
    feature += tl.arange(0, FEATURES)
    out = out_ptr + pair.to(tl.int64)[None, :] * N + feature[:, None]
    tl.store(out, sums.to(dtype), mask=(pair < num_pairs)[None, :] & (feature < N)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def _sum_parts_kernel(
    parts_ptr,  # fp32 [splits, pairs, rows of the weight]
    bias_ptr,
    factors_ptr,
    out_ptr,
    num_pairs,
    N,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    in_tile, pair = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ROWS: tl.constexpr = 2 if GATED else 1
    FEATURES: tl.constexpr = BLOCK_N // ROWS
    feature = tl.program_id(1) * FEATURES
    row = tl.minimum(feature + in_tile % FEATURES, N - 1) + in_tile // FEATURES * N
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    of_pair = tl.minimum(pair, num_pairs - 1).to(tl.int64)
    for split in tl.static_range(SPLITS):
        part = (split * num_pairs + of_pair) * (ROWS * N)
        sums += tl.load(parts_ptr + part[None, :] + row[:, None])
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    _finish(sums, row, feature, pair, bias_ptr, factors_ptr, out_ptr, num_pairs, N, GATED, BIAS, dtype)


class Routing(NamedTuple):
    """The pairs of a step, in blocks that have one expert each. It is computed without waiting for the device."""

    pairs: torch.Tensor  # int32 [blocks * block_m]; the number of pairs where there is none
    block_experts: torch.Tensor  # int32 [blocks]; the number of experts where there is none
    block_m: int
    num_experts: int
    num_pairs: int


def route(experts: torch.Tensor, num_experts: int, block_m: int | None = None) -> Routing:
    """`experts`: int64 [M, C], those that each row has chosen. Blocks have up to `block_m` pairs; by default they have
    room for about the pairs of an expert. That is rounded up, so that twice the rows have at most the next size, and
    start-up finds all sizes.
    """
    flat = experts.flatten().clamp(0, num_experts - 1)  # while kernels are only compiled, nobody has chosen
    if block_m is None:
        block_m = min(max(16, triton.next_power_of_2(triton.cdiv(len(flat), num_experts))), MAX_BLOCK_M)
    num_pairs, device = len(flat), flat.device
    num_blocks = min(num_pairs, triton.cdiv(num_pairs, block_m) + num_experts)
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (counts + block_m - 1) // block_m
    block_ends, ends = blocks.cumsum(0), counts.cumsum(0)
    by_expert = flat[order]
    place = ((block_ends - blocks) * block_m - (ends - counts))[by_expert] + torch.arange(num_pairs, device=device)
    pairs = torch.full((num_blocks * block_m,), num_pairs, dtype=torch.int32, device=device)
    pairs[place] = order.int()
    block_experts = torch.searchsorted(block_ends, torch.arange(num_blocks, device=device), right=True).int()
    return Routing(pairs, block_experts, block_m, num_experts, num_pairs)


def choose_tile(
    num_rows: int, num_tiles: int, target: KernelTarget, x: torch.Tensor, weight: Packed, is_routed: bool = False
) -> Tile | FewRowsTile:
    """The fastest, or nearly, of those that were tried for most layers of Qwen3-8B and -30B-A3B on an H100.

    `num_rows`: that a weight multiplies; `num_tiles`: of 16 rows of weights, of all programs; `is_routed`: rows are
    sorted into blocks of `num_rows`.
    """
    block_m = min(max(8, triton.next_power_of_2(num_rows)), MAX_BLOCK_M)
    if block_m <= MAX_FEW_ROWS and not is_routed and _suits_few_rows(x, weight):
        num_ahead = 2 if block_m == 8 and weight.scales is not None else 1
        return FewRowsTile(block_m, 4 if num_tiles >= MANY_TILES else 8, num_ahead)
    if x.dtype == torch.float32:  # twice the bytes
        return Tile(block_m, 64, 4, 2) if block_m < MAX_BLOCK_M else Tile(block_m, 32, 8, 2)
    is_large = target.shared_bytes >= 200 * 1024
    if weight.scales is None:
        if block_m < MAX_BLOCK_M:
            return Tile(block_m, 64, 4, 3)
        return Tile(block_m, 128, 8, 3) if is_large else Tile(block_m, 64, 8, 2)
    block_n = 128 if is_large else 64
    num_programs = triton.cdiv(16 * num_tiles, block_n) * max(1, triton.cdiv(num_rows, MAX_BLOCK_M))
    if not is_routed and num_rows <= MAX_BLOCK_M and num_programs < NUM_SMS:
        block_m = min(block_m, 64)
    num_splits = max(1, min(NUM_SMS // num_programs, weight.num_columns // MIN_SPLIT_COLUMNS, MAX_SPLITS))
    if block_m == MAX_BLOCK_M:
        num_warps, num_stages = 8, 3 if is_large else 2
    else:
        num_warps = 8 if is_large and block_m >= 32 else 4
        num_stages = 6 if is_large and block_m == 32 and not is_routed else 3 if is_large and block_m == 64 else 4
    return Tile(block_m, block_n, num_warps, num_stages, 1 if is_routed else num_splits)


def products(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    experts: torch.Tensor | None = None,
    routing: Routing | None = None,
    num_experts: int = 1,
    factors: torch.Tensor | None = None,
    tile: Tile | FewRowsTile | None = None,
) -> torch.Tensor:
    """x [M, K] by the weight -> [M, N], or with `gated` silu(first half) * second half. Hot: several times per layer.

    `experts`, int64 [M, C]: the product of each pair by its expert's rows instead, [M * C, N], which reads the weight
    for each pair. `routing`: the same, for pairs that are sorted by expert and share it. x has a row for each token, or
    one for each pair. The results are multiplied by `factors`, fp32 [pairs].
    """
    num_pairs = len(x) if experts is None else experts.numel()
    num_blocks, block_rows, pairs = 1, num_pairs, None
    if routing is not None:
        num_pairs, num_experts, experts = routing.num_pairs, routing.num_experts, routing.block_experts
        num_blocks, block_rows, pairs = len(experts), routing.block_m, routing.pairs
    elif experts is not None:
        num_blocks, block_rows = num_pairs, 1
    if tile is None:
        num_tiles = triton.cdiv(len(weight.codes) // num_experts, 16) * num_blocks
        target = kernel_target.target_of(x.device)
        tile = choose_tile(block_rows, num_tiles, target, x, weight, routing is not None)
    assert routing is None or routing.block_m == tile.block_m, "pairs are sorted into blocks of another size"
    num_features = len(weight.codes) // num_experts // (2 if gated else 1)
    out = torch.empty((num_pairs, num_features), dtype=x.dtype, device=x.device)
    if experts is None:
        num_blocks = triton.cdiv(num_pairs, tile.block_m)
    chosen = num_pairs // max(1, len(x))
    return _launch(x, weight, bias, factors, pairs, experts, out, num_blocks, num_experts, chosen, 0, gated, tile)


def can_sum_experts(x: torch.Tensor, weight: Packed, experts: torch.Tensor) -> bool:
    """Return True if `sum_of_experts` can: each expert of a token takes a warp."""
    return _suits_few_rows(x, weight) and experts.shape[1] <= MAX_SUMMED


def sum_of_experts(
    x: torch.Tensor,
    weight: Packed,
    experts: torch.Tensor,
    num_experts: int,
    factors: torch.Tensor,
    num_ahead: int = 3,
) -> torch.Tensor:
    """x [T * C, K] by the rows of `experts` [T, C], weighted by `factors`, fp32 [T, C], and summed for each token:
    [T, N]. Every pair reads its expert. Hot: once per layer.
    """
    num_tokens, num_chosen = experts.shape
    tile = FewRowsTile(8, triton.next_power_of_2(num_chosen), num_ahead)
    out = torch.empty((num_tokens, len(weight.codes) // num_experts), dtype=x.dtype, device=x.device)
    return _launch(x, weight, None, factors, None, experts, out, num_tokens, num_experts, 1, num_chosen, False, tile)


def _suits_few_rows(x: torch.Tensor, weight: Packed) -> bool:
    """Return True if the kernel for few rows can multiply: tensor cores would round fp32, and it needs whole slices."""
    return x.dtype != torch.float32 and weight.num_columns % SLICE.value == 0


def _launch(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    factors: torch.Tensor | None,
    pairs: torch.Tensor | None,
    experts: torch.Tensor | None,
    out: torch.Tensor,
    num_blocks: int,
    num_experts: int,
    num_chosen: int,
    num_summed: int,
    gated: bool,
    tile: Tile | FewRowsTile,
) -> torch.Tensor:
    """Fill `out`; the arguments are those of the kernels."""
    num_pairs, num_features = out.shape
    if not num_pairs:
        return out
    assert x.stride(-1) == 1 and (experts is None or experts.is_contiguous()), "the kernels read both in order"
    constants: dict[str, Any] = {}
    columns = BLOCK_WORDS.value * 4 // weight.codes.element_size() * weight.num_columns // weight.codes.shape[1]
    group, num_splits, target = weight.group_size, 1, out
    num_rows = 2 * num_features if gated else num_features  # of the weight, for a pair
    if isinstance(tile, FewRowsTile):
        assert len(x) <= 1 or x.stride(0) % 8 == 0, "the stride between rows must be a multiple of 16 bytes"
        kernel, x_stride = _few_products_kernel, x.stride(0) // 8
        grid: tuple[int, ...] = triton.cdiv(num_rows, 16), num_blocks
        constants |= {"SUMMED": num_summed, "SPLIT": tile.num_warps, "AHEAD": tile.num_ahead}
    else:
        kernel, x_stride, num_splits = _products_kernel, x.stride(0), tile.num_splits
        if num_splits > 1:
            target = torch.empty((num_splits, num_pairs, num_rows), dtype=torch.float32, device=x.device)
        if weight.scales is None or weight.num_columns % 128 == 0 == group % 128:
            columns = math.gcd(weight.num_columns, 128)
        assert columns >= 16, "a row must consist of whole steps"
        grid = num_blocks, triton.cdiv(num_rows, tile.block_n), num_splits
        constants |= {"BLOCK_N": tile.block_n, "SPLITS": num_splits, "STAGES": tile.num_stages}
    shared = min(group, columns) if columns % group == 0 or group % columns == 0 else SLICE.value
    on_grid(kernel, grid)(
        x,
        weight.codes,
        weight.scales,
        bias,
        factors,
        pairs,
        experts,
        target,
        x_stride,
        num_pairs,
        num_experts,
        *((0, 0) if weight.scales is None else weight.scales.stride()),
        num_features,
        CHOSEN=num_chosen,
        K=weight.num_columns,
        COLUMNS=columns,
        SHARED=columns if weight.scales is None else shared,
        GROUP=group,
        SCALE_ROWS=weight.scale_rows,
        SCALE_DTYPE=weight.scale_type,
        KIND=weight.kind,
        GATED=gated,
        BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        num_warps=tile.num_warps,
        **constants,
        **pdl_options(x.device),
    )
    if num_splits > 1:
        on_grid(_sum_parts_kernel, (triton.cdiv(num_pairs, 8), triton.cdiv(num_rows, 128)))(
            target,
            bias,
            factors,
            out,
            num_pairs,
            num_features,
            GATED=gated,
            BIAS=bias is not None,
            BLOCK_M=8,
            BLOCK_N=128,
            SPLITS=num_splits,
            **pdl_options(x.device),
        )
    return out


# -- values ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _unpack_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    first_row,
    num_rows,
    group_stride,
    scale_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    out_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_row, block = out_row < num_rows, tl.program_id(1)
    row = (first_row + out_row).to(tl.int64)
    CODES: tl.constexpr = 8 if KIND == INT4 else 4
    word = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
    words = tl.load(codes_ptr + row * (K // CODES) + word, mask=is_row, other=0)
    for part in tl.static_range(CODES // 2):
        column = block * BLOCK_WORDS * CODES + part * SLICE
        scale = scales_ptr + column // GROUP * group_stride + row // SCALE_ROWS * scale_stride
        scale_bits = tl.load(scale, mask=is_row, other=0)
        values = _values(words, scale_bits, part, KIND, SCALE_DTYPE, out_ptr.dtype.element_ty)
        at = out_row.to(tl.int64) * K + column + tl.arange(0, SLICE)[None, :]
        tl.store(out_ptr + at, values, mask=is_row)


def unpack(weight: Packed, first_row: int, out: torch.Tensor) -> torch.Tensor:
    """Write the values of as many rows, from `first_row` on, as `out` [rows, K] has. Hot."""
    assert weight.scales is not None and out.is_contiguous(), "a dense weight has its values"
    block_n = 32
    num_blocks = weight.codes.shape[1] // BLOCK_WORDS.value
    on_grid(_unpack_kernel, (triton.cdiv(len(out), block_n), num_blocks))(
        weight.codes,
        weight.scales,
        out,
        first_row,
        len(out),
        *weight.scales.stride(),
        K=weight.num_columns,
        GROUP=weight.group_size,
        SCALE_ROWS=weight.scale_rows,
        SCALE_DTYPE=weight.scale_type,
        KIND=weight.kind,
        BLOCK_N=block_n,
    )
    return out


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
    assembler of CUDA 12.8 lets that come before they are computed.
    """
    if _INTERPRETED:
        low_code = low.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int16)
        pair = low_code | (high.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int16) << 8)
    else:
        asm: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
        pair = tl.inline_asm_elementwise(asm, "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1)
    return pair


def new_codes(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for x [M, K] in e4m3 [M', K], and for scales fp32 [M', K / group_size], of which those of neighbouring
    rows are neighbours. cuBLAS wants both like this. M' is the next multiple of 4.
    """
    num_rows, num_groups = triton.cdiv(len(x), 4) * 4, x.shape[1] // group_size
    codes = torch.empty((num_rows, x.shape[1]), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_groups, num_rows), dtype=torch.float32, device=x.device)
    return codes, scales.t() if num_groups > 1 else scales.view(num_rows, 1)


def quantize_rows(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [M, K] to e4m3, with a scale for each row and group of columns. Hot: several times per layer.

    Returns codes, in the order of those of a packed weight, and scales, both as `new_codes` does; the rows that it adds
    are arbitrary. The largest value of a group becomes the largest in e4m3. A row with NaN or infinities has NaN.
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
