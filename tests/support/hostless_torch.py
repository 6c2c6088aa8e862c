"""The torch backend for batches as CUDA graphs have them, whose sizes are not known on the host."""

from dataclasses import replace

import torch

from nanovllm.attention.backends.torch_backend import TorchBackend
from nanovllm.attention.base import HostTables, PagedBatch, PartialAttention


class HostlessTorch(TorchBackend):
    """Reads the sizes from the tensors where the batch does not tell them."""

    def attend(
        self, q_THD: torch.Tensor, k_NPKD: torch.Tensor, v_NPKD: torch.Tensor, batch: PagedBatch, scale: float
    ) -> PartialAttention:
        if batch.host is None:
            sizes = (batch.cu_seqlens_q.diff(), batch.context_lens, batch.block_tables)
            batch = replace(batch, host=HostTables(*(size.tolist() for size in sizes)))
        return super().attend(q_THD, k_NPKD, v_NPKD, batch, scale)
