"""Sampling without a softmax: argmax of logit / temperature - log(noise), one read of the logits.

That is the argmax of probability over noise, as layers/sampler.py defines it, since softmax only shifts a row's
logarithms by a constant. The noise is hashed from (seed, position, entry) in registers; its bits are those of
`random_bits` there. A row of temperature 0 takes the plain argmax and hashes nothing. Programs share a row's
vocabulary; a second kernel picks among their winners, the lowest entry of equal scores first.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from nanovllm.layers.kernels.pdl import let_next_start, pdl_options, wait_for_previous

BLOCK = 2048
MAX_BLOCKS = 8  # of a program; with few rows a program has one, so that a row is spread over many SMs
FEW_ROWS = 16


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
def _log2(x, FAST: tl.constexpr):
    """FAST: one instruction instead of some twenty. Triton's interpreter does not have it."""
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def _log2_noise(bits, FAST: tl.constexpr):
    """log2 of -log2(1 - u), u an odd multiple of 2^-24: that of Exp(1) noise, but for a constant."""
    u = ((bits >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    # The fast log2 is off by 2^-22 near 1, more than a small noise is large: there, the series u + u^2/2 + u^3/3
    series = u * (1.4426950408889634 + u * (0.7213475204444817 + u * 0.4808983469629878))
    return _log2(tl.where(u < 0.015625, series, -_log2(1.0 - u, FAST)), FAST)


@triton.jit
def _best_of_part_kernel(
    logits_ptr,  # [S, vocab_size]
    temperature_ptr,
    seed_ptr,
    position_ptr,
    score_ptr,  # [S, parts] fp32
    index_ptr,  # [S, parts] int64
    row_stride,
    vocab_size,
    RANDOM: tl.constexpr,
    PART: tl.constexpr,  # vocabulary entries of a program
    BLOCK: tl.constexpr,
    FAST_LOG: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    draws = temperature != 0.0
    # Scores are in units of log 2, as the noise is
    scale = tl.where(draws, 1.4426950408889634 / tl.maximum(temperature, 1e-10), 1.0)
    if RANDOM:
        key_low, key_high = _row_key(seed_ptr, position_ptr, row)
    first = part * PART + tl.arange(0, BLOCK)
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)  # of each column of the blocks
    best_entry = first
    for start in range(0, PART, BLOCK):
        entry = first + start
        logit = tl.load(logits_ptr + row * row_stride + entry, mask=entry < vocab_size, other=float("-inf"))
        score = logit.to(tl.float32) * scale
        if RANDOM:  # noqa: SIM102  (known when compiled, the other is not)
            if draws:
                score -= _log2_noise(_random_bits(entry, key_low, key_high), FAST_LOG)
        is_better = score > best_score
        best_score = tl.where(is_better, score, best_score)
        best_entry = tl.where(is_better, entry, best_entry)
    top = tl.max(best_score, 0)
    lowest = tl.min(tl.where(best_score == top, best_entry, 0x7FFFFFFF), 0)
    tl.store(score_ptr + row * tl.num_programs(0) + part, top)
    tl.store(index_ptr + row * tl.num_programs(0) + part, lowest.to(tl.int64))


@triton.jit
def _best_part_kernel(score_ptr, index_ptr, token_ptr, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    score = tl.load(score_ptr + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    _, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(token_ptr + row, tl.load(index_ptr + row * num_parts + at))


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, random: bool
) -> torch.Tensor:
    """logits [S, vocab_size] of any float type, the rest [S] -> token ids int64 [S].

    `random`: whether any row has a temperature above 0. Tokens cut by a filter have logit -inf. Hot: once per step.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "a row of logits must lie together"
    part_size = BLOCK if num_rows <= FEW_ROWS else BLOCK * MAX_BLOCKS
    num_parts = triton.cdiv(vocab_size, part_size)
    scores = logits.new_empty((num_rows, num_parts), dtype=torch.float32)
    indices = logits.new_empty((num_rows, num_parts), dtype=torch.int64)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    _best_of_part_kernel[(num_parts, num_rows)](
        logits,
        temperature,
        seed,
        position,
        scores,
        indices,
        logits.stride(0),
        vocab_size,
        RANDOM=random,
        PART=part_size,
        BLOCK=BLOCK,
        FAST_LOG=logits.is_cuda,
        num_warps=4,
        **pdl_options(logits.device),
    )
    _best_part_kernel[(num_rows,)](
        scores,
        indices,
        tokens,
        num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
        **pdl_options(logits.device),
    )
    return tokens
