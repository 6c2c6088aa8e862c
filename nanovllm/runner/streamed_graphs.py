"""Streamed decode steps as pieces of CUDA graphs, cut where copies from CPU memory come in.

Which blocks are streamed changes from step to step, and waiting for them must not be frozen into a graph. So one
graph runs from one layer's paged attention to the next (output projection, MLP, next qkv, store, paged call), and one
for each staging buffer attends to a streamed group and merges. Between the pieces the host only waits for events,
replays and starts copies: about 0.1 ms a layer instead of 0.8 with separate launches.

    piece 0 | group* | piece 1 | group* | ... | piece L      "|": query and result (fp32) are in static buffers

The pieces are cut by the attention itself: it is an argument of the model, and this one ends a capture and begins the
next inside `attend`. Tensors that live across a cut (the residual) stay in the pieces' memory pool, whose addresses
repeat because the pieces of a size are always replayed in the same order. The group graphs, which run between them,
have a pool of their own.
"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch
from tqdm import tqdm

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention
from nanovllm.attention.merge import running_dtype
from nanovllm.core.step_limits import streamed_graph_sizes
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine
from nanovllm.layers.kv_cells import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import DecodeInputs, MakeAttention
from nanovllm.runner.graph_capture import capture, capture_stream


class _Cutter:
    """A StepAttention that ends one captured piece after each paged call, and begins the next.

    A context manager: it begins the first piece, and whatever happens, no stream is left capturing.
    """

    def __init__(self, graphs: "StreamedDecodeGraphs", size: int, pool: Any) -> None:
        self.graphs, self.size, self.pool = graphs, size, pool
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self._capture: AbstractContextManager[torch.cuda.CUDAGraph]

    def __enter__(self) -> "_Cutter":
        self._begin_piece()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._capture.__exit__(*exc_info)

    def _begin_piece(self) -> None:
        self._capture = capture(self.pool)
        self.pieces.append(self._capture.__enter__())

    def cells(self, layer: int) -> KVCells:
        offload = self.graphs.offload
        slot_mapping = self.graphs.inputs.arrays(self.size)["slot_mapping"]
        return KVCells(offload.k_cache_gpu[layer], offload.v_cache_gpu[layer], slot_mapping)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        running_out = self.graphs.attend_paged(self.size, layer, q_THD)
        self._capture.__exit__(None, None, None)
        self._begin_piece()
        return running_out.to(q_THD.dtype)  # the next piece begins with the only rounding of the merged result


class StreamedDecodeGraphs:
    """Decode steps that stream groups and load nothing into slots."""

    name: ClassVar[str] = "streamed"

    def __init__(
        self,
        inputs: DecodeInputs,
        backend: AttentionBackend,
        offload: OffloadEngine,
        scale: float,
        num_heads: int,
    ) -> None:
        """`num_heads`: query heads of this rank."""
        self.inputs, self.backend, self.offload, self.scale = inputs, backend, offload, scale
        self.sizes = streamed_graph_sizes(inputs.max_num_seqs)
        largest, spec = self.sizes[-1], offload.spec
        caches = offload.k_cache_gpu
        self._q = caches.new_zeros(largest, num_heads, spec.head_dim)
        self._out = torch.zeros_like(self._q, dtype=running_dtype(self._q.dtype))  # merged with group after group
        self._lse = caches.new_zeros(num_heads, largest, dtype=torch.float32)
        # For each staging buffer and sequence: how many keys it attends to there, and through which table
        num_buffers = len(offload.k_staging)
        self._group_lens = caches.new_zeros(num_buffers, largest, dtype=torch.int32)
        self._group_tables = caches.new_zeros(num_buffers, largest, spec.staging_group_blocks, dtype=torch.int32)
        self._group_held: list[bytes] = [b""] * num_buffers  # what the two hold
        self._pieces: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._group_graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}

    # -- capture -------------------------------------------------------------------------------------------------

    def capture(
        self, model: CausalLM, make_attention: MakeAttention, sizes: Sequence[int], show_progress: bool
    ) -> None:
        """Capture these sizes, the largest first, whose memory the others then share."""
        pool, group_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        for size in tqdm(
            sorted(sizes, reverse=True), desc="Capturing streamed decode", unit="size", disable=not show_progress
        ):
            self.run_eager(model, make_attention, size)  # loads the kernels that this size needs, outside the capture
            torch.cuda.synchronize()
            with torch.cuda.stream(capture_stream(self.inputs.device)):
                with _Cutter(self, size, pool) as cutter:
                    self.inputs.run(model, size, cutter)
                self._pieces[size] = cutter.pieces
                self._group_graphs[size] = [
                    self._capture_group(size, b, group_pool) for b in range(len(self._group_lens))
                ]
            torch.cuda.synchronize()

    def run_eager(self, model: CausalLM, make_attention: MakeAttention, size: int) -> None:
        """Launch what the graphs of a size hold, kernel by kernel."""
        slot_mapping = self.inputs.arrays(size)["slot_mapping"]
        self.inputs.run(model, size, make_attention(slot_mapping, self.inputs.batch(size)))
        for buffer in range(len(self._group_lens)):
            self._attend_group(size, buffer)

    def reset(self) -> None:
        """Destroy all graphs."""
        for graph in itertools.chain(*self._pieces.values(), *self._group_graphs.values()):
            graph.reset()
        self._pieces.clear()
        self._group_graphs.clear()

    def attend_paged(self, size: int, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Attend to what is on the GPU; query and result go to the static buffers. Returns that of the result, fp32."""
        k_cache, v_cache = self.offload.k_cache_gpu[layer], self.offload.v_cache_gpu[layer]
        result = self.backend.attend(q_THD, k_cache, v_cache, self.inputs.batch(size), self.scale)
        self._q[:size].copy_(q_THD)
        self._out[:size].copy_(result.out_THD)
        self._lse[:, :size].copy_(result.lse_HT)
        return self._out[:size]

    def _capture_group(self, size: int, buffer: int, pool: Any) -> torch.cuda.CUDAGraph:
        with capture(pool) as graph:
            self._attend_group(size, buffer)
        return graph

    def _attend_group(self, size: int, buffer: int) -> None:
        """Attend the static query to a staging buffer and merge into the static result."""
        spec = self.offload.spec
        batch = PagedBatch(
            cu_seqlens_q=self.inputs.cu_seqlens_q[: size + 1],
            context_lens=self._group_lens[buffer, :size],
            block_tables=self._group_tables[buffer, :size],
            max_query_len=1,
            max_context_len=spec.staging_group_blocks * spec.block_size,
            causal=False,
        )
        k, v = self.offload.k_staging[buffer], self.offload.v_staging[buffer]
        result = PartialAttention(self._out[:size], self._lse[:, :size])
        part = self.backend.attend(self._q[:size], k, v, batch, self.scale)
        merged = self.backend.merge((result, part), self._out.dtype)
        for static, value in zip(result, merged, strict=True):
            if value.data_ptr() != static.data_ptr():
                static.copy_(value)

    # -- replay --------------------------------------------------------------------------------------------------

    def run(self, arrays: dict[str, np.ndarray], groups: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
        """One step, as DecodeGraphs.run. `groups`: of each streamed group context lens [B] and tables [B, blocks],
        int32. Hot.
        """
        num_seqs = len(arrays["input_ids"])
        size = self.sizes[np.searchsorted(self.sizes, num_seqs)]
        self.inputs.fill(arrays, size)
        on_device = [_pad_group(lens, tables, size, self._group_lens.device) for lens, tables in groups]
        offload, pieces = self.offload, self._pieces[size]
        for layer in range(offload.spec.num_layers):
            offload.begin_layer(layer)
            pieces[layer].replay()
            offload.stored(layer)
            offload.attended(layer)
            for (key, lens, tables), buffer in zip(on_device, offload.staged_buffers(layer), strict=True):
                if self._group_held[buffer] != key:
                    self._group_held[buffer] = key
                    self._group_lens[buffer, :size].copy_(lens)
                    self._group_tables[buffer, :size].copy_(tables)
                self._group_graphs[size][buffer].replay()
        pieces[-1].replay()
        return self.inputs.logits(num_seqs)


def _pad_group(
    lens: np.ndarray, tables: np.ndarray, size: int, device: torch.device
) -> tuple[bytes, torch.Tensor, torch.Tensor]:
    """A group's lens and tables for `size` sequences, on the device, and bytes that tell equal ones."""
    padded = np.zeros((size, 1 + tables.shape[1]), dtype=np.int32)
    padded[: len(lens), 0], padded[: len(lens), 1:] = lens, tables
    staging = torch.empty(padded.shape, dtype=torch.int32, pin_memory=True)
    staging.numpy()[:] = padded
    on_device = staging.to(device, non_blocking=True)
    return padded.tobytes(), on_device[:, 0], on_device[:, 1:]
