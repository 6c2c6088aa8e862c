"""One rank's attention on the CPU: which kernel and threads it has, and how fast they are beside the link."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.capabilities.cpu_attention.cpu_split import CpuRate, CpuSplit
from nanovllm.capabilities.cpu_attention.job import AttentionJob
from nanovllm.capabilities.cpu_attention.kernels import choose_kernel
from nanovllm.capabilities.cpu_attention.queue import CpuAttention, CpuRows
from nanovllm.capabilities.cpu_attention.threads import attention_cpus, available_cpus
from nanovllm.config import Config
from nanovllm.device.cuda import UnsupportedDriverError
from nanovllm.device.devices import memory_node
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.offload.offload_engine import COPY_BYTES, OffloadEngine
from nanovllm.plan.kv_spec import KVCacheSpec
from nanovllm.plan.step_limits import MAX_VERIFYING_ROWS, streamed_graph_sizes
from nanovllm.plan.step_plan import CpuSpan, KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.runner.step_result import StepResult

MAX_QUERIES = 512  # in a step in which the CPU attends, unless max_num_seqs is larger
NUM_TIMED_STEPS = 8
# Queries of one sequence that are measured: a decode step's, and with guesses
NUM_QUERIES = (1, 4, 8, 16, 32, MAX_VERIFYING_ROWS)
LINK_S = 0.04  # time that the link is kept busy
JOB_S = 0.004  # duration of a timed call of the CPU's kernel, long against its start and end
FIRST_JOB_BYTES = 2**24  # read by the first call, which tells how large such a job is

logger = logging.getLogger("nanovllm")


def make_cpu_attention(config: Config, offload: OffloadEngine, num_heads: int, tp: TPGroup) -> CpuAttention | None:
    """None if the CPU takes no part. `num_heads`: query heads of this rank.

    Raises ConfigError for too many threads, and where the CPU must take part and the driver does not allow it.
    """
    is_gpu = offload.device.type == "cuda"
    if config.cpu_attention == "off":
        return None
    if config.cpu_attention == "auto" and is_gpu and len(available_cpus()) < 2 * tp.size:
        logger.info("attention on the CPU: off, because the only CPU drives the GPU")
        return None
    cpus = attention_cpus(config.cpu_attention_threads, tp.rank, tp.size, memory_node(offload.device))
    kernel = choose_kernel(
        cpus.cpus, head_dim=offload.spec.head_dim, dtype=offload.dtype, is_pinned=cpus.is_pinned, stays_awake=is_gpu
    )
    try:
        cpu = CpuAttention(
            kernel,
            offload.streams,
            k_cache=offload.k_cache_cpu,
            v_cache=offload.v_cache_cpu,
            num_heads=num_heads,
            max_rows=max(MAX_QUERIES, streamed_graph_sizes(config.max_num_seqs)[-1]),
            is_pinned=is_gpu,
        )
    except UnsupportedDriverError as error:
        kernel.close()
        if config.cpu_attention == "on":
            raise ConfigError(f"cpu_attention='on' cannot work here: {error}; use 'auto' or 'off'") from error
        logger.warning("attention on the CPU: none, %s", error)
        return None
    if tp.rank == 0:
        logger.info("attention on the CPU: %s", cpu.kernel_name)
    return cpu


def measure_split(
    offload: OffloadEngine, cpu: CpuAttention, launch: Callable[[StepPlan], StepResult], tp: TPGroup, *, is_forced: bool
) -> CpuSplit:
    """The split for the slowest rank. On a CPU nothing is measured, because there the CPU attends to everything."""
    if offload.device.type == "cuda":
        return split_of_slowest_rank(offload, cpu, launch, tp, is_forced=is_forced)
    token_bytes = offload.spec.layer_block_bytes // offload.spec.block_size
    return CpuSplit(
        token_bytes=token_bytes, max_queries=cpu.max_rows, max_sequence_queries=cpu.max_rows, is_forced=is_forced
    )


def split_of_slowest_rank(
    offload: OffloadEngine, cpu: CpuAttention, launch: Callable[[StepPlan], StepResult], tp: TPGroup, *, is_forced: bool
) -> CpuSplit:
    """Measure on every rank at the same time. `launch` runs a step as requests will."""

    def gather(own: list[float]) -> torch.Tensor:
        return tp.all_gather(torch.tensor(own, dtype=torch.float64, device=offload.device)).view(tp.size, -1).cpu()

    link_byte_per_s, rates = measure_together(offload, cpu, meet=lambda: gather([0.0]))
    idle_s, signal_s = _measure_idle_s(offload.spec, launch)
    all_ranks = gather([link_byte_per_s, *(rate.byte_per_s for rate in rates), -idle_s])
    slowest_link, *cpu_rates, idle_s = all_ranks.amin(0).tolist()
    return CpuSplit(
        token_bytes=offload.spec.layer_block_bytes // offload.spec.block_size,
        link_byte_per_s=slowest_link,
        cpu_rates=tuple(rate._replace(byte_per_s=least) for rate, least in zip(rates, cpu_rates, strict=True)),
        idle_s=-idle_s,
        signal_s=signal_s,
        rank_0_lead=(link_byte_per_s / slowest_link, rates[0].byte_per_s / cpu_rates[0]),  # read on rank 0 only
        max_queries=cpu.max_rows,
        max_sequence_queries=rates[-1].num_queries,
        is_forced=is_forced,
        unit_tokens=cpu.kernel.unit_tokens,
    )


def _measure_idle_s(spec: KVCacheSpec, launch: Callable[[StepPlan], StepResult]) -> tuple[float, float]:
    """The CPU's idle time in each layer: a decode step in which it attends to a single token, over its layers. Also the
    time of such a job in a layer.
    """
    sampling = SamplingRow()
    step = SequenceStep(
        seq_id=0,
        token_ids=np.zeros(1, dtype=np.int64),
        position=0,
        num_prompt_tokens=1,
        block_table=(0,),
        num_paged_keys=1,
        sampling=sampling,
    )
    plan = StepPlan((step,), KVMoves(cpu_spans=((CpuSpan(0, 0, 1),),)))
    for _ in range(2):
        launch(plan).token_ids()
    start_s = time.perf_counter()
    results = [launch(plan) for _ in range(NUM_TIMED_STEPS)]
    results[-1].token_ids()
    idle_s = (time.perf_counter() - start_s) / NUM_TIMED_STEPS / spec.num_layers
    jobs_s = [times.cpu_s for result in results if (times := result.layer_times()) and times.cpu_s is not None]
    return idle_s, median(jobs_s) if jobs_s else 0.0


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
    # Fewer queries are never slower: if other work disturbed one measurement, those after it say so
    at_least = [max(cpu_rate for _, cpu_rate in rates[i:]) for i in range(len(rates))]
    return MeasuredRates(rates[0][0], tuple(map(CpuRate, NUM_QUERIES, at_least)))


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
