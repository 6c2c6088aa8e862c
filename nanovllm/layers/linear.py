"""Tensor-parallel linear layers. A column-parallel and a row-parallel layer in sequence cost one all-reduce.

In a column-parallel layer each rank owns some output features, and nothing is communicated. In a row-parallel layer
each rank owns some input features, and the outputs are summed over the ranks. The weight is [output, input] as in
torch. `tp` is the rank group; it is always passed and never global.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.weights import NamedShard, WeightShard, divide, new_parameter

# On an H200 our kernel is 1.0 to 3.9 times as fast as cuBLAS for one row, but slower for two rows in 12 of 16 layers
# (docs/measurements.md).
MAX_GEMV_ROWS = 1


def use_gemv(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether to use our kernel, which reads the weight at the memory's speed, and not cuBLAS: for one row on a GPU.

    The kernel needs rows that consist of whole 16-byte packs.
    """
    return x.is_cuda and x.shape[0] <= MAX_GEMV_ROWS and weight.shape[1] * weight.element_size() % 16 == 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, K] by weight [N, K] -> [T, N]. Hot: several times per layer."""
    if use_gemv(x, weight):
        from nanovllm.kernels import fused as kernels

        return kernels.small_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def gate_up(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(first half) * second half of the product: [T, K] by weight [2 * N, K] -> [T, N]. Hot: once per layer."""
    if use_gemv(x, weight):
        from nanovllm.kernels import fused as kernels

        return kernels.small_gate_up(x, weight, bias)
    return silu_and_mul(F.linear(x, weight, bias))


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel layers over the same input, as one matrix product.

    [T, input_size] -> [T, sum(output_sizes) / tp]: this rank's part of the first layer, then of the second, and so on.
    Raises ConfigError if an output size is not divisible by the number of ranks.
    """

    def __init__(
        self, input_size: int, output_sizes: Sequence[int], *, bias: bool, tp: TPGroup, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.tp = tp
        self.input_size = input_size
        self.output_sizes = list(output_sizes)
        self.local_sizes = [divide(size, tp.size, "output features") for size in output_sizes]
        self.weight = new_parameter(sum(self.local_sizes), input_size, dtype=dtype)
        self.bias = new_parameter(sum(self.local_sizes), dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def weight_shards(self) -> Iterator[NamedShard]:
        end = 0
        for layer, (size, local_size) in enumerate(zip(self.output_sizes, self.local_sizes, strict=True)):
            rows = slice(self.tp.rank * local_size, (self.tp.rank + 1) * local_size)
            start, end = end, end + local_size
            weight = WeightShard(self.weight[start:end], (size, self.input_size), (rows, slice(None)))
            yield NamedShard(layer, "weight", weight)
            if self.bias is not None:
                yield NamedShard(layer, "bias", WeightShard(self.bias[start:end], (size,), (rows,)))


class ColumnParallelLinear(MergedColumnParallelLinear):
    """Each rank owns output_size / tp output features: [T, input_size] -> [T, output_size / tp].

    Not used by the engine; public, for tests and tools.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__(input_size, [output_size], bias=bias, tp=tp, dtype=dtype)


class GateUpParallelLinear(MergedColumnParallelLinear):
    """The first half of a gated MLP, silu(gate) * up: [T, hidden_size] -> [T, intermediate_size / tp]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, tp: TPGroup, dtype: torch.dtype
    ) -> None:
        super().__init__(hidden_size, [intermediate_size] * 2, bias=bias, tp=tp, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gate_up(x, self.weight, self.bias)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The q, k and v projections as one product; each rank owns num_heads / tp heads and num_kv_heads / tp kv heads.

    `split` returns q [T, H, D], k [T, K, D] and v [T, K, D] of this rank as views of the product.
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
    ) -> None:
        heads = divide(num_heads, tp.size, "num_attention_heads")
        kv_heads = divide(num_kv_heads, tp.size, "num_key_value_heads")
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        super().__init__(hidden_size, sizes, bias=bias, tp=tp, dtype=dtype)
        self.head_dim = head_dim
        self.heads_per_part = [heads, kv_heads, kv_heads]

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hot: once per layer."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = heads.split(self.heads_per_part, dim=1)
        return q, k, v


class RowParallelLinear(nn.Module):
    """Each rank owns input_size / tp input features: [T, input_size / tp] -> [T, output_size], summed over ranks.

    Only rank 0 has the bias, so that the sum counts it once. Raises ConfigError if input_size is not divisible by the
    number of ranks.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.full_shape = (output_size, input_size)
        self.has_bias = bias
        self.weight = new_parameter(output_size, divide(input_size, tp.size, "input features"), dtype=dtype)
        self.bias = new_parameter(output_size, dtype=dtype) if bias and tp.rank == 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(linear(x, self.weight, self.bias))

    def weight_shards(self) -> Iterator[NamedShard]:
        local_size = self.weight.shape[1]
        columns = slice(self.tp.rank * local_size, (self.tp.rank + 1) * local_size)
        yield NamedShard(0, "weight", WeightShard(self.weight, self.full_shape, (slice(None), columns)))
        if self.has_bias:  # the other ranks list the tensor but read nothing from it
            target = self.weight.new_empty(0) if self.bias is None else self.bias
            yield NamedShard(0, "bias", WeightShard(target, self.full_shape[:1], (slice(0, target.shape[0]),)))
