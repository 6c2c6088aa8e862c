"""What the link and the CPU carry while both are busy, as start-up measures it."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import NamedTuple

import torch

from nanovllm.core.cpu_split import CpuRate
from nanovllm.core.step_plan import CpuSpan
from nanovllm.cpu_attention.job import AttentionJob
from nanovllm.kvcache.transfer.cpu_part import CpuAttention, CpuRows
from nanovllm.kvcache.transfer.link import COPY_BYTES
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine

NUM_QUERIES = (1, 4, 16)  # of a sequence: a decode step's, and those of a few guesses
LINK_S = 0.04  # for which the link is kept busy
JOB_S = 0.004  # of one call of the CPU's kernel, long against its start and its end
FIRST_JOB_BYTES = 2**24  # of the call that tells how large such a job is


class MeasuredRates(NamedTuple):
    """In bytes per second."""

    link_byte_per_s: float
    cpu: tuple[CpuRate, ...]


def measure_together(offload: OffloadEngine, cpu: CpuAttention, meet: Callable[[], object]) -> MeasuredRates:
    """Copy from the pool to staging buffers, and attend to the pool meanwhile. Needs a GPU; before the first step.

    The link's rate is that beside a single query per sequence. `meet` returns when every rank has called it, so that
    ranks on one machine measure together. Overwrites staging buffers.
    """
    rates = [_measure(offload, cpu, num_queries, meet) for num_queries in NUM_QUERIES]
    cpu_rates = tuple(CpuRate(n, cpu_rate) for n, (_, cpu_rate) in zip(NUM_QUERIES, rates, strict=True))
    return MeasuredRates(rates[0][0], cpu_rates)


def _measure(
    offload: OffloadEngine, cpu: CpuAttention, num_queries: int, meet: Callable[[], object]
) -> tuple[float, float]:
    """The rates of the link and of the CPU, each while the other is busy."""
    busy = _BusyCpu(offload, cpu, num_queries)
    num_copies = max(1, int(LINK_S * (offload.link_byte_per_s or 0.0)) // COPY_BYTES)
    offload.streams.synchronize()
    meet()
    with busy:
        start_s = time.perf_counter()
        num_bytes = 0
        for target, source in islice(_copies(offload), num_copies):
            offload.streams.h2d.copy(target, source)
            num_bytes += source.nbytes
        offload.streams.synchronize()
        link_s = time.perf_counter() - start_s
    return num_bytes / link_s, busy.byte_per_s


class _BusyCpu:
    """The CPU's kernel at work while the link is, in a thread. A job that has begun is finished."""

    def __init__(self, offload: OffloadEngine, cpu: CpuAttention, num_queries: int) -> None:
        spec = offload.spec
        self._token_bytes = spec.layer_block_bytes // spec.block_size
        self._cpu, self._layers = cpu, cycle(range(spec.num_layers))  # another one each time, so that no cache helps
        self._num_pool_tokens = len(offload.cpu_block_offload_done) * spec.block_size
        self._block_size, self._num_queries = spec.block_size, num_queries
        self._job = self._make_job(FIRST_JOB_BYTES)
        seconds = min(self._attend() for _ in range(2))  # the first one wakes the threads
        self._job = self._make_job(self._job_bytes * JOB_S / seconds)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._num_jobs, self._seconds = 0, 0.0

    def _make_job(self, num_bytes: float) -> AttentionJob:
        num_tokens = min(self._num_pool_tokens, max(64, int(num_bytes / self._token_bytes)))
        self._job_bytes = num_tokens * self._token_bytes
        starts = range(0, num_tokens, self._block_size)
        spans = [CpuSpan(i, 0, min(self._block_size, num_tokens - start)) for i, start in enumerate(starts)]
        return self._cpu.make_job(CpuRows((self._num_queries,), (tuple(spans),)), scale=1.0)

    def _attend(self) -> float:
        start_s = time.perf_counter()
        self._cpu.kernel.attend(self._job, next(self._layers))
        return time.perf_counter() - start_s

    def _work(self) -> None:
        while not (self._stopping.is_set() and self._num_jobs):
            self._seconds += self._attend()
            self._num_jobs += 1

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()

    @property
    def byte_per_s(self) -> float:
        return self._num_jobs * self._job_bytes / self._seconds


def _copies(offload: OffloadEngine) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless pairs of target and source, which read the pool from end to end again and again."""
    source, target = offload.k_cache_cpu.view(-1), offload.k_staging.view(-1)
    size = min(COPY_BYTES // source.element_size(), source.numel(), target.numel())
    for start in cycle(range(0, source.numel() - size + 1, size)):
        yield target[:size], source[start : start + size]
