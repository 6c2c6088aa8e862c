"""Edits of logits as capabilities/edits/logit_editor.py defines them, in four kernels.

1. Copy the rows to fp32 and forbid the tokens that a mask excludes. Reads the whole vocabulary.
2. Add the biases, one program per row. Touches only the biased tokens.
3. Apply the repetition penalty to the tokens of the prompt, which are a mask over the whole vocabulary.
4. Penalize the tokens of the answer, one program per row. Touches only the tokens of the answer.

A token may be both among the tokens that the host has counted and among the step's own inputs. The program of the row
therefore adds up both counts before it penalizes the token, once.
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
def _add_biases_kernel(
    edited_ptr,
    bias_start_ptr,
    bias_end_ptr,
    ids_ptr,
    values_ptr,
    vocab_size,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(bias_start_ptr + row), tl.load(bias_end_ptr + row)
    for first in range(start, end, TILE):
        place = first + tl.arange(0, TILE)
        is_bias = place < end
        token = tl.load(ids_ptr + place, mask=is_bias, other=0)
        value = tl.load(values_ptr + place, mask=is_bias, other=0.0)
        tl.atomic_add(edited_ptr + row * vocab_size + token, value, mask=is_bias)  # a token may have several biases


@triton.jit
def _repeated(logit, repetition):
    return tl.where(logit > 0, logit / repetition, logit * repetition)


@triton.jit
def _penalize_prompt_kernel(
    edited_ptr,
    repetition_ptr,
    prompt_row_ptr,
    prompt_masks_ptr,  # [P, num_words] int32
    vocab_size,
    num_words,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    prompt_row = tl.load(prompt_row_ptr + row)
    if prompt_row >= 0:
        entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
        word = tl.load(prompt_masks_ptr + prompt_row * num_words + entry // 32, mask=entry < vocab_size, other=0)
        is_prompt = (word >> (entry % 32)) & 1 != 0
        logit = tl.load(edited_ptr + row * vocab_size + entry, mask=is_prompt, other=0.0)
        repetition = tl.load(repetition_ptr + row)
        tl.store(edited_ptr + row * vocab_size + entry, _repeated(logit, repetition), mask=is_prompt)


@triton.jit
def _penalized(logit, count, is_prompt, repetition, frequency, presence):
    """Penalize a token of the answer. The repetition penalty of the prompt's tokens has already been applied."""
    return tl.where(is_prompt, logit, _repeated(logit, repetition)) - frequency * count - presence


@triton.jit
def _is_prompt(token, prompt_row, prompt_masks_ptr, num_words, mask):
    word = tl.load(prompt_masks_ptr + prompt_row * num_words + (token >> 5), mask=mask, other=0)
    return (word >> (token & 31)) & 1 != 0


@triton.jit
def _penalize_answer_kernel(
    edited_ptr,
    input_ids_ptr,  # [T] int64
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    prompt_row_ptr,
    seen_start_ptr,
    seen_end_ptr,
    new_start_ptr,
    new_end_ptr,
    seen_ids_ptr,
    seen_counts_ptr,
    prompt_masks_ptr,
    vocab_size,
    num_words,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    edited_ptr += row * vocab_size
    new_start, new_end = tl.load(new_start_ptr + row), tl.load(new_end_ptr + row)
    repetition, frequency = tl.load(repetition_ptr + row), tl.load(frequency_ptr + row)
    presence, prompt_row = tl.load(presence_ptr + row), tl.load(prompt_row_ptr + row)
    seen_start, seen_end = tl.load(seen_start_ptr + row), tl.load(seen_end_ptr + row)
    for first in range(seen_start, seen_end, TILE):
        place = first + tl.arange(0, TILE)
        is_seen = place < seen_end
        token = tl.load(seen_ids_ptr + place, mask=is_seen, other=-1)
        count = tl.load(seen_counts_ptr + place, mask=is_seen, other=0)
        for new in range(new_start, new_end):
            count += (token == tl.load(input_ids_ptr + new)).to(tl.int32)
        logit = tl.load(edited_ptr + token, mask=is_seen, other=0.0)
        is_prompt = _is_prompt(token, prompt_row, prompt_masks_ptr, num_words, is_seen & (prompt_row >= 0))
        penalized = _penalized(logit, count.to(tl.float32), is_prompt, repetition, frequency, presence)
        tl.store(edited_ptr + token, penalized, mask=is_seen)

    penalizes = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    for new in range(new_start, tl.where(penalizes, new_end, new_start)):  # tokens that the host has not counted yet
        token = tl.load(input_ids_ptr + new)
        num_others = tl.full((), 0, tl.int32)  # counts places where the token was penalized already
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
            is_prompt = _is_prompt(token, prompt_row, prompt_masks_ptr, num_words, prompt_row >= 0)
            penalized = _penalized(logit, count.to(tl.float32), is_prompt, repetition, frequency, presence)
            tl.store(edited_ptr + token, penalized)


def edit_logits(logits: torch.Tensor, edits: EditTensors, input_ids: torch.Tensor) -> torch.Tensor:
    """logits [S, vocab_size] of any float type -> the edited rows, fp32 [R, vocab_size]. Hot: once per step."""
    num_rows, vocab_size = len(edits.rows), logits.shape[1]
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    num_words = edits.allowed.shape[1]
    tiles = triton.cdiv(vocab_size, _COPY_TILE), num_rows
    edited = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    on_grid(_copy_rows_kernel, tiles)(
        logits,
        edits.rows,
        edits.allowed_row,
        edits.allowed,
        edited,
        logits.stride(0),
        vocab_size,
        num_words,
        TILE=_COPY_TILE,
        num_warps=4,
    )
    on_grid(_add_biases_kernel, (num_rows,))(
        edited,
        edits.bias_start,
        edits.bias_end,
        edits.bias_ids,
        edits.bias_values,
        vocab_size,
        TILE=_EDIT_TILE,
        num_warps=4,
    )
    on_grid(_penalize_prompt_kernel, tiles)(
        edited,
        edits.repetition,
        edits.prompt_row,
        edits.prompt_masks,
        vocab_size,
        num_words,
        TILE=_COPY_TILE,
        num_warps=4,
    )
    on_grid(_penalize_answer_kernel, (num_rows,))(
        edited,
        input_ids,
        edits.repetition,
        edits.frequency,
        edits.presence,
        edits.prompt_row,
        edits.seen_start,
        edits.seen_end,
        edits.new_start,
        edits.new_end,
        edits.seen_ids,
        edits.seen_counts,
        edits.prompt_masks,
        vocab_size,
        num_words,
        TILE=_EDIT_TILE,
        num_warps=4,
    )
    return edited
