"""Samples the rows of a step whose logits a request has edited, again, and replaces their tokens.

Most requests edit nothing, so graphs and the plain path sample all rows from the model's own logits. Afterwards the
edited rows are copied, edited and sampled, a limited number at a time. Rows without edits pay only for the launches.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.core.logit_edits import LogitEdits
from nanovllm.core.step_plan import StepPlan
from nanovllm.kernels.sampling_tensors import EditTensors, SamplingTensors
from nanovllm.layers.sampler import edit_logits, sample
from nanovllm.runner.inputs import SamplingArrays, copy_to_device

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
    plan: StepPlan, sampling: SamplingArrays, logits: torch.Tensor, input_ids: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Replace those of `tokens`, int64 [S], whose logits [S, vocab_size] are edited. Hot: once per step with edits.

    `sampling` are the step's rows [S]. `input_ids`, int64 [T], are the step's own, as the model has read them.
    """
    edits = [step.edits for step in plan.sequences if step.edits is not None]
    rows = list(_edited_rows(plan))
    row_ids = np.array([row.row for row in rows], np.int64)
    arrays = [*_row_arrays(edits, rows), *_ragged_arrays(edits), _masks(edits, logits.shape[1])]
    chosen = [column[row_ids] for column in sampling]
    copied = copy_to_device([*arrays, *chosen], logits.device)
    tensors, params = EditTensors._make(copied[: len(arrays)]), copied[len(arrays) :]
    num_rows = max(1, _CHUNK_BYTES // (4 * logits.shape[1] * _ROW_STEP)) * _ROW_STEP
    for start in range(0, len(rows), num_rows):
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


def _row_arrays(edits: list[LogitEdits], rows: list[_EditedRow]) -> list[np.ndarray]:
    """The columns of EditTensors with one value per row."""
    penalties = [each.penalties for each in edits]
    seen_ends = list(accumulate(len(each.token_ids) for each in penalties))
    bias_ends = list(accumulate(len(edits[row.seq].rows[row.number].biases.token_ids) for row in rows))
    of_row = [penalties[row.seq] for row in rows]
    masked = iter(range(len(rows)))
    return [
        np.array([row.row for row in rows], np.int64),
        np.array([each.repetition for each in of_row], np.float32),
        np.array([each.frequency for each in of_row], np.float32),
        np.array([each.presence for each in of_row], np.float32),
        np.array([seen_ends[row.seq] - len(penalties[row.seq].token_ids) for row in rows], np.int64),
        np.array([seen_ends[row.seq] for row in rows], np.int64),
        np.array([row.first_token + 1 - edits[row.seq].num_new_tokens for row in rows], np.int64),
        np.array([row.token + 1 for row in rows], np.int64),
        np.array([0, *bias_ends[:-1]], np.int64),
        np.array(bias_ends, np.int64),
        np.array([-1 if edits[r.seq].rows[r.number].allowed is None else next(masked) for r in rows], np.int64),
    ]


def _ragged_arrays(edits: list[LogitEdits]) -> list[np.ndarray]:
    """The tokens of the penalties and of the biases, for all sequences and rows in order."""
    biases = [row.biases for each in edits for row in each.rows]
    return [
        np.concatenate([each.penalties.token_ids for each in edits]),
        np.concatenate([each.penalties.counts for each in edits]),
        np.concatenate([each.token_ids for each in biases]),
        np.concatenate([each.values for each in biases]),
        np.concatenate([each.after for each in biases]),
    ]


def _masks(edits: list[LogitEdits], vocab_size: int) -> np.ndarray:
    """int32 [K, ceil(vocab_size / 32)]: the masks of the rows that have one."""
    masks = [row.allowed for each in edits for row in each.rows if row.allowed is not None]
    return np.stack(masks) if masks else np.zeros((0, -(-vocab_size // 32)), np.int32)
