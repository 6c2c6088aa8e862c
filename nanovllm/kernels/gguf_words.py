"""Blocks of GGUF files in packed words: how they are arranged, and how kernels turn them into numbers.

A block type has codes of 4, 5, 6 or 8 bits. Columns share a scale in groups of 32, or of 16 in Q6_K. Its values are
computed in fp32 as ggml computes them, so that only the last operation rounds:

- scale * (code - zero), or scale * code - least in the types with a minimum
- scale * number, where the code chooses one of 16 numbers of a table (IQ4_NL, IQ4_XS, MXFP4). In MXFP4 they follow
  from the bits of the code, and in bf16 numbers, scales and values are exact

Scale and least are fp16 numbers (an exponent in MXFP4), or in types whose blocks have 256 columns ("units") products of
an fp16 number of the unit and an integer of the group.

A row of the weight has the words of the lower 4 bits of all codes, or of 8 bits in Q8_0, as packed_values.py arranges
codes. Then follow the words of the upper 1 or 2 bits: U words for a block of 128 columns, for U = 4 or 8. Upper word j
of a block has the upper bits of words w = 16 / U * j + i: bit 16 * h + U * i + U / 4 * s is the lowest upper bit of the
code that has its lower bits from bit 4 * s + 16 * h on. In Q6_K the words of a slice alternate between the two
groups: word w has columns 16 * (w % 2) + 2 * (w / 2) and the next. So each operand of the tensor cores has one scale.

Words with the scales of a unit, or of a block of the other types, are stored together for eight rows, as all scales:

- Q4_K, Q5_K: fp16 factors of scales and minimums; then for each block 4 scales and 4 minimums
- Q6_K: an fp32 factor; then for each block twice 4 scales, each plus 128. IQ4_XS: the same, once 4
- Q4_0, Q5_0, Q8_0, IQ4_NL: two fp16 scales in each word. Q4_1, Q5_1: a scale and a minimum in each. MXFP4: 4 exponents
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import triton
import triton.language as tl

from nanovllm.kernels import packed_words
from nanovllm.kernels.packed_words import (
    FIRST_WITH_TABLE,
    INTERPRETED,
    MXFP4,
    Q6_K,
    Q8_0,
    SLICE,
    UPPER_BITS,
    filled,
    fma,
    halves,
    mask_and_set,
    nibbles,
    times,
)

GROUP = tl.constexpr(32)  # columns whose scales are applied together; in Q6_K two scales
_UPPER = tl.constexpr(
    0x4B000000
)  # with an integer of up to 23 bits as its mantissa, this fp32 number is 2^23 + integer
# By kind: what the kernels subtract from a code as they read it, to get code - zero, or code in types with a minimum
BASES = tl.constexpr((0, 0, 0, 0, 16 + 8, 64 + 16, 272 + 128, 64 + 32, 16, 64, 16, 64, 0, 0, 0))
HAS_LEAST = tl.constexpr((0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0))
HAS_UNITS = tl.constexpr((0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 1, 0))
NUM_GROUPS = tl.constexpr((0, 0, 0, 0, 4, 4, 2, 8, 4, 4, 4, 4, 4, 4, 4))  # of a block; each has a scale
SCALE_WORDS = tl.constexpr((0, 0, 0, 0, 2, 2, 1, 2, 4, 4, 2, 2, 2, 1, 1))  # of a block, without the word of a unit
_IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _both_types(numbers: tuple[int, ...]) -> tuple[list[bytes], list[bytes]]:
    """Return the bytes of numbers in bf16 and in fp16, in which they are exact."""
    return [struct.pack("<f", number)[2:] for number in numbers], [struct.pack("<e", number) for number in numbers]


def _word(parts: Iterable[int]) -> int:
    return int.from_bytes(bytes(parts), "little", signed=True)


def _table_words(numbers: tuple[int, ...]) -> tl.constexpr:
    """Return the bytes of 16 numbers, 4 in a word: the lower bytes in bf16, the upper ones, and the same in fp16."""
    words = []
    for of_type in _both_types(numbers):
        for place in range(2):
            words += [_word(each[place] for each in of_type[i : i + 4]) for i in range(0, 16, 4)]
    return tl.constexpr(tuple(words))


_IQ4_TABLE = _table_words(_IQ4_NUMBERS)
# By kind: twice -BASES in a word, in bf16 and in fp16
_BASE_PAIRS = tl.constexpr(
    tuple(tuple(_word(each * 2) for each in of_type) for of_type in _both_types(tuple(-base for base in BASES.value)))
)


def kind_of(block_type: str) -> int:
    """Return the kind of a weight by the name of its type."""
    kind: tl.constexpr = getattr(packed_words, block_type)
    return int(kind.value)


# -- codes to numbers --------------------------------------------------------------------------------------------


@triton.jit
def _bytes_of(a, b, selector):
    """Four of the eight bytes of a and b, as the lower four nibbles of `selector` choose: prmt of PTX."""
    if INTERPRETED:
        words = 0 * selector
        for i in tl.static_range(4):
            chosen = (selector >> 4 * i) & 7
            words |= ((tl.where(chosen < 4, a, b) >> 8 * (chosen & 3)) & 255) << 8 * i
    else:
        asm: tl.constexpr = "prmt.b32 $0, $1, $2, $3;"
        words = tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, selector], tl.int32, is_pure=True, pack=1)
    return words


@triton.jit
def _looked_up(selector, upper_half, FIRST: tl.constexpr):
    """For the lower four nibbles of the codes, whose lower 3 bits are in `selector`, one byte of each number."""
    lower = _bytes_of(_IQ4_TABLE[FIRST], _IQ4_TABLE[FIRST + 1], selector)
    upper = _bytes_of(_IQ4_TABLE[FIRST + 2], _IQ4_TABLE[FIRST + 3], selector)
    return _bytes_of(lower, upper, upper_half)


@triton.jit
def _table_numbers(words, PART: tl.constexpr, dtype: tl.constexpr):
    """The numbers of a table that the codes of a slice choose: [.., n] -> [.., 2 n] in bf16 or fp16.

    The bytes of numbers are looked up for all slices. The compiler does this once for the four slices of a block.
    """
    FIRST: tl.constexpr = 0 if dtype == tl.bfloat16 else 8
    selector = words & 0x77777777
    upper_half = ((words >> 1) & 0x44444444) | 0x32103210  # chooses the second 8 numbers by the upper bit of a code
    low = _looked_up(selector, upper_half, FIRST)
    low_upper = _looked_up(selector, upper_half, FIRST + 4)
    high = _looked_up(selector >> 16, upper_half >> 16, FIRST)
    high_upper = _looked_up(selector >> 16, upper_half >> 16, FIRST + 4)
    BOTH: tl.constexpr = 0x5140 if PART < 2 else 0x7362  # lower and upper bytes of slices 0 and 1, or 2 and 3
    pairs, high_pairs = _bytes_of(low, low_upper, BOTH), _bytes_of(high, high_upper, BOTH)
    return halves(_bytes_of(pairs, high_pairs, 0x5410 if PART % 2 == 0 else 0x7632), dtype)


@triton.jit
def _mxfp4_numbers(words, PART: tl.constexpr, dtype: tl.constexpr):
    """The numbers of a slice's codes in MXFP4: [.., n] -> [.., 2 n] in bf16 or fp16.

    A code is a float with 2 bits of exponent and 1 of mantissa. At the same bits of a wider float, subnormal codes stay
    subnormal, so a power of two turns all of them into the numbers.
    """
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    signs = _shifted(words, 4 * PART - 12) & -0x7FFF8000  # 0x80008000
    bits = _shifted(words, 4 * PART - (6 if IS_BF16 else 9))
    MASK: tl.constexpr = 0x01C001C0 if IS_BF16 else 0x0E000E00
    FACTOR: tl.constexpr = 2.0**126 if IS_BF16 else 2.0**14
    return times(halves(bits & MASK | signs, dtype), tl.full((1, 1), FACTOR, tl.float32).to(dtype))


@triton.jit
def _with_upper_bits(words, uppers, PART: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """64 + code for codes of 5 or 6 bits: [.., n] -> [.., 2 n] in bf16 or fp16."""
    UNIT: tl.constexpr = 1 if dtype == tl.bfloat16 else 4  # the bit that counts 1 in a number of 64 to 127
    SHIFT: tl.constexpr = 4 * PART - UNIT
    UPPER_SHIFT: tl.constexpr = UPPER_BITS[KIND] * PART - UNIT - 4
    if SHIFT < 0:
        bits = words << -SHIFT
    else:
        bits = words >> SHIFT
    if UPPER_SHIFT < 0:
        upper = uppers << -UPPER_SHIFT
    else:
        upper = uppers >> UPPER_SHIFT
    UPPER_MASK: tl.constexpr = (0x00030003 if UPPER_BITS[KIND] == 2 else 0x00010001) << UNIT + 4
    if dtype == tl.bfloat16:
        bits = mask_and_set(bits, 0x001E001E, 0x42804280, "lop3.b32 $0, $1, 0x001E001E, 0x42804280, 0xEA;")
    else:
        bits = mask_and_set(bits, 0x00F000F0, 0x54005400, "lop3.b32 $0, $1, 0x00F000F0, 0x54005400, 0xEA;")
    return halves(bits | (upper & UPPER_MASK), dtype)


@triton.jit
def block_numbers(words, uppers, PART: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """The numbers of slice PART of a block, [.., n] -> [.., 2 n] in bf16 or fp16: numbers of a table, or codes plus a
    base. For Q8_0 the numbers of the lower halves of the codes.
    """
    if KIND == MXFP4:
        x = _mxfp4_numbers(words, PART, dtype)
    elif KIND >= FIRST_WITH_TABLE:
        x = _table_numbers(words, PART, dtype)
    elif UPPER_BITS[KIND] > 0:
        x = _with_upper_bits(words, uppers, PART, KIND, dtype)
    elif KIND == Q8_0:
        x = nibbles(words, 8 * PART, dtype)
    else:
        x = nibbles(words, 4 * PART, dtype)
    return x


@triton.jit
def block_bases(words, KIND: tl.constexpr, dtype: tl.constexpr):
    """What has to be added to `block_numbers` to get code - zero."""
    return filled(words, _BASE_PAIRS[0 if dtype == tl.bfloat16 else 1][KIND], dtype)


@triton.jit
def _nothing():
    """Return an empty tuple to append to; mypy does not look at its length."""
    return ()


@triton.jit
def load_scale_words(scales_of_row, chunk, mask, other, GROUP_STRIDE: tl.constexpr, KIND: tl.constexpr):
    """Load the words with the scales of block `chunk` of rows: a tuple of tensors in the shape of `scales_of_row`."""
    NUM: tl.constexpr = SCALE_WORDS[KIND]
    first = scales_of_row + chunk * (NUM * GROUP_STRIDE)
    words = _nothing()
    if HAS_UNITS[KIND]:
        unit = scales_of_row + chunk // 2 * ((1 + 2 * NUM) * GROUP_STRIDE)
        words = words + (tl.load(unit, mask=mask, other=other),)  # noqa: RUF005  # Triton cannot unpack here
        first = unit + (1 + chunk % 2 * NUM) * GROUP_STRIDE
    for i in tl.static_range(NUM):
        words = words + (tl.load(first + i * GROUP_STRIDE, mask=mask, other=other),)  # noqa: RUF005
    return words


@triton.jit
def _half(words, IS_HIGH: tl.constexpr):
    """Read the lower or the upper half of words in fp16."""
    if IS_HIGH:
        words = words >> 16
    return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(words, PLACE: tl.constexpr, ZERO: tl.constexpr):
    """Convert a byte of words to fp32, less ZERO."""
    bits = ((words >> 8 * PLACE) & 255) | _UPPER
    return bits.to(tl.float32, bitcast=True) - (2.0**23 + ZERO)


@triton.jit
def _power_of_two(bits):
    """2^(exponent - 127), what E8M0 means, for fp32 numbers without a mantissa. The smallest is subnormal."""
    return tl.maximum(bits, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def scale_and_least(words, GROUP: tl.constexpr, KIND: tl.constexpr):
    """The fp32 scale of a group of a block, and what is subtracted from the product (0 without a minimum)."""
    least = 0.0
    if HAS_UNITS[KIND] and HAS_LEAST[KIND]:
        scale = _half(words[0], False) * _byte(words[1], GROUP, 0)
        least = _half(words[0], True) * _byte(words[2], GROUP, 0)
    elif HAS_UNITS[KIND]:
        scale = words[0].to(tl.float32, bitcast=True) * _byte(words[1 + GROUP // 4], GROUP % 4, 128)
    elif HAS_LEAST[KIND]:
        scale, least = _half(words[GROUP], False), -_half(words[GROUP], True)
    elif KIND == MXFP4:
        scale = _power_of_two(_shifted(words[0], 8 * GROUP - 23) & 0x7F800000)
    else:
        scale = _half(words[GROUP // 2], GROUP % 2 == 1)
    return scale, least


# -- one row of x (one_row_kernel.py) ------------------------------------------------------------------------------
# Each of the 8 columns of a result has the sums of one group of a block, and one factor. Q8_0 is not supported.


@triton.jit
def column_groups(column, KIND: tl.constexpr):
    """The group of each of the 8 columns."""
    return column * NUM_GROUPS[KIND] // 8


@triton.jit
def _shifted(words, PLACES: tl.constexpr):
    """Shift words to the right, or to the left if PLACES is negative."""
    if PLACES < 0:
        words = words << -PLACES
    else:
        words = words >> PLACES
    return words


@triton.jit
def spread_upper_bits(uppers, PART: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """For slice PART of a block: repeat words with upper bits, [lanes, BITS], for the 4 words of each lane, with the
    bits where `column_numbers` wants them: [lanes, 4].
    """
    BITS: tl.constexpr = UPPER_BITS[KIND]
    PLACE: tl.constexpr = BITS * PART - 4 - (0 if dtype == tl.bfloat16 else 3)
    if BITS == 1:
        first = tl.join(_shifted(uppers, PLACE), _shifted(uppers, PLACE + 4))
        second = tl.join(_shifted(uppers, PLACE + 8), _shifted(uppers, PLACE + 12))
        spread = tl.join(first, second).permute(0, 1, 3, 2)
    else:
        spread = tl.join(_shifted(uppers, PLACE), _shifted(uppers, PLACE + 8))
    return spread.reshape(uppers.shape[0], 4)


@triton.jit
def column_numbers(words, uppers, PART: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """Like `block_numbers`, but with bases that need fewer shifts (`column_bases`). `uppers` has been spread."""
    IS_BF16: tl.constexpr = dtype == tl.bfloat16
    if UPPER_BITS[KIND] > 0:  # 128 + code
        bits = _shifted(words, 4 * PART - (0 if IS_BF16 else 3))
        if IS_BF16:
            bits = mask_and_set(bits, 0x000F000F, 0x43004300, "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;")
        else:
            bits = mask_and_set(bits, 0x00780078, 0x58005800, "lop3.b32 $0, $1, 0x00780078, 0x58005800, 0xEA;")
        MASK: tl.constexpr = (0x00300030 if UPPER_BITS[KIND] == 2 else 0x00100010) << (0 if IS_BF16 else 3)
        x = halves(bits | (uppers & MASK), dtype)
    elif IS_BF16 and KIND < FIRST_WITH_TABLE and PART == 0:  # 128 + code
        bits = mask_and_set(words, 0x000F000F, 0x43004300, "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;")
        x = halves(bits, dtype)
    else:
        x = block_numbers(words, None, PART, KIND, dtype)
    return x


@triton.jit
def column_bases(column, KIND: tl.constexpr, dtype: tl.constexpr):
    """What has to be subtracted from `column_numbers` to get code - zero, in fp32."""
    base = BASES[KIND] + 0.0
    if UPPER_BITS[KIND] > 0:
        base = BASES[KIND] + 64.0
    elif dtype == tl.bfloat16:
        base = tl.where(column_groups(column, KIND) == 0, BASES[KIND] + 112.0, BASES[KIND] + 0.0)
    return base


@triton.jit
def _byte_of_column(word, place, ZERO: tl.constexpr):
    """Convert byte `place` of words to fp32, less ZERO."""
    bits = _bytes_of(word + 0 * place, _UPPER + 0 * place, (place | 0x7440) + 0 * word)
    return bits.to(tl.float32, bitcast=True) - (2.0**23 + ZERO)


@triton.jit
def column_factors(words, column, KIND: tl.constexpr):
    """The factor of each column in fp32: the scale of its group, or in odd columns what is subtracted (`least`)."""
    group, is_scale = column_groups(column, KIND), column % 2 == 0
    if HAS_UNITS[KIND]:
        if HAS_LEAST[KIND]:
            unit = tl.where(is_scale, _half(words[0], False), _half(words[0], True))
            factor = unit * _byte_of_column(tl.where(is_scale, words[1], words[2]), group, 0)
        else:
            word = words[1]
            if SCALE_WORDS[KIND] == 2:
                word = tl.where(group < 4, words[1], words[2])
            factor = words[0].to(tl.float32, bitcast=True) * _byte_of_column(word, group % 4, 128)
    elif KIND == MXFP4:
        factor = _power_of_two(((words[0] >> 8 * group) & 255) << 23)
    else:
        EACH: tl.constexpr = 1 if HAS_LEAST[KIND] else 2  # groups of a word
        NUM: tl.constexpr = SCALE_WORDS[KIND]
        word = words[0]
        for i in tl.static_range(1, NUM):
            word = tl.where(group // EACH == i, words[i], word)
        if HAS_LEAST[KIND]:
            factor = tl.where(is_scale, _half(word, False), -_half(word, True))  # here the minimum is added
        else:
            factor = tl.where(group % 2 == 0, _half(word, False), _half(word, True))
    return factor


# -- values ------------------------------------------------------------------------------------------------------


@triton.jit
def load_upper_words(upper_row, word, mask, other, KIND: tl.constexpr):
    """Load for words of a row (the number `word`) their upper bits, from bit 0 on; None if there are none."""
    uppers = None
    BITS: tl.constexpr = UPPER_BITS[KIND]
    if BITS > 0:
        EACH: tl.constexpr = 4 // BITS
        uppers = tl.load(upper_row + word // EACH, mask=mask, other=other) >> (word % EACH * (4 * BITS))
    return uppers


@triton.jit
def _differences(words, uppers, PART: tl.constexpr, KIND: tl.constexpr):
    """code - zero, or the number of a table, for slice PART of a block without minimums: [.., n] -> fp32 [.., 2 n]."""
    x = block_numbers(words, uppers, PART, KIND, tl.bfloat16)
    if KIND < FIRST_WITH_TABLE:
        one = tl.full((1, 1), 1.0, tl.float32).to(tl.bfloat16)
        base = tl.full((1, 1), -BASES[KIND], tl.float32).to(tl.bfloat16)
        if KIND == Q8_0:
            base = fma(nibbles(words, 8 * PART + 4, tl.bfloat16, True), one, base)
        x = fma(x, one, base)
    return x.to(tl.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Round fp32 numbers to the nearest in `dtype`, two at a time. The interpreter would truncate to bf16."""
    if dtype == tl.float32:
        out = x
    elif INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            out = x.to(dtype)
    elif dtype == tl.bfloat16:
        asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        out = tl.inline_asm_elementwise(asm, "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2)
    else:
        half_asm: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        out = tl.inline_asm_elementwise(half_asm, "=r,r,r", [x], tl.float16, is_pure=True, pack=2)
    return out


@triton.jit
def block_type_values(words, uppers, scales, PART: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """The values of slice PART of one block of rows, with the columns in order: [rows, 16] -> [rows, 32] in `dtype`."""
    if KIND == Q6_K:
        in_second = (tl.arange(0, SLICE)[None, :] // 2) % 2 == 1
        first, _ = scale_and_least(scales, 2 * PART, KIND)
        second, _ = scale_and_least(scales, 2 * PART + 1, KIND)
        x = _differences(words, uppers, PART, KIND) * tl.where(in_second, second, first)
        x = _rounded(x, dtype).reshape(words.shape[0], 8, 2, 2).permute(0, 2, 1, 3).reshape(words.shape[0], SLICE)
    elif KIND == MXFP4 and dtype == tl.bfloat16:
        scale, _ = scale_and_least(scales, PART, KIND)
        x = times(block_numbers(words, uppers, PART, KIND, dtype), scale.to(dtype))
    else:
        scale, least = scale_and_least(scales, PART, KIND)
        if HAS_LEAST[KIND]:  # subtracting the base with the minimum saves an instruction for each value
            least += scale * BASES[KIND]
            x = block_numbers(words, uppers, PART, KIND, tl.bfloat16).to(tl.float32) * scale - least
        else:
            x = _differences(words, uppers, PART, KIND) * scale
        x = _rounded(x, dtype)
    return x
