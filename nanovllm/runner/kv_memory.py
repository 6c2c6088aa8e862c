"""One rank's KV memory. There are two kinds: a pool on the GPU, or a pool in CPU memory with slots on the GPU.

Both are used in the same way, so the runner need not know which one it has. It calls `allocate` at start-up, and in
each step `begin_step`, then `attention` or the graphs, then `end_step`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention, StepAttention
from nanovllm.attention.cpu_part import CpuPart
from nanovllm.attention.paged import PagedAttention, PagedPart
from nanovllm.attention.parts import AttentionPart
from nanovllm.attention.streamed import MergedAttention, SlotsPart, StreamedPart
from nanovllm.core.kv_spec import KVCacheSpec
from nanovllm.core.step_plan import StepPlan
from nanovllm.kvcache.transfer.cpu_attention import CpuAttention
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine
from nanovllm.kvcache.transfer.streams import make_streams
from nanovllm.runner.batches import StepBatches
from nanovllm.runner.step_result import StepTimes

# spec, num_cpu_blocks, dtype, device -> OffloadEngine
OffloadEngineFactory: TypeAlias = Callable[[KVCacheSpec, int, torch.dtype, torch.device], OffloadEngine]


class KVMemory(ABC):
    """The interface of both kinds. By default the calls of a step do nothing, which suits a pool on the GPU."""

    offload: OffloadEngine | None = None  # moves the blocks; None without offload
    cpu: CpuAttention | None = None  # attends to blocks in CPU memory; None if the CPU takes no part

    @property
    @abstractmethod
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V on the GPU, each `[layers, blocks, block_size, kv_heads, head_dim]`. Valid after `allocate`."""

    @abstractmethod
    def allocate(self, num_gpu_blocks: int) -> None:
        """Allocate the blocks on the GPU. Called before the first step, and again after `drop`."""

    @abstractmethod
    def drop(self) -> None:
        """Release the blocks on the GPU, so that others can be allocated."""

    @abstractmethod
    def attention(
        self,
        backend: AttentionBackend,
        scale: float,
        slot_mapping: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
    ) -> StepAttention:
        """The attention of a step that is launched kernel by kernel.

        `last_batches` are the batches for the rows that the last layer returns.
        """

    def paged_attention(
        self, backend: AttentionBackend, scale: float, slot_mapping: torch.Tensor, batch: PagedBatch
    ) -> StepAttention:
        """The attention of a decode step whose keys are all on the GPU."""
        part = self._paged_part(backend, scale, batch)
        return PagedAttention(slot_mapping, part, part)

    def _paged_part(self, backend: AttentionBackend, scale: float, batch: PagedBatch) -> PagedPart:
        k_cache, v_cache = self.cache
        return PagedPart(backend=backend, k_cache=k_cache, v_cache=v_cache, batch=batch, scale=scale)

    # -- one step ------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Called before any of the step's work is enqueued. Hot: once per step."""
        return

    def begin_all_layers(self) -> None:
        """Called before a single graph that runs all layers."""
        return

    def ran_all_layers(self) -> None:
        """Called after that graph."""
        return

    def end_step(self) -> StepTimes | None:
        """Called after all of the step's work is enqueued. Returns the times of its layers if they are measured."""
        return None

    def stats(self) -> dict[str, Any]:
        """Counters of the copies, and the rate of the link."""
        return {}

    def close(self) -> None:
        """Release what the garbage collector would not. The memory must not be used afterwards."""
        return


class GpuPool(KVMemory):
    """All blocks on the GPU. Nothing moves."""

    def __init__(self, spec: KVCacheSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self._cache = self._make(num_blocks=0)

    def _make(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        shape = (spec.num_layers, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # Untouched CPU pages are free, so leave them uninitialised. Zero the GPU cache: garbage may be NaN, and a
        # masked weight of 0 does not cancel NaN.
        make = torch.zeros if self.device.type == "cuda" else torch.empty
        k_cache, v_cache = (make(shape, dtype=self.dtype, device=self.device) for _ in ("k", "v"))
        return k_cache, v_cache

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache

    def allocate(self, num_gpu_blocks: int) -> None:
        self._cache = self._make(num_gpu_blocks)

    def drop(self) -> None:
        self._cache = self._make(num_blocks=0)

    def attention(
        self,
        backend: AttentionBackend,
        scale: float,
        slot_mapping: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
    ) -> StepAttention:
        part, last_part = (self._paged_part(backend, scale, some.paged) for some in (batches, last_batches))
        return PagedAttention(slot_mapping, part, last_part)


class OffloadedPool(KVMemory):
    """All blocks in CPU memory, some of them also in slots on the GPU. An OffloadEngine moves them."""

    def __init__(self, offload: OffloadEngine, cpu: CpuAttention | None) -> None:
        """`cpu`: None to stream every missing block."""
        self.offload: OffloadEngine = offload
        self.cpu = cpu

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.offload.k_cache_gpu, self.offload.v_cache_gpu

    def allocate(self, num_gpu_blocks: int) -> None:
        self.offload.allocate_slots(num_gpu_blocks)

    def drop(self) -> None:
        self.offload.drop_slots()

    def attention(
        self,
        backend: AttentionBackend,
        scale: float,
        slot_mapping: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
    ) -> StepAttention:
        k_cache, v_cache = self.cache
        return MergedAttention(
            stream=self.offload,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping_T=slot_mapping,
            merge=backend.merge,
            parts=self._parts(backend, scale, batches),
            last_parts=self._parts(backend, scale, last_batches),
        )

    def _parts(
        self, backend: AttentionBackend, scale: float, batches: StepBatches
    ) -> Sequence[AttentionPart[PartialAttention]]:
        """The parts of the attention, in the order in which they are finished."""
        k_cache, v_cache = self.cache
        parts: list[AttentionPart[PartialAttention]] = [
            SlotsPart(
                stream=self.offload, backend=backend, k_cache=k_cache, v_cache=v_cache, batch=batches.paged, scale=scale
            ),
            StreamedPart(stream=self.offload, backend=backend, batches=batches.groups, scale=scale),
        ]
        if batches.cpu is not None:
            assert self.cpu is not None, "the plan leaves keys to the CPU, which does not attend"
            parts.append(CpuPart(worker=self.cpu, job=self.cpu.make_job(batches.cpu, scale)))
        return parts

    def begin_step(self, plan: StepPlan) -> None:
        self.offload.begin_step(plan.moves, chain.from_iterable(step.block_table for step in plan.sequences))

    def begin_all_layers(self) -> None:
        self.offload.begin_all_layers()

    def ran_all_layers(self) -> None:
        self.offload.ran_all_layers()

    def end_step(self) -> StepTimes | None:
        self.offload.end_step()
        if self.cpu is None:
            return None
        return StepTimes(self.offload.streams, self.offload.timer.take(), self.cpu.timer.take())

    def stats(self) -> dict[str, Any]:
        return self.offload.stats() | {"cpu_attention": None if self.cpu is None else self.cpu.kernel_name}

    def close(self) -> None:
        try:
            if self.cpu is not None:
                self.cpu.close()
        finally:
            self.offload.close()


def make_offload_engine(
    spec: KVCacheSpec, num_cpu_blocks: int, dtype: torch.dtype, device: torch.device
) -> OffloadEngine:
    """With the streams of the device."""
    return OffloadEngine(spec, num_cpu_blocks, dtype, device, make_streams(device))


def make_kv_memory(
    spec: KVCacheSpec,
    num_cpu_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    make_offload_engine: OffloadEngineFactory,
    make_cpu_attention: Callable[[OffloadEngine], CpuAttention | None],
) -> KVMemory:
    """`num_cpu_blocks`: 0 for a pool on the GPU."""
    if num_cpu_blocks == 0:
        return GpuPool(spec, dtype, device)
    offload = make_offload_engine(spec, num_cpu_blocks, dtype, device)
    return OffloadedPool(offload, make_cpu_attention(offload))
