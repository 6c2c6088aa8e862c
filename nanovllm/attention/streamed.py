"""Attention of a step with offload: the blocks in slots, the groups streamed from CPU memory, and their merge.

Keys carry their rotation, so the order of the blocks before the chunk does not matter; only the paged call, which
holds the chunk itself, is causal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention
from nanovllm.attention.merge import Merge, RunningMerge
from nanovllm.attention.paged import PagedPart
from nanovllm.attention.parts import AttentionPart, finish_parts
from nanovllm.layers.kv_cells import KVCells


class KVStream(Protocol):
    """Where streamed keys come from (kvcache/transfer/offload_engine.py), seen from one layer of a step."""

    def begin_layer(self, layer: int) -> None:
        """Called before the layer writes or reads any slot."""

    def stored(self, layer: int) -> None:
        """Called when the new K and V are in their slots, before the paged call."""

    def attended(self) -> None:
        """Called after the paged call of the layer."""

    def groups(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V `[N, P, K, D]` of each streamed group, in the plan's order; valid until the next is asked for."""
        ...


@dataclass(frozen=True, kw_only=True)
class SlotsPart(PagedPart):
    """The blocks in slots, which may be overwritten once the stream knows that they have been read."""

    stream: KVStream

    def finish(self, layer: int, q_THD: torch.Tensor) -> Iterator[PartialAttention]:
        """Hot: once per layer."""
        yield self.attend(layer, q_THD)
        self.stream.attended()

    def skip(self, layer: int) -> None:
        self.stream.attended()


@dataclass(frozen=True, kw_only=True)
class StreamedPart:
    """An AttentionPart: the groups that are streamed through staging buffers, with a partial result for each.

    `batches`: the keys of each group, in the plan's order.
    """

    stream: KVStream
    backend: AttentionBackend
    batches: Sequence[PagedBatch]
    scale: float

    @property
    def num_partials(self) -> int:
        return len(self.batches)

    def start(self, layer: int, q_THD: torch.Tensor) -> None:
        """Nothing: the stream copies ahead by itself."""

    def finish(self, layer: int, q_THD: torch.Tensor) -> Iterator[PartialAttention]:
        """Hot: once per group."""
        for (k_group, v_group), batch in zip(self.stream.groups(), self.batches, strict=True):
            yield self.backend.attend(q_THD, k_group, v_group, batch, self.scale)

    def skip(self, layer: int) -> None:
        for _ in self.stream.groups():
            pass


class MergedAttention:
    """A StepAttention made of parts, whose results are merged by `merge`, a backend's.

    `parts` are for all tokens, `last_parts` for the rows that the last layer is asked for. `k_cache` and `v_cache`
    `[L, N, P, K, D]` are the slots, where new K and V go.
    """

    def __init__(
        self,
        *,
        stream: KVStream,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        merge: Merge,
        parts: Sequence[AttentionPart[PartialAttention]],
        last_parts: Sequence[AttentionPart[PartialAttention]],
    ) -> None:
        self.stream, self.merge = stream, merge
        self.k_cache, self.v_cache = k_cache, v_cache
        self.slot_mapping_T = slot_mapping_T
        self.parts, self.last_parts = parts, last_parts
        self.num_partials = sum(part.num_partials for part in parts)  # also of last_parts, over the same keys
        self.last_layer = len(k_cache) - 1

    def cells(self, layer: int) -> KVCells:
        """Hot: once per layer."""
        self.stream.begin_layer(layer)
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.slot_mapping_T)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Hot: once per layer."""
        self.stream.stored(layer)
        parts = self.last_parts if layer == self.last_layer else self.parts
        if len(q_THD) == 0:  # nothing is sampled
            for part in parts:
                part.skip(layer)
            return q_THD
        for part in parts:
            part.start(layer, q_THD)
        merged = RunningMerge(self.merge, self.num_partials)
        finish_parts(parts, layer, q_THD, merged.add)
        return merged.result().out_THD
