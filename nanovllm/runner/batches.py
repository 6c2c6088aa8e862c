"""Builds a step's PagedBatches, which say what keys each query sees: for all tokens, or only for the last ones."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm.attention.base import HostTables, PagedBatch
from nanovllm.core.step_plan import StepPlan
from nanovllm.kvcache.transfer.cpu_attention import CpuRows
from nanovllm.runner.inputs import StepTensors


class StepBatches(NamedTuple):
    """The paged keys, those of each streamed group and those that the CPU attends to, for the same rows."""

    paged: PagedBatch
    groups: tuple[PagedBatch, ...]
    cpu: CpuRows | None  # None: the CPU attends to nothing


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
