"""A step's arrays: computed from the plan with numpy, and moved to the device in one copy.

A step has T tokens of B sequences and samples S tokens.
"""

import typing
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.core.step_plan import SamplingRow, SequenceStep, StepPlan
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.utils.arithmetic import ceil_div

_ALIGNMENT = 16  # bytes; where each array starts in the staging buffer


_DTYPE_OF: dict[type, type[np.generic]] = {float: np.float32, int: np.int64}
SAMPLING_DTYPES = tuple(_DTYPE_OF[kind] for kind in typing.get_type_hints(SamplingRow).values())  # one for each field


class GroupArrays(NamedTuple):
    """The keys of one streamed group that each sequence attends to."""

    context_lens: np.ndarray  # int32 [B]
    block_tables: np.ndarray  # int32 [B, blocks of a group]


class StepArrays(NamedTuple):
    """Everything the model and the sampler read, except the streamed groups.

    The token at `input_ids[pending_tokens[i]]` is the one that row `pending_rows[i]` of the previous step sampled, or
    in a step with drafts the one that was drafted as number `pending_rows[i]`.
    """

    input_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    rope_lens: np.ndarray  # int64 [T]
    slot_mapping: np.ndarray  # int64 [T]
    cu_seqlens_q: np.ndarray  # int32 [B + 1]
    context_lens: np.ndarray  # int32 [B]
    block_tables: np.ndarray  # int32 [B, longest]
    sampling_seqs: np.ndarray  # int64 [B'], the sequences that sample
    sampling_cu_seqlens: np.ndarray  # int32 [B' + 1], how many tokens they sample, summed up
    logits_rows: np.ndarray  # int64 [S], the tokens after which they sample: the last ones of each
    pending_tokens: np.ndarray  # int64 [number of pending tokens]
    pending_rows: np.ndarray  # int64 [number of pending tokens]
    sampling: tuple[np.ndarray, ...]  # each [S], the fields of the plan's SamplingRows


class GroupTensors(NamedTuple):
    """GroupArrays on the device."""

    context_lens: torch.Tensor
    block_tables: torch.Tensor


class StepTensors(NamedTuple):
    """StepArrays on the device, and the streamed groups."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    rope_lens: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    sampling_seqs: torch.Tensor
    sampling_cu_seqlens: torch.Tensor
    logits_rows: torch.Tensor
    pending_tokens: torch.Tensor
    pending_rows: torch.Tensor
    sampling: SamplingTensors
    groups: tuple[GroupTensors, ...]


def pad_tables(tables: Sequence[Sequence[int]], num_columns: int) -> np.ndarray:
    """int32 [len(tables), num_columns]; missing entries are 0, a valid block."""
    padded = np.zeros((len(tables), num_columns), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def build_arrays(plan: StepPlan, block_size: int) -> StepArrays:
    """The arrays of a step. Hot: once per step."""
    steps = plan.sequences
    query_lens = np.array([step.num_tokens for step in steps], dtype=np.int64)
    context_lens = np.array([step.num_paged_keys for step in steps], dtype=np.int64)
    starts = np.array([step.position for step in steps], dtype=np.int64)
    prompt_lens = np.array([step.num_prompt_tokens for step in steps], dtype=np.int64)
    ends = np.cumsum(query_lens)
    tables = pad_tables([step.block_table for step in steps], max(len(step.block_table) for step in steps))

    row = np.repeat(np.arange(len(steps)), query_lens)  # each token's sequence
    offset = np.arange(ends[-1]) - (ends - query_lens)[row]
    positions = starts[row] + offset
    paged = (context_lens - query_lens)[row] + offset  # the token's index among its sequence's paged keys
    num_sampled = np.array([step.num_sampled for step in steps], dtype=np.int64)
    pending_tokens, pending_rows = _pending(plan, ends)
    return StepArrays(
        input_ids=np.concatenate([step.token_ids for step in steps]),
        positions=positions,
        rope_lens=np.maximum(prompt_lens[row], positions + 1),
        slot_mapping=tables[row, paged // block_size].astype(np.int64) * block_size + paged % block_size,
        cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        block_tables=tables,
        sampling_seqs=np.flatnonzero(num_sampled),
        sampling_cu_seqlens=np.concatenate([[0], num_sampled[num_sampled > 0].cumsum()]).astype(np.int32),
        logits_rows=np.flatnonzero(offset >= (query_lens - num_sampled)[row]),
        pending_tokens=pending_tokens,
        pending_rows=pending_rows,
        sampling=_sampling_arrays(steps),
    )


def _pending(plan: StepPlan, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`pending_tokens` and `pending_rows` of StepArrays. `ends`: where each sequence's tokens end."""
    drafts = plan.draft_rows()
    if not drafts:
        previous_rows = np.array([step.previous_row for step in plan.sequences], dtype=np.int64)
        is_pending = previous_rows >= 0
        return ends[is_pending] - 1, previous_rows[is_pending]
    assert all(step.previous_row < 0 for step in plan.sequences), "a step with drafts needs the tokens of the last one"
    drafted = [(i, row) for i, rows in enumerate(drafts) for row in rows]
    places = [
        (ends[row] - step.num_guesses + i, number)
        for number, (i, row) in enumerate(drafted)
        if i < (step := plan.sequences[row]).num_guesses and step.guesses[i] < 0
    ]
    tokens, numbers = (np.array([place[i] for place in places], dtype=np.int64) for i in range(2))
    return tokens, numbers


def _sampling_arrays(steps: Sequence[SequenceStep]) -> tuple[np.ndarray, ...]:
    """The fields of one SamplingRow for each sampled token."""
    rows = [
        step.sampling.at(step.sampling.position + i) if i else step.sampling
        for step in steps
        if step.sampling is not None
        for i in range(step.num_sampled)
    ]
    return tuple(np.array([row[i] for row in rows], dtype) for i, dtype in enumerate(SAMPLING_DTYPES))


def build_groups(plan: StepPlan, block_size: int, group_blocks: int) -> list[GroupArrays]:
    """The arrays of each streamed group, with tables of `group_blocks` columns."""
    return [
        GroupArrays(
            np.array(group.context_lens(block_size), dtype=np.int32),
            pad_tables(group.tables, group_blocks),
        )
        for group in plan.moves.streamed
    ]


def to_device(arrays: StepArrays, groups: Sequence[GroupArrays], device: torch.device) -> StepTensors:
    """Move all arrays to the device in one copy."""
    *of_step, sampling = arrays
    flat = [*of_step, *sampling, *(array for group in groups for array in group)]
    copied = iter(copy_to_device(flat, device))
    own = [next(copied) for _ in of_step]
    sampling_tensors = SamplingTensors._make(next(copied) for _ in sampling)
    group_tensors = tuple(GroupTensors(next(copied), next(copied)) for _ in groups)
    return StepTensors._make((*own, sampling_tensors, group_tensors))


def copy_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Move the arrays to the device in one copy from one buffer, which is pinned for a GPU. Does not wait for it."""
    offsets, num_bytes = [], 0
    for array in arrays:
        offsets.append(num_bytes)
        num_bytes += ceil_div(array.nbytes, _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        flat[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    on_device = staging.to(device, non_blocking=True)
    return [
        on_device[offset : offset + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]


def torch_dtype(dtype: np.dtype | type[np.generic]) -> torch.dtype:
    """The torch dtype that corresponds to a numpy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
