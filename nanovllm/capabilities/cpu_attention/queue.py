"""CpuAttention: attention on the CPU to keys that are not on the GPU, and the few rows that cross the link for it.

In each layer the queries go down and the results come up: some KiB, where the keys would be MiB. All of it is enqueued,
so the host waits for nothing.

Stream edges:
  E11  query in CPU memory -> attended  compute -> cpu  query_ready
  E12  attended -> merged               cpu -> compute  attended
No other edge is needed:
- Compute waits for the results of every layer (E12), so the next layer may use the same buffers.
- The CPU attends only to blocks without a slot. Before compute uses the slot that such a block had, it waits until the
  block has been copied out (E4, or E5 and E1), and the query comes after that.
- A block is written (E3) only from what compute stored in a later step, after this step's results.
"""

from collections import deque
from typing import NamedTuple

import torch

from nanovllm.capabilities.cpu_attention.job import AttentionJob, RowSpans, TokenSpan
from nanovllm.capabilities.cpu_attention.kernels import CpuKernel
from nanovllm.offload.streams import Event, Streams, WorkTimer
from nanovllm.plan.step_plan import CpuSpan


class CpuRows(NamedTuple):
    """The keys that each sequence's queries attend to on the CPU. The queries of the sequences follow each other."""

    num_queries: tuple[int, ...]
    spans: tuple[tuple[CpuSpan, ...], ...]


class _Rows(NamedTuple):
    """Queries and results of up to N rows, [N, H, D], and their LSE, H x N fp32 values."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def results(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads = self.out.shape[1]
        return self.out[:num_rows], self.lse[: num_heads * num_rows].view(num_heads, num_rows)


class CpuAttention:
    """The calls of a step: make_job; for each layer begin_layer and `results`. Where CUDA graphs put the query and read
    the results, `launch` and `wait_for_results` replace these two.

    Queries and results are in CPU memory, pinned for a GPU, whose kernels write and read them there: a copy of theirs
    would wait behind the copies of whole blocks.
    """

    def __init__(
        self,
        kernel: CpuKernel,
        streams: Streams,
        *,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        num_heads: int,
        max_rows: int,
        is_pinned: bool,
    ) -> None:
        """`k_cache` and `v_cache`: the pool, `[L, N, P, K, D]`. `num_heads`: query heads of this rank."""
        self.kernel, self.max_rows, self.num_heads = kernel, max_rows, num_heads
        self.streams = streams
        self._stream = streams.cpu(kernel)
        self.timer = WorkTimer(streams, self._stream)
        self._k_cache, self._v_cache = k_cache, v_cache
        q, out = (torch.zeros(max_rows, num_heads, k_cache.shape[-1], dtype=k_cache.dtype) for _ in ("q", "out"))
        host = (q, out, torch.zeros(num_heads * max_rows))
        self._host_rows = _Rows(*(rows.pin_memory() if is_pinned else rows for rows in host))
        self._device_rows = _Rows(*(streams.on_device(rows) for rows in self._host_rows))
        self._jobs: deque[tuple[AttentionJob, Event]] = deque()  # jobs that may still be running
        self._last_job: tuple[tuple[CpuRows, float, int], AttentionJob] | None = None  # with make_job's arguments

    @property
    def kernel_name(self) -> str:
        """The kernel and its number of threads."""
        return f"{self.kernel.name} kernel, {self.kernel.num_threads} threads"

    def put_query(self, q_THD: torch.Tensor) -> None:
        """Enqueue on compute that the query goes to CPU memory. Hot: once per layer."""
        self.streams.compute.copy_by_kernel(self._device_rows.q[: len(q_THD)], q_THD)

    def result_rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of so many rows on the device: [T, H, D], and the LSE [H, T]. They change with every layer."""
        return self._device_rows.results(num_rows)

    def make_job(self, rows: CpuRows, scale: float, num_padding_rows: int = 0) -> AttentionJob:
        """A step's attention, for queries in this order and then some that see no key. Most steps repeat the last one,
        and so does their job.
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

    def begin_layer(self, job: AttentionJob, layer: int, q_THD: torch.Tensor) -> None:
        """Bring the layer's query down and attend. Hot: once per layer."""
        self.put_query(q_THD)
        query_ready = self.streams.event()
        self.streams.compute.record(query_ready)
        self.launch(job, layer, query_ready)

    def launch(self, job: AttentionJob, layer: int, query_ready: Event) -> None:
        """Attend once `query_ready` is done. Hot: once per layer."""
        self._stream.wait(query_ready)  # E11: query is there -> attended
        start = self.timer.begin()
        attended = self._stream.attend(job, layer)
        if start is not None:
            self._stream.wait(attended)  # its own work: only so that the end can be timed
            self.timer.end(start, 0)
        if self._jobs and self._jobs[-1][0] is job:
            self._jobs.pop()
        self._jobs.append((job, attended))

    def wait_for_results(self) -> None:
        """Compute may read the results of the layer that was launched last. Hot: once per layer."""
        _, attended = self._jobs[-1]
        self.streams.compute.wait(attended)  # E12: attended -> merged

    def results(self, q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's results for these queries: [T, H, D], and the LSE [H, T]. Hot: once per layer."""
        self.wait_for_results()
        return self.result_rows(len(q_THD))

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self.kernel.close()
