"""Runs: tokens that are contiguous both in CPU memory and on the GPU, so that one copy moves them.

In one layer a block of 256 tokens is half a MiB for Qwen3-0.6B. A copy of that size does not reach the link's full
rate, and enqueuing it takes the host about as long as the transfer takes the link. The managers therefore try to give
contiguous blocks contiguous slots, and the offload engine joins their copies once per step.

Legend: L layers (or staging groups), N blocks, P tokens per block, K kv heads, D head dim.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch

from nanovllm.core.step_plan import SlotLoad, SlotOffload, StreamedGroup

KV: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer or staging group, each [N * P, K, D]
LayersKV: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # those of all layers, each [L, N * P, K, D]
Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # target and source


class Run(NamedTuple):
    """`num_tokens` tokens of each layer.

    `cpu_start` is a token index in the CPU pool, `gpu_start` one in the slot ring or in a staging group.
    """

    cpu_start: int
    gpu_start: int
    num_tokens: int


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join the runs into as few as possible, in the order of CPU memory."""
    joined: list[Run] = []
    cpu_end = gpu_end = -1
    for run in sorted(runs):
        if (run.cpu_start, run.gpu_start) == (cpu_end, gpu_end):
            joined[-1] = joined[-1]._replace(num_tokens=joined[-1].num_tokens + run.num_tokens)
        else:
            joined.append(run)
        cpu_end, gpu_end = run.cpu_start + run.num_tokens, run.gpu_start + run.num_tokens
    return tuple(joined)


def load_runs(loads: Iterable[SlotLoad], block_size: int) -> tuple[Run, ...]:
    return join_runs(
        Run(cpu_block_id * block_size, ring_slot * block_size, num_tokens)
        for cpu_block_id, ring_slot, num_tokens in loads
    )


def offload_runs(offloads: Iterable[SlotOffload], block_size: int) -> tuple[Run, ...]:
    return join_runs(
        Run(cpu_block_id * block_size + start, ring_slot * block_size + start, end - start)
        for ring_slot, cpu_block_id, start, end in offloads
    )


def staging_runs(group: StreamedGroup, block_size: int) -> tuple[Run, ...]:
    """Block i of the group goes to place i of the staging group."""
    num_tokens = group.num_tokens(block_size)
    return join_runs(
        Run(cpu_block_id * block_size, start, min(block_size, num_tokens - start))
        for cpu_block_id, start in zip(group.cpu_block_ids, range(0, num_tokens, block_size), strict=True)
    )


def token_views(k_LNPKD: torch.Tensor, v_LNPKD: torch.Tensor) -> list[KV]:
    """Views of the caches `[L, N, P, K, D]`, one pair per layer, with the tokens of all blocks in a row.

    Make the views once and slice them for each copy. That takes a fraction of the time of indexing the whole cache.
    """
    return list(zip(k_LNPKD.flatten(1, 2).unbind(0), v_LNPKD.flatten(1, 2).unbind(0), strict=True))


def run_tensors(runs: tuple[Run, ...], dst: KV, src: KV, *, to_gpu: bool) -> Iterator[Copy]:
    """Yield two copies for each run: that of K, then that of V. Hot."""
    for cpu_start, gpu_start, num_tokens in runs:
        dst_start, src_start = (gpu_start, cpu_start) if to_gpu else (cpu_start, gpu_start)
        for dst_cache, src_cache in zip(dst, src, strict=True):
            yield dst_cache[dst_start : dst_start + num_tokens], src_cache[src_start : src_start + num_tokens]


def layer_run_tensors(runs: tuple[Run, ...], cpu: LayersKV, gpu: LayersKV) -> Iterator[Copy]:
    """Yield two copies to CPU memory for each run, of all layers: that of K, then that of V. Hot."""
    for cpu_start, gpu_start, num_tokens in runs:
        for cpu_cache, gpu_cache in zip(cpu, gpu, strict=True):
            yield cpu_cache[:, cpu_start : cpu_start + num_tokens], gpu_cache[:, gpu_start : gpu_start + num_tokens]
