"""One rank's KV memory, and the attention of a step over it.

Legend: T packed tokens of the step, S tokens after which it samples, H query heads, D head dim.

If all keys of a step are on the GPU, a layer is one call of the backend. With offload, some keys are streamed from CPU
memory in groups, and the CPU attends in place to others. The results over these parts are merged exactly. Keys are
stored rotated, so the order of the blocks before the chunk does not matter. Only the paged call, which holds the chunk
itself, is causal.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from nanovllm.attention.base import (
    AttentionBackend,
    HostTables,
    PagedBatch,
    PartialAttention,
    RunningMerge,
    StepAttention,
)
from nanovllm.kernels.state_tensors import LayerStates
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import Streams, TimedPieces, make_streams
from nanovllm.plan.kv_spec import KVCacheSpec
from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.inputs import StepInputs
from nanovllm.runner.seams import (
    CompanionColumns,
    CompanionMemory,
    CpuPart,
    CpuRows,
    CpuStep,
    GroupHook,
    LayerMemoryOf,
    NoCpuPart,
)


class StepBatches(NamedTuple):
    """The paged keys, the keys of each streamed group and the keys that the CPU attends to, for the same rows."""

    paged: PagedBatch
    groups: tuple[PagedBatch, ...] = ()
    cpu: CpuRows | None = None  # None if the CPU attends to no key


def _no_layer_memory(layer: int) -> LayerStates:
    raise AssertionError("a layer of the model does not attend to all keys, and no companion has its memory")


class PagedAttention:
    """A StepAttention whose keys are all on the GPU, in caches `[layers, blocks, block_size, kv_heads, head_dim]`.

    `batch` is for all tokens, `last_batch` for the rows that the last layer returns.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        cache: tuple[torch.Tensor, torch.Tensor],
        slot_mapping_T: torch.Tensor,
        batch: PagedBatch,
        last_batch: PagedBatch,
        scale: float,
        layer_memory: LayerMemoryOf = _no_layer_memory,
    ) -> None:
        self.backend, self.slot_mapping_T, self.scale, self.layer_memory = backend, slot_mapping_T, scale, layer_memory
        self.k_cache, self.v_cache = cache
        self.batch, self.last_batch = batch, last_batch
        self.last_layer = len(self.k_cache) - 1

    def cells(self, layer: int) -> KVCells:
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.slot_mapping_T)

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        """Attend to all keys of the layer. Hot: once per layer."""
        return self.attend_paged(layer, q_THD, sinks_H).out_THD if len(q_THD) else q_THD

    def attend_paged(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None) -> PartialAttention:
        """Attend to the keys that are on the GPU. The sinks count here, and in no other part."""
        batch = self.last_batch if layer == self.last_layer else self.batch
        return self.backend.attend(q_THD, self.k_cache[layer], self.v_cache[layer], batch, self.scale, sinks_H)


class MergedAttention(PagedAttention):
    """A StepAttention with offload. The caches are the slots, to which new K and V are written."""

    def __init__(
        self,
        backend: AttentionBackend,
        offload: OffloadEngine,
        cpu: CpuPart,
        slot_mapping_T: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
        scale: float,
        layer_memory: LayerMemoryOf = _no_layer_memory,
        group_hooks: Sequence[GroupHook] = (),
    ) -> None:
        cache = offload.k_cache_gpu, offload.v_cache_gpu
        super().__init__(backend, cache, slot_mapping_T, batches.paged, last_batches.paged, scale, layer_memory)
        self.offload, self.group_hooks = offload, group_hooks
        self.groups, self.last_groups = batches.groups, last_batches.groups

        def steps_of(rows: CpuRows | None) -> list[CpuStep]:
            return [] if rows is None else [cpu.step(rows, scale)]

        # Empty if the plan leaves no keys to the CPU
        self.cpu_steps, self.last_cpu_steps = steps_of(batches.cpu), steps_of(last_batches.cpu)

    def cells(self, layer: int) -> KVCells:
        """Wait for the layer's slots and return its cells. Hot: once per layer."""
        self.offload.begin_layer(layer)
        return super().cells(layer)

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        """Attend to all keys. A result is merged before the next is computed, because it may take 64 MiB. Hot: per
        layer.
        """
        offload, is_last = self.offload, layer == self.last_layer
        groups, cpu_steps = (self.last_groups, self.last_cpu_steps) if is_last else (self.groups, self.cpu_steps)
        offload.stored(layer)
        if len(q_THD) == 0:  # nothing is sampled: only release the staging buffers of this layer
            offload.attended()
            for number, (k_group, v_group) in enumerate(offload.groups()):
                self._attended(layer, number, k_group, v_group)
            return q_THD
        for cpu in cpu_steps:  # the CPU and the GPU compute concurrently, so the CPU begins first and ends last
            cpu.begin_layer(layer, q_THD)
        merged = RunningMerge(self.backend.merge, 1 + len(groups) + len(cpu_steps))
        merged.add(self.attend_paged(layer, q_THD, sinks_H))
        offload.attended()
        for number, ((k_group, v_group), batch) in enumerate(zip(offload.groups(), groups, strict=True)):
            merged.add(self.backend.attend(q_THD, k_group, v_group, batch, self.scale))
            self._attended(layer, number, k_group, v_group)
        for cpu in cpu_steps:
            merged.add(cpu.results(q_THD))
        return merged.result().out_THD

    def _attended(self, layer: int, number: int, k_NPKD: torch.Tensor, v_NPKD: torch.Tensor) -> None:
        for hook in self.group_hooks:
            hook(layer, number, k_NPKD, v_NPKD)


def build_batches(plan: StepPlan, tensors: StepInputs, block_size: int) -> StepBatches:
    """Build the batches for all tokens of the step."""
    query_lens = [step.num_tokens for step in plan.sequences]
    max_query_len = max(query_lens)

    def batch(
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        host_lens: list[int],
        host_tables: Sequence[Sequence[int]],
        causal: bool,
    ) -> PagedBatch:
        return PagedBatch(
            cu_seqlens_q=tensors.cu_seqlens_q,
            context_lens=context_lens,
            block_tables=block_tables,
            max_query_len=max_query_len,
            max_context_len=max(host_lens),
            causal=causal,
            host=HostTables(query_lens, host_lens, host_tables),
        )

    paged = batch(
        tensors.context_lens,
        tensors.block_tables,
        [step.num_paged_keys for step in plan.sequences],
        [step.block_table for step in plan.sequences],
        causal=True,
    )
    groups = (
        batch(*on_device, group.context_lens(block_size), group.tables, causal=False)
        for on_device, group in zip(tensors.groups, plan.moves.streamed, strict=True)
    )
    return StepBatches(paged, tuple(groups), cpu_rows(plan))


def last_token_batches(plan: StepPlan, batches: StepBatches, tensors: StepInputs) -> StepBatches:
    """Select the batches for the tokens after which the step samples: the last tokens of each sequence that samples."""
    rows = [row for row, step in enumerate(plan.sequences) if step.sampling is not None]
    query_lens = [plan.sequences[row].num_sampled for row in rows]

    def select(batch: PagedBatch) -> PagedBatch:
        assert batch.host is not None, "a planned step knows its sizes"
        context_lens = [batch.host.context_lens[row] for row in rows]
        return replace(
            batch,
            cu_seqlens_q=tensors.sampling_cu_seqlens,
            context_lens=batch.context_lens[tensors.sampling_seqs],
            block_tables=batch.block_tables[tensors.sampling_seqs],
            max_query_len=max(query_lens, default=0),
            max_context_len=max(context_lens, default=0),
            host=HostTables(query_lens, context_lens, [batch.host.block_tables[row] for row in rows]),
        )

    cpu = batches.cpu and CpuRows(tuple(query_lens), tuple(batches.cpu.spans[row] for row in rows))
    return StepBatches(select(batches.paged), tuple(select(group) for group in batches.groups), cpu)


def cpu_rows(plan: StepPlan) -> CpuRows | None:
    """Return the spans that the CPU attends to, for all tokens of the step."""
    spans = plan.moves.cpu_spans
    return CpuRows(tuple(step.num_tokens for step in plan.sequences), spans) if spans else None


# spec, num_cpu_blocks, dtype, device -> OffloadEngine
OffloadEngineFactory: TypeAlias = Callable[[KVCacheSpec, int, torch.dtype, torch.device], OffloadEngine]


class KVMemory:
    """A pool of blocks on the GPU, and what companions keep there.

    The runner calls `allocate` at start-up, and in each step `begin_step`, then `attention` or the graphs, then
    `end_step`. OffloadMemory is used in the same way.
    """

    offload: OffloadEngine | None = None
    cpu: CpuPart = NoCpuPart()
    group_blocks = 0  # most blocks of a streamed group
    link_byte_per_s: float | None = None  # rate of the link to CPU memory, or None if it was not measured

    def __init__(self, spec: KVCacheSpec, backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.backend, self.dtype, self.device = spec, backend, dtype, device
        self.companions: list[CompanionMemory] = []
        self.scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self._pool = self.make_pool(num_blocks=0)

    def make_pool(self, num_blocks: int, num_layers: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        shape = (num_layers or spec.num_layers, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # Untouched CPU pages are free, so leave them uninitialised. Zero the GPU cache: garbage may be NaN, and a
        # masked weight of 0 does not cancel NaN.
        make = torch.zeros if self.device.type == "cuda" else torch.empty
        k_cache, v_cache = (make(shape, dtype=self.dtype, device=self.device) for _ in ("k", "v"))
        return k_cache, v_cache

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V on the GPU, each `[layers, blocks, block_size, kv_heads, head_dim]`. Valid after `allocate`."""
        return self._pool

    @property
    def whole_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all blocks, in CPU memory with offload. Shapes as in `cache`."""
        return self._pool

    @property
    def streams(self) -> Streams:
        """The streams of copies of blocks."""
        return make_streams(self.device)

    def allocate(self, num_gpu_blocks: int) -> None:
        """Allocate the blocks on the GPU. Called before the first step, and again after `drop`."""
        self._pool = self.make_pool(num_gpu_blocks)

    def drop(self) -> None:
        """Release all memory on the GPU, so that it can be allocated in other sizes."""
        self._drop_companions()
        self._pool = self.make_pool(num_blocks=0)

    def _drop_companions(self) -> None:
        companions, self.companions = self.companions, []
        for companion in companions:
            companion.close()

    @property
    def stored_parts(self) -> list[torch.Tensor]:
        """Snapshots of companions that can be stored, each [snapshots, ...]."""
        return [part for companion in self.companions for part in companion.stored_parts]

    # -- one step ------------------------------------------------------------------------------------------------

    def companion_columns(self, plan: StepPlan) -> tuple[np.ndarray, ...]:
        """Return the columns of all companions. Hot: once per step."""
        return tuple(column for companion in self.companions for column in companion.columns(plan))

    @property
    def column_paddings(self) -> tuple[int, ...]:
        """For each of `companion_columns`, its value in a graph's padding rows."""
        return tuple(padding for companion in self.companions for padding in companion.paddings)

    def layer_memory(self, given: CompanionColumns | None) -> LayerMemoryOf:
        """Return the memory, in a step, of layers that do not attend to all keys. `given`: the columns of all
        companions, or None if all layers attend to all keys.
        """
        if given is None:
            return _no_layer_memory
        start = 0
        for companion in self.companions:
            columns = given.columns[start : start + len(companion.paddings)]
            start += len(columns)
            if (found := companion.layer_memory(given._replace(columns=columns))) is not None:
                return found
        return _no_layer_memory

    def attention(
        self,
        plan: StepPlan,
        slot_mapping: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
        columns: CompanionColumns,
    ) -> StepAttention:
        """Make the attention of a step that is launched kernel by kernel.

        `last_batches` are the batches for the rows that the last layer returns.
        """
        paged, last, layer_memory = batches.paged, last_batches.paged, self.layer_memory(columns)
        return PagedAttention(self.backend, self.cache, slot_mapping, paged, last, self.scale, layer_memory)

    def paged_attention(
        self, slot_mapping: torch.Tensor, batch: PagedBatch, columns: CompanionColumns | None = None
    ) -> PagedAttention:
        """Make the attention of a decode step whose keys are all on the GPU. `columns`: see layer_memory."""
        layer_memory = self.layer_memory(columns)
        return PagedAttention(self.backend, self.cache, slot_mapping, batch, batch, self.scale, layer_memory)

    def begin_step(self, plan: StepPlan) -> None:
        """Called before any of the step's work is enqueued. Hot: once per step."""
        for companion in self.companions:
            companion.begin_step(plan, self.cache)

    def begin_all_layers(self) -> None:
        """Called before a single graph that runs all layers."""

    def ran_all_layers(self) -> None:
        """Called after a single graph that ran all layers."""

    def end_step(self) -> TimedPieces | None:
        """Called after all of the step's work is enqueued. Returns the times of its layers if they are measured."""
        for companion in self.companions:
            companion.end_step()
        return None

    def stats(self) -> dict[str, Any]:
        """Counters of the copies, and the rate of the link."""
        return {}

    def close(self) -> None:
        """Release what the garbage collector does not. The memory must not be used afterwards."""
        self._drop_companions()


class OffloadMemory(KVMemory):
    """A pool of blocks in CPU memory, with slots on the GPU. Some keys may be left to the CPU's part of attention."""

    offload: OffloadEngine

    def __init__(
        self,
        spec: KVCacheSpec,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        offload: OffloadEngine,
        cpu: CpuPart,
    ) -> None:
        super().__init__(spec, backend, dtype, device)
        self.offload, self.cpu, self.group_blocks = offload, cpu, spec.staging_group_blocks
        self.link_byte_per_s = offload.link_byte_per_s

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.offload.k_cache_gpu, self.offload.v_cache_gpu

    @property
    def whole_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.offload.k_cache_cpu, self.offload.v_cache_cpu

    @property
    def streams(self) -> Streams:
        return self.offload.streams

    def allocate(self, num_gpu_blocks: int) -> None:
        self.offload.allocate_slots(num_gpu_blocks)

    def drop(self) -> None:
        self._drop_companions()
        self.offload.drop_slots()

    def attention(
        self,
        plan: StepPlan,
        slot_mapping: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
        columns: CompanionColumns,
    ) -> StepAttention:
        hooks = (companion.group_hook(plan) for companion in self.companions)
        return MergedAttention(
            self.backend,
            self.offload,
            self.cpu,
            slot_mapping,
            batches,
            last_batches,
            self.scale,
            self.layer_memory(columns),
            [hook for hook in hooks if hook is not None],
        )

    def begin_step(self, plan: StepPlan) -> None:
        self.offload.begin_step(plan.moves, chain.from_iterable(step.block_table for step in plan.sequences))
        super().begin_step(plan)

    def begin_all_layers(self) -> None:
        self.offload.begin_all_layers()

    def ran_all_layers(self) -> None:
        self.offload.ran_all_layers()

    def end_step(self) -> TimedPieces | None:
        self.offload.end_step()
        super().end_step()
        return self.cpu.end_step(self.offload.timer.take())

    def stats(self) -> dict[str, Any]:
        return self.offload.stats() | {"cpu_attention": self.cpu.name}

    def close(self) -> None:
        try:
            self.cpu.close()
        finally:
            self._drop_companions()
            self.offload.close()


def make_offload_engine(
    spec: KVCacheSpec, num_cpu_blocks: int, dtype: torch.dtype, device: torch.device
) -> OffloadEngine:
    """Make the OffloadEngine with the streams of the device."""
    return OffloadEngine(spec, num_cpu_blocks, dtype, device, make_streams(device))
