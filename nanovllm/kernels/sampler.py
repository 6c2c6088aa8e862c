"""Sampling as layers/sampler.py defines it, in three kernels.

The first kernel reads the logits once and gives every group of the vocabulary a score: the log of its weight plus
noise, or its largest logit if the temperature is 0. The second picks each row's best group and draws noise for the
entries of that group only. So hashing and logarithms, which cost most, are needed for one group of many. The third
replaces tokens that a filter cuts (kernels/redraw.py). Scores are binary logarithms. Among equal scores the lowest
entry wins.

A NaN or +inf among the logits of a group makes its score NaN, and a NaN score makes the row invalid. The score gets its
NaN from a sum, because on a GPU a maximum may drop one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.constants import LOG2_E
from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.noise import log2_noise, random_bits, row_key
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from nanovllm.kernels.redraw import DEFAULT_TILE, RedrawTile, redraw_cut_tokens
from nanovllm.kernels.sampling_tensors import (
    GROUP_SIZE,
    SamplingTensors,
)


@triton.jit
def _row_scale(temperature_ptr, row):
    """Whether the row draws (its temperature is not 0), and the factor for its logits."""
    temperature = tl.load(temperature_ptr + row)
    draws = temperature != 0.0
    return draws, tl.where(draws, LOG2_E / tl.maximum(temperature, 1e-10), 1.0)


@triton.jit
def _score_groups_kernel(
    logits_ptr,  # [S, vocab_size]
    temperature_ptr,
    seed_ptr,
    position_ptr,
    groups_ptr,  # [S, 3, groups] fp32: score, largest logit, sum of the weights relative to it
    row_stride,
    vocab_size,
    GROUP_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    group, num_groups, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    draws, scale = _row_scale(temperature_ptr, row)
    entry = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    logit = tl.load(logits_ptr + row * row_stride + entry, mask=entry < vocab_size, other=float("-inf")).to(tl.float32)
    largest = tl.max(logit, 0)
    top = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.sum(tl.exp2((logit - top) * scale), 0)
    score = largest * scale + (weight - weight)  # NaN if a logit is NaN, or +inf, as inf - inf is NaN
    if draws:
        key_low, key_high = row_key(seed_ptr, position_ptr, row)
        score += tl.log2(weight) - log2_noise(random_bits(num_groups * GROUP_SIZE + group, key_low, key_high))
    groups_ptr += row * 3 * num_groups + group
    tl.store(groups_ptr, score)
    tl.store(groups_ptr + num_groups, largest)
    tl.store(groups_ptr + 2 * num_groups, weight)


@triton.jit
def _pick_entry_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    groups_ptr,
    token_ptr,  # [S] int64
    row_stride,
    vocab_size,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # num_groups or more
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    draws, scale = _row_scale(temperature_ptr, row)
    index = tl.arange(0, BLOCK)
    group_score = tl.load(groups_ptr + row * 3 * num_groups + index, mask=index < num_groups, other=float("-inf"))
    is_nan = group_score != group_score
    group_score = tl.where(is_nan, float("-inf"), group_score)
    best_score, group = tl.max(group_score, 0, return_indices=True, return_indices_tie_break_left=True)
    is_valid = (best_score > float("-inf")) & (tl.sum(is_nan.to(tl.int32), 0) == 0)
    entry = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    logit = tl.load(logits_ptr + row * row_stride + entry, mask=entry < vocab_size, other=float("-inf"))
    score = logit.to(tl.float32) * scale
    if draws:
        key_low, key_high = row_key(seed_ptr, position_ptr, row)
        score -= log2_noise(random_bits(entry, key_low, key_high))
    _, best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    token = group * GROUP_SIZE + best
    tl.store(token_ptr + row, tl.where(is_valid, token, -1).to(tl.int64))  # INVALID_TOKEN


def draw_tokens(
    logits: torch.Tensor, params: SamplingTensors, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw without filters. Returns token ids, int64 [S], written to `tokens` if given, and the groups.

    The groups are fp32 [S, 3, groups]: score, largest logit, sum of the weights relative to it.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE)
    groups = logits.new_empty((num_rows, 3, num_groups), dtype=torch.float32)
    if tokens is None:
        tokens = logits.new_empty(num_rows, dtype=torch.int64)
    options = {"GROUP_SIZE": GROUP_SIZE, **pdl_options(logits.device)}
    rows = logits, params.temperature, params.seed, params.position, groups
    on_grid(_score_groups_kernel, (num_groups, num_rows))(*rows, logits.stride(0), vocab_size, num_warps=1, **options)
    sizes = logits.stride(0), vocab_size, num_groups
    block = triton.next_power_of_2(num_groups)
    on_grid(_pick_entry_kernel, (num_rows,))(*rows, tokens, *sizes, BLOCK=block, num_warps=8, **options)
    return tokens, groups


def sample_tokens(
    logits: torch.Tensor,
    params: SamplingTensors,
    tokens: torch.Tensor | None = None,
    tile: RedrawTile = DEFAULT_TILE,
) -> torch.Tensor:
    """logits [S, vocab_size], any float -> token ids int64 [S], written to `tokens` if given. Hot: once per step."""
    tokens, groups = draw_tokens(logits, params, tokens)
    redraw_cut_tokens(logits, params, groups, tokens, tile)
    return tokens
