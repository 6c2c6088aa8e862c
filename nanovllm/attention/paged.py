"""Attention of a step whose keys are all on the GPU: one call over the paged cache."""

import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch
from nanovllm.layers.kv_cells import KVCells


class PagedAttention:
    """A StepAttention over caches `[layers, N, P, K, D]` (legend: attention/base.py).

    `batch` describes the keys of all tokens, `last_batch` those of the rows that the last layer is asked for.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        batch: PagedBatch,
        last_batch: PagedBatch,
        scale: float,
    ) -> None:
        self.backend = backend
        self.k_cache, self.v_cache = k_cache, v_cache
        self.slot_mapping_T = slot_mapping_T
        self.batch, self.last_batch = batch, last_batch
        self.scale = scale

    def cells(self, layer: int) -> KVCells:
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.slot_mapping_T)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Hot: once per layer."""
        if len(q_THD) == 0:
            return q_THD
        batch = self.batch if len(q_THD) == len(self.slot_mapping_T) else self.last_batch
        return self.backend.attend(q_THD, self.k_cache[layer], self.v_cache[layer], batch, self.scale).out_THD
