"""Samples the rows of a step whose logits a request has edited, again, and replaces their tokens.

Most requests edit nothing, so graphs and the plain path sample all rows from the model's own logits. Afterwards the
edited rows are copied, edited and sampled, a limited number at a time. Rows without edits pay only for the launches.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.core.step_plan import StepPlan
from nanovllm.kernels.sampling_tensors import EditTensors, SamplingTensors
from nanovllm.layers.sampler import edit_logits, sample
from nanovllm.runner.inputs import copy_to_device
from nanovllm.utils.arithmetic import ceil_div

_ROW_STEP = 16  # rows of a chunk are a multiple of this, so that its arrays stay aligned
_CHUNK_BYTES = 32 << 20  # fp32 logits that are edited at once


class _EditedRow(NamedTuple):
    """One row of logits that is edited, and where its sequence is."""

    row: int  # among the sampled rows
    token: int  # the row's own token among the step's inputs
    first_token: int  # the first row's of the sequence
    seq: int  # number among the edited sequences
    number: int  # among the sequence's sampled rows


def resample_edited(
    plan: StepPlan,
    sampling: tuple[np.ndarray, ...],
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Replace those of `tokens`, int64 [S], whose logits [S, vocab_size] are edited. Hot: once per step with edits.

    `sampling` are the step's rows [S]. `input_ids`, int64 [T], are the step's own, as the model has read them.
    """
    arrays = edit_arrays(plan, logits.shape[1])
    row_ids = arrays[0]
    chosen = [column[row_ids] for column in sampling]
    copied = copy_to_device([*arrays, *chosen], logits.device)
    tensors, params = EditTensors._make(copied[: len(arrays)]), copied[len(arrays) :]
    num_rows = max(1, _CHUNK_BYTES // (4 * logits.shape[1] * _ROW_STEP)) * _ROW_STEP
    for start in range(0, len(row_ids), num_rows):
        part = tensors.part(start, start + num_rows)
        edited = edit_logits(logits, part, input_ids)
        tokens[part.rows] = sample(edited, SamplingTensors(*(column[start : start + num_rows] for column in params)))


def _edited_rows(plan: StepPlan) -> Iterator[_EditedRow]:
    first_row = num_tokens = num_edited = 0
    for step in plan.sequences:
        num_tokens += step.num_tokens
        if step.edits is not None:
            first_token = num_tokens - step.num_sampled
            for i in range(step.num_sampled):
                yield _EditedRow(first_row + i, first_token + i, first_token, num_edited, i)
            num_edited += 1
        first_row += step.num_sampled


def edit_arrays(plan: StepPlan, vocab_size: int) -> list[np.ndarray]:
    """The fields of EditTensors."""
    edits = [step.edits for step in plan.sequences if step.edits is not None]
    rows = list(_edited_rows(plan))
    penalties = [edits[row.seq].penalties for row in rows]
    of_rows = [edits[row.seq].rows[row.number] for row in rows]
    prompt_rows, prompt_masks = _distinct_masks([each.prompt_mask for each in penalties], vocab_size)
    allowed_rows, allowed = _distinct_masks([each.allowed for each in of_rows], vocab_size)
    (seen_starts, seen_ends), seen = _end_to_end(
        [each.token_ids for each in penalties], [each.counts for each in penalties]
    )
    biases = [each.biases for each in of_rows] + [each.bad_ends for each in of_rows]
    (bias_starts, bias_ends), bias_arrays = _end_to_end(*zip(*biases, strict=True))
    num_rows = len(rows)
    return [
        np.array([row.row for row in rows], np.int64),
        np.array([each.repetition for each in penalties], np.float32),
        np.array([each.frequency for each in penalties], np.float32),
        np.array([each.presence for each in penalties], np.float32),
        prompt_rows,
        seen_starts,
        seen_ends,
        np.array([row.first_token + 1 - edits[row.seq].num_new_tokens for row in rows], np.int64),
        np.array([row.token + 1 for row in rows], np.int64),
        bias_starts[:num_rows],
        bias_ends[:num_rows],
        bias_starts[num_rows:],
        bias_ends[num_rows:],
        allowed_rows,
        *seen,
        *bias_arrays,
        allowed,
        prompt_masks,
    ]


def _end_to_end(*columns: Sequence[np.ndarray]) -> tuple[tuple[np.ndarray, np.ndarray], list[np.ndarray]]:
    """Each column's arrays in one, and the start and end of each, int64. An object that occurs again is not repeated:
    answers to one prompt share their biases.
    """
    starts: dict[int, int] = {}  # by the id of the first column's array
    distinct, num_entries = [], 0
    for i, array in enumerate(columns[0]):
        if id(array) not in starts:
            starts[id(array)] = num_entries
            num_entries += len(array)
            distinct.append(i)
    found = np.array([starts[id(array)] for array in columns[0]], np.int64)
    ends = found + [len(array) for array in columns[0]]
    return (found, ends), [np.concatenate([column[i] for i in distinct]) for column in columns]


def _distinct_masks(masks: Sequence[np.ndarray | None], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each mask its row, or -1, int64, and the rows, int32 [K, ceil(vocab_size / 32)], each once."""
    distinct = {id(mask): mask for mask in masks if mask is not None}
    numbers = {id(None): -1} | dict(zip(distinct, range(len(distinct)), strict=True))
    rows = np.stack(list(distinct.values())) if distinct else np.zeros((0, ceil_div(vocab_size, 32)), np.int32)
    return np.array([numbers[id(mask)] for mask in masks], np.int64), rows
