"""The rate of the link from CPU memory to the GPU, as start-up measures it."""

import time

import torch

from nanovllm.kvcache.transfer.streams import Streams

COPY_BYTES = 8 * 2**20  # size of one copy; smaller copies do not reach the link's full rate
TOTAL_BYTES = 2**30  # 20 ms at 54.6 GB/s, which is long compared with the calls that are timed along with it


def measure_link(streams: Streams, pool: torch.Tensor, staging: torch.Tensor) -> float | None:
    """Bytes per second of copies from the pinned `pool` to the `staging` buffer on the GPU, or None on a CPU.

    After a short warm-up, 1 GiB is copied through the h2d stream in pieces of 8 MiB, or of the size of the smaller
    tensor if that is less. The pool is read from end to end, and again from its start as often as needed. This
    overwrites `staging`. Each rank measures its own link.
    """
    if not staging.is_cuda:
        return None
    source, target = pool.view(-1), staging.view(-1)
    size = min(COPY_BYTES // pool.element_size(), source.numel(), target.numel())
    starts = range(0, source.numel() - size + 1, size)
    num_copies = max(1, min(1024, TOTAL_BYTES // (size * pool.element_size())))
    seconds = 0.0
    for repeats in (max(1, num_copies // 16), num_copies):  # the first round is the warm-up
        streams.synchronize()
        start_s = time.perf_counter()
        for i in range(repeats):
            start = starts[i % len(starts)]
            streams.h2d.copy(target[:size], source[start : start + size])
        streams.synchronize()
        seconds = time.perf_counter() - start_s
    return num_copies * size * pool.element_size() / seconds
