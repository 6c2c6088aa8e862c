"""PackedWeight: a quantized weight that stays packed, and its product with the rows of a step.

For few rows a kernel multiplies the packed weight. For many rows the values are unpacked, part by part, and cuBLAS
multiplies them (kernels/packed_values.py). If the format wants activations in fp8, the many rows are quantized
instead, and cuBLAS or CUTLASS multiplies the codes: see `can_multiply_codes`. On a CPU weights are not packed: their
values are computed when they are loaded.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import ScalingType

from nanovllm.checkpoint.quantization import Quantization
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.utils.arithmetic import ceil_div

if TYPE_CHECKING:
    from nanovllm.kernels.packed_values import Packed

MAX_PACKED_ROWS = 256  # rows up to which multiplying the packed weight was fastest on an H100
MAX_BLOCK_ROWS = {4: 256, 5: 16, 6: 16, 8: 256}  # for GGUF's blocks, by bits of a code, on an H200 or H100; 5 as 6
MAX_ROWS_BEFORE_CODES = 64  # the same where cuBLAS can multiply the codes
UNPACKED_BYTES = 64 * 2**20  # unpacked values that exist at a time
_ALIGNED_ROWS = 128  # cuBLAS is slow if the parts of its results are not aligned
_FP8_BLOCK = 128  # rows and columns that share a scale where cuBLAS multiplies blocks of codes
_MIN_FP8_RANGE = 2.0**-100  # lower bound of the largest value of a row, as in kernels/quantizing.py
_ORDER_REMEDY = "a checkpoint with desc_act=false, or device='cpu'"
_CHUNK_ROWS = 1024  # rows whose values are computed at a time, to limit the memory on top of the model


class QuantizedWeight(NamedTuple):
    """n rows and k columns of a weight. A value is (codes[i, j] - zeros[i, g]) * scales[i, g], where g = groups[j]."""

    codes: torch.Tensor  # uint8 or e4m3 [n, k], or numbers in e2m1 as bf16
    scales: torch.Tensor  # any float [n, G]
    zeros: torch.Tensor | None  # int16 [n, G]; or None for e4m3 and e2m1
    groups: torch.Tensor  # int64 [k], on the CPU

    def part(self, rows: slice, columns: slice) -> "QuantizedWeight":
        zeros = None if self.zeros is None else self.zeros[rows]
        return QuantizedWeight(self.codes[rows, columns], self.scales[rows], zeros, self.groups[columns])

    def copy_values(self, target: torch.Tensor) -> None:
        """Write the values to `target` [n, k], some rows at a time."""
        for start in range(0, len(self.codes), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            codes = self.codes[rows].float()
            if self.zeros is not None:
                codes -= self.zeros[rows, self.groups]
            target[rows] = codes * self.scales[rows, self.groups]


class WeightRows(Protocol):
    """Rows of a weight of codes, which the loader fills."""

    device: torch.device  # computes the codes

    @property
    def can_quantize(self) -> bool:
        """Return True if `quantize` has a kernel for the format."""
        ...

    def __getitem__(self, rows: slice) -> "WeightRows": ...

    def store(self, given: QuantizedWeight, where: str) -> None:
        """Store the values of a shard. Raises CheckpointError, which names `where`, for values that the format does not
        have.
        """
        ...

    def quantize(self, values: torch.Tensor, columns: slice) -> None:
        """Store `columns` of `values` [n, k], a tensor of a checkpoint that is quantized while it is loaded.

        One kernel does the work of `quantize` of models/quantized_weights.py and of `store`: a mixture has tens of
        thousands of matrices, and launching their operations one by one takes longer than everything else.
        """
        ...


@dataclass(frozen=True)
class CodedRows:
    """Activations that are quantized for a product of codes with a scale per row: what `quantize_rows` returns."""

    codes: torch.Tensor  # e4m3 [M', K], where M' is num_rows rounded up
    scales: torch.Tensor  # fp32 [M', 1]
    num_rows: int

    def split(self, size: int) -> Iterator["CodedRows"]:
        """Yield the rows in parts of `size` rows, which is a multiple of the padding."""
        for start in range(0, self.num_rows, size):
            part = slice(start, start + size)
            yield CodedRows(self.codes[part], self.scales[part], min(size, self.num_rows - start))


Activations: TypeAlias = torch.Tensor | CodedRows  # [M, K]


def new_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter in uninitialised memory on the device of the `torch.device` context. The loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def fits_fp8_products(part_sizes: Sequence[int], num_columns: int, quantization: Quantization) -> bool:
    """Return True if the format wants activations in fp8 and torch can multiply the codes of this weight by them.

    The weight has a scale for each row, or for each block of 128 x 128, and neither parts nor ranks may cut a block.
    """
    if quantization.block == (_FP8_BLOCK, _FP8_BLOCK):
        fits = not any(size % _FP8_BLOCK for size in (*part_sizes, num_columns))
    else:
        fits = quantization.block in ((1, 0), (0, 0)) and num_columns % 64 == 0 and sum(part_sizes) % 16 == 0
    return quantization.has_fp8_activations and fits


def can_multiply_codes(
    part_sizes: Sequence[int],
    num_columns: int,
    quantization: Quantization,
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> bool:
    """Return True if products of many rows multiply codes on this GPU."""
    is_able = dtype == torch.bfloat16 and quantization.has_fp8_products(capability)
    return is_able and fits_fp8_products(part_sizes, num_columns, quantization)


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round rows [M, K] to the numbers that `quantize_rows` of kernels/quantizing.py stores as codes and a scale."""
    largest = x.float().abs().amax(1, keepdim=True).clamp_(min=_MIN_FP8_RANGE)
    most = torch.full_like(largest, torch.finfo(torch.float8_e4m3fn).max)  # a number would become its reciprocal
    codes = (x.float() * (most / largest)).clamp_(-most, most).to(torch.float8_e4m3fn)
    return (codes.float() * (largest / most)).to(x.dtype)


class PackedWeight(nn.Module):
    """Codes, scales and zeros of a weight [N, K], in uninitialised memory on the device of the `torch.device` context.

    part_sizes: rows of each part with separate scales, such as q, k and v. multiplies_codes: many rows
    are multiplied in fp8. sorts_columns: columns that are not in the order of their groups are sorted, and so are the
    columns of x at each product. Raises ConfigError if groups or blocks do not fit.

    The columns of some weights in GGUF's blocks stay in the order of the file, and the columns of x are permuted, too.
    Rows of such blocks are padded to whole blocks of the kernels (`padding` columns).
    """

    column_order: torch.Tensor | None
    padding = 0

    def __init__(
        self,
        part_sizes: Sequence[int],
        num_columns: int,
        quantization: Quantization,
        *,
        multiplies_codes: bool = False,
        sorts_columns: bool = True,
    ) -> None:
        from nanovllm.kernels import packed_values, packed_words

        super().__init__()
        num_rows, (block_rows, block_columns) = sum(part_sizes), quantization.block
        self.shape, self.bits, self.is_float = (num_rows, num_columns), quantization.bits, quantization.is_float
        self.block_type = quantization.block_type
        # int32 [K], the column of x for each column, or None if all are in order; known from the first shard
        self.register_buffer("column_order", None)
        self.sorts_columns, self._has_shards = sorts_columns, False
        if self.block_type is not None:
            self._allocate_blocks(quantization)
            return
        integers = packed_words.INT4 if self.bits == 4 else packed_words.INT8
        self.kind = (packed_words.E4M3 if self.is_float else integers).value
        self.scale_rows = math.gcd(block_rows, *part_sizes)
        self.group_size = math.gcd(block_columns, num_columns)
        if problem := quantization.packing_problem(num_columns):
            raise ConfigError(problem)
        assert packed_values.can_pack(num_columns, quantization.bits, self.group_size), "unsupported groups"
        self.multiplies_codes = multiplies_codes
        self.max_packed_rows = MAX_ROWS_BEFORE_CODES if multiplies_codes else MAX_PACKED_ROWS
        if multiplies_codes and self.group_size == num_columns:
            self.scale_rows = 1  # cuBLAS wants a scale for each row
        num_scales = num_rows // self.scale_rows, num_columns // self.group_size
        self.codes = new_parameter(num_rows, num_columns * quantization.bits // 32, dtype=torch.int32)
        scales = packed_values.new_scales(*num_scales, torch.float32 if self.is_float else torch.int32)
        if multiplies_codes and self.scale_rows > 1:
            # cuBLAS wants the scales of a row of blocks together, and their number to be a multiple of 4
            scales = torch.zeros(*scales.shape[:2], ceil_div(num_scales[1], 4) * 4)
        self.scales = nn.Parameter(scales, requires_grad=False)
        # Integers have 16-bit scales, whose dtype is known from the first shard
        self.scale_dtype = torch.float32 if self.is_float else None

    def _allocate_blocks(self, quantization: Quantization) -> None:
        from nanovllm.kernels import gguf_words, packed_values

        (num_rows, num_columns), block_columns = self.shape, quantization.block[1]
        assert quantization.block_type is not None and quantization.stays_packed(num_columns), "blocks must be whole"
        self.padding = -num_columns % block_columns
        num_columns += self.padding
        self.kind = gguf_words.kind_of(quantization.block_type)
        self.scale_rows, self.group_size, self.scale_dtype = 1, gguf_words.GROUP.value, None
        self.multiplies_codes, self.max_packed_rows = False, MAX_BLOCK_ROWS[self.bits]
        num_words = num_columns // block_columns * quantization.scale_words
        self.codes = new_parameter(num_rows, num_columns * self.bits // 32, dtype=torch.int32)
        self.scales = nn.Parameter(packed_values.new_scales(num_rows, num_words, torch.int32), requires_grad=False)

    def rows(self, start: int, end: int) -> "PackedRows":
        return PackedRows(self, start, end)

    def choose_scales(self, dtype: torch.dtype, where: str) -> None:
        """Store the scales of integers in the dtype that they have in the checkpoint. Raises CheckpointError if the
        dtype has more than 16 bits, or if parts of the weight have several dtypes.
        """
        if self.scale_dtype not in (None, dtype) or dtype == torch.float32:
            beside = "" if self.scale_dtype in (None, dtype) else f", but other parts in {self.scale_dtype}"
            raise CheckpointError(
                f"{where} has scales in {dtype}{beside}; on a GPU all must be in bfloat16 or all in float16; use "
                "device='cpu'"
            )
        self.scale_dtype = dtype

    def choose_order(self, order: torch.Tensor | None, where: str) -> None:
        """Store the order of columns of a shard. Raises CheckpointError if it is not the order of the other shards."""
        mine = self.column_order
        if self._has_shards and (
            (order is None) != (mine is None)
            or (order is not None and mine is not None and not torch.equal(order.int(), mine.cpu()))
        ):
            raise CheckpointError(
                f"{where} has columns in another order (desc_act) than the layers that read the same input; on a GPU "
                f"all must have the same order; use {_ORDER_REMEDY}"
            )
        if order is not None and not self.sorts_columns:
            raise CheckpointError(
                f"{where} has columns in another order (desc_act), which is supported for experts on a CPU only; "
                f"use {_ORDER_REMEDY}"
            )
        self._has_shards = True
        if mine is None and order is not None:
            self.column_order = order.int().to(self.codes.device)

    @property
    def takes_codes(self) -> bool:
        """True if many rows of x may be CodedRows."""
        return self.multiplies_codes and self.group_size == self.shape[1]

    def linear(self, x: Activations, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """[M, K] -> [M, N], written to `out` if given and the activations are not quantized. Hot: several times per
        layer.
        """
        if isinstance(x, CodedRows):
            return self.product_of_codes(x.codes, x.scales, bias)[: x.num_rows]
        return self._product(self._in_order(x), bias, out)

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        if self.column_order is None:
            return x
        from nanovllm.kernels.fused import select_columns

        return select_columns(x, self.column_order)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        from nanovllm.kernels import packed_linear as kernels
        from nanovllm.kernels import quantizing

        if len(x) <= self.max_packed_rows:
            return kernels.products(x, packed(self), bias, out=out)
        if self.multiplies_codes:
            assert out is None, "cuBLAS allocates the result"
            return self.product_of_codes(*quantizing.quantize_rows(x, self.group_size), bias)[: len(x)]
        return unpacked_linear(x, packed(self), bias, out=out)

    def product_of_codes(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply rows as `quantize_rows` returns them: [M, K], [M, K / group_size] -> [M, N] in bf16. Hot."""
        by_row = self.scale_rows == 1
        of_rows = self.scales.flatten(0, 1)[: self.shape[0] // self.scale_rows]
        out = F.scaled_mm(
            codes,
            self.codes.view(torch.float8_e4m3fn).t(),
            scales,
            ScalingType.RowWise if by_row else ScalingType.BlockWise1x128,
            of_rows.t(),
            ScalingType.RowWise if by_row else ScalingType.BlockWise128x128,
            use_fast_accum=by_row,
        )
        return out if bias is None else out.add_(bias)

    def warm_up(self, x: torch.Tensor) -> None:
        """Call cuBLAS as `linear` does for many rows, without our kernels. The numbers are arbitrary."""
        from nanovllm.kernels import quantizing

        if self.multiplies_codes:
            self.product_of_codes(*quantizing.new_codes(x, self.group_size), None)
        else:
            F.linear(x, new_values(*self.shape, x))

    def gate_up(
        self, x: Activations, bias: torch.Tensor | None, *, makes_codes: bool = False, activation: str = "silu"
    ) -> Activations:
        """activation(first half) * second half of the product, of many rows as CodedRows if `makes_codes`. Hot: once
        per layer.
        """
        from nanovllm.kernels import fused, quantizing
        from nanovllm.kernels import packed_linear as kernels

        if isinstance(x, torch.Tensor) and len(x) <= self.max_packed_rows:
            return kernels.products(self._in_order(x), packed(self), bias, gated=True, activation=activation)
        both = self.linear(x, bias)
        if makes_codes:
            return CodedRows(*quantizing.act_and_quantize(both, activation), len(both))
        return fused.act_and_mul(both, activation)


class PackedRows(WeightRows):
    """Rows start to end - 1 of a packed weight."""

    def __init__(self, weight: PackedWeight, start: int, end: int) -> None:
        self.weight, self.start, self.end = weight, start, end
        self.device, self.block_type = weight.codes.device, weight.block_type

    def __getitem__(self, rows: slice) -> "PackedRows":
        start, end, _ = rows.indices(self.end - self.start)
        return PackedRows(self.weight, self.start + start, self.start + end)

    def store(self, given: QuantizedWeight, where: str) -> None:
        """Store the values of a shard. Raises CheckpointError, which names `where`, for columns in another order than
        the other shards, for groups of which this rank has a part, and for scales of several dtypes.
        """
        from nanovllm.kernels import packed_values

        weight, rows = self.weight, slice(self.start, self.end)
        order, of_groups = None, given.groups.view(-1, weight.group_size)
        if not (of_groups == of_groups[:, :1]).all():
            order = given.groups.argsort(stable=True)
            of_groups = given.groups[order].view(-1, weight.group_size)
            if not (of_groups == of_groups[:, :1]).all():
                raise CheckpointError(
                    f"{where} has columns in another order (desc_act), and on this rank only some columns of a group; "
                    f"use tensor_parallel_size=1, {_ORDER_REMEDY}"
                )
            given = given._replace(codes=given.codes[:, order.to(given.codes.device)])
        weight.choose_order(order, where)
        step, first, num_groups = weight.scale_rows, int(of_groups[0, 0]), len(of_groups)
        columns: slice | torch.Tensor = slice(first, first + num_groups)
        if of_groups[:, 0].tolist() != list(range(first, first + num_groups)):  # smaller than the checkpoint's
            columns = of_groups[:, 0].to(self.device)
        assert self.start % step == 0 and self.end % step == 0, "a part of a block of scales cannot be stored"
        scales = given.scales[::step, columns]
        if given.zeros is None:
            scales = scales.float()
        else:
            weight.choose_scales(scales.dtype, where)
            scales = packed_values.pack_scales(scales, given.zeros[::step, columns], weight.bits)
        weight.codes[rows] = packed_values.pack_codes(given.codes.view(torch.uint8), weight.bits).to(self.device)
        first_row = self.start // step
        scale_rows = torch.arange(first_row, first_row + len(scales), device=self.device)
        packed_values.store_scales(weight.scales, scale_rows, scales)

    @property
    def can_quantize(self) -> bool:
        return self.weight.is_float

    def quantize(self, values: torch.Tensor, columns: slice) -> None:
        from nanovllm.kernels import quantizing

        assert len(values) == self.end - self.start, "values must have as many rows as the target"
        first_column, _, _ = columns.indices(values.shape[1])
        quantizing.quantize_weight(values, packed(self.weight), self.start, first_column)


def store_blocks(blocks: torch.Tensor, targets: Sequence[PackedRows]) -> None:
    """Store rows of GGUF's blocks, uint8 [n, bytes of a row], which are on the device and in the type of the targets'
    weight: first the rows of the first target, and so on. One kernel fills targets at equal distances, such as the
    gates of experts.
    """
    from nanovllm.kernels import gguf_pack

    first, sizes = targets[0], [each.end - each.start for each in targets]
    assert all(each.weight is first.weight for each in targets), "the targets must be rows of one weight"
    assert len(blocks) == sum(sizes), "blocks must have as many rows as the targets"
    stride = targets[1].start - first.start if len(targets) > 1 else 0
    starts = [first.start + i * stride for i in range(len(targets))]
    if set(sizes) == {sizes[0]} and [each.start for each in targets] == starts:
        gguf_pack.pack_blocks(blocks, packed(first.weight), gguf_pack.PartRows(first.start, sizes[0], stride))
        return
    for target, part in zip(targets, blocks.split(sizes), strict=True):
        store_blocks(part, [target])


def packed(weight: nn.Parameter | PackedWeight) -> "Packed":
    """Return the weight in the form that the kernels take. Hot."""
    from nanovllm.kernels.packed_values import Packed

    if isinstance(weight, PackedWeight):
        sizes = weight.scale_rows, weight.group_size, weight.padding
        return Packed(weight.codes, weight.scales, weight.kind, weight.scale_dtype, *sizes)
    return Packed(weight)


def new_values(num_rows: int, num_columns: int, like: torch.Tensor, max_bytes: int = UNPACKED_BYTES) -> torch.Tensor:
    """Allocate memory for the values of the rows that are unpacked at a time, in the dtype of `like`."""
    most = max_bytes // (num_columns * like.element_size()) // _ALIGNED_ROWS * _ALIGNED_ROWS
    return like.new_empty(min(max(most, _ALIGNED_ROWS), num_rows), num_columns)


def unpacked_linear(
    x: torch.Tensor,
    weight: "Packed",
    bias: torch.Tensor | None,
    max_bytes: int = UNPACKED_BYTES,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply with cuBLAS, unpacking some rows of the weight at a time: [M, K] -> [M, N], written to `out` if given.
    Hot.
    """
    from nanovllm.kernels import packed_values

    num_rows = len(weight.codes)
    values = new_values(num_rows, x.shape[1], x, max_bytes)
    if len(values) == num_rows and out is None:
        return F.linear(x, packed_values.unpack(weight, 0, values), bias)
    out = x.new_empty(len(x), num_rows) if out is None else out
    for start in range(0, num_rows, len(values)):
        end = min(start + len(values), num_rows)
        part = packed_values.unpack(weight, start, values[: end - start]).t()
        if bias is None:
            torch.mm(x, part, out=out[:, start:end])
        else:
            torch.addmm(bias[start:end], x, part, out=out[:, start:end])
    return out
