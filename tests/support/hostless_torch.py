"""The torch backend for batches as CUDA graphs have them, whose sizes are not known on the host."""

from dataclasses import replace

import torch

from nanovllm.attention.backends.torch_backend import TorchBackend
from nanovllm.attention.base import HostTables, PagedBatch, PartialAttention


class HostlessTorch(TorchBackend):
    """Reads the sizes from the tensors, one query per sequence, where the batch does not tell them."""

    def attend(
        self, q_THD: torch.Tensor, k_NPKD: torch.Tensor, v_NPKD: torch.Tensor, batch: PagedBatch, scale: float
    ) -> PartialAttention:
        if batch.host is None:
            sizes = batch.context_lens.tolist(), batch.block_tables.tolist()
            batch = replace(batch, host=HostTables([1] * len(q_THD), *sizes))
        return super().attend(q_THD, k_NPKD, v_NPKD, batch, scale)
