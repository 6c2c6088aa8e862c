"""CpuAttention: attention on the CPU to keys that are not on the GPU.

In each layer the queries are copied to CPU memory and the results are copied back. Queries and results take a few KiB,
the keys would take MiB. The copies and the attention are enqueued, so the host never waits.

Stream edges:
  E11  query in CPU memory -> attended  compute -> cpu  query_ready
  E12  attended -> merged               cpu -> compute  attended
No other edge is needed:
- Compute waits for the results of every layer (E12), so the next layer may use the same buffers.
- The CPU attends only to blocks without a slot. Compute uses a block's former slot only after it has waited until the
  block has been copied out (E4, or E5 and E1). Compute produces the query after this wait, so the block is complete in
  CPU memory when the CPU attends.
- A block is written (E3) only with K and V that compute stores in a later step, after the results of this step.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm.attention.base import PartialAttention
from nanovllm.capabilities.cpu_attention.job import AttentionJob, CpuKernel, RowSpans, TokenSpan
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import Event, TimedPiece, TimedPieces, WorkTimer
from nanovllm.runner.seams import CpuRows


class RowBuffers(NamedTuple):
    """Queries and results of up to N rows, [N, H, D], and the results' LSE, H x N fp32 values."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def results(self, num_rows: int) -> PartialAttention:
        num_heads = self.out.shape[1]
        return PartialAttention(self.out[:num_rows], self.lse[: num_heads * num_rows].view(num_heads, num_rows))


class CpuAttention:
    """The CpuPart of an engine with CPU attention. StepJobs and GraphJobs make the calls of a step.

    Queries and results are in CPU memory. With a GPU the memory is pinned, and kernels of the GPU read and write it.
    Copy engines would be too slow, because they would first finish the queued copies of whole blocks.
    """

    def __init__(
        self, kernel: CpuKernel, offload: OffloadEngine, *, num_heads: int, max_rows: int, is_pinned: bool
    ) -> None:
        """num_heads: query heads of this rank. max_rows: query rows of the largest step."""
        self.kernel, self.max_rows, self.streams = kernel, max_rows, offload.streams
        self._stream = self.streams.cpu(kernel)
        self._timer = WorkTimer(self.streams, self._stream)
        self._k_cache, self._v_cache = k_cache, _ = offload.k_cache_cpu, offload.v_cache_cpu
        q, out = (torch.zeros(max_rows, num_heads, k_cache.shape[-1], dtype=k_cache.dtype) for _ in ("q", "out"))
        host = (q, out, torch.zeros(num_heads * max_rows))
        self._host_rows = RowBuffers(*(rows.pin_memory() if is_pinned else rows for rows in host))
        self._device_rows = RowBuffers(*(self.streams.on_device(rows) for rows in self._host_rows))
        self._jobs: deque[tuple[AttentionJob, Event]] = deque()  # jobs that may still be running
        self._last_job: tuple[tuple[CpuRows, float, int], AttentionJob] | None = None  # make_job's arguments and result

    @property
    def name(self) -> str:
        """Return the name of the kernel and its number of threads."""
        return f"{self.kernel.name} kernel, {self.kernel.num_threads} threads"

    def step(self, rows: CpuRows, scale: float) -> "StepJobs":
        return StepJobs(self, self.make_job(rows, scale))

    def graphs(self, scale: float) -> Sequence["GraphJobs"]:
        return (GraphJobs(self, scale),)

    def end_step(self, link_pieces: Sequence[TimedPiece]) -> TimedPieces:
        return TimedPieces(self.streams, link_pieces, self._timer.take())

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self.kernel.close()

    # -- the calls of a step -------------------------------------------------------------------------------------

    def make_job(self, rows: CpuRows, scale: float, num_padding_rows: int = 0) -> AttentionJob:
        """Return a step's attention job, for queries in the order of `rows` followed by padding rows without keys.

        Most steps have the same arguments as the previous step, and reuse its job.
        """
        while self._jobs and self.streams.is_done(self._jobs[0][1]):
            self._jobs.popleft()
        key = rows, scale, num_padding_rows
        if self._last_job is None or self._last_job[0] != key:
            self._last_job = key, self._make_job(*key)
        return self._last_job[1]

    def _make_job(self, rows: CpuRows, scale: float, num_padding_rows: int) -> AttentionJob:
        block_size = self._k_cache.shape[2]
        row_spans = [
            RowSpans(n, tuple(TokenSpan(block_id * block_size + start, end - start) for block_id, start, end in spans))
            for n, spans in zip(*rows, strict=True)
        ]
        if num_padding_rows:
            row_spans.append(RowSpans(num_padding_rows, ()))
        num_rows = sum(row.num_rows for row in row_spans)
        out, lse = self._host_rows.results(num_rows)
        return AttentionJob(
            k_cache=self._k_cache,
            v_cache=self._v_cache,
            q_THD=self._host_rows.q[:num_rows],
            out_THD=out,
            lse_HT=lse,
            rows=row_spans,
            scale=scale,
            num_threads=self.kernel.num_threads,
            scratch=None if self._last_job is None else self._last_job[1].scratch,
        )

    def put_query(self, q_THD: torch.Tensor) -> None:
        """Enqueue the copy of the query to CPU memory on the compute stream. Hot: once per layer."""
        self.streams.compute.copy_by_kernel(self._device_rows.q[: len(q_THD)], q_THD)

    def launch(self, job: AttentionJob, layer: int, query_ready: Event) -> None:
        """Enqueue the attention of a layer, to run after `query_ready`. Hot: once per layer."""
        self._stream.wait(query_ready)  # E11: query in CPU memory -> attended
        start = self._timer.begin()
        attended = self._stream.attend(job, layer)
        if start is not None:
            self._stream.wait(attended)  # not an edge: the stream waits for its own work, to time the end of the work
            self._timer.end(start, 0)
        if self._jobs and self._jobs[-1][0] is job:
            self._jobs.pop()
        self._jobs.append((job, attended))

    def wait_for_results(self) -> None:
        """Let the compute stream wait for the results of the layer that was launched last. Hot: once per layer."""
        _, attended = self._jobs[-1]
        self.streams.compute.wait(attended)  # E12: attended -> merged

    def result_rows(self, num_rows: int) -> PartialAttention:
        """Return the results of `num_rows` rows on the device. Every layer overwrites them."""
        return self._device_rows.results(num_rows)


class StepJobs:
    """The CpuStep of CpuAttention."""

    def __init__(self, cpu: CpuAttention, job: AttentionJob) -> None:
        self.cpu, self.job = cpu, job

    def begin_layer(self, layer: int, q_THD: torch.Tensor) -> None:
        self.cpu.put_query(q_THD)
        query_ready = self.cpu.streams.event()
        self.cpu.streams.compute.record(query_ready)
        self.cpu.launch(self.job, layer, query_ready)

    def results(self, q_THD: torch.Tensor) -> PartialAttention:
        self.cpu.wait_for_results()
        return self.cpu.result_rows(len(q_THD))


class GraphJobs:
    """The CpuGraphs of CpuAttention.

    The graphs record an event after the copy of the query, so the CPU attends concurrently with the paged attention. In
    steps in which the CPU has no keys, the graphs copy the query needlessly.
    """

    def __init__(self, cpu: CpuAttention, scale: float) -> None:
        self.cpu, self.scale = cpu, scale
        self._query_ready = cpu.streams.graph_event()
        self._job: AttentionJob | None = None  # of the current step, or None if the CPU has no keys in the step

    def capture_query(self, q_BHD: torch.Tensor) -> None:
        self.cpu.put_query(q_BHD)
        self.cpu.streams.compute.record(self._query_ready)

    def results(self, size: int) -> PartialAttention:
        return self.cpu.result_rows(size)

    def begin_step(self, size: int, rows: CpuRows | None) -> None:
        self._job = rows and self.cpu.make_job(rows, self.scale, num_padding_rows=size - sum(rows.num_queries))

    def begin_layer(self, layer: int) -> None:
        if self._job is not None:
            self.cpu.launch(self._job, layer, self._query_ready)

    def end_layer(self) -> bool:
        if self._job is None:
            return False
        self.cpu.wait_for_results()
        return True
