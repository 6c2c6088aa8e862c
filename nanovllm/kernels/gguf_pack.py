"""Pack rows of GGUF's blocks, as a file has them: one kernel writes the words of their codes and scales.

models/gguf_values.py says where the parts of a block are, packed_values.py and gguf_words.py how words are arranged.
Rows may be padded: a block of the words begins in a file's row and ends after it, where codes and scales are 0.
Most words need no single codes: two neighbouring bytes of the file, in the halves of a word ("a pair"), have nibbles or
bits that belong to the same halves of packed words. The bits of some pairs only have to be moved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.gguf_words import HAS_LEAST, HAS_UNITS, SCALE_WORDS
from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.packed_values import Packed, scale_row
from nanovllm.kernels.packed_words import (
    BLOCK_WORDS,
    CODES_OF_WORD,
    FIRST_BLOCK_TYPE,
    INTERPRETED,
    IQ4_XS,
    MXFP4,
    Q5_K,
    Q6_K,
    Q8_0,
    UPPER_BITS,
)

UNIT = tl.constexpr(256)  # columns that a program packs: one block of the file, or eight blocks of 32 columns
# By kind: bytes of a block of the file, and the first byte with codes, or with the lower 4 bits of codes
_BLOCK_BYTES = tl.constexpr((0, 0, 0, 0, 18, 22, 34, 210, 20, 24, 144, 176, 18, 136, 17))
_FIRST_CODE = tl.constexpr((0, 0, 0, 0, 2, 6, 2, 0, 4, 8, 16, 48, 2, 8, 1))
_FIRST_UPPER = tl.constexpr((0, 0, 0, 0, 0, 2, 0, 128, 0, 4, 0, 16, 0, 0, 0))  # byte with upper bits


class PartRows(NamedTuple):
    """Rows of a weight: parts of `size` rows that are `stride` rows apart, such as the gates of experts."""

    first: int
    size: int
    stride: int


# -- bytes of the file -------------------------------------------------------------------------------------------


@triton.jit
def _byte(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(at, mask, KIND: tl.constexpr):
    """Two neighbouring bytes, as the lower half of a word."""
    if KIND == MXFP4:  # blocks have an odd number of bytes
        half = _byte(at, mask) | (_byte(at + 1, mask) << 8)
    else:
        half = tl.load(at.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32) & 0xFFFF
    return half


@triton.jit
def _before(mask, block, num_blocks):
    """Restrict a mask to blocks of 32 columns that the file's row has. num_blocks: None if the words are not padded."""
    if num_blocks is not None:
        mask = mask & (block < num_blocks)
    return mask


@triton.jit
def _pair(at, mask, KIND: tl.constexpr):
    """Two neighbouring bytes, in the halves of a word."""
    half = _half(at, mask, KIND)
    return (half & 0xFF) | ((half & 0xFF00) << 8)


@triton.jit
def _word(at, mask, KIND: tl.constexpr):
    return _half(at, mask, KIND) | (_half(at + 2, mask, KIND) << 16)


# -- words -------------------------------------------------------------------------------------------------------


@triton.jit
def _code_words(rows, word, mask, num_blocks, KIND: tl.constexpr):
    """The words `word` of rows, whose bytes begin at `rows`: lower 4 bits of the codes, or 8 bits in Q8_0."""
    BYTES: tl.constexpr = _BLOCK_BYTES[KIND]
    rows += _FIRST_CODE[KIND]
    block, place = word // BLOCK_WORDS, word % BLOCK_WORDS  # `block` is half of a unit, in Q8_0 a quarter
    if KIND == Q8_0:
        at = rows + block * (2 * BYTES) + place * 2
        second = _pair(at + BYTES, _before(mask, block * 2 + 1, num_blocks), KIND)
        words = (_pair(at, mask, KIND) | (second << 8)) ^ -0x7F7F7F80
    elif HAS_UNITS[KIND] and HAS_LEAST[KIND]:
        at = rows + block // 2 * BYTES + block % 2 * 64 + place * 2
        words = _pair(at, mask, KIND) | (_pair(at + 32, mask, KIND) << 8)
    elif KIND == Q6_K:
        at = rows + block // 2 * BYTES + block % 2 * 64 + place % 2 * 16 + place // 2 * 2
        first, second = _pair(at, mask, KIND), _pair(at + 32, mask, KIND)
        words = (first & 0x000F000F) | ((first & 0x00F000F0) << 4)
        words |= ((second & 0x000F000F) << 4) | ((second & 0x00F000F0) << 8)
    else:
        if KIND == IQ4_XS:
            at, SLICE_BYTES = rows + block // 2 * BYTES + block % 2 * 64, 16
        else:
            at, SLICE_BYTES = rows + block * (4 * BYTES), BYTES
        at, shift = at + place % 8 * 2, place // 8 * 4
        words = (_pair(at, mask, KIND) >> shift) & 0x000F000F
        for i in tl.static_range(1, 4):
            is_there = _before(mask, block * 4 + i, num_blocks)
            words |= ((_pair(at + i * SLICE_BYTES, is_there, KIND) >> shift) & 0x000F000F) << 4 * i
    return words


@triton.jit
def _upper_words(rows, word, mask, num_blocks, KIND: tl.constexpr):
    """The words `word` of rows with the upper bits of their codes."""
    BYTES: tl.constexpr = _BLOCK_BYTES[KIND]
    rows += _FIRST_UPPER[KIND]
    block, place = word // (4 * UPPER_BITS[KIND]), word % (4 * UPPER_BITS[KIND])
    words = tl.zeros(mask.shape, tl.int32)
    if KIND == Q6_K:
        at = rows + block // 2 * BYTES + block % 2 * 32 + place * 2
        words = _pair(at, mask, KIND) | (_pair(at + 16, mask, KIND) << 8)
    elif KIND == Q5_K:
        at, shift = rows + block // 2 * BYTES + place * 8, block % 2 * 4
        for i in tl.static_range(4):
            words |= ((_pair(at + 2 * i, mask, KIND) >> shift) & 0x000F000F) << 4 * i
    else:
        for part in tl.static_range(4):
            bits = _byte(rows + (block * 4 + part) * BYTES + place, _before(mask, block * 4 + part, num_blocks))
            bits |= bits << 15  # neighbouring bits in the halves of a word
            for i in tl.static_range(4):
                words |= ((bits >> 2 * i) & 0x00010001) << (4 * i + part)
    return words


@triton.jit
def _scale_words(blocks, number, mask, num_blocks, KIND: tl.constexpr):
    """The words `number` of the scales of a unit, whose bytes begin at `blocks`. Threads of a warp read neighbours.
    num_blocks: see `_before`, from this unit on.
    """
    BYTES: tl.constexpr = _BLOCK_BYTES[KIND]
    if HAS_UNITS[KIND]:
        is_head, is_group = mask & (number == 0), mask & (number > 0)
        if HAS_LEAST[KIND]:  # two numbers; then scales, minimums, and both of the second half
            own = _word(blocks + tl.where(number == 0, 0, 8 - number % 2 * 4), mask, KIND)
            shift, is_second = 4 - number % 2 * 4, mask & (number > 2)
            second = (_word(blocks + 12, is_second, KIND) >> shift) & 0x0F0F0F0F
            words = tl.where(number > 2, second | ((own >> 2) & 0x30303030), own & 0x3F3F3F3F)
            words = tl.where(number == 0, own, words)
        else:
            head = _half(blocks + (208 if KIND == Q6_K else 0), is_head, KIND)
            if KIND == Q6_K:
                words = _word(blocks + 188 + number * 4, is_group, KIND) ^ -0x7F7F7F80
            else:
                low, high = _half(blocks + 2 + number * 2, is_group, KIND), _byte(blocks + 1 + number, is_group)
                words = 0x60606060 + tl.zeros(mask.shape, tl.int32)  # 128 - 32
                for i in tl.static_range(4):
                    words += (((low >> 4 * i) & 15) | (((high >> 2 * i) & 3) << 4)) << 8 * i
            head = head.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
            words = tl.where(number == 0, head, words)
    elif HAS_LEAST[KIND]:
        words = _word(blocks + number * BYTES, _before(mask, number, num_blocks), KIND)
    elif KIND == MXFP4:
        words = _byte(blocks + number * (4 * BYTES), mask)
        for i in tl.static_range(1, 4):
            is_there = _before(mask, number * 4 + i, num_blocks)
            words |= _byte(blocks + number * (4 * BYTES) + i * BYTES, is_there) << 8 * i
    else:
        at = blocks + number * (2 * BYTES)
        words = _half(at, _before(mask, number * 2, num_blocks), KIND)
        words |= _half(at + BYTES, _before(mask, number * 2 + 1, num_blocks), KIND) << 16
    return words


# Triton knows which numbers of words are multiples of 16, so that a thread stores words together
@triton.jit(
    do_not_specialize=[
        *("block_stride", "num_rows", "start", "first_row", "part_size", "part_stride", "num_scales", "tile_stride"),
        "num_blocks",
    ]
)
def _pack_blocks_kernel(
    blocks_ptr,
    codes_ptr,
    scales_ptr,
    block_stride,  # bytes from one row of blocks to the next
    num_rows,
    start,  # number of the first row, see `pack_blocks`
    first_row,
    part_size,
    part_stride,
    row_words,
    num_codes,  # words of a row without upper bits
    num_scales,  # words of a row
    tile_stride,
    row_stride,
    group_stride,
    num_blocks,  # of a row in the file if the words are padded, else None
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
):
    num_tiles = tl.cdiv(part_size, ROWS)
    unit, part = tl.program_id(0), start // part_size + tl.program_id(1) // num_tiles
    row_of_part = tl.program_id(1) % num_tiles * ROWS + tl.arange(0, ROWS)[:, None]
    row = part * part_size - start + row_of_part
    is_row = (row_of_part < part_size) & (row >= 0) & (row < num_rows)
    target = first_row + (part * part_stride).to(tl.int64) + row_of_part
    rows, codes = blocks_ptr + row.to(tl.int64) * block_stride, codes_ptr + target * row_words
    UNIT_WORDS: tl.constexpr = UNIT // CODES_OF_WORD[KIND]
    word = unit * UNIT_WORDS + tl.arange(0, UNIT_WORDS)[None, :]
    is_there = is_row & (word < num_codes)
    tl.store(codes + word, _code_words(rows, word, is_there, num_blocks, KIND), mask=is_there)
    if UPPER_BITS[KIND] > 0:
        NUM_UPPER: tl.constexpr = UNIT // 32 * UPPER_BITS[KIND]
        word = unit * NUM_UPPER + tl.arange(0, NUM_UPPER)[None, :]
        is_there = is_row & (word < row_words - num_codes)
        tl.store(codes + num_codes + word, _upper_words(rows, word, is_there, num_blocks, KIND), mask=is_there)
    NUM_SCALES: tl.constexpr = UNIT_WORDS // BLOCK_WORDS * SCALE_WORDS[KIND] + HAS_UNITS[KIND]
    number = tl.arange(0, triton.next_power_of_2(NUM_SCALES))[None, :]
    is_there = is_row & (number < NUM_SCALES) & (unit * NUM_SCALES + number < num_scales)
    scales = scale_row(scales_ptr, target, tile_stride, row_stride, 1) + (unit * NUM_SCALES + number) * group_stride
    unit_blocks = rows + unit * (_BLOCK_BYTES[KIND] if HAS_UNITS[KIND] else 8 * _BLOCK_BYTES[KIND])
    if num_blocks is not None:
        num_blocks -= unit * 8
    tl.store(scales, _scale_words(unit_blocks, number, is_there, num_blocks, KIND), mask=is_there)


def pack_blocks(blocks: torch.Tensor, weight: Packed, rows: PartRows, start: int = 0) -> None:
    """Pack rows of blocks, uint8 [n, bytes of a row], in the weight's type: into `rows` from row number `start` on,
    where numbers count the rows of the parts, one part after the other. Hot.
    """
    assert weight.scales is not None and weight.kind >= FIRST_BLOCK_TYPE.value, "the weight has no blocks"
    assert blocks.dtype == torch.uint8 and blocks.stride(1) == 1, "the kernel reads the bytes of a row in order"
    is_even = blocks.data_ptr() % 2 == blocks.stride(0) % 2 == 0
    assert is_even or weight.kind == MXFP4.value, "the kernel reads two bytes at a time"
    if not len(blocks):
        return
    # 64 rows take two to three times as long on an H200, probably because bytes leave the L1 cache between loads
    block_rows = 128 if INTERPRETED.value else 8
    num_parts = (start + len(blocks) - 1) // rows.size - start // rows.size + 1
    grid = triton.cdiv(weight.num_columns, UNIT.value), num_parts * triton.cdiv(rows.size, block_rows)
    on_grid(_pack_blocks_kernel, grid)(
        blocks,
        weight.codes,
        weight.scales,
        blocks.stride(0),
        len(blocks),
        start,
        *rows,
        weight.codes.shape[1],
        weight.num_columns // CODES_OF_WORD.value[weight.kind],
        weight.scales.shape[2],
        *weight.scales.stride(),
        (weight.num_columns - weight.padding) // 32 if weight.padding else None,
        KIND=weight.kind,
        ROWS=block_rows,
        num_warps=1,
    )
