"""Sampling in two draws, as layers/sampler.py defines it: a group of the vocabulary, then an entry of that group.

The first kernel reads the logits once and gives every group a score: log of its weight, plus noise; with temperature
0 its largest logit. The second picks a row's best group and draws noise for the entries of that one only, so that what
costs most, hashing and logarithms, is spent on one group of many. Scores are in units of log 2. The noise is hashed
from (seed, position, entry) in registers; its bits are those of `random_bits` there. Of equal scores the lowest entry
wins.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from nanovllm.layers.sampler import GROUP_SIZE


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _row_key(seed_ptr, position_ptr, row):
    """The two halves of a row's 64-bit key."""
    seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
    key = _mix(_mix(seed) + tl.load(position_ptr + row).to(tl.uint64, bitcast=True))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _random_bits(entry, key_low, key_high):
    bits = entry.to(tl.uint32) * 0x9E3779B9 + key_low
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15) ^ key_high) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _log2_noise(bits):
    """log2 of -log2(1 - u), u an odd multiple of 2^-24: that of Exp(1) noise, but for a constant."""
    u = ((bits >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    return tl.log2(-tl.log2(1.0 - u))


@triton.jit
def _row_scale(temperature_ptr, row):
    """Whether the row draws, and what its logits are multiplied by."""
    temperature = tl.load(temperature_ptr + row)
    draws = temperature != 0.0
    return draws, tl.where(draws, 1.4426950408889634 / tl.maximum(temperature, 1e-10), 1.0)  # log2 e


@triton.jit
def _score_groups_kernel(
    logits_ptr,  # [S, vocab_size]
    temperature_ptr,
    seed_ptr,
    position_ptr,
    score_ptr,  # [S, groups] fp32
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
    logit = tl.load(logits_ptr + row * row_stride + entry, mask=entry < vocab_size, other=float("-inf"))
    scaled = logit.to(tl.float32) * scale
    score = tl.max(scaled, 0)
    if draws:
        weight = tl.exp2(scaled - tl.where(score == float("-inf"), 0.0, score))  # a group may be cut as a whole
        key_low, key_high = _row_key(seed_ptr, position_ptr, row)
        bits = _random_bits(num_groups * GROUP_SIZE + group, key_low, key_high)
        score += tl.log2(tl.sum(weight, 0)) - _log2_noise(bits)
    tl.store(score_ptr + row * num_groups + group, score)


@triton.jit
def _pick_entry_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    score_ptr,
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
    group_score = tl.load(score_ptr + row * num_groups + index, mask=index < num_groups, other=float("-inf"))
    _, group = tl.max(group_score, 0, return_indices=True, return_indices_tie_break_left=True)
    entry = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
    logit = tl.load(logits_ptr + row * row_stride + entry, mask=entry < vocab_size, other=float("-inf"))
    score = logit.to(tl.float32) * scale
    if draws:
        key_low, key_high = _row_key(seed_ptr, position_ptr, row)
        score -= _log2_noise(_random_bits(entry, key_low, key_high))
    _, best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.minimum(group * GROUP_SIZE + best, vocab_size - 1)  # of a row that is all NaN, whatever group won
    tl.store(token_ptr + row, token.to(tl.int64))


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits [S, vocab_size] of any float type, the rest [S] -> token ids int64 [S], in `tokens` if given.

    Tokens cut by a filter have logit -inf. Hot: once per step.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "a row of logits must lie together"
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE)
    scores = logits.new_empty((num_rows, num_groups), dtype=torch.float32)
    if tokens is None:
        tokens = logits.new_empty(num_rows, dtype=torch.int64)
    options = {"GROUP_SIZE": GROUP_SIZE, **pdl_options(logits.device)}
    rows = logits, temperature, seed, position, scores
    _score_groups_kernel[(num_groups, num_rows)](*rows, logits.stride(0), vocab_size, num_warps=1, **options)
    sizes = logits.stride(0), vocab_size, num_groups
    block = triton.next_power_of_2(num_groups)
    _pick_entry_kernel[(num_rows,)](*rows, tokens, *sizes, BLOCK=block, num_warps=8, **options)
    return tokens
