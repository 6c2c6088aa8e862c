"""The attention of one step: which keys its queries see, and the calls of a layer that attend to them.

Legend: T packed tokens of the step, S those after which it samples, H query heads, D head dim.

All keys of a step may be on the GPU, and then a layer is one call of the backend. With offload, some are streamed from
CPU memory in groups, and some are attended to by the CPU where they lie. The results over these parts are merged
exactly. Keys carry their rotation, so the order of the blocks before the chunk does not matter. Only the paged call,
which holds the chunk itself, is causal.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention
from nanovllm.attention.merge import RunningMerge
from nanovllm.core.step_plan import StepPlan
from nanovllm.cpu_attention.job import AttentionJob
from nanovllm.kvcache.transfer.cpu_attention import CpuAttention, CpuRows
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.runner.inputs import StepTensors


class StepBatches(NamedTuple):
    """The paged keys, those of each streamed group and those that the CPU attends to, for the same rows."""

    paged: PagedBatch
    groups: tuple[PagedBatch, ...] = ()
    cpu: CpuRows | None = None  # None: the CPU attends to nothing


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
    ) -> None:
        self.backend, self.slot_mapping_T, self.scale = backend, slot_mapping_T, scale
        self.k_cache, self.v_cache = cache
        self.batch, self.last_batch = batch, last_batch
        self.last_layer = len(self.k_cache) - 1

    def cells(self, layer: int) -> KVCells:
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.slot_mapping_T)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Hot: once per layer."""
        return self.attend_paged(layer, q_THD).out_THD if len(q_THD) else q_THD

    def attend_paged(self, layer: int, q_THD: torch.Tensor) -> PartialAttention:
        batch = self.last_batch if layer == self.last_layer else self.batch
        return self.backend.attend(q_THD, self.k_cache[layer], self.v_cache[layer], batch, self.scale)


class MergedAttention(PagedAttention):
    """A StepAttention with offload. The caches are the slots, where new K and V go."""

    def __init__(
        self,
        backend: AttentionBackend,
        offload: OffloadEngine,
        cpu: CpuAttention | None,
        slot_mapping_T: torch.Tensor,
        batches: StepBatches,
        last_batches: StepBatches,
        scale: float,
    ) -> None:
        cache = offload.k_cache_gpu, offload.v_cache_gpu
        super().__init__(backend, cache, slot_mapping_T, batches.paged, last_batches.paged, scale)
        self.offload, self.cpu = offload, cpu
        self.groups, self.last_groups = batches.groups, last_batches.groups
        self.job, self.last_job = self._job(batches.cpu), self._job(last_batches.cpu)

    def _job(self, rows: CpuRows | None) -> AttentionJob | None:
        if rows is None:
            return None
        assert self.cpu is not None, "the plan leaves keys to the CPU, which does not attend"
        return self.cpu.make_job(rows, self.scale)

    def cells(self, layer: int) -> KVCells:
        """Hot: once per layer."""
        self.offload.begin_layer(layer)
        return super().cells(layer)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Hot: once per layer. A result is merged before the next one is computed, because it may take 64 MiB."""
        offload, is_last = self.offload, layer == self.last_layer
        groups, job = (self.last_groups, self.last_job) if is_last else (self.groups, self.job)
        offload.stored(layer)
        if len(q_THD) == 0:  # nothing is sampled: only release what was brought in for this layer
            offload.attended()
            for _ in offload.groups():
                pass
            return q_THD
        if job is not None:  # the CPU computes beside the GPU, so it begins first and is waited for last
            assert self.cpu is not None
            self.cpu.begin_layer(job, layer, q_THD)
        merged = RunningMerge(self.backend.merge, 1 + len(groups) + (job is not None))
        merged.add(self.attend_paged(layer, q_THD))
        offload.attended()
        for (k_group, v_group), batch in zip(offload.groups(), groups, strict=True):
            merged.add(self.backend.attend(q_THD, k_group, v_group, batch, self.scale))
        if job is not None:
            assert self.cpu is not None
            merged.add(PartialAttention(*self.cpu.results(q_THD)))
        return merged.result().out_THD


def build_batches(plan: StepPlan, tensors: StepTensors, block_size: int) -> StepBatches:
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
    return StepBatches(paged, tuple(groups), cpu_rows(plan))


def last_token_batches(plan: StepPlan, batches: StepBatches, tensors: StepTensors) -> StepBatches:
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
    """What the CPU attends to, for all tokens of the step."""
    spans = plan.moves.cpu_spans
    return CpuRows(tuple(step.num_tokens for step in plan.sequences), spans) if spans else None
