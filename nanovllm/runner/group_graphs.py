"""The streamed part of a decode step as CUDA graphs. Each staging buffer has one, which attends to the group in the
buffer and merges the result.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention
from nanovllm.attention.merge import running_dtype
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine
from nanovllm.runner.decode_inputs import DecodeInputs
from nanovllm.runner.inputs import GroupArrays


class StaticResult:
    """The query of a layer and the running result of its parts, in static buffers that all graphs share.

    A graph cannot know whether it merges the last part, so the result stays in fp32 and its reader rounds it.
    """

    def __init__(self, like: torch.Tensor, max_num_rows: int, num_heads: int, head_dim: int) -> None:
        """`like` gives the dtype and the device. `num_heads`: query heads of this rank."""
        self.q_BHD = like.new_zeros(max_num_rows, num_heads, head_dim)
        self.out_BHD = torch.zeros_like(self.q_BHD, dtype=running_dtype(like.dtype))
        self.lse_HB = like.new_zeros(num_heads, max_num_rows, dtype=torch.float32)

    def at(self, size: int) -> PartialAttention:
        """The running result of `size` rows."""
        return PartialAttention(self.out_BHD[:size], self.lse_HB[:, :size])

    def begin(self, q_BHD: torch.Tensor, partial: PartialAttention) -> torch.Tensor:
        """Store a layer's query and its first partial result. Returns the buffer of the running result, [B, H, D]."""
        size = len(q_BHD)
        self.q_BHD[:size].copy_(q_BHD)
        for static, value in zip(self.at(size), partial, strict=True):
            static.copy_(value)
        return self.out_BHD[:size]

    def merge(self, backend: AttentionBackend, partial: PartialAttention) -> None:
        """Merge another partial result into the running one."""
        running = self.at(len(partial.out_THD))
        merged = backend.merge((running, partial), self.out_BHD.dtype)
        for static, value in zip(running, merged, strict=True):
            if value.data_ptr() != static.data_ptr():
                static.copy_(value)


class _PaddedGroup(NamedTuple):
    """A streamed group's arrays for all sequences of a graph, on the device."""

    key: bytes  # equal for groups with equal content
    context_lens: torch.Tensor
    block_tables: torch.Tensor


class GroupGraphs:
    """An AttentionPart whose partial results are graphs. Replaying one attends to a group and merges the result.

    StreamedDecodeGraphs owns the graphs. This class owns their static inputs except the query: for each staging buffer,
    how many of its keys each sequence attends to, and each sequence's block table.
    """

    def __init__(
        self,
        inputs: DecodeInputs,
        *,
        max_num_seqs: int,
        max_query_len: int,
        offload: OffloadEngine,
        backend: AttentionBackend,
        scale: float,
    ) -> None:
        """`max_num_seqs`: of the largest graph. `max_query_len`: the most queries of a sequence."""
        self.inputs, self.max_query_len = inputs, max_query_len
        self.offload, self.backend, self.scale = offload, backend, scale
        caches, spec, largest = offload.k_cache_gpu, offload.spec, max_num_seqs
        self.num_buffers = len(offload.k_staging)
        self._lens = caches.new_zeros(self.num_buffers, largest, dtype=torch.int32)
        self._tables = caches.new_zeros(self.num_buffers, largest, spec.staging_group_blocks, dtype=torch.int32)
        self._held: list[bytes] = [b""] * self.num_buffers  # keys of the groups that _lens and _tables describe
        self._size = 0  # size of the step's graphs
        self._graphs: Sequence[torch.cuda.CUDAGraph] = ()
        self._groups: list[_PaddedGroup] = []

    def launch_kernels(self, size: int, buffer: int, result: StaticResult) -> None:
        """Launch the kernels that the graph of this size and buffer captures."""
        spec = self.offload.spec
        batch = PagedBatch(
            cu_seqlens_q=self.inputs.cu_seqlens_q(size, self.max_query_len),
            context_lens=self._lens[buffer, :size],
            block_tables=self._tables[buffer, :size],
            max_query_len=self.max_query_len,
            max_context_len=spec.staging_group_blocks * spec.block_size,
            causal=False,
        )
        k, v = self.offload.k_staging[buffer], self.offload.v_staging[buffer]
        result.merge(self.backend, self.backend.attend(result.q_BHD[:size], k, v, batch, self.scale))

    # -- one step ------------------------------------------------------------------------------------------------

    def begin_step(self, size: int, graphs: Sequence[torch.cuda.CUDAGraph], groups: Sequence[GroupArrays]) -> None:
        """Enqueue the copies of the groups' arrays. `graphs` are those of `size`, one for each buffer."""
        self._size, self._graphs = size, graphs
        self._groups = [_pad_group(group, size, self._lens.device) for group in groups]

    def end_step(self) -> None:
        """Drop the references to the step's arrays."""
        self._graphs, self._groups = (), []

    @property
    def num_partials(self) -> int:
        return len(self._groups)

    def start(self, layer: int, q_THD: torch.Tensor) -> None:
        """Nothing to do: the offload engine copies ahead by itself."""

    def finish(self, layer: int, q_THD: torch.Tensor) -> Iterator[torch.cuda.CUDAGraph]:
        """Yield the graph to replay for each group. Hot: once per group."""
        held, graphs = self._held, self._graphs
        for group, buffer in zip(self._groups, self.offload.staged_buffers(), strict=True):
            if held[buffer] != group.key:
                held[buffer] = group.key
                self._lens[buffer, : self._size].copy_(group.context_lens)
                self._tables[buffer, : self._size].copy_(group.block_tables)
            yield graphs[buffer]

    def skip(self, layer: int) -> None:
        raise AssertionError("every sequence of a decode step has a query")


def _pad_group(group: GroupArrays, size: int, device: torch.device) -> _PaddedGroup:
    """A group's arrays, padded to `size` sequences. Those added have no keys."""
    num_seqs, num_columns = group.block_tables.shape
    padded = np.zeros((size, 1 + num_columns), dtype=np.int32)
    padded[:num_seqs, 0], padded[:num_seqs, 1:] = group.context_lens, group.block_tables
    staging = torch.empty(padded.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    staging.numpy()[:] = padded
    on_device = staging.to(device, non_blocking=True)
    return _PaddedGroup(padded.tobytes(), on_device[:, 0], on_device[:, 1:])
