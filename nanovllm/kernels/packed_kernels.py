"""Kernels that multiply packed weights (packed_values.py), for few rows and for many. packed_linear.py chooses.

For few rows each warp of a program has separate columns, or a separate expert, and the warps' sums are added at the
end; scales and zeros are applied to the sums of a group. For many rows all warps work on one tile, and the values are
computed before they are multiplied; several programs share the columns of a narrow weight, and another kernel adds
their sums.

A program multiplies a block of rows, or of pairs: a pair is a row and one of the experts chosen for the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm.kernels.activation import gated
from nanovllm.kernels.gguf_words import (
    BASES,
    HAS_LEAST,
    block_bases,
    block_numbers,
    load_scale_words,
    load_upper_words,
    scale_and_least,
)
from nanovllm.kernels.launch import let_next_start, wait_for_previous
from nanovllm.kernels.packed_values import block_values, enlarged, scale_of, scale_row, small_e4m3
from nanovllm.kernels.packed_words import (
    BLOCK_WORDS,
    CODES_OF_WORD,
    DENSE,
    E4M3,
    FIRST_BLOCK_TYPE,
    FIRST_WITH_TABLE,
    INT4,
    Q6_K,
    Q8_0,
    SLICE,
    UPPER_BITS,
    halves,
    nibbles,
    ones,
)


@triton.jit
def _nothing():
    """Return an empty tuple to append to; mypy does not look at its length."""
    return ()


@triton.jit
def two_rows(low, high):
    """Arrange words of two rows, [SPLIT * 32, 4] each -> [SPLIT, 2, 8, 4, 4]."""
    words = tl.join(low, high)
    return words.reshape(words.shape[0] // 32, 8, 4, 4, 2).permute(0, 4, 1, 2, 3)


@triton.jit
def _spread(uppers, BITS: tl.constexpr):
    """Repeat words [lanes, BITS] with upper bits for the 4 words of each lane, shifted for each: [lanes, 4]."""
    uppers = tl.join(uppers, uppers >> 8)
    if BITS == 1:
        uppers = tl.join(uppers, uppers >> 4)
    return uppers.reshape(uppers.shape[0], 4)


@triton.jit
def _load_block(
    low_row,
    high_row,
    low_uppers,  # where the rows' upper bits are
    high_uppers,
    scales_of_row,  # None if no scales are wanted
    chunk,
    scale_chunk,
    GROUP_STRIDE: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    IS_FULL: tl.constexpr,  # every warp has a block
):
    """Load words of a block of each warp's 16 rows, [SPLIT, 2, 8, 4, 4], a tuple with their upper bits in the same
    shape, which may be empty, and scales [SPLIT, 16, 1] for every SHARED columns, or the words of GGUF's scales. Words
    and scales past the last block are 0. `scale_chunk` is `chunk` in the layout of the scales.
    """
    BITS: tl.constexpr = UPPER_BITS[KIND]
    low, high = low_row + chunk * BLOCK_WORDS, high_row + chunk * BLOCK_WORDS
    is_block, other = (None, None) if IS_FULL else (chunk * COLUMNS < K, 0)
    low_words = tl.load(low, is_block, other, eviction_policy="evict_first")
    words = two_rows(low_words, tl.load(high, is_block, other, eviction_policy="evict_first"))
    uppers, scales = _nothing(), _nothing()
    if BITS > 0:
        low = tl.load(low_uppers + chunk * (4 * BITS), is_block, other, eviction_policy="evict_first")
        high = tl.load(high_uppers + chunk * (4 * BITS), is_block, other, eviction_policy="evict_first")
        uppers = (two_rows(_spread(low, BITS), _spread(high, BITS)),)
    if KIND >= FIRST_BLOCK_TYPE:
        scales = load_scale_words(scales_of_row, scale_chunk, scale_chunk * COLUMNS < K, 0, GROUP_STRIDE, KIND)
    elif scales_of_row is not None:
        column = scale_chunk * COLUMNS
        for start in tl.static_range(0, COLUMNS, SHARED):
            scale = tl.load(scales_of_row + (column + start) // GROUP * GROUP_STRIDE, mask=column < K, other=0)
            scales = scales + (scale,)  # noqa: RUF005  # Triton cannot unpack here
    return words, uppers, scales


@triton.jit
def weight_operand(numbers):
    """Reshape numbers of a slice [SPLIT, 2, 8, 4, 8] -> [SPLIT, 16, 32]. No number moves to another thread."""
    SPLIT: tl.constexpr = numbers.shape[0]
    return numbers.reshape(SPLIT, 2, 8, 4, 2, 2, 2).permute(0, 1, 2, 5, 3, 4, 6).reshape(SPLIT, 16, 32)


@triton.jit
def load_x(x_row, column, KIND: tl.constexpr, END: tl.constexpr = None):
    """Load words with x [lanes, 4] for a slice. `x_row` points to the lane's first words, in Q6_K to 2 of them. END:
    the number of columns of x if the weight is padded with others, else None.
    """
    if KIND == Q6_K:  # words alternate between the groups of 16 columns
        x = tl.load(x_row + column // 2)
        x = tl.join(x, tl.load(x_row + (column // 2 + SLICE // 4))).reshape(x.shape[0], 4)
    elif END is None:
        x = tl.load(x_row + column // 2)
    else:
        x = tl.load(x_row + column // 2, mask=column < END, other=0)
    return x


@triton.jit
def both_groups(operand, IS_X: tl.constexpr):
    """Split an operand along its 32 columns."""
    SPLIT: tl.constexpr = operand.shape[0]
    if IS_X:
        parts = operand.reshape(SPLIT, 2, 16, operand.shape[2]).permute(0, 2, 3, 1)
    else:
        parts = operand.reshape(SPLIT, 16, 2, 16).permute(0, 1, 3, 2)
    return tl.split(parts)


@triton.jit
def _scaled(sums, code_sums, x_sums, scales, GROUP: tl.constexpr, KIND: tl.constexpr):
    """Add the products of a group of columns of a GGUF type to `sums`."""
    scale, least = scale_and_least(scales, GROUP, KIND)
    sums += code_sums * scale
    if HAS_LEAST[KIND]:
        sums -= x_sums * (scale * BASES[KIND] + least)
    return sums


@triton.jit
def _slice_products(sums, words, uppers, x, scales, PART: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """Add the products of slice PART of a block of a GGUF type to `sums`."""
    none = tl.zeros_like(sums)
    numbers = weight_operand(block_numbers(words, uppers, PART, KIND, dtype))
    if KIND == Q6_K:
        x_first, x_second = both_groups(x, True)
        first, second = both_groups(numbers, False)
        bases, _ = both_groups(weight_operand(block_bases(words, KIND, dtype)), False)
        first_sums = tl.dot(first, x_first, tl.dot(bases, x_first, none))
        second_sums = tl.dot(second, x_second, tl.dot(bases, x_second, none))
        sums = _scaled(sums, first_sums, None, scales, 2 * PART, KIND)
        sums = _scaled(sums, second_sums, None, scales, 2 * PART + 1, KIND)
    else:
        code_sums, x_sums = none, none
        if HAS_LEAST[KIND]:
            x_sums = tl.dot(weight_operand(ones(words, dtype)), x, none)
        elif KIND < FIRST_WITH_TABLE:
            code_sums = tl.dot(weight_operand(block_bases(words, KIND, dtype)), x, none)
        code_sums = tl.dot(numbers, x, code_sums)
        if KIND == Q8_0:
            code_sums = tl.dot(weight_operand(nibbles(words, 8 * PART + 4, dtype, True)), x, code_sums)
        sums = _scaled(sums, code_sums, x_sums, scales, PART, KIND)
    return sums


@triton.jit
def x_operand(words, KIND: tl.constexpr, dtype: tl.constexpr):
    """Words of a slice [SPLIT * 32, 4, rows / 8] -> [SPLIT, 32, rows], with columns in the weight's order. Or 2 words
    of 16 columns each.
    """
    SPLIT: tl.constexpr = words.shape[0] // 32
    PAIRS: tl.constexpr = words.shape[1] // 2
    EIGHTS: tl.constexpr = words.shape[2]
    numbers = enlarged(words, dtype) if KIND == E4M3 else halves(words, dtype)
    numbers = numbers.reshape(SPLIT, 8, 4, 2, PAIRS, EIGHTS, 2).permute(0, 4, 2, 3, 6, 5, 1)
    return numbers.reshape(SPLIT, 16 * PAIRS, 8 * EIGHTS)


@triton.jit(do_not_specialize=["num_pairs"])  # compile once for all numbers of rows
def few_products_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,  # a number for each row of the weight, of all experts, or None
    factors_ptr,  # fp32 [pairs], factors of the results, or None for 1
    pairs_ptr,  # int32 [blocks * BLOCK_M]: the pairs of each block, sorted by expert, or None for all pairs in order
    experts_ptr,  # of each block, or each pair; num_experts for a block without pairs. None if there is one weight
    out_ptr,
    x_stride,  # between rows, in units of 16 bytes
    num_pairs,
    num_experts,
    N,  # features of the result
    out_stride,  # between rows of `out`
    CHOSEN: tl.constexpr,  # pairs of a row of x
    SUMMED: tl.constexpr,  # pairs that are summed for a row of the result, or 0 if nothing is summed
    K: tl.constexpr,
    X_COLUMNS: tl.constexpr,  # columns of x, if the weight is padded with others (Packed), else None
    COLUMNS: tl.constexpr,  # columns of a block
    SHARED: tl.constexpr,  # columns of a block that share a scale
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,  # strides between tiles, rows and groups
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,  # the result is activation(first half) * second half
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,  # warps
    STRIDE: tl.constexpr,  # warps that share the columns of a pair: SPLIT, or a part of it if pairs are summed
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply 16 rows of a weight. The tensor cores want the 16 rows as two times 8, with four threads per row. So a
    thread loads words 4 * q to 4 * q + 3 of a block of two rows, 16 bytes each. The words are the thread's parts of all
    operands, in both layouts: nothing passes through shared memory before the end.
    """
    if experts_ptr is None:
        let_next_start(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    CODES: tl.constexpr = COLUMNS // BLOCK_WORDS  # codes of a word
    BITS: tl.constexpr = UPPER_BITS[KIND]
    ROW_WORDS: tl.constexpr = K // CODES + K // 32 * BITS
    FULL: tl.constexpr = K // COLUMNS // STRIDE  # steps in which every warp has a block
    STEPS: tl.constexpr = (K // COLUMNS + STRIDE - 1) // STRIDE
    AT_END: tl.constexpr = KIND == E4M3 and GROUP == K  # the scale of a row is applied to its sum
    # The assembler moves the loads of a turn to its end unless the turn has more steps than blocks are loaded ahead
    UNROLLED: tl.constexpr = 2 * AHEAD if AHEAD > 3 else AHEAD
    # Tensors of a step are [lanes, 4 words]. Lane 4 * m + q of a warp has a part of rows m and m + 8.
    lane, warp = tl.arange(0, SPLIT * 32)[:, None], tl.arange(0, SPLIT)[:, None, None]
    part, m = lane // 32, lane % 32 // 4
    word = lane % 4 * 4 + tl.arange(0, 4)[None, :]
    block, in_tile = tl.program_id(1), tl.arange(0, 16)
    ROWS: tl.constexpr = 2 if GATED else 1  # rows of a feature
    FEATURES: tl.constexpr = 16 // ROWS
    feature = tl.program_id(0) * FEATURES
    row = tl.minimum(feature + in_tile % FEATURES, N - 1) + in_tile // FEATURES * N
    low = tl.minimum(feature + m, N - 1)
    high = low + N if GATED else tl.minimum(feature + m + 8, N - 1)
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    expert, warp_expert = 0, 0
    if experts_ptr is not None:
        if SUMMED:  # the previous kernel has waited for the router's choice
            let_next_start(PDL)
            chosen = experts_ptr + block * SUMMED
            expert = tl.load(chosen + tl.minimum(part // STRIDE, SUMMED - 1), cache_modifier=".cg")
            warp_expert = tl.load(chosen + tl.minimum(warp // STRIDE, SUMMED - 1), cache_modifier=".cg")
        else:
            wait_for_previous(PDL)  # for the router's choice
            let_next_start(PDL)  # only now, because `sum_of_experts` reads the router's choice before it waits
            expert = tl.load(experts_ptr + block).to(tl.int64)
            warp_expert = expert
            if expert >= num_experts:
                return
        if pairs_ptr is not None:
            pair = tl.load(pairs_ptr + pair)
        else:  # one block per pair, or per sum
            pair = tl.where(tl.arange(0, BLOCK_M) == 0, block, num_pairs)
    code_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + word
    low_words = (expert * (ROWS * N) + low).to(tl.int64) * ROW_WORDS
    high_words = (expert * (ROWS * N) + high).to(tl.int64) * ROW_WORDS
    low_row, high_row, low_uppers, high_uppers = code_ptr + low_words, code_ptr + high_words, None, None
    if BITS > 0:
        upper_ptr = codes_ptr + K // CODES + lane % 4 * BITS + tl.arange(0, BITS)[None, :]
        low_uppers, high_uppers = upper_ptr + low_words, upper_ptr + high_words
    scales_of_row = None
    if KIND != DENSE:
        weight_row = warp_expert * (ROWS * N) + row[None, :, None] + 0 * warp
        scales_of_row = scale_row(scales_ptr, weight_row, SCALE_STRIDES[0], SCALE_STRIDES[1], SCALE_ROWS)
    row_scales = None if AT_END else scales_of_row
    first, scale_first = part % STRIDE, warp % STRIDE
    queue = _nothing()
    for step in tl.static_range(AHEAD):
        chunk, scale_chunk = step * STRIDE + first, step * STRIDE + scale_first
        ahead = _load_block(
            low_row,
            high_row,
            low_uppers,
            high_uppers,
            row_scales,
            chunk,
            scale_chunk,
            SCALE_STRIDES[2],
            K,
            COLUMNS,
            SHARED,
            GROUP,
            KIND,
            step < FULL,
        )
        queue = queue + (ahead,)  # noqa: RUF005
    if experts_ptr is None or SUMMED:
        wait_for_previous(PDL)  # before this only weights may be read; other kernels use x and out
    # Rows of x that do not exist are replaced by copies of others
    x_word = lane % 4 * 2 + tl.arange(0, 2)[None, :] if KIND == Q6_K else word
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + x_word
    x_row = _nothing()
    for i in tl.static_range(BLOCK_M // 8):
        if SUMMED:
            of_x = block * SUMMED + tl.minimum(part // STRIDE, SUMMED - 1)
        elif experts_ptr is None:
            of_x = tl.minimum(block * BLOCK_M + 8 * i + m, num_pairs - 1)
        elif pairs_ptr is None:
            of_x = block + 0 * m
        else:
            of_x = tl.minimum(tl.load(pairs_ptr + block * BLOCK_M + 8 * i + m), num_pairs - 1)
        x_row = x_row + (x_ptr + (of_x // CHOSEN).to(tl.int64) * (4 * x_stride),)  # noqa: RUF005
    sums = tl.zeros((SPLIT, 16, BLOCK_M), tl.float32)
    for step in tl.range(STEPS, num_stages=1, loop_unroll_factor=UNROLLED):
        words, uppers, scales = queue[0]
        chunk, scale_chunk = (step + AHEAD) * STRIDE + first, (step + AHEAD) * STRIDE + scale_first
        ahead = _load_block(
            low_row,
            high_row,
            low_uppers,
            high_uppers,
            row_scales,
            chunk,
            scale_chunk,
            SCALE_STRIDES[2],
            K,
            COLUMNS,
            SHARED,
            GROUP,
            KIND,
            False,
        )
        queue = queue[1:] + (ahead,)  # noqa: RUF005
        column = tl.minimum((step * STRIDE + first) * COLUMNS, K - COLUMNS)
        for start in tl.static_range(0, COLUMNS, SHARED):
            code_sums = sums if AT_END or KIND == DENSE else tl.zeros_like(sums)
            x_sums = tl.zeros_like(sums)
            for i in tl.static_range(start // SLICE, (start + SHARED) // SLICE):
                x = load_x(x_row[0], column + i * SLICE, KIND, X_COLUMNS)[:, :, None]
                if BLOCK_M == 16:
                    x = tl.join(x.reshape(x.shape[0], 4), load_x(x_row[1], column + i * SLICE, KIND, X_COLUMNS))
                x = x_operand(x, KIND, dtype)
                if KIND >= FIRST_BLOCK_TYPE:
                    upper = uppers[0] if BITS > 0 else None
                    sums = _slice_products(sums, words, upper, x, scales, i, KIND, dtype)
                elif KIND == DENSE:
                    code_sums = tl.dot(weight_operand(halves(words, dtype)), x, code_sums)
                elif KIND == E4M3:
                    code_sums = tl.dot(weight_operand(small_e4m3(words, 8 * i, dtype)), x, code_sums)
                else:
                    if KIND == INT4:
                        code_sums = tl.dot(weight_operand(nibbles(words, 4 * i, dtype)), x, code_sums)
                    else:
                        code_sums = tl.dot(weight_operand(nibbles(words, 8 * i, dtype)), x, code_sums)
                        code_sums = tl.dot(weight_operand(nibbles(words, 8 * i + 4, dtype, True)), x, code_sums)
                    x_sums = tl.dot(weight_operand(ones(words, dtype)), x, x_sums)
            if AT_END or KIND == DENSE:
                sums = code_sums
            elif KIND < FIRST_BLOCK_TYPE:
                scale_bits = scales[start // SHARED]
                if KIND != E4M3:
                    code_sums -= x_sums * (scale_bits >> 16).to(tl.float32)
                sums += code_sums * scale_of(scale_bits, SCALE_DTYPE, KIND, dtype)
    if AT_END:
        sums *= scale_of(tl.load(scales_of_row), SCALE_DTYPE, KIND, dtype)
    bias, factors = bias_ptr, factors_ptr
    if SUMMED:
        if bias_ptr is not None:
            bias_row = bias_ptr + warp_expert * N + row[None, :, None]
            sums += tl.load(bias_row, mask=scale_first == 0, other=0.0).to(tl.float32)
        sums *= tl.load(factors_ptr + block * SUMMED + warp // STRIDE, mask=warp // STRIDE < SUMMED, other=0.0)
        bias, factors = None, None
    elif experts_ptr is not None and bias_ptr is not None:
        bias += expert * (ROWS * N)
    sums = tl.sum(sums, 0)
    finish(sums, row, feature, pair, bias, factors, out_ptr, out_stride, num_pairs, N, GATED, ACTIVATION)


@triton.jit(do_not_specialize=["num_pairs"])
def products_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    factors_ptr,  # this and the other arguments as in `few_products_kernel`
    pairs_ptr,
    experts_ptr,
    out_ptr,  # with several splits: fp32 [splits, pairs, rows of the weight]
    x_stride,
    num_pairs,
    num_experts,
    N,
    out_stride,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,  # columns that are loaded at once
    SHARED: tl.constexpr,  # loaded columns that share a scale
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,  # strides between tiles, rows and groups
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,  # parts of the columns, one program each
    PRODUCTS: tl.constexpr,  # products of a step: more products need fewer registers for the values of each
    WAIT: tl.constexpr,  # wait for the tensor cores before computing the next values
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N rows of a weight. Values are computed in the registers from which the tensor cores read them,
    while the tensor cores multiply the previous values; x is in shared memory.
    """
    if experts_ptr is None:
        let_next_start(PDL)
    wait_for_previous(PDL)
    if experts_ptr is not None:
        let_next_start(PDL)  # see `few_products_kernel`
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    CODES: tl.constexpr = CODES_OF_WORD[KIND]
    AT_END: tl.constexpr = KIND == E4M3 and GROUP == K
    # Programs that share a part of the weight are neighbours, so that they find it in the cache
    block, in_tile = tl.program_id(0), tl.arange(0, BLOCK_N)
    ROWS: tl.constexpr = 2 if GATED else 1  # rows of a feature
    FEATURES: tl.constexpr = BLOCK_N // ROWS
    feature = tl.program_id(1) * FEATURES
    row = tl.minimum(feature + in_tile % FEATURES, N - 1) + in_tile // FEATURES * N
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_row, bias = row.to(tl.int64), bias_ptr
    if experts_ptr is not None:
        expert = tl.load(experts_ptr + block).to(tl.int64)
        if expert >= num_experts:
            return
        weight_row += expert * (ROWS * N)
        if bias_ptr is not None:
            bias += expert * (ROWS * N)
        if pairs_ptr is not None:
            pair = tl.load(pairs_ptr + pair)
        else:  # one block per pair
            pair = tl.where(tl.arange(0, BLOCK_M) == 0, block, num_pairs)
    # Rows that do not exist are replaced by copies of different rows: if all were copies of one row, the loads of its
    # cache lines would queue up
    x_row = tl.where(pair < num_pairs, pair, (pair + tl.arange(0, BLOCK_M)) % num_pairs) // CHOSEN
    x_column = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + tl.arange(0, COLUMNS // PRODUCTS)[:, None]
    word = tl.arange(0, COLUMNS // CODES)[None, :]
    first_word = codes_ptr + weight_row[:, None] * (K // CODES + K // 32 * UPPER_BITS[KIND])
    code_row, upper_row = first_word + word, first_word + K // CODES
    scales_of_row = 0
    if KIND != DENSE:
        scales_of_row = scale_row(scales_ptr, weight_row[:, None], SCALE_STRIDES[0], SCALE_STRIDES[1], SCALE_ROWS)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    STEPS: tl.constexpr = (K // COLUMNS + SPLITS - 1) // SPLITS
    first = tl.program_id(2) * STEPS
    for step in tl.range(first, tl.minimum(first + STEPS, K // COLUMNS), num_stages=STAGES):
        words = tl.load(code_row + step * (COLUMNS // CODES))
        if KIND == DENSE:
            sums = tl.dot(words, tl.load(x_column + step * COLUMNS), sums, input_precision="ieee")
        else:
            scales = _nothing()
            uppers = load_upper_words(upper_row, step * (COLUMNS // CODES) + word, None, None, KIND)
            if KIND >= FIRST_BLOCK_TYPE:
                scales = load_scale_words(scales_of_row, step, None, None, SCALE_STRIDES[2], KIND)
            else:
                for start in tl.static_range(0, COLUMNS, SHARED):
                    scale_ptr = scales_of_row + (step * COLUMNS + start) // GROUP * SCALE_STRIDES[2]
                    scales = scales + (0 if AT_END else tl.load(scale_ptr),)  # noqa: RUF005
            for part in tl.static_range(PRODUCTS):
                column = step * COLUMNS + part * (COLUMNS // PRODUCTS)
                if X_COLUMNS is None:
                    x = tl.load(x_column + column)
                else:
                    is_x = column + tl.arange(0, COLUMNS // PRODUCTS)[:, None] < X_COLUMNS
                    x = tl.load(x_column + column, mask=is_x, other=0.0)
                values = block_values(
                    words, uppers, scales, part, PRODUCTS, SHARED, KIND, SCALE_DTYPE, dtype, not AT_END
                )
                sums = tl.dot(values, x, sums, input_precision="ieee")
                if WAIT:  # using the sums makes Triton wait for the product
                    sums = tl.inline_asm_elementwise("// $0", "=r,0", [sums], tl.float32, is_pure=False, pack=1)
    if AT_END:
        sums *= tl.load(scales_of_row)
    if SPLITS > 1:
        part = (tl.program_id(2).to(tl.int64) * num_pairs + pair) * (ROWS * N)
        is_there = (pair < num_pairs)[None, :] & (feature + in_tile % FEATURES < N)[:, None]
        tl.store(out_ptr + part[None, :] + row[:, None], sums, mask=is_there)
    else:
        finish(sums, row, feature, pair, bias, factors_ptr, out_ptr, out_stride, num_pairs, N, GATED, ACTIVATION)


@triton.jit(do_not_specialize=["num_pairs"])
def sum_parts_kernel(
    parts_ptr,  # fp32 [splits, pairs, rows of the weight]
    bias_ptr,
    factors_ptr,
    out_ptr,
    num_pairs,
    N,
    out_stride,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    finish(sums, row, feature, pair, bias_ptr, factors_ptr, out_ptr, out_stride, num_pairs, N, GATED, ACTIVATION)


@triton.jit
def _gated(sums, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(first half of the rows) * second half, rounded where torch rounds."""
    HALF: tl.constexpr = sums.shape[0] // 2
    sums = sums.to(dtype).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, sums.shape[1])), (1, 2, 0)))
    return gated(gate, up, dtype, ACTIVATION)


@triton.jit
def finish(
    sums,
    row,
    feature,
    pair,
    bias_ptr,
    factors_ptr,
    out_ptr,
    out_stride,
    num_pairs,
    N,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Store the results of `sums` [BLOCK_N, BLOCK_M], for rows of the weight and pairs."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    FEATURES: tl.constexpr = sums.shape[0] // (2 if GATED else 1)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    if GATED:
        sums = _gated(sums, dtype, ACTIVATION)
    if factors_ptr is not None:
        sums *= tl.load(factors_ptr + pair, mask=pair < num_pairs, other=0.0)[None, :]
    feature += tl.arange(0, FEATURES)
    out = out_ptr + pair.to(tl.int64)[None, :] * out_stride + feature[:, None]
    tl.store(out, sums.to(dtype), mask=(pair < num_pairs)[None, :] & (feature < N)[:, None])
