"""The CPU's part of a streamed decode step that runs as CUDA graphs."""

from collections.abc import Iterator
from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend, PartialAttention
from nanovllm.cpu_attention.job import AttentionJob
from nanovllm.kvcache.transfer.cpu_attention import CpuAttention, CpuRows
from nanovllm.runner.group_graphs import StaticResult


class CpuGraph:
    """An AttentionPart whose partial result is a graph. Replaying it merges what the CPU has computed.

    The query is brought down inside the pieces, before their paged calls. An event in the graph tells the CPU when it
    has arrived, so the CPU starts beside the paged call. Steps in which the CPU has no keys bring it down for nothing.
    """

    def __init__(self, cpu: CpuAttention, backend: AttentionBackend, scale: float) -> None:
        self.cpu, self.backend, self.scale = cpu, backend, scale
        self._query_ready = cpu.streams.graph_event()
        self._job: AttentionJob | None = None  # of the step
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture_query(self, q_BHD: torch.Tensor) -> None:
        """Enqueue that a layer's query goes to CPU memory, and the event that says when it is there."""
        self.cpu.put_query(q_BHD)
        self.cpu.streams.compute.record(self._query_ready)

    def launch_kernels(self, size: int, result: StaticResult) -> None:
        """Launch what the graph of a size holds."""
        result.merge(self.backend, PartialAttention(*self.cpu.result_rows(size)))

    # -- one step ------------------------------------------------------------------------------------------------

    def begin_step(self, size: int, graph: torch.cuda.CUDAGraph, rows: CpuRows | None) -> None:
        """Begin a step of `size` rows including padding. `rows`: None if the CPU attends to nothing."""
        self._graph = graph
        self._job = rows and self.cpu.make_job(rows, self.scale, num_padding_rows=size - sum(rows.num_queries))

    @property
    def num_partials(self) -> int:
        return 0 if self._job is None else 1

    def start(self, layer: int, q_THD: torch.Tensor) -> None:
        """Hot: once per layer."""
        if self._job is not None:
            self.cpu.launch(self._job, layer, self._query_ready)

    def finish(self, layer: int, q_THD: torch.Tensor) -> Iterator[Any]:
        """Hot: once per layer."""
        if self._job is not None:
            self.cpu.wait_for_results()
            yield self._graph

    def skip(self, layer: int) -> None:
        raise AssertionError("every sequence of a decode step has a query")
