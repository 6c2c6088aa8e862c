"""Tensor-parallel linear layers, and where their weights come from.

In a column-parallel layer each rank owns some output features, and nothing is communicated. In a row-parallel layer
each rank owns some input features, and the outputs are summed over the ranks, so a column-parallel layer followed by a
row-parallel layer costs one all-reduce. The weight is [output, input] as in torch. `tp` is the rank group; it is always
passed and never global.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.quantization import Quantization
from nanovllm.device import kernel_target
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.layers.packed_weight import (
    MAX_ROWS_BEFORE_CODES,
    Activations,
    PackedRows,
    PackedWeight,
    WeightRows,
    can_multiply_codes,
    fits_fp8_products,
    new_parameter,
    rounded_to_fp8,
)
from nanovllm.plan.kv_spec import kv_heads_of_rank
from nanovllm.utils.arithmetic import SWIGLU_ALPHA, SWIGLU_LIMIT

Weight: TypeAlias = "nn.Parameter | PackedWeight | StackedWeight"
_ONLY_PACKED = "only packed weights take codes"


@dataclass(frozen=True)
class WeightShard:
    """`target` (a view of a parameter) is filled with `tensor[index]` of a checkpoint tensor of shape `full_shape`.

    A tensor of numbers is filled with values, a tensor of bytes with blocks of a GGUF file.
    """

    target: torch.Tensor | WeightRows
    full_shape: tuple[int, ...]
    index: tuple[slice, ...]
    quantization: Quantization | None = None  # the format of the layer, if it is quantized
    plus: float = 0.0  # added to the checkpoint's values


class NamedShard(NamedTuple):
    """`layer` is the index of the checkpoint layer among those stacked in the module (q, k, v: 0, 1, 2), else 0.

    Several shards of the same name each take some rows of the checkpoint tensor.
    """

    layer: int
    parameter: str  # "weight" or "bias"; for an expert, preceded by the names of its modules
    shard: WeightShard


@runtime_checkable
class HasWeightShards(Protocol):
    def weight_shards(self) -> Iterator[NamedShard]:
        """List every checkpoint tensor that fills this module's parameters."""
        ...


def packed_format(quantization: Quantization | None, num_columns: int, num_ranks: int = 1) -> Quantization | None:
    """Return the format if the device of the `torch.device` context keeps a weight packed, else None.

    num_columns: on each rank. num_ranks: the number of ranks that share the columns.
    """
    is_gpu = torch.get_default_device().type == "cuda"
    is_packed = is_gpu and quantization is not None and quantization.stays_packed(num_columns, num_ranks)
    return quantization if is_packed else None


def new_weight(
    part_sizes: Sequence[int],
    num_columns: int,
    *,
    dtype: torch.dtype,
    quantization: Quantization | None,
    num_ranks: int = 1,
    sorts_columns: bool = True,
) -> nn.Parameter | PackedWeight:
    """Make the weight of a layer with parts of these sizes, such as q, k and v. On a GPU a quantized weight is packed.

    num_ranks: the number of ranks that share the columns. sorts_columns: as for PackedWeight.
    """
    format = packed_format(quantization, num_columns, num_ranks)
    if format is None:
        return new_parameter(sum(part_sizes), num_columns, dtype=dtype)
    capability = kernel_target.target_of(torch.get_default_device()).capability
    multiplies_codes = can_multiply_codes(part_sizes, num_columns, format, dtype, capability)
    return PackedWeight(part_sizes, num_columns, format, multiplies_codes=multiplies_codes, sorts_columns=sorts_columns)


def rounds_rows(part_sizes: Sequence[int], num_columns: int, quantization: Quantization | None) -> bool:
    """Return True if a layer rounds its input as a product in fp8 does: with fp8_dynamic on a CPU, whose weights are
    values instead of codes.
    """
    if quantization is None or not quantization.needs_fp8_products or torch.get_default_device().type == "cuda":
        return False
    return fits_fp8_products(part_sizes, num_columns, quantization)


def takes_codes(weight: Weight) -> bool:
    """Return True if the kernels that compute many rows of a layer's input may return them as CodedRows."""
    return isinstance(weight, PackedWeight) and weight.takes_codes


def stack_weights(
    part_sizes: Sequence[int], num_columns: int, *, dtype: torch.dtype, formats: Sequence[Quantization | None]
) -> Weight:
    """Make the weight of a layer whose parts may have several formats: one weight for each run of equal formats."""
    kept = [packed_format(each, num_columns) for each in formats]
    runs = [(format, list(run)) for format, run in groupby(range(len(kept)), kept.__getitem__)]
    weights = [
        new_weight([part_sizes[i] for i in run], num_columns, dtype=dtype, quantization=format) for format, run in runs
    ]
    return weights[0] if len(weights) == 1 else StackedWeight(weights)


class StackedWeight(nn.Module):
    """Weights with the same columns, as the rows of one weight. In GGUF files, q, k and v often have several types."""

    def __init__(self, weights: Sequence[nn.Parameter | PackedWeight]) -> None:
        super().__init__()
        for i, weight in enumerate(weights):
            setattr(self, f"part_{i}", weight)
        self.weights = tuple(weights)
        self.starts = list(accumulate((weight.shape[0] for weight in weights), initial=0))
        self.shape = self.starts[-1], weights[0].shape[1]

    def rows(self, start: int, end: int) -> torch.Tensor | PackedRows:
        """Return the target of a shard that fills rows of one of the weights."""
        part = max(i for i, first in enumerate(self.starts[:-1]) if first <= start)
        first = self.starts[part]
        assert end <= self.starts[part + 1], "a shard fills rows of one weight"
        return weight_rows(self.weights[part], start - first, end - first)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, K] -> [T, N]: each weight writes some columns of the result. Hot: several times per layer."""
        out = x.new_empty(len(x), self.shape[0])
        for weight, start in zip(self.weights, self.starts, strict=False):
            rows = slice(start, start + weight.shape[0])
            part, of_part = out[:, rows], None if bias is None else bias[rows]
            if isinstance(weight, PackedWeight):
                weight.linear(x, of_part, part)
            elif of_part is None:
                torch.mm(x, weight.t(), out=part)
            else:
                torch.addmm(of_part, x, weight.t(), out=part)
        return out

    def gate_up(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu") -> torch.Tensor:
        """activation(first half) * second half of the product. Hot: once per layer."""
        return act_and_mul(self.linear(x, bias), activation)


def weight_rows(weight: Weight, start: int, end: int) -> torch.Tensor | PackedRows:
    """Return the target of a shard that fills these rows."""
    return weight.rows(start, end) if isinstance(weight, PackedWeight | StackedWeight) else weight[start:end]


def divide(size: int, parts: int, name: str) -> int:
    """Return `size / parts`. Raises ConfigError if the quotient is not an integer."""
    if size % parts:
        raise ConfigError(f"{name}={size} is not divisible by tensor_parallel_size={parts}; choose a divisor of {size}")
    return size // parts


def act_and_mul(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(first half) * second half of the last dimension: [T, 2 * size] -> [T, size]. Hot: once per layer.

    "clamped_swiglu" is the form in gpt-oss: with gate at most SWIGLU_LIMIT, and up from -SWIGLU_LIMIT to SWIGLU_LIMIT,
    gate * sigmoid(SWIGLU_ALPHA * gate) * (up + 1).
    """
    if x.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.act_and_mul(x, activation)
    gate, up = x.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.float().clamp(max=SWIGLU_LIMIT), up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (gate * (SWIGLU_ALPHA * gate).sigmoid() * (up + 1)).to(x.dtype)
    return (F.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else F.silu(gate)) * up


def gate_heads(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gates): [T, size] each. Hot: once per layer."""
    if x.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.sigmoid_and_mul(gates, x)
    return x * gates.sigmoid()


# On an H200 our kernel is 1.0 to 3.9 times as fast as cuBLAS for one row, but slower for two rows in 12 of 16 layers
# (docs/measurements.md).
MAX_GEMV_ROWS = 1


def use_gemv(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if our kernel should compute the product: for one row on a GPU, where cuBLAS is slower.

    The kernel needs rows that consist of whole 16-byte packs.
    """
    return x.is_cuda and x.shape[0] <= MAX_GEMV_ROWS and weight.shape[1] * weight.element_size() % 16 == 0


def linear(x: Activations, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply [T, K] by weight [N, K] -> [T, N]. Hot: several times per layer."""
    if isinstance(weight, PackedWeight):
        return weight.linear(x, bias)
    assert isinstance(x, torch.Tensor), _ONLY_PACKED
    if isinstance(weight, StackedWeight):
        return weight.linear(x, bias)
    if use_gemv(x, weight):
        from nanovllm.kernels import small_linear as kernels

        return kernels.small_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def gate_up(
    x: Activations,
    weight: Weight,
    bias: torch.Tensor | None,
    *,
    makes_codes: bool = False,
    activation: str = "silu",
) -> Activations:
    """activation(first half) * second half of the product: [T, K] by weight [2 * N, K] -> [T, N]. Hot: once per
    layer.
    """
    if isinstance(weight, PackedWeight):
        return weight.gate_up(x, bias, makes_codes=makes_codes, activation=activation)
    assert isinstance(x, torch.Tensor) and not makes_codes, _ONLY_PACKED
    if isinstance(weight, StackedWeight):
        return weight.gate_up(x, bias, activation)
    if use_gemv(x, weight):
        from nanovllm.kernels import small_linear as kernels

        return kernels.small_gate_up(x, weight, bias, activation=activation)
    return act_and_mul(F.linear(x, weight, bias), activation)


def _input(x: Activations, rounds_rows: bool) -> Activations:
    if rounds_rows and isinstance(x, torch.Tensor) and len(x) > MAX_ROWS_BEFORE_CODES:
        return rounded_to_fp8(x)
    return x


def sum_over_ranks(x: torch.Tensor, tp: TPGroup) -> torch.Tensor:
    """Sum over ranks, in place, of contiguous numbers. Hot: twice per layer."""
    if tp.inboxes is not None:
        from nanovllm.kernels import peer_sum

        if peer_sum.can_sum(x, tp.inboxes):
            return peer_sum.peer_sum(x, tp.rank, tp.size, tp.inboxes)
    return tp.all_reduce(x)


class Rows(NamedTuple):
    """Some rows of one of the checkpoint layers that are stacked in a module."""

    layer: int
    rows: slice


def share(layer: int, size: int, tp: TPGroup, name: str, start: int = 0) -> Rows:
    """This rank's rows among the `size` rows from `start` on. Raises ConfigError if the ranks cannot share them."""
    local_size = divide(size, tp.size, name)
    return Rows(layer, slice(start + tp.rank * local_size, start + (tp.rank + 1) * local_size))


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel layers over the same input, as one matrix product.

    [T, input_size] -> [T, features of this rank]: the features that `parts` lists, in the order of `parts`. By default
    they are this rank's part of the first layer, then of the second, and so on. Raises ConfigError if an output size is
    not divisible by the number of ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        bias: bool,
        tp: TPGroup,
        dtype: torch.dtype,
        formats: Sequence[Quantization | None] | None = None,
        parts: Sequence[Rows] | None = None,
    ) -> None:
        """`formats`: of each layer, None if it is not quantized; by default no layer is quantized."""
        super().__init__()
        self.tp, self.formats = tp, formats or [None] * len(output_sizes)
        self.input_size = input_size
        self.output_sizes = list(output_sizes)
        self.parts = parts or [share(layer, size, tp, "output features") for layer, size in enumerate(output_sizes)]
        part_sizes = [part.rows.stop - part.rows.start for part in self.parts]
        of_parts = [self.formats[part.layer] for part in self.parts]
        self.weight = stack_weights(part_sizes, input_size, dtype=dtype, formats=of_parts)
        self.rounds_rows = rounds_rows(part_sizes, input_size, self.formats[0])
        self.bias = new_parameter(sum(part_sizes), dtype=dtype) if bias else None

    def forward(self, x: Activations) -> torch.Tensor:
        return linear(_input(x, self.rounds_rows), self.weight, self.bias)

    def weight_shards(self) -> Iterator[NamedShard]:
        end = 0
        for layer, rows in self.parts:
            size, start, end = self.output_sizes[layer], end, end + rows.stop - rows.start
            target, index = weight_rows(self.weight, start, end), (rows, slice(None))
            weight = WeightShard(target, (size, self.input_size), index, self.formats[layer])
            yield NamedShard(layer, "weight", weight)
            if self.bias is not None:
                yield NamedShard(layer, "bias", WeightShard(self.bias[start:end], (size,), (rows,)))


class GateUpParallelLinear(MergedColumnParallelLinear):
    """The first half of a gated MLP, activation(gate) * up: [T, hidden_size] -> [T, intermediate_size / tp].

    makes_codes: return many rows as CodedRows, for a layer that takes them. activation: as in ModelConfig.
    """

    makes_codes = False
    activation = "silu"

    def forward(self, x: Activations) -> Activations:  # type: ignore[override]
        x = _input(x, self.rounds_rows)
        return gate_up(x, self.weight, self.bias, makes_codes=self.makes_codes, activation=self.activation)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The q, k and v projections as one product; each rank owns num_heads / tp heads and their kv heads
    (`kv_heads_of_rank`).

    `split` returns q [T, H, D], k [T, K, D] and v [T, K, D] of this rank, and gates [T, H, D] if `gated`, as views of
    the product. With gates, q_proj has for each head the rows of q followed by the rows of the gate. `head_rows` is the
    order in which q and k have the rows of a head. If `v_from_k`, there is no v projection, and v is k.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        tp: TPGroup,
        dtype: torch.dtype,
        formats: Sequence[Quantization | None] | None = None,
        gated: bool = False,
        head_rows: Sequence[slice] | None = None,
        v_from_k: bool = False,
    ) -> None:
        num_local = divide(num_heads, tp.size, "num_attention_heads")
        heads = range(tp.rank * num_local, (tp.rank + 1) * num_local)
        kv_heads = kv_heads_of_rank(num_kv_heads, tp.size, tp.rank)
        q_rows, whole = (2 if gated else 1) * head_dim, [slice(0, head_dim)]

        def rows(layer: int, heads: range, per_head: int, order: Sequence[slice]) -> list[Rows]:
            starts = [head * per_head for head in heads]
            return [Rows(layer, slice(start + each.start, start + each.stop)) for start in starts for each in order]

        parts = rows(0, heads, q_rows, head_rows or whole) + rows(1, kv_heads, head_dim, head_rows or whole)
        parts += [] if v_from_k else rows(2, kv_heads, head_dim, whole)
        if gated:
            parts += rows(0, heads, q_rows, [slice(head_dim, 2 * head_dim)])
        sizes = [num_heads * q_rows, *[num_kv_heads * head_dim] * (1 if v_from_k else 2)]
        super().__init__(hidden_size, sizes, bias=bias, tp=tp, dtype=dtype, formats=formats, parts=_joined(parts))
        self.head_dim, self.v_from_k = head_dim, v_from_k
        num_v_heads, num_gates = 0 if v_from_k else len(kv_heads), num_local if gated else 0
        self.heads_per_part = [num_local, len(kv_heads), num_v_heads, num_gates]

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the product into views, as the class describes. Hot: once per layer."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v, gates = heads.split(self.heads_per_part, dim=1)
        return q, k, k if self.v_from_k else v, gates


def _joined(parts: Sequence[Rows]) -> list[Rows]:
    """Join adjacent parts, so that fewer parts cover the same rows."""
    joined: list[Rows] = []
    for layer, rows in parts:
        if joined and joined[-1].layer == layer and joined[-1].rows.stop == rows.start:
            joined[-1] = Rows(layer, slice(joined[-1].rows.start, rows.stop))
        else:
            joined.append(Rows(layer, rows))
    return joined


class RowParallelLinear(nn.Module):
    """Each rank owns input_size / tp input features: [T, input_size / tp] -> [T, output_size], summed over ranks.

    Only rank 0 has the bias, so that the sum counts it once. Raises ConfigError if input_size is not divisible by the
    number of ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        tp: TPGroup,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.quantization = tp, quantization
        self.full_shape = (output_size, input_size)
        self.has_bias = bias
        local_size = divide(input_size, tp.size, "input features")
        self.weight = new_weight([output_size], local_size, dtype=dtype, quantization=quantization, num_ranks=tp.size)
        self.rounds_rows = rounds_rows([output_size], local_size, quantization)
        self.bias = new_parameter(output_size, dtype=dtype) if bias and tp.rank == 0 else None

    def forward(self, x: Activations) -> torch.Tensor:
        return sum_over_ranks(linear(_input(x, self.rounds_rows), self.weight, self.bias), self.tp)

    def weight_shards(self) -> Iterator[NamedShard]:
        local_size = self.weight.shape[1]
        columns = slice(self.tp.rank * local_size, (self.tp.rank + 1) * local_size)
        target = weight_rows(self.weight, 0, self.full_shape[0])
        index = (slice(None), columns)
        yield NamedShard(0, "weight", WeightShard(target, self.full_shape, index, self.quantization))
        if self.has_bias:  # the other ranks list the tensor but read nothing from it
            target = torch.empty(0) if self.bias is None else self.bias
            yield NamedShard(0, "bias", WeightShard(target, self.full_shape[:1], (slice(0, target.shape[0]),)))
