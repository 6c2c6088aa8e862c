"""Products with packed weights, and with those of a mixture's experts.

A packed weight (layers/packed_weight.py) consists of int32 words that hold codes of 4 or 8 bits. Groups of `group_size`
columns and `scale_rows` rows share a scale, and integers also a zero: a value is (code - zero) * scale. The weights of
several experts are one weight, with an expert's rows together.

`block_words` words of a row, W, are a block. The codes are arranged so that the tensor cores can use them with few
instructions: a shift and a mask leave two codes of a word in the halves of a register, in the mantissas of two 16-bit
numbers, and these are neighbours in the weight. Word w of a block has, from bit B * s + 16 * h on, the code of column
2 * W * s + 2 * w + h, for B bits per code, h of 0 and 1, and s from 0 to 16 / B - 1. The columns with the same s are a
slice, which has one scale.

- An integer of 4 bits reads as 16 + code. 8 bits are two such integers.
- The bits of an e4m3 number at the place of those of a bf16 number read as 2^-120 of its value.

`products` multiplies tiles of weight and input. For few rows each warp of a program has columns of its own, and their
sums are added at the end; scales and zeros are applied to the sums of a group. For many rows all warps work on one
tile, and the values are computed before they are multiplied. `unpack` writes the values of some rows, so that cuBLAS
can multiply them by many.

Legend: M rows, N output features, K input features; a pair is a row and one of the experts that it has chosen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KernelTarget
from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

DENSE, INT4, INT8, E4M3 = (tl.constexpr(kind) for kind in range(4))
BLOCK_WORDS = (64, 32, 16)  # that a block may have; more are faster
MAX_BLOCK_M = 128
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Packed(NamedTuple):
    """The tensors of a weight [N, K]. A dense one has nothing but values, in `codes`."""

    codes: torch.Tensor  # int32 words [N, K / 8] or [N, K / 4]; dense: the values [N, K]
    scales: torch.Tensor | None = None  # [K / group_size, N / scale_rows]: fp32, or words of `pack_scales`
    kind: int = DENSE.value
    scale_dtype: torch.dtype | None = None  # bf16 or fp16 in words; None is fp32
    scale_rows: int = 1
    group_size: int = 128
    block_words: int = 16

    @property
    def scale_type(self) -> tl.dtype:
        return tl.float32 if self.scale_dtype is None else getattr(tl, str(self.scale_dtype).removeprefix("torch."))

    @property
    def num_columns(self) -> int:
        return self.codes.shape[1] * (1 if self.kind == DENSE.value else 8 if self.kind == INT4.value else 4)


def choose_block_words(num_columns: int, bits: int, group_size: int) -> int | None:
    """Words of a block, if possible with one scale for all of it. None: no block fits such rows and groups."""
    for words in BLOCK_WORDS:
        block = words * 32 // bits
        if num_columns % block == 0 and group_size % block == 0:
            return words
    words = BLOCK_WORDS[-1]
    return words if num_columns % (words * 32 // bits) == 0 and group_size % (2 * words) == 0 else None


def pack_codes(codes: torch.Tensor, bits: int, block_words: int) -> torch.Tensor:
    """Codes uint8 [n, K] -> words int32 [n, K * bits / 32]."""
    slices = codes.reshape(len(codes), -1, 16 // bits, block_words, 2).int()
    words = torch.zeros_like(slices[:, :, 0, :, 0])
    for part in range(16 // bits):
        for half in range(2):
            words |= slices[:, :, part, :, half] << (bits * part + 16 * half)
    return words.flatten(1)


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
    if dtype == tl.bfloat16:
        ones = _mask_and_set(words, 0, 0x3F803F80, "lop3.b32 $0, $1, 0, 0x3F803F80, 0xEA;")
    else:
        ones = _mask_and_set(words, 0, 0x3C003C00, "lop3.b32 $0, $1, 0, 0x3C003C00, 0xEA;")
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
def _enlarged(x, KIND: tl.constexpr):
    """Half of the factor by which numbers in e4m3 are too small; all of it at once could overflow."""
    if KIND == E4M3 and x.dtype != tl.float16:
        x = (x.to(tl.float32) * 2.0**60).to(x.dtype)
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
def _values(words, scale_bits, PART: tl.constexpr, KIND: tl.constexpr, SCALE_DTYPE: tl.constexpr, dtype: tl.constexpr):
    """The values of slice PART of a block, rounded to `dtype`: [.., n] -> [.., 2 n]."""
    if KIND == E4M3:  # of 16-bit types fp16 needs the smaller factor
        values = _small_e4m3(words, 8 * PART, tl.float16).to(tl.float32) * _scale(
            scale_bits, SCALE_DTYPE, KIND, tl.float16
        )
    else:
        read: tl.constexpr = tl.float16 if dtype == tl.float16 else tl.bfloat16
        if KIND == INT4:
            codes = _nibbles(words, 4 * PART, read).to(tl.float32)
        else:
            codes = _nibbles(words, 8 * PART, read).to(tl.float32)
            codes += _nibbles(words, 8 * PART + 4, read, True).to(tl.float32)
        scale = _scale(scale_bits, SCALE_DTYPE, KIND, dtype)
        values = codes * scale - (scale_bits >> 16).to(tl.float32) * scale  # the second product is exact
    return values.to(dtype)


# -- products ----------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """The rows (or pairs) and features that a program computes. If `split` is above 1, it is the number of warps, and
    each of them sums over columns of its own. If it is 1, all warps share the columns.
    """

    block_m: int
    block_n: int
    split: int
    num_warps: int
    num_stages: int
    num_words: int = 16  # of a row that are multiplied at once; at most those of a block


@triton.jit
def _load(ptrs, is_there, EVEN: tl.constexpr):
    if EVEN:
        loaded = tl.load(ptrs, eviction_policy="evict_first")
    else:
        loaded = tl.load(ptrs, mask=is_there, other=0, eviction_policy="evict_first")
    return loaded


@triton.jit(do_not_specialize=["num_pairs"])  # compile once for all numbers of rows
def _products_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    factors_ptr,  # fp32 [pairs], by which the results are multiplied; None: 1
    pairs_ptr,  # int32 [blocks * BLOCK_M]: the pairs of each block, sorted by expert; None: all in order
    experts_ptr,  # of each block: int32, num_experts for one without pairs; None: there is one weight
    out_ptr,
    x_stride,
    num_pairs,
    num_experts,
    num_scales,  # of a group of columns
    N,  # features of the result
    CHOSEN: tl.constexpr,  # pairs of a row of x
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,  # the result is silu(first half) * second half
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,  # of a row that are multiplied at once; dense: columns
    BLOCK_WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # Without SPLIT tiles have no first dimension: [BLOCK_N, words], [columns, BLOCK_M] and [BLOCK_N, BLOCK_M]
    CODES: tl.constexpr = 1 if KIND == DENSE else 8 if KIND == INT4 else 4  # of a word
    NUM_STEPS: tl.constexpr = K // CODES // WORDS
    block, in_tile = tl.program_id(1), tl.arange(0, BLOCK_N)
    if GATED:  # a tile has features of both halves
        HALF: tl.constexpr = BLOCK_N // 2
        feature = tl.program_id(0) * HALF + in_tile % HALF
        row = tl.minimum(feature, N - 1) + in_tile // HALF * N
    else:
        feature = tl.program_id(0) * BLOCK_N + in_tile
        row = tl.minimum(feature, N - 1)
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_row = row.to(tl.int64)
    if experts_ptr is not None:
        expert = tl.load(experts_ptr + block).to(tl.int64)
        if expert >= num_experts:
            return
        weight_row += expert * (2 * N if GATED else N)
        if pairs_ptr is not None:
            pair = tl.load(pairs_ptr + pair)
        else:  # a block for each pair
            pair = tl.where(tl.arange(0, BLOCK_M) == 0, block, num_pairs)
    is_pair = pair < num_pairs
    EVEN: tl.constexpr = NUM_STEPS % SPLIT == 0
    COLUMNS: tl.constexpr = WORDS if KIND == DENSE else 2 * WORDS  # of a slice
    SLICES: tl.constexpr = CODES // 2
    # Slices of a group, or all of a block, have one scale
    SHARING: tl.constexpr = (
        min(GROUP // (2 * BLOCK_WORDS), SLICES)
        if (CODES * BLOCK_WORDS) % GROUP == 0 or GROUP % (CODES * BLOCK_WORDS) == 0
        else 1
    )
    if SPLIT > 1:
        part = tl.arange(0, SPLIT)[:, None, None]
        code_row = codes_ptr + weight_row[None, :, None] * (NUM_STEPS * WORDS) + tl.arange(0, WORDS)[None, None, :]
        scale_row = scales_ptr + (weight_row // SCALE_ROWS)[None, :, None] if KIND != DENSE else 0
        x_column = (
            x_ptr + (pair // CHOSEN).to(tl.int64)[None, None, :] * x_stride + tl.arange(0, COLUMNS)[None, :, None]
        )
        is_x = is_pair[None, None, :]
        sums = tl.zeros((SPLIT, BLOCK_N, BLOCK_M), tl.float32)
    else:
        part = 0
        code_row = codes_ptr + weight_row[:, None] * (NUM_STEPS * WORDS) + tl.arange(0, WORDS)[None, :]
        scale_row = scales_ptr + (weight_row // SCALE_ROWS)[:, None] if KIND != DENSE else 0
        x_column = x_ptr + (pair // CHOSEN).to(tl.int64)[None, :] * x_stride + tl.arange(0, COLUMNS)[:, None]
        is_x = is_pair[None, :]
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for index in tl.range(0, tl.cdiv(NUM_STEPS, SPLIT), num_stages=STAGES):
        step = index * SPLIT + part
        is_step = step < NUM_STEPS
        words = _load(code_row + step * WORDS, is_step, EVEN)
        if KIND == DENSE:
            x = tl.load(x_column + step * WORDS, mask=is_x & is_step, other=0.0)
            sums = tl.dot(words, x, sums, input_precision="ieee")
        else:
            in_block = step * WORDS % BLOCK_WORDS
            column = (step * WORDS - in_block) * CODES + 2 * in_block
            for first in tl.static_range(0, SLICES, SHARING):
                scale_bits = _load(scale_row + (column + first * 2 * BLOCK_WORDS) // GROUP * num_scales, is_step, EVEN)
                code_sums, x_sums = tl.zeros_like(sums), tl.zeros_like(sums)
                for i in tl.static_range(first, first + SHARING):
                    x = tl.load(x_column + column + i * 2 * BLOCK_WORDS, mask=is_x & is_step, other=0.0)
                    if SPLIT == 1:
                        values = _values(words, scale_bits, i, KIND, SCALE_DTYPE, dtype)
                        sums = tl.dot(values, x, sums, input_precision="ieee")
                    elif KIND == E4M3:
                        code_sums = tl.dot(_small_e4m3(words, 8 * i, dtype), _enlarged(x, KIND), code_sums)
                    else:
                        if KIND == INT4:
                            code_sums = tl.dot(_nibbles(words, 4 * i, dtype), x, code_sums)
                        else:
                            code_sums = tl.dot(_nibbles(words, 8 * i, dtype), x, code_sums)
                            code_sums = tl.dot(_nibbles(words, 8 * i + 4, dtype, True), x, code_sums)
                        x_sums = tl.dot(_ones(words, dtype), x, x_sums)
                if SPLIT > 1:
                    if KIND != E4M3:
                        code_sums -= x_sums * (scale_bits >> 16).to(tl.float32)
                    sums += code_sums * _scale(scale_bits, SCALE_DTYPE, KIND, dtype)
    if SPLIT > 1:
        sums = tl.sum(sums, 0)
    if BIAS:
        sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    if GATED:
        sums = sums.to(dtype).to(tl.float32)  # round where torch rounds
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, HALF, BLOCK_M)), (1, 2, 0)))
        sums = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        feature = tl.program_id(0) * HALF + tl.arange(0, HALF)
    if factors_ptr is not None:
        sums *= tl.load(factors_ptr + pair, mask=is_pair, other=0.0)[None, :]
    out = out_ptr + pair.to(tl.int64)[None, :] * N + feature[:, None]
    tl.store(out, sums.to(dtype), mask=is_pair[None, :] & (feature < N)[:, None])


class Routing(NamedTuple):
    """The pairs of a step, in blocks that have one expert each. It is computed without waiting for the device."""

    pairs: torch.Tensor  # int32 [blocks * block_m]; the number of pairs where there is none
    block_experts: torch.Tensor  # int32 [blocks]; the number of experts where there is none
    block_m: int
    num_experts: int
    num_pairs: int


def route(experts: torch.Tensor, num_experts: int, block_m: int | None = None) -> Routing:
    """`experts`: int64 [M, C], those that each row has chosen. Blocks have up to `block_m` pairs; by default they have
    room for about twice the pairs of an expert.
    """
    flat = experts.flatten()
    if block_m is None:
        block_m = min(max(16, triton.next_power_of_2(2 * len(flat) // num_experts)), MAX_BLOCK_M)
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


def choose_tile(num_rows: int, total_features: int, target: KernelTarget, is_dense: bool) -> Tile:
    """The fastest of those that benchmarks/bench_linear.py tried on an H200 for most layers of Qwen3-8B and -30B-A3B.

    `num_rows`: that a weight multiplies; `total_features`: of all programs.
    """
    block_m, is_wide = min(max(8, triton.next_power_of_2(num_rows)), MAX_BLOCK_M), total_features >= 6144
    if block_m <= 16 and not is_dense:
        if is_wide:
            return Tile(block_m, 32, 4, 4, 3, 32)
        return Tile(8, 16, 8, 8, 3, 32) if block_m == 8 else Tile(16, 16, 4, 4, 3, 32)
    if block_m <= 16:
        return Tile(block_m, 16, 4, 4, 3)
    if block_m < MAX_BLOCK_M:
        return Tile(block_m, 64, 1, 4, 3 if is_dense else 4)
    return Tile(block_m, 128, 1, 8, 3) if target.shared_bytes >= 200 * 1024 else Tile(block_m, 64, 1, 8, 2)


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
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [M, K] by the weight -> [M, N], or with `gated` silu(first half) * second half. Hot: several times per layer.

    `experts`, int64 [M, C]: the product of each pair by its expert's rows instead, [M * C, N], which reads the weight
    for each pair. `routing`: the same, for pairs that are sorted by expert and share it. x has a row for each token, or
    one for each pair. The results are multiplied by `factors`, fp32 [pairs].
    """
    num_pairs = len(x) if experts is None else experts.numel()
    if routing is not None:
        num_pairs, num_experts = routing.num_pairs, routing.num_experts
    expert_rows = weight.codes.shape[0] // num_experts
    num_features = expert_rows // 2 if gated else expert_rows
    out = torch.empty((num_pairs, num_features), dtype=x.dtype, device=x.device)
    if not num_pairs:
        return out
    num_blocks, block_rows, pairs, block_experts = 1, num_pairs, None, None
    if routing is not None:
        num_blocks, block_rows = len(routing.block_experts), routing.block_m
        pairs, block_experts = routing.pairs, routing.block_experts
    elif experts is not None:
        assert experts.is_contiguous(), "the kernel reads experts in order"
        num_blocks, block_rows, block_experts = num_pairs, 1, experts
    is_dense = weight.kind == DENSE.value
    if tile is None:
        tile = choose_tile(block_rows, expert_rows * num_blocks, kernel_target.target_of(x.device), is_dense)
    if block_experts is None:
        num_blocks = triton.cdiv(num_pairs, tile.block_m)
    if x.dtype == torch.float32:  # the tensor cores would round it
        tile = tile._replace(split=1)
    size = weight.num_columns
    num_words = math.gcd(size, 128) if is_dense else min(tile.num_words, weight.block_words)
    assert num_words >= 16 and x.stride(-1) == 1, "a row must consist of whole steps"
    assert routing is None or routing.block_m == tile.block_m, "pairs are sorted into blocks of another size"
    block_features = tile.block_n // 2 if gated else tile.block_n
    on_grid(_products_kernel, (triton.cdiv(num_features, block_features), num_blocks))(
        x,
        weight.codes,
        weight.scales,
        bias,
        factors,
        pairs,
        block_experts,
        out,
        x.stride(0),
        num_pairs,
        num_experts,
        0 if weight.scales is None else weight.scales.shape[1],
        num_features,
        CHOSEN=num_pairs // len(x),
        K=size,
        GROUP=weight.group_size,
        SCALE_ROWS=weight.scale_rows,
        SCALE_DTYPE=weight.scale_type,
        KIND=weight.kind,
        GATED=gated,
        BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        WORDS=num_words,
        BLOCK_WORDS=weight.block_words,
        SPLIT=tile.split,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
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
    num_scales,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,  # of a block
    BLOCK_N: tl.constexpr,
):
    out_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_row, block = out_row < num_rows, tl.program_id(1)
    row = (first_row + out_row).to(tl.int64)
    CODES: tl.constexpr = 8 if KIND == INT4 else 4
    words = tl.load(codes_ptr + row * (K // CODES) + block * WORDS + tl.arange(0, WORDS)[None, :], mask=is_row, other=0)
    for part in tl.static_range(CODES // 2):
        column = block * WORDS * CODES + part * 2 * WORDS
        scale_bits = tl.load(scales_ptr + column // GROUP * num_scales + row // SCALE_ROWS, mask=is_row, other=0)
        values = _values(words, scale_bits, part, KIND, SCALE_DTYPE, out_ptr.dtype.element_ty)
        at = out_row.to(tl.int64) * K + column + tl.arange(0, 2 * WORDS)[None, :]
        tl.store(out_ptr + at, values, mask=is_row)


def unpack(weight: Packed, first_row: int, out: torch.Tensor) -> torch.Tensor:
    """Write the values of as many rows, from `first_row` on, as `out` [rows, K] has. Hot."""
    assert weight.scales is not None and out.is_contiguous(), "a dense weight has its values"
    block_n = 512 // weight.block_words
    num_blocks = weight.codes.shape[1] // weight.block_words
    on_grid(_unpack_kernel, (triton.cdiv(len(out), block_n), num_blocks))(
        weight.codes,
        weight.scales,
        out,
        first_row,
        len(out),
        weight.scales.shape[1],
        K=weight.num_columns,
        GROUP=weight.group_size,
        SCALE_ROWS=weight.scale_rows,
        SCALE_DTYPE=weight.scale_type,
        KIND=weight.kind,
        WORDS=weight.block_words,
        BLOCK_N=block_n,
    )
    return out
