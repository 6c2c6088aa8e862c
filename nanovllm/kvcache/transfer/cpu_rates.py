"""What the link and the CPU carry while both are busy, as start-up measures it."""

import time
from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

from nanovllm.core.cpu_split import CpuRate
from nanovllm.core.step_plan import CpuSpan
from nanovllm.kvcache.transfer.cpu_part import CpuAttention, CpuRows
from nanovllm.kvcache.transfer.link import COPY_BYTES
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine

NUM_QUERIES = (1, 4, 16)  # of a sequence: a decode step's, and those of a few guesses
LINK_BYTES = 2**31  # copied beside each measurement: 40 ms at 54 GB/s
JOB_BYTES = 2**28  # attended to in one call, in another layer each time, so that no cache holds them


class MeasuredRates(NamedTuple):
    link_byte_per_s: float
    cpu: tuple[CpuRate, ...]


def measure_together(offload: OffloadEngine, cpu: CpuAttention) -> MeasuredRates:
    """Copy from the pool to staging buffers, and attend to the pool meanwhile. Needs a GPU; before the first step.

    The link's rate is that beside a single query per sequence. Overwrites staging buffers.
    """
    rates = [_measure(offload, cpu, num_queries) for num_queries in NUM_QUERIES]
    return MeasuredRates(
        rates[0][0], tuple(CpuRate(n, cpu_rate) for n, (_, cpu_rate) in zip(NUM_QUERIES, rates, strict=True))
    )


def _measure(offload: OffloadEngine, cpu: CpuAttention, num_queries: int) -> tuple[float, float]:
    """Bytes per second of the link and of the CPU."""
    spec, streams, h2d = offload.spec, offload.streams, offload.streams.h2d
    num_blocks = max(1, min(len(offload.cpu_block_offload_done), JOB_BYTES // spec.layer_block_bytes))
    spans = tuple(CpuSpan(block_id, 0, spec.block_size) for block_id in range(num_blocks))
    job = cpu.make_job(CpuRows((num_queries,), (spans,)), scale=1.0)
    layers = cycle(range(spec.num_layers))
    cpu.kernel.attend(job, next(layers))  # wakes the threads
    streams.synchronize()
    num_link_bytes, num_cpu_bytes, start_s = 0, 0, time.perf_counter()
    for target, source in _copies(offload):
        h2d.copy(target, source)
        num_link_bytes += source.nbytes
    copied = streams.event()
    h2d.record(copied)
    while True:
        cpu.kernel.attend(job, next(layers))
        end_s = time.perf_counter()
        if num_cpu_bytes and streams.is_done(copied):
            break
        num_cpu_bytes, cpu_end_s = num_cpu_bytes + num_blocks * spec.layer_block_bytes, end_s
    return num_link_bytes / (end_s - start_s), num_cpu_bytes / (cpu_end_s - start_s)


def _copies(offload: OffloadEngine) -> Iterator[tuple]:
    """Pairs of equal size, target and source, LINK_BYTES in all, that read the pool from end to end."""
    source, target = offload.k_cache_cpu.view(-1), offload.k_staging.view(-1)
    size = min(COPY_BYTES // source.element_size(), source.numel(), target.numel())
    starts = range(0, source.numel() - size + 1, size)
    for _, start in zip(range(max(1, LINK_BYTES // (size * source.element_size()))), cycle(starts), strict=False):
        yield target[:size], source[start : start + size]
