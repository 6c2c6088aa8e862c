"""Multiply a weight in GGUF's blocks (gguf_words.py) by one row of x: the decode steps of a single sequence.

`few_products_kernel` of packed_kernels.py also multiplies a single row, but then the 8 columns of each result of the
tensor cores are equal, and the four threads of a weight row scale the same sums. Here each of the 8 columns keeps the
sums of one group of a block, so that a thread scales the sums of one group, or of two in Q6_K. In types with a minimum,
even columns have the scales and odd columns the minimums. At the end the columns are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm.kernels.gguf_words import (
    HAS_LEAST,
    HAS_UNITS,
    NUM_GROUPS,
    SCALE_WORDS,
    column_bases,
    column_factors,
    column_groups,
    column_numbers,
    spread_upper_bits,
)
from nanovllm.kernels.launch import let_next_start, wait_for_previous
from nanovllm.kernels.packed_kernels import both_groups, finish, load_x, two_rows, weight_operand, x_operand
from nanovllm.kernels.packed_values import scale_row
from nanovllm.kernels.packed_words import (
    BLOCK_WORDS,
    CODES_OF_WORD,
    FIRST_WITH_TABLE,
    Q6_K,
    SLICE,
    UPPER_BITS,
    filled,
)


@triton.jit
def _nothing():
    """Return an empty tuple to append to; mypy does not look at its length."""
    return ()


@triton.jit
def _load_block(
    rows,
    step,
    block,
    scale_block,
    SCALE_STEP: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    KIND: tl.constexpr,
):
    """Load the words of each warp's block of 16 rows, [SPLIT, 2, 8, 4, 4], the words with the upper bits of 8 rows and
    of the other 8, [SPLIT * 32, BITS] each, and the words with scales, [SPLIT, 16, 1]. `block` is the number of the
    block. Past the last block all words are 0, or undefined if a step has blocks for all warps or for none.
    `scale_block` is the same in the layout of the scales.
    """
    low_row, high_row, low_uppers, high_uppers, units, scales_of_row = rows
    BITS: tl.constexpr = UPPER_BITS[KIND]
    NUM: tl.constexpr = SCALE_WORDS[KIND]
    if NUM_BLOCKS % SPLIT == 0:
        is_block, is_scale, other = step < NUM_BLOCKS // SPLIT, step < NUM_BLOCKS // SPLIT, None
    else:
        is_block, is_scale, other = block < NUM_BLOCKS, scale_block < NUM_BLOCKS, 0
    at = step * (SPLIT * BLOCK_WORDS)
    low = tl.load(low_row + at, is_block, other, eviction_policy="evict_first")
    words = two_rows(low, tl.load(high_row + at, is_block, other, eviction_policy="evict_first"))
    uppers, scales = _nothing(), _nothing()
    if BITS > 0:
        at = step * (SPLIT * 4 * BITS)
        low = tl.load(low_uppers + at, is_block, other, eviction_policy="evict_first")
        uppers = low, tl.load(high_uppers + at, is_block, other, eviction_policy="evict_first")
    if HAS_UNITS[KIND]:
        scales = (tl.load(units + step * SCALE_STEP, is_scale, other),)
    for i in tl.static_range(NUM):
        at = step * SCALE_STEP + i * GROUP_STRIDE
        scales = scales + (tl.load(scales_of_row + at, is_scale, other),)  # noqa: RUF005  # Triton cannot unpack here
    return words, uppers, scales


@triton.jit
def _add_block(sums, block, x_row, x_group, column, KIND: tl.constexpr, dtype: tl.constexpr):
    """Add the products of a block to `sums` [SPLIT, 16, 8]. `x_group` points to the x of each column's group."""
    words, uppers, scales = block
    none = tl.zeros_like(sums)
    in_tile = tl.arange(0, 8)[None, None, :]
    group = column_groups(in_tile, KIND)
    SLICES: tl.constexpr = CODES_OF_WORD[KIND] // 2
    group_sums = none
    for part in tl.static_range(SLICES):
        x = x_operand(load_x(x_row, column + part * SLICE, KIND)[:, :, None], KIND, dtype)
        upper = None
        if UPPER_BITS[KIND] > 0:
            low = spread_upper_bits(uppers[0], part, KIND, dtype)
            upper = two_rows(low, spread_upper_bits(uppers[1], part, KIND, dtype))
        numbers = weight_operand(column_numbers(words, upper, part, KIND, dtype))
        if KIND == Q6_K:
            x_first, x_second = both_groups(x, True)
            first, second = both_groups(numbers, False)
            products = tl.where(in_tile % 2 == 0, tl.dot(first, x_first, none), tl.dot(second, x_second, none))
        else:
            products = tl.dot(numbers, x, none)
        if part == 0:
            group_sums = products
        else:
            group_sums = tl.where(group * SLICES // NUM_GROUPS[KIND] == part, products, group_sums)
    if KIND < FIRST_WITH_TABLE:
        x = x_operand(tl.load(x_group + column // 2)[:, :, None], KIND, dtype)
        minus_ones = weight_operand(filled(words, -0x407F4080 if dtype == tl.bfloat16 else -0x43FF4400, dtype))
        if KIND == Q6_K:
            minus_ones, _ = both_groups(minus_ones, False)
        less = tl.dot(minus_ones, x, none)
        group_sums += less * column_bases(in_tile, KIND, dtype)
        if HAS_LEAST[KIND]:
            group_sums = tl.where(in_tile % 2 == 0, group_sums, less)
    return sums + group_sums * column_factors(scales, in_tile, KIND)


@triton.jit
def one_row_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    N,  # features of the result
    K: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,  # strides between tiles, rows and groups
    KIND: tl.constexpr,
    GATED: tl.constexpr,  # the result is activation(first half) * second half
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,  # warps, which sum over separate columns
    AHEAD: tl.constexpr,  # blocks that each warp loads ahead
    PDL: tl.constexpr,
):
    """Multiply 16 rows of a weight. Threads have the same words as in `few_products_kernel`."""
    let_next_start(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    CODES: tl.constexpr = CODES_OF_WORD[KIND]
    BITS: tl.constexpr = UPPER_BITS[KIND]
    COLUMNS: tl.constexpr = BLOCK_WORDS * CODES
    ROW_WORDS: tl.constexpr = K // CODES + K // 32 * BITS
    NUM_BLOCKS: tl.constexpr = K // COLUMNS
    STEPS: tl.constexpr = (NUM_BLOCKS + SPLIT - 1) // SPLIT
    # Tensors of a step are [lanes, 4 words]. Lane 4 * m + q of a warp has a part of rows m and m + 8.
    lane, warp = tl.arange(0, SPLIT * 32)[:, None], tl.arange(0, SPLIT)[:, None, None]
    part, m = lane // 32, lane % 32 // 4
    in_tile = tl.arange(0, 16)
    FEATURES: tl.constexpr = 16 // (2 if GATED else 1)
    feature = tl.program_id(0) * FEATURES
    row = tl.minimum(feature + in_tile % FEATURES, N - 1) + in_tile // FEATURES * N
    low = tl.minimum(feature + m, N - 1)
    high = low + N if GATED else tl.minimum(feature + m + 8, N - 1)
    low_row, high_row = codes_ptr + low.to(tl.int64) * ROW_WORDS, codes_ptr + high.to(tl.int64) * ROW_WORDS
    low_uppers, high_uppers = None, None
    if BITS > 0:
        upper = K // CODES + part * (4 * BITS) + lane % 4 * BITS + tl.arange(0, BITS)[None, :]
        low_uppers, high_uppers = low_row + upper, high_row + upper
    word = lane % 4 * 4 + tl.arange(0, 4)[None, :]
    low_row, high_row = low_row + (part * BLOCK_WORDS + word), high_row + (part * BLOCK_WORDS + word)
    GROUP_STRIDE: tl.constexpr = SCALE_STRIDES[2]
    # Two warps share the two blocks of a unit, so the distance between a warp's scales does not change
    units = scale_row(scales_ptr, row[None, :, None] + 0 * warp, SCALE_STRIDES[0], SCALE_STRIDES[1], 1)
    NUM: tl.constexpr = SCALE_WORDS[KIND]
    UNIT: tl.constexpr = (1 + 2 * NUM) * GROUP_STRIDE
    SCALE_STEP: tl.constexpr = UNIT * SPLIT // 2 if HAS_UNITS[KIND] else NUM * GROUP_STRIDE * SPLIT
    if HAS_UNITS[KIND]:
        units += warp // 2 * UNIT
        scales_of_row = units + (1 + warp % 2 * NUM) * GROUP_STRIDE
    else:
        scales_of_row = units + warp * (NUM * GROUP_STRIDE)
    rows = low_row, high_row, low_uppers, high_uppers, units, scales_of_row
    queue = _nothing()
    for step in tl.static_range(AHEAD):
        block, scale_block = step * SPLIT + part, step * SPLIT + warp
        ahead = _load_block(rows, step, block, scale_block, SCALE_STEP, GROUP_STRIDE, NUM_BLOCKS, SPLIT, KIND)
        queue = queue + (ahead,)  # noqa: RUF005  # Triton cannot unpack here
    wait_for_previous(PDL)  # before this only weights may be read; other kernels use x and out
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + part * (COLUMNS // 2)
    x_row = x_ptr + (lane % 4 * 2 + tl.arange(0, 2)[None, :] if KIND == Q6_K else word)
    x_group = x_row + column_groups(m, KIND) * (COLUMNS // NUM_GROUPS[KIND] // 2)
    sums = tl.zeros((SPLIT, 16, 8), tl.float32)
    # If a turn has AHEAD + 1 steps, no registers are copied. In Q6_K such a turn of 8 warps would spill registers.
    IN_LOOP: tl.constexpr = 1 if KIND == Q6_K and SPLIT > 4 else AHEAD + 1
    for step in tl.range(STEPS, num_stages=1, loop_unroll_factor=IN_LOOP):
        block, scale_block = (step + AHEAD) * SPLIT + part, (step + AHEAD) * SPLIT + warp
        ahead = _load_block(rows, step + AHEAD, block, scale_block, SCALE_STEP, GROUP_STRIDE, NUM_BLOCKS, SPLIT, KIND)
        column = step * (SPLIT * COLUMNS)
        if NUM_BLOCKS % SPLIT > 0:  # a block that does not exist has zeros and is multiplied by the last block's x
            column -= tl.maximum(step * SPLIT + part - (NUM_BLOCKS - 1), 0) * COLUMNS
        sums = _add_block(sums, queue[0], x_row, x_group, column, KIND, dtype)
        queue = queue[1:] + (ahead,)  # noqa: RUF005
    EACH: tl.constexpr = 1 if HAS_LEAST[KIND] else 8 // NUM_GROUPS[KIND]  # equal columns
    of_rows = tl.where(tl.arange(0, 8)[None, :] % EACH == 0, tl.sum(sums, 0), 0.0)
    of_rows = tl.sum(of_rows, 1)[:, None]
    finish(of_rows, row, feature, tl.arange(0, 1), bias_ptr, None, out_ptr, 0, 1, N, GATED, ACTIVATION)
