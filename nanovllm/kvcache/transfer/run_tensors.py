"""The tensors that a run is copied between: K and V of its tokens, in CPU memory and on the GPU.

Legend: L layers (or staging groups), N blocks, P tokens per block, K kv heads, D head dim.
"""

from collections.abc import Iterator
from typing import TypeAlias

import torch

from nanovllm.kvcache.policy.copy_runs import Run

KV: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer or staging group, each [N * P, K, D]
LayersKV: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # those of all layers, each [L, N * P, K, D]
Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # target and source


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
