"""Products with packed weights, also with the weights of a mixture's experts: choose the kernel (packed_kernels.py) and
its tile.

Legend: M rows, N output features, K input features; a pair is a row and one of the experts chosen for the row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KernelTarget
from nanovllm.kernels.activation import ACTIVATIONS
from nanovllm.kernels.expert_routing import Routing, sort_by_expert
from nanovllm.kernels.launch import on_grid, pdl_options
from nanovllm.kernels.one_row_kernel import one_row_kernel
from nanovllm.kernels.packed_kernels import few_products_kernel, products_kernel, sum_parts_kernel
from nanovllm.kernels.packed_values import Packed, unpack
from nanovllm.kernels.packed_words import E4M3, FIRST_BLOCK_TYPE, INT4, MXFP4, Q8_0, SLICE, UPPER_BITS
from nanovllm.plan.step_limits import MIN_UNPACKED_PAIRS, UNPACKED_EXPERT_BYTES

MAX_FEW_ROWS, MAX_BLOCK_M = 16, 128
MAX_SUMMED = 16  # experts of a token
MANY_TILES = 384  # programs that fill a GPU with few warps each
REGISTERS = 65536  # registers of a multiprocessor
MIN_SPLIT_COLUMNS, MAX_SPLITS = 512, 8  # splitting into fewer columns or more parts costs more than it gains


class FewRowsTile(NamedTuple):
    """Sizes of a program that multiplies 16 rows of the weight by up to `block_m` rows (or pairs)."""

    block_m: int  # 8 or 16
    num_warps: int  # each warp sums over separate columns
    num_ahead: int  # blocks of each row that a warp loads ahead


class OneRowTile(NamedTuple):
    """Sizes of a program that multiplies 16 rows of a weight in GGUF's blocks by one row."""

    num_warps: int  # each warp sums over separate columns
    num_ahead: int  # blocks of each row that a warp loads ahead
    num_per_sm: int  # programs per multiprocessor, which limits registers


class ManyRowsTile(NamedTuple):
    """Sizes of a program that multiplies rows (or pairs) by features, all warps together."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1  # parts of the columns, whose sums another kernel adds
    # Programs per multiprocessor, and products of a step: one multiplies while others compute values
    num_per_sm: int = 1


def choose_block_m(num_pairs: int, num_experts: int, weight: Packed | None = None) -> int:
    """Choose the number of pairs per block: about as many as an expert has, or twice as many for a weight in GGUF's
    blocks of 4 bits, so that few experts need a second block, which reads the weight again. The number is rounded up,
    so that twice the rows have at most the next size, and start-up finds all sizes.
    """
    mean = triton.cdiv(num_pairs, num_experts)
    if weight is not None and _has_blocks_of_four_bits(weight):
        mean *= 2
    return min(max(16, triton.next_power_of_2(mean)), MAX_BLOCK_M)


def route(experts: torch.Tensor, num_experts: int, block_m: int | None = None, weight: Packed | None = None) -> Routing:
    """Sort pairs by expert. `experts`: int64 [M, C], chosen for each row. `block_m` defaults to `choose_block_m`, for
    the `weight` of the experts if it is given.
    """
    return sort_by_expert(experts, num_experts, block_m or choose_block_m(experts.numel(), num_experts, weight))


def choose_tile(
    num_rows: int, num_tiles: int, target: KernelTarget, x: torch.Tensor, weight: Packed, is_routed: bool = False
) -> ManyRowsTile | FewRowsTile:
    """Choose a tile that is among the fastest of those measured for most layers of Qwen3-8B and -30B-A3B on an H100,
    for Q4_K also on an H200, and for the experts of gpt-oss in MXFP4 on both.

    `num_rows`: rows that a weight multiplies; `num_tiles`: tiles of 16 weight rows, over all programs; `is_routed`:
    rows are sorted into blocks of `num_rows`.
    """
    block_m = min(max(8, triton.next_power_of_2(num_rows)), MAX_BLOCK_M)
    if block_m <= MAX_FEW_ROWS and not is_routed and _suits_few_rows(x, weight):
        num_ahead = 2
        if block_m > 8 or weight.scales is None:
            num_ahead = 1
        elif weight.kind in (INT4.value, MXFP4.value):
            num_ahead = 3
        elif weight.kind == E4M3.value and weight.group_size == weight.num_columns:
            num_ahead = 8  # no scales are loaded with each block, so registers are free for it
        return FewRowsTile(block_m, 4 if num_tiles >= MANY_TILES else 8, num_ahead)
    if x.dtype == torch.float32:  # x takes twice the bytes
        return ManyRowsTile(block_m, 64, 4, 2) if block_m < MAX_BLOCK_M else ManyRowsTile(block_m, 32, 8, 2)
    is_large = target.shared_bytes >= 200 * 1024
    if weight.scales is None:
        if block_m < 32 or (block_m < MAX_BLOCK_M and not is_large):
            return ManyRowsTile(block_m, 64, 4, 3)
        return ManyRowsTile(block_m, 256, 8, 4) if is_large else ManyRowsTile(block_m, 128, 8, 3)
    # GGUF's blocks of 4 bits were fastest with 4 warps, and with enough programs for two on each multiprocessor
    is_shared = is_large and _has_blocks_of_four_bits(weight)
    has_many_rows = block_m == 64 or (block_m == MAX_BLOCK_M and (not is_routed or weight.kind == MXFP4.value))
    block_n = 128 if is_large and not (is_shared and has_many_rows) else 64
    num_programs = triton.cdiv(16 * num_tiles, block_n) * max(1, triton.cdiv(num_rows, MAX_BLOCK_M))
    if not is_shared and not is_routed and num_rows <= MAX_BLOCK_M and num_programs < target.num_sms:
        block_m = min(block_m, 64)
    num_running = target.num_sms * (2 if is_shared else 1)
    num_splits = max(1, min(num_running // num_programs, weight.num_columns // MIN_SPLIT_COLUMNS, MAX_SPLITS))
    num_per_sm = 1
    if is_shared and block_m == MAX_BLOCK_M:
        num_warps, num_stages = (8 if block_n == 128 else 4), 3  # with 4 warps a tile of 128 x 128 spills registers
    elif is_shared:
        num_warps, num_stages = 4, 3 if block_n == 64 and num_programs > target.num_sms else 4
    elif block_m == MAX_BLOCK_M:
        num_warps, num_stages = 8, 3 if is_large else 2
        fits_twice = weight.kind == INT4.value and weight.group_size % 128 == 0 and target.capability[0] == 9
        if fits_twice and (is_routed or num_programs > target.num_sms):
            num_per_sm = 2
    else:
        num_warps = 8 if is_large and block_m >= 32 else 4
        num_stages = 6 if is_large and block_m == 32 and not is_routed else 3 if is_large and block_m == 64 else 4
    return ManyRowsTile(block_m, block_n, num_warps, num_stages, 1 if is_routed else num_splits, num_per_sm)


def _has_blocks_of_four_bits(weight: Packed) -> bool:
    return weight.kind >= FIRST_BLOCK_TYPE.value and weight.kind != Q8_0.value and not UPPER_BITS.value[weight.kind]


def choose_one_row_tile(num_rows: int, target: KernelTarget, weight: Packed) -> OneRowTile:
    """Choose a tile that is among the fastest of those measured for the layers of Qwen3-8B in Q4_K_M on an H200.

    All programs run at once if the weight has few enough rows. Otherwise fewer warps finish together less often.
    """
    num_warps, num_per_sm = (8, 2) if triton.cdiv(num_rows, 16) <= 2 * target.num_sms else (4, 3)
    return OneRowTile(num_warps, 1, num_per_sm)


def products(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    activation: str = "silu",
    experts: torch.Tensor | None = None,
    routing: Routing | None = None,
    num_experts: int = 1,
    factors: torch.Tensor | None = None,
    tile: ManyRowsTile | FewRowsTile | OneRowTile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [M, K] by the weight -> [M, N], or with `gated` activation(first half) * second half. Hot: per
    layer.

    activation: as in ModelConfig. bias: a number for each row of the weight. The
    results are in `out` if it is given, whose rows may be apart, else in a new tensor.

    `experts`, int64 [M, C]: multiply each pair by its expert's rows instead -> [M * C, N]; every pair reads the weight
    anew. `routing`: the same for pairs that are sorted by expert and share the reads. x has a row for each token, or a
    row for each pair. The results are multiplied by `factors`, fp32 [pairs].
    """
    num_pairs = len(x) if experts is None else experts.numel()
    num_blocks, block_rows, pairs = 1, num_pairs, None
    if routing is not None:
        pairs, experts, block_rows, num_experts, num_pairs = routing
        num_blocks = len(experts)
    elif experts is not None:
        num_blocks, block_rows = num_pairs, 1
    num_rows = len(weight.codes) // num_experts
    if out is None:
        out = x.new_empty(num_pairs, num_rows // 2 if gated else num_rows)
    assert out.stride(1) == 1 and len(out) == num_pairs, "the kernels write rows"
    if routing is not None and tile is None and unpacks_experts(x, weight, routing):
        return unpacked_products(x, weight, bias, routing, out, gated=gated, activation=activation, factors=factors)
    if tile is None:
        target, num_tiles = kernel_target.target_of(x.device), triton.cdiv(num_rows, 16) * num_blocks
        if experts is None and num_pairs == 1 and _suits_one_row(x, weight):
            tile = choose_one_row_tile(num_rows, target, weight)
        else:
            tile = choose_tile(block_rows, num_tiles, target, x, weight, routing is not None)
    product = _Product(x, weight, bias, factors, pairs, experts, num_experts, gated, activation, out)
    if isinstance(tile, OneRowTile):
        return _one_row_product(product, tile)
    assert routing is None or routing.block_m == tile.block_m, "pairs are sorted into blocks of another size"
    if isinstance(tile, FewRowsTile):
        return _few_products(product, tile)
    return _products(product, tile)


def can_sum_experts(x: torch.Tensor, weight: Packed, experts: torch.Tensor) -> bool:
    """Return True if `sum_of_experts` supports these arguments: each expert of a token takes a warp."""
    return _suits_few_rows(x, weight) and experts.shape[1] <= MAX_SUMMED


def unpacks_experts(x: torch.Tensor, weight: Packed, routing: Routing) -> bool:
    """Return True if an expert has enough pairs for unpacking its blocks of GGUF to pay: products with values in 16
    bits are faster. Measured for MXFP4 on an H100.
    """
    is_large = kernel_target.target_of(x.device).shared_bytes >= 200 * 1024
    has_blocks = x.dtype != torch.float32 and weight.kind >= FIRST_BLOCK_TYPE.value
    return is_large and has_blocks and routing.num_pairs >= MIN_UNPACKED_PAIRS * routing.num_experts


def unpacked_products(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    routing: Routing,
    out: torch.Tensor,
    max_bytes: int = UNPACKED_EXPERT_BYTES,
    **options: Any,
) -> torch.Tensor:
    """Compute `products` with a `routing`, unpacking the weights of as many experts at a time as fit into `max_bytes`,
    at least one. `options`: as for `products`.
    """
    num_rows, num_columns = len(weight.codes) // routing.num_experts, x.shape[1]
    group = max(1, max_bytes // (num_rows * num_columns * x.element_size()))
    values = x.new_empty(min(group, routing.num_experts) * num_rows, num_columns)
    for first in range(0, routing.num_experts, group):
        count = min(group, routing.num_experts - first)
        part = unpack(weight, first * num_rows, values[: count * num_rows])
        own = routing.block_experts - first
        own = own.masked_fill((own < 0) | (own > count), count)  # the kernel skips blocks of other experts
        of_group = routing._replace(block_experts=own, num_experts=count)
        part_bias = None if bias is None else bias[first : first + count]
        products(x, Packed(part), part_bias, routing=of_group, out=out, **options)
    return out


def sum_of_experts(
    x: torch.Tensor,
    weight: Packed,
    experts: torch.Tensor,
    num_experts: int,
    factors: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: FewRowsTile | None = None,
) -> torch.Tensor:
    """Multiply x [T * C, K] by the rows of `experts` [T, C], add the rows' `bias`, weight by `factors`, fp32 [T, C],
    and sum for each token: [T, N]. Every pair reads its expert. Hot: once per layer.

    x must be what `products` has returned for the same `experts`: the kernel loads weights while `products` still runs.
    """
    num_tokens, num_chosen = experts.shape
    out = x.new_empty(num_tokens, len(weight.codes) // num_experts)
    product = _Product(x, weight, bias, factors, None, experts, num_experts, False, "silu", out)
    return _few_products(product, tile or _choose_tile_of_sums(num_chosen, weight), num_chosen)


def _choose_tile_of_sums(num_chosen: int, weight: Packed) -> FewRowsTile:
    """Each pair takes a warp, or two that share its columns, so that few experts with long rows have enough warps.
    Two were faster for four experts of 2,944 columns, and four were slower, measured on an H200.
    """
    share_columns = num_chosen <= 4 and weight.num_columns >= 8 * weight.block_columns
    return FewRowsTile(8, triton.next_power_of_2(num_chosen) * (1 + share_columns), 3)


def _suits_few_rows(x: torch.Tensor, weight: Packed) -> bool:
    """Return True if the kernel for few rows fits: its tensor cores would round fp32, and it needs whole slices."""
    return x.dtype != torch.float32 and weight.num_columns % SLICE.value == 0


def _suits_one_row(x: torch.Tensor, weight: Packed) -> bool:
    """Return True if the kernel for one row fits: it is for GGUF's blocks without padding, and its tensor cores would
    round fp32. The kernel was slower for Q8_0, whose scales take the smallest part of the work.
    """
    is_of_blocks = weight.kind >= FIRST_BLOCK_TYPE.value and weight.kind != Q8_0.value
    return x.dtype != torch.float32 and is_of_blocks and not weight.padding


class _Product(NamedTuple):
    """Arguments of the kernels, documented there. `out` has a row for each pair, or for each sum."""

    x: torch.Tensor
    weight: Packed
    bias: torch.Tensor | None
    factors: torch.Tensor | None
    pairs: torch.Tensor | None
    experts: torch.Tensor | None
    num_experts: int
    gated: bool
    activation: str
    out: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows of the weight that each row of x is multiplied by."""
        return len(self.weight.codes) // self.num_experts

    def num_blocks(self, block_m: int) -> int:
        if self.experts is None:
            return int(triton.cdiv(len(self.out), block_m))
        return len(self.out if self.pairs is None else self.experts)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], out: torch.Tensor, x_stride: int, columns: int, **constants: Any
    ) -> None:
        """Launch one of the kernels with its own `constants`; it writes to `out`."""
        x, weight, experts, (num_pairs, num_features) = self.x, self.weight, self.experts, self.out.shape
        assert x.stride(1) == 1 and (experts is None or experts.is_contiguous()), "the kernels read both in order"
        assert x.shape[1] == weight.num_columns - weight.padding, "x has as many columns as the weight"
        tensors = x, weight.codes, weight.scales, self.bias, self.factors, self.pairs, experts, out
        on_grid(kernel, grid)(
            *tensors,
            x_stride,
            num_pairs,
            self.num_experts,
            num_features,
            self.out.stride(0),
            CHOSEN=max(1, num_pairs // len(x)),  # 1 for sums, which have fewer rows than x
            K=weight.num_columns,
            X_COLUMNS=weight.num_columns - weight.padding if weight.padding else None,
            COLUMNS=columns,
            SHARED=math.gcd(weight.group_size, columns),
            GROUP=weight.group_size,
            SCALE_ROWS=weight.scale_rows,
            SCALE_STRIDES=(0, 0, 0) if weight.scales is None else weight.scales.stride(),
            SCALE_DTYPE=weight.scale_type,
            KIND=weight.kind,
            GATED=self.gated,
            ACTIVATION=ACTIVATIONS[self.activation],
            **constants,
            **pdl_options(x.device),
        )


def _few_products(product: _Product, tile: FewRowsTile, num_summed: int = 0) -> torch.Tensor:
    """Fill `product.out` with the kernel for few rows. `num_summed`: pairs summed for each row of the result."""
    x, columns = product.x, product.weight.block_columns
    if not len(product.out):
        return product.out
    assert len(x) <= 1 or x.stride(0) % 8 == 0, "the stride between rows must be a multiple of 16 bytes"
    num_sharing = tile.num_warps // triton.next_power_of_2(max(1, num_summed))  # warps that share a pair's columns
    num_steps = triton.cdiv(product.weight.num_columns, columns * num_sharing)
    product.launch(
        few_products_kernel,
        (triton.cdiv(product.num_rows, 16), product.num_blocks(tile.block_m)),
        product.out,
        x.stride(0) // 8,
        columns,
        SUMMED=num_summed,
        BLOCK_M=tile.block_m,
        SPLIT=tile.num_warps,
        STRIDE=num_sharing,
        AHEAD=min(tile.num_ahead, num_steps),
        num_warps=tile.num_warps,
    )
    return product.out


def _one_row_product(product: _Product, tile: OneRowTile) -> torch.Tensor:
    """Fill `product.out` with the kernel for one row."""
    x, weight, out = product.x, product.weight, product.out
    assert weight.scales is not None and product.experts is None and len(x) == 1, "only one row and no experts"
    assert x.stride(1) == 1, "the kernel reads x in order"
    assert tile.num_warps % 2 == 0, "pairs of warps share units of two blocks"
    num_steps = triton.cdiv(weight.num_columns, weight.block_columns * tile.num_warps)
    on_grid(one_row_kernel, (triton.cdiv(product.num_rows, 16),))(
        x,
        weight.codes,
        weight.scales,
        product.bias,
        out,
        out.shape[1],
        K=weight.num_columns,
        SCALE_STRIDES=weight.scales.stride(),
        KIND=weight.kind,
        GATED=product.gated,
        ACTIVATION=ACTIVATIONS[product.activation],
        SPLIT=tile.num_warps,
        AHEAD=min(tile.num_ahead, num_steps),
        num_warps=tile.num_warps,
        maxnreg=REGISTERS // (tile.num_per_sm * tile.num_warps * 32) // 8 * 8,
        **pdl_options(x.device),
    )
    return out


def _products(product: _Product, tile: ManyRowsTile) -> torch.Tensor:
    """Fill `product.out` with the kernel for many rows."""
    x, weight, out, num_rows, num_splits = product.x, product.weight, product.out, product.num_rows, tile.num_splits
    num_pairs, num_features = out.shape
    if not num_pairs:
        return out
    columns = weight.block_columns
    if weight.scales is None:
        columns = math.gcd(
            weight.num_columns, 128 if tile.block_n <= 64 else 64
        )  # wide tiles have room for four stages of 64
    elif weight.group_size % 128 == 0 and tile.num_per_sm == 1:  # several products divide a single block
        columns = math.gcd(weight.num_columns, 128)
    assert columns >= 16, "a row must consist of whole steps"
    assert num_splits == 1 or product.experts is None or product.bias is None, "sums of parts have no expert's bias"
    sums = out if num_splits == 1 else x.new_empty(num_splits, num_pairs, num_rows, dtype=torch.float32)
    product.launch(
        products_kernel,
        (product.num_blocks(tile.block_m), triton.cdiv(num_rows, tile.block_n), num_splits),
        sums,
        x.stride(0),
        columns,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SPLITS=num_splits,
        PRODUCTS=1 if weight.scales is None else tile.num_per_sm,
        # On 9.0 the tensor cores read values from registers while a warp goes on. Unless each step uses the sums,
        # Triton 3.6 lets the warp overwrite these registers too early (triton-lang/triton#9433). Where the assembler
        # notices this hazard, the tensor cores wait after each instruction instead.
        WAIT=kernel_target.target_of(x.device).capability[0] == 9,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        maxnreg=None if tile.num_per_sm == 1 else REGISTERS // (tile.num_per_sm * tile.num_warps * 32),
    )
    if num_splits > 1:
        on_grid(sum_parts_kernel, (triton.cdiv(num_pairs, 8), triton.cdiv(num_rows, 128)))(
            sums,
            product.bias,
            product.factors,
            out,
            num_pairs,
            num_features,
            out.stride(0),
            GATED=product.gated,
            ACTIVATION=ACTIVATIONS[product.activation],
            BLOCK_M=8,
            BLOCK_N=128,
            SPLITS=num_splits,
            **pdl_options(x.device),
        )
    return out
