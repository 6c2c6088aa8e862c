"""One rank's KV memory: a pool on the GPU or, with offload, a pool in CPU memory with slots on the GPU.

Both are used in the same way, so the runner need not know which one it has. It calls `allocate` at start-up, and in
each step `begin_step`, then `attention` or the graphs, then `end_step`.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias

import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, StepAttention
from nanovllm.core.kv_spec import KVCacheSpec
from nanovllm.core.step_plan import StepPlan
from nanovllm.kvcache.transfer.cpu_attention import CpuAttention
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine
from nanovllm.kvcache.transfer.streams import make_streams
from nanovllm.runner.step_attention import MergedAttention, PagedAttention, StepBatches
from nanovllm.runner.step_result import StepTimes

# spec, num_cpu_blocks, dtype, device -> OffloadEngine
OffloadEngineFactory: TypeAlias = Callable[[KVCacheSpec, int, torch.dtype, torch.device], OffloadEngine]


class KVMemory:
    def __init__(
        self,
        spec: KVCacheSpec,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        offload: OffloadEngine | None,
        cpu: CpuAttention | None,
    ) -> None:
        """`offload`: what moves the blocks; None for a pool on the GPU. `cpu`: what attends to blocks in CPU memory;
        None if the CPU takes no part.
        """
        self.spec, self.backend, self.dtype, self.device = spec, backend, dtype, device
        self.offload, self.cpu = offload, cpu
        self.scale = spec.head_dim**-0.5
        self._pool = self._make_pool(num_blocks=0)

    def _make_pool(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        shape = (spec.num_layers, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # Untouched CPU pages are free, so leave them uninitialised. Zero the GPU cache: garbage may be NaN, and a
        # masked weight of 0 does not cancel NaN.
        make = torch.zeros if self.device.type == "cuda" else torch.empty
        k_cache, v_cache = (make(shape, dtype=self.dtype, device=self.device) for _ in ("k", "v"))
        return k_cache, v_cache

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V on the GPU, each `[layers, blocks, block_size, kv_heads, head_dim]`. Valid after `allocate`."""
        return self._pool if self.offload is None else (self.offload.k_cache_gpu, self.offload.v_cache_gpu)

    def allocate(self, num_gpu_blocks: int) -> None:
        """Allocate the blocks on the GPU. Called before the first step, and again after `drop`."""
        if self.offload is None:
            self._pool = self._make_pool(num_gpu_blocks)
        else:
            self.offload.allocate_slots(num_gpu_blocks)

    def drop(self) -> None:
        """Release the blocks on the GPU, so that others can be allocated."""
        if self.offload is None:
            self._pool = self._make_pool(num_blocks=0)
        else:
            self.offload.drop_slots()

    # -- one step ------------------------------------------------------------------------------------------------

    def attention(self, slot_mapping: torch.Tensor, batches: StepBatches, last_batches: StepBatches) -> StepAttention:
        """The attention of a step that is launched kernel by kernel.

        `last_batches` are the batches for the rows that the last layer returns.
        """
        if self.offload is not None:
            return MergedAttention(
                self.backend, self.offload, self.cpu, slot_mapping, batches, last_batches, self.scale
            )
        return PagedAttention(self.backend, self.cache, slot_mapping, batches.paged, last_batches.paged, self.scale)

    def paged_attention(self, slot_mapping: torch.Tensor, batch: PagedBatch) -> PagedAttention:
        """The attention of a decode step whose keys are all on the GPU."""
        return PagedAttention(self.backend, self.cache, slot_mapping, batch, batch, self.scale)

    def begin_step(self, plan: StepPlan) -> None:
        """Called before any of the step's work is enqueued. Hot: once per step."""
        if self.offload is not None:
            self.offload.begin_step(plan.moves, chain.from_iterable(step.block_table for step in plan.sequences))

    def begin_all_layers(self) -> None:
        """Called before a single graph that runs all layers."""
        if self.offload is not None:
            self.offload.begin_all_layers()

    def ran_all_layers(self) -> None:
        """Called after that graph."""
        if self.offload is not None:
            self.offload.ran_all_layers()

    def end_step(self) -> StepTimes | None:
        """Called after all of the step's work is enqueued. Returns the times of its layers if they are measured."""
        if self.offload is not None:
            self.offload.end_step()
        if self.offload is None or self.cpu is None:
            return None
        return StepTimes(self.offload.streams, self.offload.timer.take(), self.cpu.timer.take())

    def stats(self) -> dict[str, Any]:
        """Counters of the copies, and the rate of the link."""
        if self.offload is None:
            return {}
        return self.offload.stats() | {"cpu_attention": None if self.cpu is None else self.cpu.kernel_name}

    def close(self) -> None:
        """Release what the garbage collector would not. The memory must not be used afterwards."""
        try:
            if self.cpu is not None:
                self.cpu.close()
        finally:
            if self.offload is not None:
                self.offload.close()


def make_offload_engine(
    spec: KVCacheSpec, num_cpu_blocks: int, dtype: torch.dtype, device: torch.device
) -> OffloadEngine:
    """With the streams of the device."""
    return OffloadEngine(spec, num_cpu_blocks, dtype, device, make_streams(device))
