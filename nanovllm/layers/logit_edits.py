"""Edits of logits before sampling: masks, biases and penalties, as core/logit_edits.py defines them."""

import torch

from nanovllm.kernels.sampling_tensors import EditTensors


def edit_logits(logits: torch.Tensor, edits: EditTensors, input_ids: torch.Tensor) -> torch.Tensor:
    """logits [S, vocab_size] of any float type -> the edited rows, fp32 [R, vocab_size].

    input_ids: int64 [T], the step's own. Hot: once per step. On a GPU nothing here waits for the GPU.
    """
    if logits.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.edit_logits(logits, edits, input_ids)
    edited = logits[edits.rows].float()
    for i, row in enumerate(edited):
        _edit_row(row, edits, i, input_ids)
    return edited


def _edit_row(row: torch.Tensor, edits: EditTensors, i: int, input_ids: torch.Tensor) -> None:
    """Edit row i [vocab_size] in place."""
    if edits.allowed_row[i] >= 0:
        row.masked_fill_(~_bits(edits.allowed[edits.allowed_row[i]], len(row)), -torch.inf)
    new_ids = input_ids[edits.new_start[i] : edits.new_end[i]]
    last_id = input_ids[edits.new_end[i] - 1]
    for starts, ends in ((edits.bias_start, edits.bias_end), (edits.bad_end_start, edits.bad_end_end)):
        biases = slice(starts[i], ends[i])
        after = edits.bias_after[biases]
        applies = (after < 0) | (after == last_id)
        row.index_add_(0, edits.bias_ids[biases][applies], edits.bias_values[biases][applies])

    seen = slice(edits.seen_start[i], edits.seen_end[i])
    counts = torch.zeros(len(row), dtype=torch.int32).index_add_(0, edits.seen_ids[seen], edits.seen_counts[seen])
    counts.index_add_(0, new_ids, torch.ones_like(new_ids, dtype=torch.int32))
    repeats = counts > 0
    if edits.prompt_row[i] >= 0:
        repeats |= _bits(edits.prompt_masks[edits.prompt_row[i]], len(row))
    repeated = torch.where(row > 0, row / edits.repetition[i], row * edits.repetition[i])
    penalized = torch.where(repeats, repeated, row)
    penalized -= edits.frequency[i] * counts + edits.presence[i] * (counts > 0)
    row.copy_(penalized)


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """A mask of int32 words as bool [count]."""
    return ((words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).flatten()[:count] != 0
