"""Packed weights: how codes are arranged in words, and how kernels turn them into numbers.

A packed weight (layers/packed_weight.py) consists of int32 words that hold codes of 4 or 8 bits. Groups of `group_size`
columns and `scale_rows` rows share a scale, and integers also a zero: a value is (code - zero) * scale. The weights of
several experts are one weight, in which the rows of an expert are contiguous.

The scales of eight rows are stored together, group after group, so that a warp finds the scales of its next groups in
the cache. When cuBLAS multiplies blocks of codes, it wants the scales of a row together instead. So kernels take three
strides.

16 words of a row are a block. The codes are arranged so that the tensor cores can use them with few instructions: a
shift and a mask leave two codes of a word in the halves of a register, in the mantissas of two 16-bit numbers, and
these two codes are neighbours in the weight. Word w of a block has, from bit B * s + 16 * h on, the code of column
32 * s + 2 * w + h, for B bits per code, h of 0 and 1, and s from 0 to 16 / B - 1. The 32 columns with the same s are a
slice, which has one scale.

- A 4-bit integer reads as 16 + code. An 8-bit integer is read as two 4-bit integers.
- The bits of an e4m3 number, read in place as bf16, are 2^-120 of its value.
- Blocks of GGUF files have further words, with upper bits of codes, and other scales: gguf_words.py.

`unpack` writes the values of some rows, so that cuBLAS can multiply them by many rows of x.

Legend: N output features, K input features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.gguf_words import block_type_values, load_scale_words, load_upper_words
from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.packed_words import (
    BLOCK_WORDS,
    CODES_OF_WORD,
    DENSE,
    E4M3,
    FIRST_BLOCK_TYPE,
    INT4,
    INTERPRETED,
    SLICE,
    UPPER_BITS,
    fma,
    halves,
    nibbles,
)

SCALE_TILE = tl.constexpr(8)  # rows whose scales are stored together


class Packed(NamedTuple):
    """The tensors of a weight [N, K]. A dense weight has only `codes`, which are its values."""

    codes: torch.Tensor  # int32 words [N, K * bits / 32]; dense: the values [N, K]
    # [tiles, 8 rows, K / group_size] as from `new_scales`: fp32, or words of `pack_scales`; GGUF: see gguf_words.py
    scales: torch.Tensor | None = None
    kind: int = DENSE.value
    scale_dtype: torch.dtype | None = None  # bf16 or fp16 within words, or None for fp32
    scale_rows: int = 1
    group_size: int = 128
    padding: int = 0  # columns after the last one of x, so that rows consist of whole blocks. Their codes are finite

    @property
    def scale_type(self) -> tl.dtype:
        return tl.float32 if self.scale_dtype is None else getattr(tl, str(self.scale_dtype).removeprefix("torch."))

    @property
    def num_columns(self) -> int:
        """Columns with padding."""
        if self.kind == DENSE.value:
            return self.codes.shape[1]
        return self.codes.shape[1] * 32 // (32 // CODES_OF_WORD.value[self.kind] + UPPER_BITS.value[self.kind])

    @property
    def block_columns(self) -> int:
        """Columns of a block; for a dense weight, columns in the same number of bytes."""
        return BLOCK_WORDS.value * 4 // self.codes.element_size() * CODES_OF_WORD.value[self.kind]


def can_pack(num_columns: int, bits: int, group_size: int) -> bool:
    """Return True if rows consist of whole blocks and groups consist of whole slices."""
    return num_columns % (BLOCK_WORDS.value * 32 // bits) == 0 and group_size % SLICE.value == 0


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes uint8 [n, K] -> words int32 [n, K * bits / 32]."""
    slices = codes.reshape(len(codes), -1, 16 // bits, BLOCK_WORDS.value, 2).int()
    places = torch.arange(0, 16, bits, dtype=torch.int32, device=codes.device)[:, None]
    words = (slices.select(4, 0) << places).sum(2, dtype=torch.int32)
    return (words | (slices.select(4, 1) << (places + 16)).sum(2, dtype=torch.int32)).flatten(1)


def new_scales(num_rows: int, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros for the scales of a weight, [tiles, 8 rows, groups]. The last tile may be padded with rows."""
    tiles = torch.zeros(triton.cdiv(num_rows, SCALE_TILE.value), num_groups, SCALE_TILE.value, dtype=dtype)
    return tiles.transpose(1, 2)


def store_scales(target: torch.Tensor, row: torch.Tensor, scales: torch.Tensor) -> None:
    """Write scales [n, groups] to `target`, for these rows, int64 [n]."""
    target[row // SCALE_TILE.value, row % SCALE_TILE.value, : scales.shape[1]] = scales.to(target.device)


def pack_scales(scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack scales in bf16 or fp16 and the zeros of integers -> words int32: the scale's bits, and above them the number
    to subtract from a code as the kernels read it.
    """
    offsets = zeros.int() + (16 if bits == 4 else 16 * 17)
    return (scales.contiguous().view(torch.int16).int() & 0xFFFF) | (offsets << 16)


# -- codes to numbers --------------------------------------------------------------------------------------------


@triton.jit
def small_e4m3(words, PLACE: tl.constexpr, dtype: tl.constexpr):
    """The numbers in the bytes at PLACE and at PLACE + 16, times 2^-120 in bf16, or 2^-8 in fp16."""
    SHIFT: tl.constexpr = PLACE - (4 if dtype == tl.bfloat16 else 7)
    MASK: tl.constexpr = 0x07F007F0 if dtype == tl.bfloat16 else 0x3F803F80
    if SHIFT < 0:
        bits = (words << -SHIFT) & MASK
    else:
        bits = (words >> SHIFT) & MASK
    signs = words << (8 - PLACE)
    if INTERPRETED:
        bits |= signs & -0x7FFF8000
    else:
        asm: tl.constexpr = "lop3.b32 $0, $1, 0x80008000, $2, 0xEA;"  # (signs & mask) | bits
        bits = tl.inline_asm_elementwise(asm, "=r,r,r", [signs, bits], dtype=tl.int32, is_pure=True, pack=1)
    return halves(bits, dtype)


@triton.jit
def enlarged(words, dtype: tl.constexpr):
    """The numbers in words [.., n], times half of the exponent by which e4m3 numbers read too small: [.., 2 n]. The
    whole factor at once could overflow.
    """
    if dtype == tl.float16:  # in fp16 the scales include the whole factor
        x = halves(words, dtype)
    elif INTERPRETED:
        x = (halves(words, dtype).to(tl.float32) * 2.0**60).to(dtype)
    else:
        asm: tl.constexpr = """{
            .reg .b32 factor, zero;
            mov.b32 factor, 0x5D805D80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, factor, zero;
        }"""
        x = halves(tl.inline_asm_elementwise(asm, "=r,r", [words], tl.int32, is_pure=True, pack=1), dtype)
    return x


@triton.jit
def scale_row(scales_ptr, row, tile_stride, row_stride, SCALE_ROWS: tl.constexpr):
    """Pointers to the first scales of rows of the weight."""
    row //= SCALE_ROWS
    return scales_ptr + row // SCALE_TILE * tile_stride + row % SCALE_TILE * row_stride


@triton.jit
def scale_of(bits, SCALE_DTYPE: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """Convert stored scales to fp32. Scales of e4m3 numbers include the other half of the factor."""
    if KIND == E4M3:
        scale = bits * (2.0**8 if dtype == tl.float16 else 2.0**60)
    else:
        scale = bits.to(tl.int16).to(SCALE_DTYPE, bitcast=True).to(tl.float32)
    return scale


@triton.jit
def _differences(words, scale_bits, PART: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """code - zero, or the number in e4m3, for slice PART of a block: [.., n] -> [.., 2 n] in bf16 or fp16, without
    rounding.
    """
    one, none = tl.full((1, 1), 1.0, dtype), tl.zeros((1, 1), dtype)
    if KIND == E4M3:
        factor: tl.constexpr = 2.0**8 if dtype == tl.float16 else 2.0**120
        x = fma(small_e4m3(words, 8 * PART, dtype), tl.full((1, 1), factor, dtype), none)
    elif KIND == INT4:
        x = fma(nibbles(words, 4 * PART, dtype), one, (-(scale_bits >> 16)).to(tl.float32).to(dtype))
    else:
        x = fma(nibbles(words, 8 * PART + 4, dtype, True), one, tl.full((1, 1), -272.0, dtype))
        x = fma(nibbles(words, 8 * PART, dtype), one, x)
        x = fma(x, one, (272 - (scale_bits >> 16)).to(tl.float32).to(dtype))
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
    """The values of slice PART of a block, rounded to `dtype`: [.., n] -> [.., 2 n]. Without SCALED, e4m3 numbers.

    A scale with more bits than `dtype` is the sum of two numbers.
    """
    read: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    x = _differences(words, scale_bits, PART, KIND, read)
    if SCALED:
        scale = scale_bits if KIND == E4M3 else scale_of(scale_bits, SCALE_DTYPE, KIND, dtype)
        if dtype == tl.bfloat16 or (dtype == tl.float16 and dtype == SCALE_DTYPE):
            rounded, rest = scale.to(dtype), tl.zeros((1, 1), dtype)
            if dtype != SCALE_DTYPE:
                rest = fma(x, (scale - rounded.to(tl.float32)).to(dtype), rest)
            x = fma(x, rounded, rest)
        else:  # in fp16 small scales would lose bits
            x = x.to(tl.float32) * scale
    return x.to(dtype)


@triton.jit
def _slice_values(
    words,
    uppers,
    scales,
    PART: tl.constexpr,
    EACH: tl.constexpr,  # slices that share one of `scales`
    KIND: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    dtype: tl.constexpr,
    SCALED: tl.constexpr,
):
    if KIND >= FIRST_BLOCK_TYPE:
        x = block_type_values(words, uppers, scales, PART, KIND, dtype)
    else:
        x = _values(words, scales[PART // EACH], PART, KIND, SCALE_DTYPE, dtype, SCALED)
    return x


@triton.jit
def block_values(
    words,
    uppers,
    scales,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    dtype: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The values of a part of each block, with the columns in order: [rows, n] -> [rows, n * codes of a word / PARTS].
    SHARED columns of a block share one of `scales`. In GGUF's types `scales` are the words of one block.
    """
    EACH: tl.constexpr = SHARED // SLICE
    SLICES: tl.constexpr = CODES_OF_WORD[KIND] // 2 // PARTS
    FIRST: tl.constexpr = PART * SLICES
    x = _slice_values(words, uppers, scales, FIRST, EACH, KIND, SCALE_DTYPE, dtype, SCALED)
    if SLICES > 1:
        second = _slice_values(words, uppers, scales, FIRST + 1, EACH, KIND, SCALE_DTYPE, dtype, SCALED)
        if SLICES == 4:
            third = _slice_values(words, uppers, scales, 2, EACH, KIND, SCALE_DTYPE, dtype, SCALED)
            fourth = _slice_values(words, uppers, scales, 3, EACH, KIND, SCALE_DTYPE, dtype, SCALED)
            x, second = tl.join(x, third), tl.join(second, fourth)
        x = tl.join(x, second).reshape(words.shape[0], words.shape[1] // BLOCK_WORDS, SLICE, SLICES)
        x = x.permute(0, 1, 3, 2).reshape(words.shape[0], words.shape[1] * 2 * SLICES)
    return x


# -- values ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_weight_rows"])
def _unpack_kernel(
    codes_ptr,
    scales_ptr,
    rows_ptr,  # the rows to unpack, or None for num_rows in order
    out_ptr,
    first_row,  # the number of the weight's first row in rows_ptr; without rows_ptr the first row to unpack
    num_rows,
    num_weight_rows,
    tile_stride,
    row_stride,
    GROUP_STRIDE: tl.constexpr,
    K: tl.constexpr,
    PADDING: tl.constexpr,  # columns that `out` does not have
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    out_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_row, block = out_row < num_rows, tl.program_id(1)
    is_there = is_row
    if rows_ptr is None:
        row = (first_row + out_row).to(tl.int64)
    else:
        row = tl.load(rows_ptr + out_row, mask=is_row, other=0).to(tl.int64) - first_row
        is_there = is_row & (row >= 0) & (row < num_weight_rows)
        row = tl.where(is_there, row, 0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    CODES: tl.constexpr = CODES_OF_WORD[KIND]
    word = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
    code_row = codes_ptr + row * (K // CODES + K // 32 * UPPER_BITS[KIND])
    words = tl.load(code_row + word, mask=is_row, other=0)
    scales = scale_row(scales_ptr, row, tile_stride, row_stride, SCALE_ROWS)
    if KIND >= FIRST_BLOCK_TYPE:
        uppers = load_upper_words(code_row + K // CODES, word, is_row, 0, KIND)
        scale_words = load_scale_words(scales, block, is_row, 0, GROUP_STRIDE, KIND)
    for part in tl.static_range(CODES // 2):
        column = block * BLOCK_WORDS * CODES + part * SLICE
        if KIND >= FIRST_BLOCK_TYPE:
            values = block_type_values(words, uppers, scale_words, part, KIND, dtype)
        else:
            scale_bits = tl.load(scales + column // GROUP * GROUP_STRIDE, mask=is_row, other=0)
            values = _values(words, scale_bits, part, KIND, SCALE_DTYPE, dtype)
        if rows_ptr is not None:
            values = tl.where(is_there, values, 0.0)
        at = out_row.to(tl.int64) * (K - PADDING) + column + tl.arange(0, SLICE)[None, :]
        tl.store(out_ptr + at, values, mask=is_row & (column < K - PADDING) if PADDING else is_row)


def unpack(weight: Packed, first_row: int, out: torch.Tensor) -> torch.Tensor:
    """Write the values of the weight's rows from `first_row` on to all rows of `out` [rows, K]. Hot."""
    return _unpack(weight, None, first_row, out)


def unpack_rows(weight: Packed, rows: torch.Tensor, first_row: int, out: torch.Tensor) -> torch.Tensor:
    """Write the values of rows to `out` [T, K], or zeros for rows that the weight does not have. Hot: once per step.

    rows: int64 [T], in a numbering in which the weight's first row is `first_row`.
    """
    assert rows.is_contiguous(), "the kernel reads the rows in order"
    return _unpack(weight, rows, first_row, out) if len(rows) else out


def _unpack(weight: Packed, rows: torch.Tensor | None, first_row: int, out: torch.Tensor) -> torch.Tensor:
    assert weight.scales is not None and out.is_contiguous(), "a dense weight needs no unpacking"
    assert out.shape[1] == weight.num_columns - weight.padding, "the values have as many columns as the weight"
    block_n = 128 if INTERPRETED.value else 32  # the interpreter takes its time for each program
    num_blocks = weight.num_columns // weight.block_columns
    on_grid(_unpack_kernel, (triton.cdiv(len(out), block_n), num_blocks))(
        weight.codes,
        weight.scales,
        rows,
        out,
        first_row,
        len(out),
        len(weight.codes),
        *weight.scales.stride(),
        K=weight.num_columns,
        PADDING=weight.padding,
        GROUP=weight.group_size,
        SCALE_ROWS=weight.scale_rows,
        SCALE_DTYPE=weight.scale_type,
        KIND=weight.kind,
        BLOCK_N=block_n,
    )
    return out
