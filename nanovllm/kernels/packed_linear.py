"""Products with packed weights (kernels/packed_values.py), and with those of a mixture's experts.

There are two kernels. For few rows each warp of a program has columns of its own, and their sums are added at the end;
scales and zeros are applied to the sums of a group. For many rows all warps work on one tile, and the values are
computed before they are multiplied; several programs share the columns of a narrow weight.

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
from nanovllm.kernels.packed_values import (
    BLOCK_WORDS,
    DENSE,
    E4M3,
    INT4,
    SLICE,
    Packed,
    block_values,
    enlarged,
    halves,
    nibbles,
    ones,
    scale_of,
    scale_row,
    small_e4m3,
)

MAX_FEW_ROWS, MAX_BLOCK_M = 16, 128
MAX_SUMMED = 16  # experts of a token
MANY_TILES = 384  # programs that fill a GPU with few warps each
REGISTERS = 65536  # of a multiprocessor
MIN_SPLIT_COLUMNS, MAX_SPLITS = 512, 8  # fewer columns, or more parts, cost more than they gain


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
    num_per_sm: int = 1  # programs of a multiprocessor, and products of a step: one multiplies while others compute


@triton.jit
def _nothing():
    """A tuple to which others are added; mypy does not look at its length."""
    return ()


@triton.jit
def _load_block(
    low_row,
    high_row,
    scales_of_row,  # None: no scales are wanted
    chunk,
    scale_chunk,
    GROUP_STRIDE: tl.constexpr,
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
    if scales_of_row is not None:
        column = scale_chunk * COLUMNS
        for start in tl.static_range(0, COLUMNS, SHARED):
            scale = tl.load(scales_of_row + (column + start) // GROUP * GROUP_STRIDE, mask=column < K, other=0)
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
    numbers = enlarged(words, dtype) if KIND == E4M3 else halves(words, dtype)
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
    N,  # features of the result
    CHOSEN: tl.constexpr,  # pairs of a row of x
    SUMMED: tl.constexpr,  # pairs of a row of the result, each of which is a warp's; 0: nothing is summed
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a block
    SHARED: tl.constexpr,  # columns of a block that have one scale
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,  # from one tile, row and group to the next
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
    if experts_ptr is None:
        let_next_start(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    CODES: tl.constexpr = 2 if KIND == DENSE else 8 if KIND == INT4 else 4  # of a word
    STRIDE: tl.constexpr = 1 if SUMMED else SPLIT  # blocks from one of a warp to its next
    STEPS: tl.constexpr = (K // COLUMNS + STRIDE - 1) // STRIDE
    AT_END: tl.constexpr = KIND == E4M3 and GROUP == K  # the scale of a row is applied to its sum
    # The assembler moves the loads of a turn to its end, unless the turn has more steps than there are blocks ahead
    UNROLLED: tl.constexpr = 2 * AHEAD if AHEAD > 3 else AHEAD
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
        if SUMMED:  # the kernel before has waited for the router's choice
            let_next_start(PDL)
            chosen = experts_ptr + block * SUMMED
            expert = tl.load(chosen + tl.minimum(part, SUMMED - 1), cache_modifier=".cg")
            warp_expert = tl.load(chosen + tl.minimum(warp, SUMMED - 1), cache_modifier=".cg")
        else:
            wait_for_previous(PDL)  # for the router's choice
            let_next_start(PDL)  # only now, because `sum_of_experts` reads the choice before it waits
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
    scales_of_row = None
    if KIND != DENSE:
        weight_row = warp_expert * (ROWS * N) + row[None, :, None] + 0 * warp
        scales_of_row = scale_row(scales_ptr, weight_row, SCALE_STRIDES[0], SCALE_STRIDES[1], SCALE_ROWS)
    block_scales = None if AT_END else scales_of_row
    first, scale_first = (0 * part, 0 * warp) if SUMMED else (part, warp)
    queue = _nothing()
    for step in tl.static_range(AHEAD):
        ahead = _load_block(
            low_row,
            high_row,
            block_scales,
            step * STRIDE + first,
            step * STRIDE + scale_first,
            SCALE_STRIDES[2],
            K,
            COLUMNS,
            SHARED,
            GROUP,
            (step + 1) * STRIDE * COLUMNS <= K,
        )
        queue = queue + (ahead,)  # noqa: RUF005
    if experts_ptr is None or SUMMED:
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
    for step in tl.range(STEPS, num_stages=1, loop_unroll_factor=UNROLLED):
        words, scales = queue[0]
        ahead = _load_block(
            low_row,
            high_row,
            block_scales,
            (step + AHEAD) * STRIDE + first,
            (step + AHEAD) * STRIDE + scale_first,
            SCALE_STRIDES[2],
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
                    code_sums = tl.dot(_weight_operand(halves(words, dtype)), x, code_sums)
                elif KIND == E4M3:
                    code_sums = tl.dot(_weight_operand(small_e4m3(words, 8 * i, dtype)), x, code_sums)
                else:
                    if KIND == INT4:
                        code_sums = tl.dot(_weight_operand(nibbles(words, 4 * i, dtype)), x, code_sums)
                    else:
                        code_sums = tl.dot(_weight_operand(nibbles(words, 8 * i, dtype)), x, code_sums)
                        code_sums = tl.dot(_weight_operand(nibbles(words, 8 * i + 4, dtype, True)), x, code_sums)
                    x_sums = tl.dot(_weight_operand(ones(words, dtype)), x, x_sums)
            if AT_END or KIND == DENSE:
                sums = code_sums
            else:
                scale_bits = scales[start // SHARED]
                if KIND != E4M3:
                    code_sums -= x_sums * (scale_bits >> 16).to(tl.float32)
                sums += code_sums * scale_of(scale_bits, SCALE_DTYPE, KIND, dtype)
    if AT_END:
        sums *= scale_of(tl.load(scales_of_row), SCALE_DTYPE, KIND, dtype)
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
    N,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # that are loaded at once
    SHARED: tl.constexpr,  # of these that have one scale
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDES: tl.constexpr,  # from one tile, row and group to the next
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,  # parts of the columns, each of which is a program's
    PRODUCTS: tl.constexpr,  # of a step, so that the values of each take fewer registers
    WAIT: tl.constexpr,  # for the tensor cores before the next values are computed
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N rows of a weight. Values are computed in the registers from which the tensor cores take them,
    while these multiply those before; x is in shared memory.
    """
    if experts_ptr is None:
        let_next_start(PDL)
    wait_for_previous(PDL)
    if experts_ptr is not None:
        let_next_start(PDL)  # see `_few_products_kernel`
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
    x_column = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + tl.arange(0, COLUMNS // PRODUCTS)[:, None]
    code_row = codes_ptr + weight_row[:, None] * (K // CODES) + tl.arange(0, COLUMNS // CODES)[None, :]
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
            for start in tl.static_range(0, COLUMNS, SHARED):
                scale_ptr = scales_of_row + (step * COLUMNS + start) // GROUP * SCALE_STRIDES[2]
                scales = scales + (0 if AT_END else tl.load(scale_ptr),)  # noqa: RUF005
            for part in tl.static_range(PRODUCTS):
                x = tl.load(x_column + (step * COLUMNS + part * (COLUMNS // PRODUCTS)))
                values = block_values(words, scales, part, PRODUCTS, SHARED, KIND, SCALE_DTYPE, dtype, not AT_END)
                sums = tl.dot(values, x, sums, input_precision="ieee")
                if WAIT:  # a use of the sums, before which Triton waits for the product
                    sums = tl.inline_asm_elementwise("// $0", "=r,0", [sums], tl.float32, is_pure=False, pack=1)
    if AT_END:
        sums *= tl.load(scales_of_row)
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
        num_ahead = 2
        if block_m > 8 or weight.scales is None:
            num_ahead = 1
        elif weight.kind == INT4.value:
            num_ahead = 3
        elif weight.kind == E4M3.value and weight.group_size == weight.num_columns:
            num_ahead = 8  # without scales that are loaded with each block, there are registers for it
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
    if not is_routed and num_rows <= MAX_BLOCK_M and num_programs < target.num_sms:
        block_m = min(block_m, 64)
    num_splits = max(1, min(target.num_sms // num_programs, weight.num_columns // MIN_SPLIT_COLUMNS, MAX_SPLITS))
    num_per_sm = 1
    if block_m == MAX_BLOCK_M:
        num_warps, num_stages = 8, 3 if is_large else 2
        fits_twice = weight.kind == INT4.value and weight.group_size % 128 == 0 and target.capability[0] == 9
        if fits_twice and not is_routed and num_programs > target.num_sms:
            num_per_sm = 2
    else:
        num_warps = 8 if is_large and block_m >= 32 else 4
        num_stages = 6 if is_large and block_m == 32 and not is_routed else 3 if is_large and block_m == 64 else 4
    return Tile(block_m, block_n, num_warps, num_stages, 1 if is_routed else num_splits, num_per_sm)


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

    x must be what `products` has returned for the same `experts`: the kernel loads weights while that one still runs.
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
        num_steps = triton.cdiv(weight.num_columns, columns * (1 if num_summed else tile.num_warps))
        constants |= {"SUMMED": num_summed, "SPLIT": tile.num_warps, "AHEAD": min(tile.num_ahead, num_steps)}
    else:
        kernel, x_stride, num_splits = _products_kernel, x.stride(0), tile.num_splits
        if num_splits > 1:
            target = torch.empty((num_splits, num_pairs, num_rows), dtype=torch.float32, device=x.device)
        is_wide = weight.num_columns % 128 == 0 == group % 128
        if weight.scales is None or (is_wide and tile.num_per_sm == 1):  # several products divide a single block
            columns = math.gcd(weight.num_columns, 128)
        assert columns >= 16, "a row must consist of whole steps"
        grid = num_blocks, triton.cdiv(num_rows, tile.block_n), num_splits
        constants |= {"BLOCK_N": tile.block_n, "SPLITS": num_splits, "STAGES": tile.num_stages}
        # On 9.0 the tensor cores read values from registers while a warp goes on. Unless each step uses the sums,
        # Triton 3.6 lets it overwrite these registers too early (triton-lang/triton#9433). Where the assembler notices,
        # they wait after each instruction instead.
        constants["WAIT"] = kernel_target.target_of(x.device).capability[0] == 9
        constants["PRODUCTS"] = 1 if weight.scales is None else tile.num_per_sm
        if tile.num_per_sm > 1:
            constants["maxnreg"] = REGISTERS // (tile.num_per_sm * tile.num_warps * 32)
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
        num_features,
        CHOSEN=num_chosen,
        K=weight.num_columns,
        COLUMNS=columns,
        SHARED=columns if weight.scales is None else shared,
        GROUP=group,
        SCALE_ROWS=weight.scale_rows,
        SCALE_STRIDES=(0, 0, 0) if weight.scales is None else weight.scales.stride(),
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
