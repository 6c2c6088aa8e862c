"""Edits of logits as core/logit_edits.py defines them, in two kernels.

The first copies the rows to fp32 and forbids the tokens that a mask leaves out. It reads the whole vocabulary. The
second applies biases and penalties in place, one program per row. It touches only the tokens concerned, so its cost
does not depend on the vocabulary.

A token may be among those that the host has counted and also among the step's own inputs. The program of the row
therefore adds up both before it penalizes the token, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.sampling_tensors import EditTensors

_COPY_TILE = 2048  # vocabulary entries
_EDIT_TILE = 512  # tokens


@triton.jit
def _copy_rows_kernel(
    logits_ptr,  # [S, vocab_size]
    rows_ptr,
    allowed_row_ptr,
    allowed_ptr,  # [K, num_words] int32
    edited_ptr,  # [R, vocab_size] fp32
    row_stride,
    vocab_size,
    num_words,
    TILE: tl.constexpr,
):
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64)
    is_entry = entry < vocab_size
    logit = tl.load(logits_ptr + tl.load(rows_ptr + row) * row_stride + entry, mask=is_entry, other=0.0).to(tl.float32)
    allowed_row = tl.load(allowed_row_ptr + row)
    if allowed_row >= 0:
        word = tl.load(allowed_ptr + allowed_row * num_words + entry // 32, mask=is_entry, other=0)
        logit = tl.where((word >> (entry % 32)) & 1 != 0, logit, float("-inf"))
    tl.store(edited_ptr + row * vocab_size + entry, logit, mask=is_entry)


@triton.jit
def _penalized(logit, count, repetition, frequency, presence):
    logit = tl.where(logit > 0, logit / repetition, logit * repetition)
    return logit - frequency * count - tl.where(count > 0, presence, 0.0)


@triton.jit
def _edit_rows_kernel(
    edited_ptr,
    input_ids_ptr,  # [T] int64
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    seen_start_ptr,
    seen_end_ptr,
    new_start_ptr,
    new_end_ptr,
    bias_start_ptr,
    bias_end_ptr,
    seen_ids_ptr,
    seen_counts_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    bias_after_ptr,
    vocab_size,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    edited_ptr += row * vocab_size
    new_start, new_end = tl.load(new_start_ptr + row), tl.load(new_end_ptr + row)
    last_token = tl.load(input_ids_ptr + new_end - 1)
    bias_end = tl.load(bias_end_ptr + row)
    for first in range(tl.load(bias_start_ptr + row), bias_end, TILE):
        place = first + tl.arange(0, TILE)
        is_bias = place < bias_end
        after = tl.load(bias_after_ptr + place, mask=is_bias, other=0)
        token = tl.load(bias_ids_ptr + place, mask=is_bias, other=0)
        value = tl.load(bias_values_ptr + place, mask=is_bias, other=0.0)
        applies = is_bias & ((after < 0) | (after == last_token))
        tl.atomic_add(edited_ptr + token, value, mask=applies)  # a token may have several biases
    tl.debug_barrier()  # the biases are in place before other threads of this program read the logits

    repetition, frequency = tl.load(repetition_ptr + row), tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    seen_start, seen_end = tl.load(seen_start_ptr + row), tl.load(seen_end_ptr + row)
    for first in range(seen_start, seen_end, TILE):
        place = first + tl.arange(0, TILE)
        is_seen = place < seen_end
        token = tl.load(seen_ids_ptr + place, mask=is_seen, other=-1)
        count = tl.load(seen_counts_ptr + place, mask=is_seen, other=0)
        for new in range(new_start, new_end):
            count += (token == tl.load(input_ids_ptr + new)).to(tl.int64)
        logit = tl.load(edited_ptr + token, mask=is_seen, other=0.0)
        penalized = _penalized(logit, count.to(tl.float32), repetition, frequency, presence)
        tl.store(edited_ptr + token, penalized, mask=is_seen)

    penalizes = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    for new in range(new_start, tl.where(penalizes, new_end, new_start)):  # those that are not among the seen ones
        token = tl.load(input_ids_ptr + new)
        num_others = tl.full((), 0, tl.int32)  # where the token was penalized already
        for first in range(seen_start, seen_end, TILE):
            place = first + tl.arange(0, TILE)
            seen = tl.load(seen_ids_ptr + place, mask=place < seen_end, other=-1)
            num_others += tl.sum((seen == token).to(tl.int32), 0)
        count = tl.full((), 0, tl.int32)
        for other in range(new_start, new_end):
            is_same = (tl.load(input_ids_ptr + other) == token).to(tl.int32)
            count += is_same
            num_others += tl.where(other < new, is_same, 0)
        if num_others == 0:
            logit = tl.load(edited_ptr + token)
            penalized = _penalized(logit, count.to(tl.float32), repetition, frequency, presence)
            tl.store(edited_ptr + token, penalized)


def edit_logits(logits: torch.Tensor, edits: EditTensors, input_ids: torch.Tensor) -> torch.Tensor:
    """logits [S, vocab_size] of any float type -> the edited rows, fp32 [R, vocab_size]. Hot: once per step."""
    num_rows, vocab_size = len(edits.rows), logits.shape[1]
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    edited = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    on_grid(_copy_rows_kernel, (triton.cdiv(vocab_size, _COPY_TILE), num_rows))(
        logits,
        edits.rows,
        edits.allowed_row,
        edits.allowed,
        edited,
        logits.stride(0),
        vocab_size,
        edits.allowed.shape[1],
        TILE=_COPY_TILE,
        num_warps=4,
    )
    on_grid(_edit_rows_kernel, (num_rows,))(
        edited,
        input_ids,
        edits.repetition,
        edits.frequency,
        edits.presence,
        edits.seen_start,
        edits.seen_end,
        edits.new_start,
        edits.new_end,
        edits.bias_start,
        edits.bias_end,
        edits.seen_ids,
        edits.seen_counts,
        edits.bias_ids,
        edits.bias_values,
        edits.bias_after,
        vocab_size,
        TILE=_EDIT_TILE,
        num_warps=4,
    )
    return edited
