"""The sampling parameters that the sampler reads, as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP_SIZE = 2048  # vocabulary entries; changing it changes which tokens a seed draws


class SamplingTensors(NamedTuple):
    """One value per row, [S], on the device of the logits."""

    temperature: torch.Tensor  # float32, 0: greedy
    top_k: torch.Tensor  # int64, 0: off
    top_p: torch.Tensor  # float32, 1: off
    min_p: torch.Tensor  # float32, 0: off
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64


class EditTensors(NamedTuple):
    """Edits of R rows of a step's logits (capabilities/edits/logit_editor.py), on the device of the logits.

    The tokens of the ranges bias, seen and new of row i are entries start[i] to end[i] - 1: of the arrays below for
    bias and seen, where rows may share entries, and of the step's input ids for `new`.
    """

    rows: torch.Tensor  # int64 [R], the rows of the logits
    repetition: torch.Tensor  # float32 [R], 1: off
    frequency: torch.Tensor  # float32 [R], 0: off
    presence: torch.Tensor  # float32 [R], 0: off
    prompt_row: torch.Tensor  # int64 [R], a row of `prompt_masks`, or -1 if the repetition is 1
    seen_start: torch.Tensor  # int64 [R]
    seen_end: torch.Tensor  # int64 [R]
    new_start: torch.Tensor  # int64 [R]
    new_end: torch.Tensor  # int64 [R], one after the row's own input token
    bias_start: torch.Tensor  # int64 [R]
    bias_end: torch.Tensor  # int64 [R]
    allowed_row: torch.Tensor  # int64 [R], a row of `allowed`, or -1 if every token is allowed
    seen_ids: torch.Tensor  # int32 [N], tokens of answers, distinct in each range
    seen_counts: torch.Tensor  # int32 [N]
    bias_ids: torch.Tensor  # int32 [M]
    bias_values: torch.Tensor  # float32 [M]
    allowed: torch.Tensor  # int32 [K, ceil(vocab_size / 32)]
    prompt_masks: torch.Tensor  # int32 [P, ceil(vocab_size / 32)]

    def part(self, start: int, end: int) -> EditTensors:
        """Rows start to end - 1."""
        return EditTensors(*(column[start:end] for column in self[:NUM_EDIT_COLUMNS]), *self[NUM_EDIT_COLUMNS:])


NUM_EDIT_COLUMNS = EditTensors._fields.index("seen_ids")  # fields with one value per row
