"""Index arithmetic of a step: the plan as flat arrays, with numpy, and their one copy to the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import HostTables, PagedBatch
from nanovllm.core.step_plan import StepPlan

_ALIGNMENT = 16  # bytes, of each array in the staging copy


def pad_tables(tables: Sequence[Sequence[int]], num_columns: int) -> np.ndarray:
    """int32 [len(tables), num_columns]; missing entries are 0, a valid block."""
    padded = np.zeros((len(tables), num_columns), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def build_arrays(plan: StepPlan, block_size: int) -> dict[str, np.ndarray]:
    """Everything the model and the sampler read, except the streamed groups.

    For T tokens of B sequences, S of which sample: input_ids, positions, rope_lens, slot_mapping int64 [T];
    cu_seqlens_q int32 [B + 1]; context_lens int32 [B]; block_tables int32 [B, longest]; sampled int64 [S], rows of
    the sequences that sample, and logits_rows int64 [S], their last tokens;
    pending_tokens, pending_rows int64 [number of pending tokens]: input_ids[pending_tokens[i]] is the token that the
    previous step sampled in its row pending_rows[i]; temperature, top_p, min_p float32 [S]; top_k, seed,
    sample_position int64 [S].
    """
    steps = plan.sequences
    query_lens = np.array([step.num_tokens for step in steps], dtype=np.int64)
    context_lens = np.array([step.num_paged_keys for step in steps], dtype=np.int64)
    starts = np.array([step.position for step in steps], dtype=np.int64)
    prompt_lens = np.array([step.num_prompt_tokens for step in steps], dtype=np.int64)
    ends = np.cumsum(query_lens)
    tables = pad_tables([step.block_table for step in steps], max(len(step.block_table) for step in steps))

    row = np.repeat(np.arange(len(steps)), query_lens)  # of each token
    offset = np.arange(ends[-1]) - (ends - query_lens)[row]
    positions = starts[row] + offset
    paged = (context_lens - query_lens)[row] + offset  # the token's index among its sequence's paged keys
    sampled = np.array([step.sampling is not None for step in steps])
    pending = np.array([step.previous_row for step in steps], dtype=np.int64)
    arrays = {
        "input_ids": np.concatenate([step.token_ids for step in steps]),
        "positions": positions,
        "rope_lens": np.maximum(prompt_lens[row], positions + 1),
        "slot_mapping": tables[row, paged // block_size].astype(np.int64) * block_size + paged % block_size,
        "cu_seqlens_q": np.concatenate([[0], ends]).astype(np.int32),
        "context_lens": context_lens.astype(np.int32),
        "block_tables": tables,
        "sampled": np.flatnonzero(sampled),
        "logits_rows": ends[sampled] - 1,
        "pending_tokens": ends[pending >= 0] - 1,
        "pending_rows": pending[pending >= 0],
    }
    rows = [step.sampling for step in steps if step.sampling is not None]
    for i, (name, dtype) in enumerate(SAMPLING_ARRAYS.items()):
        arrays[name] = np.array([sampling[i] for sampling in rows], dtype=dtype)
    return arrays


SAMPLING_ARRAYS = {  # fields of SamplingRow and of SamplingTensors, in order
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "sample_position": np.int64,
}


def build_groups(plan: StepPlan, block_size: int, group_blocks: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each streamed group context_lens int32 [B] and block_tables int32 [B, group_blocks]."""
    return [
        (
            np.array([len(table) * block_size for table in group.tables], dtype=np.int32),
            pad_tables(group.tables, group_blocks),
        )
        for group in plan.moves.streamed
    ]


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """All arrays on the device, by one copy from one (pinned) buffer. Does not wait for it."""
    offsets, size = {}, 0
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat = staging.numpy()
    for name, array in arrays.items():
        flat[offsets[name] : offsets[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
    on_device = staging.to(device, non_blocking=True)
    return {
        name: on_device[offsets[name] : offsets[name] + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for name, array in arrays.items()
    }


class StepBatches(NamedTuple):
    """The PagedBatches of a step: of the paged keys and of each streamed group, for all tokens or for some rows."""

    paged: PagedBatch
    groups: tuple[PagedBatch, ...]


def build_batches(plan: StepPlan, tensors: dict[str, torch.Tensor], block_size: int) -> StepBatches:
    """`tensors`: on the device, build_arrays, and of streamed group i `group_context_lens_i`, `group_tables_i`."""
    query_lens = [step.num_tokens for step in plan.sequences]
    context_lens = [step.num_paged_keys for step in plan.sequences]
    tables = [step.block_table for step in plan.sequences]

    def batch(
        lens_name: str, tables_name: str, lens: list[int], host_tables: Sequence[Sequence[int]], causal: bool
    ) -> PagedBatch:
        return PagedBatch(
            cu_seqlens_q=tensors["cu_seqlens_q"],
            context_lens=tensors[lens_name],
            block_tables=tensors[tables_name],
            max_query_len=max(query_lens),
            max_context_len=max(lens),
            causal=causal,
            host=HostTables(query_lens, lens, host_tables),
        )

    groups = []
    for i, group in enumerate(plan.moves.streamed):
        lens = [len(table) * block_size for table in group.tables]
        groups.append(batch(f"group_context_lens_{i}", f"group_tables_{i}", lens, group.tables, causal=False))
    return StepBatches(batch("context_lens", "block_tables", context_lens, tables, causal=True), tuple(groups))


def last_token_batches(plan: StepPlan, batches: StepBatches, sampled: torch.Tensor) -> StepBatches:
    """The same for the last tokens of the sequences that sample; `sampled` int64 [S]: their rows in the step."""
    rows = [row for row, step in enumerate(plan.sequences) if step.sampling is not None]
    cu_seqlens_q = torch.arange(len(rows) + 1, dtype=torch.int32, device=sampled.device)

    def select(batch: PagedBatch) -> PagedBatch:
        assert batch.host is not None, "a planned step knows its sizes"
        context_lens = [batch.host.context_lens[row] for row in rows]
        return PagedBatch(
            cu_seqlens_q=cu_seqlens_q,
            context_lens=batch.context_lens[sampled],
            block_tables=batch.block_tables[sampled],
            max_query_len=1,
            max_context_len=max(context_lens, default=0),
            causal=batch.causal,
            host=HostTables([1] * len(rows), context_lens, [batch.host.block_tables[row] for row in rows]),
        )

    return StepBatches(select(batches.paged), tuple(select(group) for group in batches.groups))
