"""Attention of a step with offload: the paged call over what is on the GPU, one call for each streamed group, merged.

Keys carry their rotation, so the order of the blocks before the chunk does not matter; only the paged call, which
holds the chunk itself, is causal.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch
from nanovllm.attention.merge import RunningMerge
from nanovllm.layers.kv_cells import KVCells


class KVStream(Protocol):
    """Where streamed keys come from (kvcache/transfer/offload_engine.py), seen from one layer of a step."""

    def begin_layer(self, layer: int) -> None:
        """Called before the layer writes or reads any slot."""

    def stored(self, layer: int) -> None:
        """Called when the new K and V are in their slots, before the paged call."""

    def attended(self, layer: int) -> None:
        """Called after the paged call."""

    def groups(self, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V `[N, P, K, D]` of each streamed group, in the plan's order; valid until the next is asked for."""
        ...


class StreamedAttention:
    """A StepAttention. `batch` and `last_batch` as in PagedAttention, for the paged keys; `group_batches` and
    `last_group_batches` the same for each streamed group.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        stream: KVStream,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        batch: PagedBatch,
        last_batch: PagedBatch,
        group_batches: Sequence[PagedBatch],
        last_group_batches: Sequence[PagedBatch],
        scale: float,
    ) -> None:
        self.backend, self.stream = backend, stream
        self.k_cache, self.v_cache = k_cache, v_cache
        self.slot_mapping_T = slot_mapping_T
        self.all_rows = batch, group_batches
        self.last_rows = last_batch, last_group_batches
        self.scale = scale

    def cells(self, layer: int) -> KVCells:
        """Hot: once per layer."""
        self.stream.begin_layer(layer)
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.slot_mapping_T)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Hot: once per layer."""
        backend, stream = self.backend, self.stream
        batch, group_batches = self.all_rows if len(q_THD) == len(self.slot_mapping_T) else self.last_rows
        stream.stored(layer)
        if len(q_THD) == 0:  # nothing is sampled; what was loaded for this layer is released unread
            stream.attended(layer)
            for _ in stream.groups(layer):
                pass
            return q_THD
        merged = RunningMerge(backend.merge, num_parts=1 + len(group_batches))
        merged.add(backend.attend(q_THD, self.k_cache[layer], self.v_cache[layer], batch, self.scale))
        stream.attended(layer)
        for (k_group, v_group), group_batch in zip(stream.groups(layer), group_batches, strict=True):
            merged.add(backend.attend(q_THD, k_group, v_group, group_batch, self.scale))
        return merged.result().out_THD
