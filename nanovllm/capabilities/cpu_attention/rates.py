"""Start-up of CPU attention on one rank: opens the kernel, and measures the rates of link and CPU with both busy."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from statistics import median

import numpy as np
import torch

from nanovllm.capabilities.cpu_attention.cpu_split import CpuRate, CpuSplit
from nanovllm.capabilities.cpu_attention.job import AttentionJob, CpuKernel
from nanovllm.capabilities.cpu_attention.kernels import choose_kernel, why_unfit
from nanovllm.capabilities.cpu_attention.queue import CpuAttention
from nanovllm.capabilities.cpu_attention.threads import attention_cpus, available_cpus
from nanovllm.config import Config
from nanovllm.device.cuda import UnsupportedDriverError
from nanovllm.device.devices import memory_node
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.offload.offload_engine import COPY_BYTES, OffloadEngine
from nanovllm.plan.step_limits import MAX_VERIFYING_ROWS, streamed_graph_sizes
from nanovllm.plan.step_plan import CpuSpan, KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.runner.kv_memory import OffloadMemory
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.seams import CpuPart, CpuRows, NoCpuPart

MAX_QUERIES = 512  # most queries of a step in which the CPU attends, unless max_num_seqs is larger
NUM_TIMED_STEPS = 8
NUM_QUERIES = (1, 4, 8, 16, 32, MAX_VERIFYING_ROWS)  # numbers of queries of a sequence to measure the CPU's rate with
LINK_S = 0.04  # time for which the link is kept busy
JOB_S = 0.004  # duration of a timed call of the CPU's kernel, long compared with the overhead of a call
FIRST_JOB_BYTES = 2**24  # bytes that the first call reads; its duration gives the size of a job of JOB_S

logger = logging.getLogger("nanovllm")


def make_cpu_attention(
    config: Config, offload: OffloadEngine, num_heads: int, tp: TPGroup, shared: CpuKernel | None = None
) -> CpuPart:
    """Start attention on the CPU according to the options. num_heads: query heads of this rank. shared: the kernel that
    computes experts, if there is one. Its threads attend, too, if it supports the KV cache.

    Raises ConfigError for too many threads, and if CPU attention is required and the driver does not allow it.
    """
    is_gpu = offload.device.type == "cuda"
    if config.cpu_attention == "off":
        return NoCpuPart()
    if config.cpu_attention == "auto" and is_gpu and len(available_cpus()) < 2 * tp.size:
        logger.info("attention on the CPU: off, because the only CPU drives the GPU")
        return NoCpuPart()
    kernel = shared
    if kernel is None or why_unfit(offload.spec.head_dim, offload.dtype) is not None:
        cpus = attention_cpus(config.cpu_attention_threads, tp.rank, tp.size, memory_node(offload.device))
        kernel = choose_kernel(
            cpus.cpus, head_dim=offload.spec.head_dim, dtype=offload.dtype, is_pinned=cpus.is_pinned, stays_awake=is_gpu
        )
    max_rows = max(MAX_QUERIES, streamed_graph_sizes(config.max_num_seqs)[-1])
    try:
        cpu = CpuAttention(kernel, offload, num_heads=num_heads, max_rows=max_rows, is_pinned=is_gpu)
    except UnsupportedDriverError as error:
        if kernel is not shared:
            kernel.close()
        if config.cpu_attention == "on":
            raise ConfigError(f"cpu_attention='on' cannot work here: {error}; use 'auto' or 'off'") from error
        logger.warning("attention on the CPU: none, %s", error)
        return NoCpuPart()
    if tp.rank == 0:
        logger.info("attention on the CPU: %s", cpu.name)
    return cpu


def measure_split(runner: ModelRunner) -> CpuSplit | None:
    """Measure the split for the slowest rank, or return None if CPU attention is disabled. All ranks call together.

    Without a GPU there is no link, so nothing is measured and the CPU attends to all keys.
    """
    memory = runner.memory
    if not isinstance(memory, OffloadMemory) or not isinstance(memory.cpu, CpuAttention):
        return None
    offload, cpu = memory.offload, memory.cpu
    with runner.phases("CPU attention"):
        split = CpuSplit(
            token_bytes=offload.spec.layer_block_bytes // offload.spec.block_size,
            max_queries=cpu.max_rows,
            max_sequence_queries=cpu.max_rows,
            is_forced=runner.config.cpu_attention == "on",
        )
        return with_rates(split, runner, offload, cpu) if offload.device.type == "cuda" else split


def with_rates(split: CpuSplit, runner: ModelRunner, offload: OffloadEngine, cpu: CpuAttention) -> CpuSplit:
    """Return the split with the rates of the slowest rank. Runs decode steps."""
    tp = runner.tp

    def gather(own: list[float]) -> torch.Tensor:
        return tp.all_gather(torch.tensor(own, dtype=torch.float64, device=offload.device)).view(tp.size, -1).cpu()

    link_byte_per_s, rates = measure_together(offload, cpu, meet=lambda: gather([0.0]))
    idle_s, signal_s = _measure_idle_s(runner)
    all_ranks = gather([link_byte_per_s, *(rate.byte_per_s for rate in rates), -idle_s])
    slowest_link, *cpu_rates, idle_s = all_ranks.amin(0).tolist()
    return replace(
        split,
        link_byte_per_s=slowest_link,
        cpu_rates=tuple(rate._replace(byte_per_s=least) for rate, least in zip(rates, cpu_rates, strict=True)),
        idle_s=-idle_s,
        signal_s=signal_s,
        rank_0_lead=(link_byte_per_s / slowest_link, rates[0].byte_per_s / cpu_rates[0]),  # read on rank 0 only
        max_sequence_queries=rates[-1].num_queries,
        unit_tokens=cpu.kernel.unit_tokens,
    )


def _measure_idle_s(runner: ModelRunner) -> tuple[float, float]:
    """Time decode steps in which the CPU attends to a single token.

    Returns the duration of a step divided by the number of layers, which is how long the CPU is idle in each layer, and
    the duration of the job in a layer.
    """
    token = np.zeros(1, dtype=np.int64)
    step = SequenceStep(0, token, 0, num_prompt_tokens=1, block_table=(0,), num_paged_keys=1, sampling=SamplingRow())
    plan = StepPlan((step,), KVMoves(cpu_spans=((CpuSpan(0, 0, 1),),)))
    for _ in range(2):
        runner.launch(plan).token_ids()
    start_s = time.perf_counter()
    results = [runner.launch(plan) for _ in range(NUM_TIMED_STEPS)]
    results[-1].token_ids()
    idle_s = (time.perf_counter() - start_s) / NUM_TIMED_STEPS / runner.spec.num_layers
    jobs_s = [times.cpu_s for result in results if (times := result.layer_times()) and times.cpu_s is not None]
    return idle_s, median(jobs_s) if jobs_s else 0.0


def measure_together(
    offload: OffloadEngine, cpu: CpuAttention, meet: Callable[[], object]
) -> tuple[float, tuple[CpuRate, ...]]:
    """Copy from the pool to staging buffers while the CPU attends to the pool. Must be called before the first step.

    Returns the link's rate in bytes per second while the CPU attends with one query, and the CPU's rates. meet: a
    barrier of all ranks, so that ranks on one machine measure concurrently. Overwrites staging buffers.
    """
    rates = [_measure(offload, cpu, num_queries, meet) for num_queries in NUM_QUERIES]
    # Fewer queries are never slower, so each rate is at least every rate with more queries. A lower measurement was
    # disturbed by other work.
    at_least = [max(cpu_rate for _, cpu_rate in rates[i:]) for i in range(len(rates))]
    return rates[0][0], tuple(map(CpuRate, NUM_QUERIES, at_least))


def _measure(
    offload: OffloadEngine, cpu: CpuAttention, num_queries: int, meet: Callable[[], object]
) -> tuple[float, float]:
    """Return the rates of the link and of the CPU while both are busy."""
    layers = cycle(range(offload.spec.num_layers))  # a different layer in each call, so that the keys are not cached
    stopping = threading.Event()

    def seconds_of(job: AttentionJob) -> float:
        start_s = time.perf_counter()
        cpu.kernel.attend(job, next(layers))
        return time.perf_counter() - start_s

    def attend_until_stopped(job: AttentionJob) -> float:
        """Attend at least once, until `stopping` is set. Returns the mean seconds of a call."""
        times = [seconds_of(job)]
        while not stopping.is_set():
            times.append(seconds_of(job))
        return sum(times) / len(times)

    job, num_bytes = _make_job(offload, cpu, num_queries, FIRST_JOB_BYTES)
    first_s = min(seconds_of(job) for _ in range(2))  # the first call wakes the threads
    job, num_bytes = _make_job(offload, cpu, num_queries, num_bytes * JOB_S / first_s)
    num_copies = max(1, int(LINK_S * (offload.link_byte_per_s or 0.0)) // COPY_BYTES)
    offload.streams.synchronize()
    meet()
    with ThreadPoolExecutor(1) as pool:
        job_s = pool.submit(attend_until_stopped, job)
        try:
            start_s = time.perf_counter()
            num_copied_bytes = 0
            for target, source in islice(_copies(offload), num_copies):
                offload.streams.h2d.copy(target, source)
                num_copied_bytes += source.nbytes
            offload.streams.synchronize()
            link_s = time.perf_counter() - start_s
        finally:
            stopping.set()
    return num_copied_bytes / link_s, num_bytes / job_s.result()


def _make_job(
    offload: OffloadEngine, cpu: CpuAttention, num_queries: int, num_bytes: float
) -> tuple[AttentionJob, int]:
    """Return a job of one sequence that reads about `num_bytes` of the pool's first blocks, and the exact number."""
    spec, num_blocks = offload.spec, offload.k_cache_cpu.shape[1]
    token_bytes = spec.layer_block_bytes // spec.block_size
    num_tokens = min(num_blocks * spec.block_size, max(64, int(num_bytes / token_bytes)))
    starts = range(0, num_tokens, spec.block_size)
    spans = tuple(CpuSpan(i, 0, min(spec.block_size, num_tokens - start)) for i, start in enumerate(starts))
    return cpu.make_job(CpuRows((num_queries,), (spans,)), scale=1.0), num_tokens * token_bytes


def _copies(offload: OffloadEngine) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless pairs of target and source, which read the whole pool again and again."""
    source, target = offload.k_cache_cpu.view(-1), offload.k_staging.view(-1)
    size = min(COPY_BYTES // source.element_size(), source.numel(), target.numel())
    for start in cycle(range(0, source.numel() - size + 1, size)):
        yield target[:size], source[start : start + size]
