"""Attention over the keys of the paged cache on the GPU: one backend call per layer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention
from nanovllm.layers.kv_cells import KVCells


@dataclass(frozen=True, kw_only=True)
class PagedPart:
    """An AttentionPart: the keys that `batch` names in a cache on the GPU.

    `k_cache` and `v_cache` are `[L, N, P, K, D]`, of L layers (legend: attention/base.py).
    """

    backend: AttentionBackend
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: PagedBatch
    scale: float
    num_partials = 1

    def attend(self, layer: int, q_THD: torch.Tensor) -> PartialAttention:
        """Hot: once per layer."""
        return self.backend.attend(q_THD, self.k_cache[layer], self.v_cache[layer], self.batch, self.scale)

    def start(self, layer: int, q_THD: torch.Tensor) -> None:
        """Nothing: the call itself is the first work that `finish` enqueues."""

    def finish(self, layer: int, q_THD: torch.Tensor) -> Iterator[PartialAttention]:
        yield self.attend(layer, q_THD)

    def skip(self, layer: int) -> None:
        pass


class PagedAttention:
    """A StepAttention of a single part, so there is nothing to merge: all keys are on the GPU.

    `part` is for all tokens, `last_part` for the rows that the last layer is asked for; both read the same cache.
    """

    def __init__(self, slot_mapping_T: torch.Tensor, part: PagedPart, last_part: PagedPart) -> None:
        self.slot_mapping_T = slot_mapping_T
        self.part, self.last_part = part, last_part
        self.last_layer = len(part.k_cache) - 1

    def cells(self, layer: int) -> KVCells:
        return KVCells(self.part.k_cache[layer], self.part.v_cache[layer], self.slot_mapping_T)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Hot: once per layer."""
        if len(q_THD) == 0:
            return q_THD
        part = self.last_part if layer == self.last_layer else self.part
        return part.attend(layer, q_THD).out_THD
