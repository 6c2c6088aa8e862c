"""The link between CPU memory and the GPU: what it can carry, and what streamed decode steps get of it."""

import time

import torch

from nanovllm.kvcache.transfer.streams import Streams

COPY_BYTES = 8 * 2**20  # of one copy; smaller ones do not reach the link's rate
TOTAL_BYTES = 2**30  # 20 ms at 54.6 GB/s: long against the host's two calls around it


def measure_link(streams: Streams, pool: torch.Tensor, staging: torch.Tensor) -> float | None:
    """Bytes per second of copies from the pinned `pool` to a `staging` buffer on the GPU. None on a CPU.

    Copies of 8 MiB (or of the smaller of the two, if that is less) through the h2d stream, 1 GiB in all, after a short
    warm-up; the pool is read from end to end, again and again. Overwrites `staging`. Each rank measures its own link.
    """
    if not staging.is_cuda:
        return None
    source, target = pool.view(-1), staging.view(-1)
    size = min(COPY_BYTES // pool.element_size(), source.numel(), target.numel())
    starts = range(0, source.numel() - size + 1, size)
    num_copies = max(1, min(1024, TOTAL_BYTES // (size * pool.element_size())))
    seconds = 0.0
    for repeats in (max(1, num_copies // 16), num_copies):  # the first is the warm-up
        streams.synchronize()
        start_s = time.perf_counter()
        for i in range(repeats):
            start = starts[i % len(starts)]
            streams.h2d.copy(target[:size], source[start : start + size])
        streams.synchronize()
        seconds = time.perf_counter() - start_s
    return num_copies * size * pool.element_size() / seconds
