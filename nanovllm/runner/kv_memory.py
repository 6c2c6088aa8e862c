"""One rank's KV memory, and the attention of a step over it.

Legend: T packed tokens of the step, S those after which it samples, H query heads, D head dim.

All keys of a step may be on the GPU, and then a layer is one call of the backend. With offload, some are streamed from
CPU memory in groups, and some are attended to by the CPU where they lie. The results over these parts are merged
exactly. Keys carry their rotation, so the order of the blocks before the chunk does not matter. Only the paged call,
which holds the chunk itself, is causal.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from nanovllm.attention.base import (
    AttentionBackend,
    HostTables,
    PagedBatch,
    PartialAttention,
    RunningMerge,
    StepAttention,
)
from nanovllm.capabilities.disk.worker import KVPool
from nanovllm.capabilities.draft_head.memory import DraftHead
from nanovllm.capabilities.recurrent.memory import StateMemory, StepStates
from nanovllm.capabilities.shadow.memory import Shadow
from nanovllm.capabilities.shadow.shadow_spec import ShadowSpec
from nanovllm.kernels.state_tensors import LayerStates, StateRows
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import make_streams
from nanovllm.plan.kv_spec import KVCacheSpec
from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.cpu_part import CpuPart, CpuRows
from nanovllm.runner.inputs import StepInputs
from nanovllm.runner.step_result import TimedPieces


class StepBatches(NamedTuple):
    """The paged keys, those of each streamed group and those that the CPU attends to, for the same rows."""

    paged: PagedBatch
    groups: tuple[PagedBatch, ...] = ()
    cpu: CpuRows | None = None  # None if the CPU attends to no key
    shadow: PagedBatch | None = None  # None: no draft reads it


class PagedAttention:
    """A StepAttention whose keys are all on the GPU, in caches `[layers, blocks, block_size, kv_heads, head_dim]`.

    `batch` is for all tokens, `last_batch` for the rows that the last layer is asked for.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        cache: tuple[torch.Tensor, torch.Tensor],
        slot_mapping_T: torch.Tensor,
        batch: PagedBatch,
        last_batch: PagedBatch,
        scale: float,
        states: StepStates | None = None,
    ) -> None:
        """`states`: None if no layer is recurrent."""
        self.backend, self.slot_mapping_T, self.scale, self.step_states = backend, slot_mapping_T, scale, states
        self.k_cache, self.v_cache = cache
        self.batch, self.last_batch = batch, last_batch
        self.last_layer = len(self.k_cache) - 1

    def cells(self, layer: int) -> KVCells:
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.slot_mapping_T)

    def states(self, layer: int) -> LayerStates:
        """Hot: once per layer."""
        assert self.step_states is not None, "the model has recurrent layers that its config does not name"
        return self.step_states.of_layer(layer)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Hot: once per layer."""
        return self.attend_paged(layer, q_THD).out_THD if len(q_THD) else q_THD

    def attend_paged(self, layer: int, q_THD: torch.Tensor) -> PartialAttention:
        batch = self.last_batch if layer == self.last_layer else self.batch
        return self.backend.attend(q_THD, self.k_cache[layer], self.v_cache[layer], batch, self.scale)


class DraftAttention(PagedAttention):
    """The StepAttention of a draft: the newest keys as they are, and all others from the shadow."""

    def __init__(
        self,
        backend: AttentionBackend,
        cache: tuple[torch.Tensor, torch.Tensor],
        slot_mapping_T: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        states: StepStates | None,
        shadow: Shadow,
        shadow_batch: PagedBatch,
    ) -> None:
        super().__init__(backend, cache, slot_mapping_T, batch, batch, scale, states)
        self.shadow, self.shadow_batch = shadow, shadow_batch

    def attend_paged(self, layer: int, q_THD: torch.Tensor) -> PartialAttention:
        exact = super().attend_paged(layer, q_THD)
        rest = self.shadow.attend(layer, q_THD, self.shadow_batch, self.scale, self.backend)
        return self.backend.merge((exact, rest), q_THD.dtype)


class MergedAttention(PagedAttention):
    """A StepAttention with offload. The caches are the slots, where new K and V go."""

    def __init__(
        self,
        backend: AttentionBackend,
        offload: OffloadEngine,
        cpu: CpuPart,
        slot_mapping_T: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
        scale: float,
        states: StepStates | None = None,
        fills: Sequence[torch.Tensor | None] = (),
        shadow: Shadow | None = None,
    ) -> None:
        """`fills`: for each group, the pages of the shadow that it fills; empty if none does."""
        cache = offload.k_cache_gpu, offload.v_cache_gpu
        super().__init__(backend, cache, slot_mapping_T, batches.paged, last_batches.paged, scale, states)
        self.offload = offload
        self.groups, self.last_groups = batches.groups, last_batches.groups
        # None if the plan leaves no keys to the CPU
        self.cpu_step = None if batches.cpu is None else cpu.step(batches.cpu, scale)
        self.last_cpu_step = None if last_batches.cpu is None else cpu.step(last_batches.cpu, scale)
        self.fills, self.shadow = fills or (None,) * len(self.groups), shadow

    def cells(self, layer: int) -> KVCells:
        """Hot: once per layer."""
        self.offload.begin_layer(layer)
        return super().cells(layer)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Hot: once per layer. A result is merged before the next one is computed, because it may take 64 MiB."""
        offload, is_last = self.offload, layer == self.last_layer
        groups, cpu = (self.last_groups, self.last_cpu_step) if is_last else (self.groups, self.cpu_step)
        offload.stored(layer)
        if len(q_THD) == 0:  # nothing is sampled: only release what was brought in for this layer
            offload.attended()
            for fill, (k_group, v_group) in zip(self.fills, offload.groups(), strict=True):
                self._fill(layer, fill, k_group, v_group)
            return q_THD
        if cpu is not None:  # the CPU and the GPU compute concurrently, so the CPU begins first and ends last
            cpu.begin_layer(layer, q_THD)
        merged = RunningMerge(self.backend.merge, 1 + len(groups) + (cpu is not None))
        merged.add(self.attend_paged(layer, q_THD))
        offload.attended()
        for fill, (k_group, v_group), batch in zip(self.fills, offload.groups(), groups, strict=True):
            merged.add(self.backend.attend(q_THD, k_group, v_group, batch, self.scale))
            self._fill(layer, fill, k_group, v_group)
        if cpu is not None:
            merged.add(cpu.results(q_THD))
        return merged.result().out_THD

    def _fill(self, layer: int, fill: torch.Tensor | None, k_NPKD: torch.Tensor, v_NPKD: torch.Tensor) -> None:
        if fill is not None:
            assert self.shadow is not None, "the plan fills pages, but there is no shadow"
            self.shadow.fill_layer(layer, fill, k_NPKD, v_NPKD)


def build_batches(plan: StepPlan, tensors: StepInputs, block_size: int) -> StepBatches:
    """The batches for all tokens of the step."""
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
    shadow = None
    if tensors.shadow is not None:
        tables = [() if step.draft_keys is None else step.draft_keys.pages for step in plan.sequences]
        lens = [len(table) * block_size for table in tables]
        shadow = batch(*tensors.shadow, lens, tables, causal=False)
    return StepBatches(paged, tuple(groups), cpu_rows(plan), shadow)


def last_token_batches(plan: StepPlan, batches: StepBatches, tensors: StepInputs) -> StepBatches:
    """The batches for only the tokens after which the step samples: the last ones of each sequence that samples."""
    rows = [row for row, step in enumerate(plan.sequences) if step.sampling is not None]
    query_lens = [plan.sequences[row].num_sampled for row in rows]

    def select(batch: PagedBatch) -> PagedBatch:
        assert batch.host is not None, "a planned step knows its sizes"
        context_lens = [batch.host.context_lens[row] for row in rows]
        return PagedBatch(
            cu_seqlens_q=tensors.sampling_cu_seqlens,
            context_lens=batch.context_lens[tensors.sampling_seqs],
            block_tables=batch.block_tables[tensors.sampling_seqs],
            max_query_len=max(query_lens, default=0),
            max_context_len=max(context_lens, default=0),
            causal=batch.causal,
            host=HostTables(query_lens, context_lens, [batch.host.block_tables[row] for row in rows]),
        )

    cpu = batches.cpu and CpuRows(tuple(query_lens), tuple(batches.cpu.spans[row] for row in rows))
    return StepBatches(select(batches.paged), tuple(select(group) for group in batches.groups), cpu)


def cpu_rows(plan: StepPlan) -> CpuRows | None:
    """Spans that the CPU attends to, for all tokens of the step."""
    spans = plan.moves.cpu_spans
    return CpuRows(tuple(step.num_tokens for step in plan.sequences), spans) if spans else None


# spec, num_cpu_blocks, dtype, device -> OffloadEngine
OffloadEngineFactory: TypeAlias = Callable[[KVCacheSpec, int, torch.dtype, torch.device], OffloadEngine]


class KVMemory:
    """A pool on the GPU or, with offload, a pool in CPU memory with slots on the GPU.

    Both are used in the same way, so the runner need not know which one it has. It calls `allocate` at start-up, and in
    each step `begin_step`, then `attention` or the graphs, then `end_step`.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        offload: OffloadEngine | None,
        cpu: CpuPart,
    ) -> None:
        """offload: the OffloadEngine, or None if the whole cache is on the GPU."""
        self.spec, self.backend, self.dtype, self.device = spec, backend, dtype, device
        self.offload, self.cpu = offload, cpu
        self.shadow: Shadow | None = None  # until `allocate_shadow`
        self.state_memory: StateMemory | None = None  # until `allocate_states`
        self.draft_head: DraftHead | None = None  # until `allocate_draft_head`
        self.scale = spec.head_dim**-0.5
        self._pool = self._make_pool(num_blocks=0)

    def _make_pool(self, num_blocks: int, num_layers: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
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
        return self._pool if self.offload is None else (self.offload.k_cache_gpu, self.offload.v_cache_gpu)

    def allocate(self, num_gpu_blocks: int) -> None:
        """Allocate the blocks on the GPU. Called before the first step, and again after `drop`."""
        if self.offload is None:
            self._pool = self._make_pool(num_gpu_blocks)
        else:
            self.offload.allocate_slots(num_gpu_blocks)

    def allocate_shadow(self, spec: ShadowSpec, num_pages: int) -> None:
        self.shadow = Shadow(spec, num_pages, self.device)

    def allocate_states(self, num_slots: int, num_snapshots: int) -> None:
        assert self.spec.states is not None, "no layer is recurrent"
        self.state_memory = StateMemory(self.spec.states, self.dtype, self.device, num_slots, num_snapshots)

    def allocate_draft_head(self, num_cpu_blocks: int, num_slots: int) -> None:
        """Called after `allocate`. `num_slots`: of states."""
        states = self.spec.states
        assert states is not None, "what the draft head yields is kept beside states"
        k_pool, v_pool = self._pool if self.offload is None else self._make_pool(num_cpu_blocks, num_layers=1)
        self.draft_head = DraftHead(
            (k_pool[-1], v_pool[-1]), num_slots, states.max_guesses, states.draft_size, self.backend, self.scale
        )

    def _drop_states(self) -> None:
        memory, self.state_memory = self.state_memory, None
        if memory is not None:
            memory.close()

    def drop(self) -> None:
        """Release all that is on the GPU, so that it can be allocated in other sizes."""
        self.shadow = self.draft_head = None
        self._drop_states()
        if self.offload is None:
            self._pool = self._make_pool(num_blocks=0)
        else:
            self.offload.drop_slots()

    def disk_pool(self) -> KVPool:
        """The memory that has room for all blocks, and the snapshots of states."""
        snapshots = () if self.state_memory is None else self.state_memory.stored_parts
        if self.offload is None:
            caches, streams = self._pool, make_streams(self.device)
        else:
            caches, streams = (self.offload.k_cache_cpu, self.offload.v_cache_cpu), self.offload.streams
        return KVPool(self.spec, *caches, streams, snapshots=snapshots, device=self.device)

    # -- one step ------------------------------------------------------------------------------------------------

    def attention(
        self,
        plan: StepPlan,
        slot_mapping: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
        states: StateRows | None,
    ) -> StepAttention:
        """The attention of a step that is launched kernel by kernel.

        `last_batches` are the batches for the rows that the last layer returns. `states`: None if no layer is
        recurrent.
        """
        if self.offload is not None:
            fills = [self.shadow.moves(group) for group in plan.moves.streamed] if self.shadow is not None else ()
            return MergedAttention(
                self.backend,
                self.offload,
                self.cpu,
                slot_mapping,
                batches,
                last_batches,
                self.scale,
                self._step_states(states),
                fills,
                self.shadow,
            )
        paged, last = batches.paged, last_batches.paged
        return PagedAttention(
            self.backend, self.cache, slot_mapping, paged, last, self.scale, self._step_states(states)
        )

    def _step_states(self, rows: StateRows | None) -> StepStates | None:
        if rows is None:
            return None
        assert self.state_memory is not None, "allocate_states comes first"
        return StepStates(self.state_memory, rows)

    def paged_attention(
        self, slot_mapping: torch.Tensor, batch: PagedBatch, states: StateRows | None = None
    ) -> PagedAttention:
        """The attention of a decode step whose keys are all on the GPU."""
        step_states = self._step_states(states)
        return PagedAttention(self.backend, self.cache, slot_mapping, batch, batch, self.scale, step_states)

    def draft_attention(
        self, slot_mapping: torch.Tensor, batch: PagedBatch, states: StateRows | None, shadow: PagedBatch | None
    ) -> PagedAttention:
        """The attention of a draft. `shadow`: None if drafts attend to the keys on the GPU alone."""
        if shadow is None:
            return self.paged_attention(slot_mapping, batch, states)
        assert self.shadow is not None, "the plan reads the shadow, but there is none"
        step_states = self._step_states(states)
        return DraftAttention(
            self.backend, self.cache, slot_mapping, batch, self.scale, step_states, self.shadow, shadow
        )

    def begin_step(self, plan: StepPlan) -> None:
        """Called before any of the step's work is enqueued. Hot: once per step."""
        if self.offload is not None:
            self.offload.begin_step(plan.moves, chain.from_iterable(step.block_table for step in plan.sequences))
        if plan.moves.page_fills:
            assert self.shadow is not None, "the plan fills pages, but there is no shadow"
            self.shadow.fill(plan.moves.page_fills, *self.cache)
        if self.state_memory is not None:
            self.state_memory.begin_step(plan)

    def begin_all_layers(self) -> None:
        """Called before a single graph that runs all layers."""
        if self.offload is not None:
            self.offload.begin_all_layers()

    def ran_all_layers(self) -> None:
        """Called after that graph."""
        if self.offload is not None:
            self.offload.ran_all_layers()

    def end_step(self) -> TimedPieces | None:
        """Called after all of the step's work is enqueued. Returns the times of its layers if they are measured."""
        if self.offload is not None:
            self.offload.end_step()
        if self.state_memory is not None:
            self.state_memory.end_step()
        return None if self.offload is None else self.cpu.end_step(self.offload.timer.take())

    def stats(self) -> dict[str, Any]:
        """Counters of the copies, and the rate of the link."""
        if self.offload is None:
            return {}
        return self.offload.stats() | {"cpu_attention": self.cpu.name}

    def close(self) -> None:
        """Release what the garbage collector would not. The memory must not be used afterwards."""
        try:
            self.cpu.close()
        finally:
            self._drop_states()
            if self.offload is not None:
                self.offload.close()


def make_offload_engine(
    spec: KVCacheSpec, num_cpu_blocks: int, dtype: torch.dtype, device: torch.device
) -> OffloadEngine:
    """With the streams of the device."""
    return OffloadEngine(spec, num_cpu_blocks, dtype, device, make_streams(device))
