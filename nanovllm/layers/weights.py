"""WeightShard: where one tensor of a checkpoint goes on this rank. Every layer with parameters lists its shards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from nanovllm.errors import ConfigError


@dataclass(frozen=True)
class WeightShard:
    """`target` (a view of a parameter) is filled with `tensor[index]` of a checkpoint tensor of shape `full_shape`."""

    target: torch.Tensor
    full_shape: tuple[int, ...]
    index: tuple[slice, ...]


class NamedShard(NamedTuple):
    """`layer` is the index of the checkpoint layer among those stacked in the module (q, k, v: 0, 1, 2), else 0."""

    layer: int
    parameter: str  # "weight" or "bias"
    shard: WeightShard


@runtime_checkable
class HasWeightShards(Protocol):
    def weight_shards(self) -> Iterator[NamedShard]:
        """List every checkpoint tensor that fills this module's parameters."""
        ...


def new_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter in uninitialised memory on the device of the `torch.device` context. The loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def divide(size: int, parts: int, name: str) -> int:
    """`size / parts`. Raises ConfigError if it is not an integer."""
    if size % parts:
        raise ConfigError(f"{name}={size} is not divisible by tensor_parallel_size={parts}; choose a divisor of {size}")
    return size // parts
