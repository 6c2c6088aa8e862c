"""Two codes of a packed word as two 16-bit numbers in a register: what the kernels of packed weights share.

packed_values.py has the arrangement of the codes; gguf_words.py the codes of GGUF's types.
"""

from __future__ import annotations

import triton
import triton.language as tl

DENSE, INT4, INT8, E4M3 = (tl.constexpr(kind) for kind in range(4))
# The types of GGUF's blocks. Values are scale * (code - zero), scale * code - least, or scale * a number of a table
Q4_0, Q5_0, Q8_0, Q6_K, Q4_1, Q5_1, Q4_K, Q5_K, IQ4_NL, IQ4_XS, MXFP4 = (tl.constexpr(kind) for kind in range(4, 15))
FIRST_BLOCK_TYPE, FIRST_WITH_TABLE = Q4_0, IQ4_NL
# By kind: codes in a word, without upper bits, and upper bits of a code, which other words have (gguf_words.py)
CODES_OF_WORD = tl.constexpr((1, 8, 4, 4, 8, 8, 4, 8, 8, 8, 8, 8, 8, 8, 8))
UPPER_BITS = tl.constexpr((0, 0, 0, 0, 0, 1, 0, 2, 0, 1, 0, 1, 0, 0, 0))
BLOCK_WORDS, SLICE = (tl.constexpr(size) for size in (16, 32))  # words of a block, columns of a slice
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def halves(words, dtype: tl.constexpr):
    """Split words into the two numbers that each holds: [.., n] -> [.., 2 n]."""
    low = words.to(tl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
    both = tl.join(low, high)
    return both.reshape(both.shape[:-2] + [2 * both.shape[-2]])  # noqa: RUF005  # Triton cannot unpack here


@triton.jit
def mask_and_set(words, MASK: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Compute (words & MASK) | BITS with one instruction; the compiler would use two."""
    if INTERPRETED:
        words = (words & MASK) | BITS
    else:
        words = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    return words


@triton.jit
def nibbles(words, PLACE: tl.constexpr, dtype: tl.constexpr, IS_HIGH: tl.constexpr = False):
    """The 4 bits at PLACE and at PLACE + 16 of words [.., n]: [.., 2 n] in `dtype`, which is bf16 or fp16.

    The result is 16 + bits, or with IS_HIGH, for the upper half of an 8-bit code, 256 + 16 * bits.
    """
    SHIFT: tl.constexpr = PLACE - (3 if dtype == tl.bfloat16 else 6)
    if SHIFT < 0:
        bits = words << -SHIFT
    else:
        bits = words >> SHIFT
    if dtype == tl.bfloat16:
        if IS_HIGH:
            bits = mask_and_set(bits, 0x00780078, 0x43804380, "lop3.b32 $0, $1, 0x00780078, 0x43804380, 0xEA;")
        else:
            bits = mask_and_set(bits, 0x00780078, 0x41804180, "lop3.b32 $0, $1, 0x00780078, 0x41804180, 0xEA;")
    elif IS_HIGH:
        bits = mask_and_set(bits, 0x03C003C0, 0x5C005C00, "lop3.b32 $0, $1, 0x03C003C0, 0x5C005C00, 0xEA;")
    else:
        bits = mask_and_set(bits, 0x03C003C0, 0x4C004C00, "lop3.b32 $0, $1, 0x03C003C0, 0x4C004C00, 0xEA;")
    return halves(bits, dtype)


@triton.jit
def filled(words, PAIR: tl.constexpr, dtype: tl.constexpr):
    """The two 16-bit numbers of PAIR for the columns of a slice. They formally depend on the words, so that they get
    the same layout.
    """
    if INTERPRETED:
        pairs = words * 0 + PAIR
    else:
        pairs = tl.inline_asm_elementwise("mov.b32 $0, $2;", "=r,r,r", [words, PAIR], tl.int32, is_pure=True, pack=1)
    return halves(pairs, dtype)


@triton.jit
def ones(words, dtype: tl.constexpr):
    """1 for each column of a slice."""
    return filled(words, 0x3F803F80 if dtype == tl.bfloat16 else 0x3C003C00, dtype)


@triton.jit
def fma(x, factor, addend):
    """x * factor + addend in 16 bits, for two numbers at a time."""
    if INTERPRETED:
        x = (x.to(tl.float32) * factor.to(tl.float32) + addend.to(tl.float32)).to(x.dtype)
    elif x.dtype == tl.bfloat16:
        asm: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;"
        x = tl.inline_asm_elementwise(asm, "=r,r,r,r", [x, factor, addend], x.dtype, is_pure=True, pack=2)
    else:
        half_asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;"
        x = tl.inline_asm_elementwise(half_asm, "=r,r,r,r", [x, factor, addend], x.dtype, is_pure=True, pack=2)
    return x


@triton.jit
def times(x, factor):
    """x * factor in 16 bits, for two numbers at a time. Subnormal numbers are kept."""
    return fma(x, factor, tl.full((1, 1), -0.0, tl.float32).to(x.dtype))  # GPUs before 9.0 lack a product alone
