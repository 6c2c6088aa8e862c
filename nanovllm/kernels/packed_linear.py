"""Products with packed weights, and with those of a mixture's experts.

A packed weight (layers/packed_weight.py) has codes [N, K] of 4 or 8 bits. Groups of `group_size` columns and
`scale_rows` rows share a scale, and integers also a zero: a value is (code - zero) * scale. Codes of 4 bits lie in
blocks of 128 columns: byte j of a block has column j in its low half and column 64 + j in its high half. The weights of
several experts are one weight, with an expert's rows together.

- `row_products` is for few rows, and bound by reading the weight. Each program reads a part of it for one row, 16 bytes
  per thread at a time, and sums in fp32.
- `tile_products` is for more rows: the tensor cores multiply tiles, whose codes become 16-bit numbers on the way.
- `unpack` writes the values of some rows, so that cuBLAS can multiply them by many rows.

Codes become fp32 numbers without a conversion: a nibble is put into the mantissa of 128, so it reads as 128 + code, and
the 128 is subtracted together with the zero, once for a pack. The bits of an e4m3 number at the place of those of an
fp32 number read as 2^-120 of its value.
Legend: M rows, N output features, K input features; a pack is the 16 bytes that a thread loads at once; a pair is a row
and one of the experts that it has chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

DENSE, INT4, INT8, E4M3 = (tl.constexpr(kind) for kind in range(4))
BLOCK_COLUMNS = 128  # columns of codes of 4 bits that lie together
_SHIFTED_E4M3 = tl.constexpr(2.0**60)  # times itself it is 2^120; all of it at once could overflow
_PACK_BYTES = 16
_MAX_NARROW_ROWS = 32  # up to which a tile has 16 rows


class Packed(NamedTuple):
    """The tensors of a weight [N, K]. A dense one has nothing but values, in `codes`."""

    codes: torch.Tensor  # uint8 [N, K / 2] or [N, K], e4m3 [N, K]; dense: the values [N, K]
    scales: torch.Tensor | None = None  # [N / scale_rows, K / group_size], any float
    zeros: torch.Tensor | None = None  # uint8, like scales; None: 0
    scale_rows: int = 1
    group_size: int = BLOCK_COLUMNS

    @property
    def kind(self) -> int:
        if self.scales is None:
            return DENSE.value
        if self.codes.dtype == torch.float8_e4m3fn:
            return E4M3.value
        return INT8.value if self.scales.shape[1] * self.group_size == self.codes.shape[1] else INT4.value

    @property
    def num_columns(self) -> int:
        return self.codes.shape[1] * (2 if self.kind == INT4.value else 1)


# -- few rows ----------------------------------------------------------------------------------------------------


@triton.jit
def _nibbles(words, IS_HIGH: tl.constexpr):
    """The codes in the low or the high halves of bytes, plus 128: [.., 1] words -> [.., 4] fp32."""
    byte = tl.arange(0, 4)[None, None, None, :]
    bits = (words << (16 - 16 * (byte // 2))) >> (8 * (byte % 2) + 4 * IS_HIGH)
    return ((bits & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _bytes(words, KIND: tl.constexpr):
    """[.., 1] words -> [.., 4] fp32: codes, or numbers in e4m3 times 2^-120."""
    byte = tl.arange(0, 4)[None, None, None, :]
    if KIND == E4M3:
        numbers = (((words << (24 - 8 * byte)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)
    else:
        numbers = (((words >> (8 * byte)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return numbers


@triton.jit
def _sum4(products):
    return tl.sum(tl.sum(products, 3), 2)


@triton.jit
def _pack_sums(
    codes_ptr, scales_ptr, zeros_ptr, row, pack, is_pack, x_low, x_high,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """The products of the packs with `x`, summed over each pack: [BLOCK_N, STEP].

    `row` is [BLOCK_N, 1] and `pack` [1, STEP]. x_low, x_high: fp32 [1, STEP, 4, 4], the columns of a pack; x_high is
    for the high halves of codes of 4 bits.
    """
    NUM_PACKS: tl.constexpr = K // (32 if KIND == INT4 else 8 if KIND == DENSE else 16)
    SIZE: tl.constexpr = 8 if KIND == DENSE else 4  # values or words of a pack
    at = (row * NUM_PACKS + pack)[:, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    words = tl.load(codes_ptr + at, mask=is_pack[:, :, None], other=0, eviction_policy="evict_first")
    scale_at = row // SCALE_ROWS * (K // GROUP)
    if KIND == DENSE:
        sums = tl.sum(words.to(tl.float32) * x_low, 2)
    elif KIND == INT4:
        column = pack // 4 * 128 + pack % 4 * 16
        low_at, high_at = scale_at + column // GROUP, scale_at + (column + 64) // GROUP
        low_zero, high_zero = 128.0, 128.0
        if ZEROS:
            low_zero += tl.load(zeros_ptr + low_at, mask=is_pack, other=0).to(tl.float32)
            high_zero += tl.load(zeros_ptr + high_at, mask=is_pack, other=0).to(tl.float32)
        low = _sum4(_nibbles(words[:, :, :, None], 0) * x_low) - low_zero * _sum4(x_low)
        high = _sum4(_nibbles(words[:, :, :, None], 1) * x_high) - high_zero * _sum4(x_high)
        sums = low * tl.load(scales_ptr + low_at, mask=is_pack, other=0.0).to(tl.float32)
        sums += high * tl.load(scales_ptr + high_at, mask=is_pack, other=0.0).to(tl.float32)
    else:
        at = scale_at + pack * 16 // GROUP
        scale = tl.load(scales_ptr + at, mask=is_pack, other=0.0).to(tl.float32)
        sums = _sum4(_bytes(words[:, :, :, None], KIND) * x_low)
        if ZEROS:
            sums -= tl.load(zeros_ptr + at, mask=is_pack, other=0).to(tl.float32) * _sum4(x_low)
        if KIND == E4M3:
            scale *= _SHIFTED_E4M3
        sums *= scale
    return sums


@triton.jit
def _load_columns(x_row, column, is_pack, KIND: tl.constexpr):
    """Columns from `column` [1, STEP] on, as many as a pack has, in fp32."""
    if KIND == DENSE:
        at = column[:, :, None] + tl.arange(0, 8)[None, None, :]
        x = tl.load(x_row + at, mask=is_pack[:, :, None], other=0.0).to(tl.float32)
    else:
        at = column[:, :, None, None] + 4 * tl.arange(0, 4)[None, None, :, None] + tl.arange(0, 4)[None, None, None, :]
        x = tl.load(x_row + at, mask=is_pack[:, :, None, None], other=0.0).to(tl.float32)
        if KIND == E4M3:
            x *= _SHIFTED_E4M3
    return x


@triton.jit
def _row_products_kernel(
    x_ptr,
    codes_ptr,  # int32 words; dense: the values
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    experts_ptr,  # int64 [pairs]: the expert of each; None: there is one weight
    out_ptr,
    x_stride,
    N,  # features of the result
    EXPERT_ROWS,  # rows of an expert's weight
    CHOSEN: tl.constexpr,  # pairs of a row of x
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    GATED: tl.constexpr,  # the result is silu(first half) * second half
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,  # packs of a row that the program loads at once
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    COLUMNS: tl.constexpr = 32 if KIND == INT4 else 8 if KIND == DENSE else 16  # of a pack
    NUM_PACKS: tl.constexpr = K // COLUMNS
    wait_for_previous(PDL)
    pair = tl.program_id(1)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    row = tl.minimum(feature, N - 1).to(tl.int64)
    if experts_ptr is not None:
        row += tl.load(experts_ptr + pair) * EXPERT_ROWS
    x_row = x_ptr + (pair // CHOSEN).to(tl.int64) * x_stride
    sums = tl.zeros((BLOCK_N, STEP), tl.float32)
    up_sums = tl.zeros((BLOCK_N, STEP), tl.float32)
    for start in range(0, NUM_PACKS, STEP):
        pack = start + tl.arange(0, STEP)[None, :]
        is_pack = pack < NUM_PACKS
        column = pack * COLUMNS
        if KIND == INT4:
            column = pack // 4 * 128 + pack % 4 * 16
        x_low = _load_columns(x_row, column, is_pack, KIND)
        x_high = x_low
        if KIND == INT4:
            x_high = _load_columns(x_row, column + 64, is_pack, KIND)
        sums += _pack_sums(
            codes_ptr, scales_ptr, zeros_ptr, row, pack, is_pack, x_low, x_high, K, GROUP, SCALE_ROWS, KIND, ZEROS
        )
        if GATED:
            up_sums += _pack_sums(
                codes_ptr,
                scales_ptr,
                zeros_ptr,
                row + N,
                pack,
                is_pack,
                x_low,
                x_high,
                K,
                GROUP,
                SCALE_ROWS,
                KIND,
                ZEROS,
            )
    dtype = out_ptr.dtype.element_ty
    is_feature = feature < N
    out = tl.sum(sums, 1)[:, None]
    if BIAS:
        out += tl.load(bias_ptr + feature, mask=is_feature, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 1)[:, None]
        if BIAS:
            up += tl.load(bias_ptr + N + feature, mask=is_feature, other=0.0).to(tl.float32)
        gate = out.to(dtype).to(tl.float32)  # round where torch rounds
        out = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    tl.store(out_ptr + pair.to(tl.int64) * N + feature, out.to(dtype), mask=is_feature)


def row_products(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    experts: torch.Tensor | None = None,
    num_experts: int = 1,
    block_n: int = 1,
    num_warps: int = 4,
) -> torch.Tensor:
    """x [M, K] by the weight -> [M, N], or with `gated` silu(first half) * second half. Hot: several times per layer.

    `experts`, int64 [M, C] or [M]: the product is by these experts' rows instead, for each pair: [M, C, N].
    """
    expert_rows = weight.codes.shape[0] // num_experts
    num_features = expert_rows // 2 if gated else expert_rows
    shape = (len(x),) if experts is None else tuple(experts.shape)
    out = torch.empty((*shape, num_features), dtype=x.dtype, device=x.device)
    num_pairs = out.numel() // num_features
    if num_pairs:
        columns, size = _columns_of_pack(weight), weight.num_columns
        assert size % columns == 0 and x.stride(-1) == 1, "a row must consist of whole packs"
        assert experts is None or experts.is_contiguous(), "the kernel reads experts in order"
        on_grid(_row_products_kernel, (triton.cdiv(num_features, block_n), num_pairs))(
            x,
            weight.codes if weight.kind == DENSE.value else weight.codes.view(torch.int32),
            weight.scales,
            weight.zeros,
            bias,
            experts,
            out,
            x.stride(0),
            num_features,
            expert_rows,
            CHOSEN=num_pairs // len(x),
            K=size,
            GROUP=weight.group_size,
            SCALE_ROWS=weight.scale_rows,
            KIND=weight.kind,
            ZEROS=weight.zeros is not None,
            GATED=gated,
            BIAS=bias is not None,
            BLOCK_N=block_n,
            STEP=min(32 * num_warps, triton.next_power_of_2(size // columns)),
            num_warps=num_warps,
            **pdl_options(x.device),
        )
    return out


def _columns_of_pack(weight: Packed) -> int:
    if weight.kind == DENSE.value:
        return 8
    return _PACK_BYTES * (2 if weight.kind == INT4.value else 1)


# -- more rows ---------------------------------------------------------------------------------------------------


@triton.jit
def _e4m3_values(codes, dtype: tl.constexpr):
    """uint8 codes -> numbers in `dtype`, exact. Not every GPU knows the type."""
    bits = codes.to(tl.int32)
    number = (((bits << 24) >> 4) & -0x78100000).to(tl.float32, bitcast=True)
    return (number * _SHIFTED_E4M3 * _SHIFTED_E4M3).to(dtype)


@triton.jit
def _scale_tile(ptr, row, column, is_row, K: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """Scales or zeros of rows [R, 1] and columns [1, C], fp32."""
    at = row // SCALE_ROWS * (K // GROUP) + column // GROUP
    return tl.load(ptr + at, mask=is_row, other=0.0).to(tl.float32)


@triton.jit
def _value_tile(
    codes_ptr, scales_ptr, zeros_ptr, row, is_row, start, HALF: tl.constexpr, dtype: tl.constexpr,
    COLUMNS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Values of COLUMNS columns from `start` on, [R, COLUMNS] in `dtype`; `row` and `is_row` are [R, 1].

    4 bits: COLUMNS is 64, and the columns are the low (HALF 0) or high (1) ones of a block. Without SCALED the scales
    are left out, so that the numbers are exact.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    if KIND == INT4:
        codes = tl.load(codes_ptr + row * (K // 2) + start // 2 + column, mask=is_row, other=0)
        values = ((codes.to(tl.int32) >> (4 * HALF)) & 0xF).to(tl.float32)
    else:
        values = tl.load(codes_ptr + row * K + start + column, mask=is_row, other=0)
        if KIND == E4M3:
            values = _e4m3_values(values, tl.float32)
        elif KIND == INT8:
            values = values.to(tl.float32)
    if KIND != DENSE:
        column += start + 64 * HALF
        if ZEROS:
            values -= _scale_tile(zeros_ptr, row, column, is_row, K, GROUP, SCALE_ROWS)
        if SCALED:
            values *= _scale_tile(scales_ptr, row, column, is_row, K, GROUP, SCALE_ROWS)
    return values.to(dtype)


@triton.jit
def _multiply_half(
    acc, x_row, is_x, codes_ptr, scales_ptr, zeros_ptr, row, is_row, start, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Add the product with COLUMNS columns to `acc` [M, N]."""
    dtype: tl.constexpr = x_row.dtype.element_ty
    # One scale for all of the columns is applied to the sums, where it costs less and rounds nothing
    AFTER: tl.constexpr = KIND != DENSE and GROUP % COLUMNS == 0
    x = tl.load(x_row + start + 64 * HALF + tl.arange(0, COLUMNS)[None, :], mask=is_x, other=0.0)
    values = _value_tile(
        codes_ptr, scales_ptr, zeros_ptr, row, is_row, start, HALF, dtype, COLUMNS, K, GROUP, SCALE_ROWS, KIND, ZEROS,
        not AFTER,
    )  # fmt: skip
    if AFTER:
        scale = _scale_tile(scales_ptr, row, start + 64 * HALF, is_row, K, GROUP, SCALE_ROWS)
        acc += tl.dot(x, values.T, input_precision="ieee") * scale.T
    else:
        acc = tl.dot(x, values.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_pairs"])  # compile once for all numbers of rows
def _tile_products_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    factors_ptr,  # fp32 [pairs], by which the results are multiplied; None: 1
    pairs_ptr,  # int32 [blocks * BLOCK_M]: the pairs of each block of rows, sorted by expert; None: all rows in order
    block_experts_ptr,  # int32 [blocks]: the expert of each block; num_experts for one without pairs
    out_ptr,
    x_stride,
    num_pairs,
    num_experts,
    N,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,  # columns of a step; 4 bits: 128, two halves
    STAGES: tl.constexpr,
):
    block = tl.program_id(1)
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_row = feature < N
    row = feature.to(tl.int64)
    if pairs_ptr is not None:
        expert = tl.load(block_experts_ptr + block)
        if expert >= num_experts:
            return
        pair = tl.load(pairs_ptr + pair)
        row += expert.to(tl.int64) * N
    is_pair = pair < num_pairs
    x_row = x_ptr + (pair // CHOSEN).to(tl.int64) * x_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    HALF_STEP: tl.constexpr = STEP // 2 if KIND == INT4 else STEP
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        acc = _multiply_half(
            acc, x_row, is_pair, codes_ptr, scales_ptr, zeros_ptr, row, is_row, start, 0, HALF_STEP, K, GROUP,
            SCALE_ROWS, KIND, ZEROS,
        )  # fmt: skip
        if KIND == INT4:
            acc = _multiply_half(
                acc, x_row, is_pair, codes_ptr, scales_ptr, zeros_ptr, row, is_row, start, 1, HALF_STEP, K, GROUP,
                SCALE_ROWS, KIND, ZEROS,
            )  # fmt: skip
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + feature, mask=feature < N, other=0.0).to(tl.float32)
    if factors_ptr is not None:
        acc *= tl.load(factors_ptr + pair, mask=is_pair, other=0.0)
    tl.store(out_ptr + pair.to(tl.int64) * N + feature, acc.to(out_ptr.dtype.element_ty), mask=is_pair & (feature < N))


class Routing(NamedTuple):
    """The pairs of a step, in blocks that have one expert each. It is computed without waiting for the device."""

    pairs: torch.Tensor  # int32 [blocks * block_m]; the number of pairs where there is none
    block_experts: torch.Tensor  # int32 [blocks]; the number of experts where there is none
    block_m: int
    num_experts: int
    num_pairs: int


def route(experts: torch.Tensor, num_experts: int, block_m: int) -> Routing:
    """`experts`: int64 [M, C], those that each row has chosen."""
    flat = experts.flatten()
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


def tile_products(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    routing: Routing | None = None,
    factors: torch.Tensor | None = None,
    block_m: int | None = None,
    block_n: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """x [M, K] by the weight -> [M, N]. Hot: several times per layer.

    With `routing`, the product of each pair by its expert's rows: [pairs, N], times `factors` [pairs]. x has a row for
    each pair, or one for all pairs of a token.
    """
    num_experts, total = (1, len(x)) if routing is None else (routing.num_experts, routing.num_pairs)
    num_features, size = weight.codes.shape[0] // num_experts, weight.num_columns
    out = torch.empty((total, num_features), dtype=x.dtype, device=x.device)
    if not total:
        return out
    step = BLOCK_COLUMNS if size % BLOCK_COLUMNS == 0 else 16
    assert size % step == 0 and x.stride(-1) == 1, "a row must consist of whole steps"
    if routing is not None:
        block_m, num_blocks = routing.block_m, len(routing.block_experts)
    else:
        block_m = block_m or (16 if total <= _MAX_NARROW_ROWS else 64)
        num_blocks = triton.cdiv(total, block_m)
    on_grid(_tile_products_kernel, (triton.cdiv(num_features, block_n), num_blocks))(
        x,
        weight.codes.view(torch.uint8) if weight.kind == E4M3.value else weight.codes,
        weight.scales,
        weight.zeros,
        bias,
        factors,
        None if routing is None else routing.pairs,
        None if routing is None else routing.block_experts,
        out,
        x.stride(0),
        total,
        num_experts,
        num_features,
        CHOSEN=total // len(x),
        K=size,
        GROUP=weight.group_size,
        SCALE_ROWS=weight.scale_rows,
        KIND=weight.kind,
        ZEROS=weight.zeros is not None,
        BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STEP=step,
        STAGES=num_stages,
        num_warps=num_warps,
    )
    return out


# -- many rows ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _unpack_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, first_row, num_rows,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    out_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_row, start = out_row < num_rows, tl.program_id(1) * STEP
    row = (first_row + out_row).to(tl.int64)
    COLUMNS: tl.constexpr = STEP // 2 if KIND == INT4 else STEP
    for half in tl.static_range(2 if KIND == INT4 else 1):
        values = _value_tile(
            codes_ptr, scales_ptr, zeros_ptr, row, is_row, start, half, out_ptr.dtype.element_ty, COLUMNS,
            K, GROUP, SCALE_ROWS, KIND, ZEROS, True,
        )  # fmt: skip
        at = out_row.to(tl.int64) * K + start + 64 * half + tl.arange(0, COLUMNS)[None, :]
        tl.store(out_ptr + at, values, mask=is_row)


def unpack(weight: Packed, first_row: int, out: torch.Tensor) -> torch.Tensor:
    """Write the values of as many rows, from `first_row` on, as `out` [rows, K] has. Hot."""
    assert weight.kind != DENSE.value and out.is_contiguous(), "a dense weight has its values"
    size = weight.num_columns
    step = BLOCK_COLUMNS if size % BLOCK_COLUMNS == 0 else 16
    on_grid(_unpack_kernel, (triton.cdiv(len(out), 16), size // step))(
        weight.codes.view(torch.uint8) if weight.kind == E4M3.value else weight.codes,
        weight.scales,
        weight.zeros,
        out,
        first_row,
        len(out),
        K=size,
        GROUP=weight.group_size,
        SCALE_ROWS=weight.scale_rows,
        KIND=weight.kind,
        ZEROS=weight.zeros is not None,
        BLOCK_N=16,
        STEP=step,
    )
    return out
