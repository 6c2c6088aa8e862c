"""Sampling without a softmax: argmax of logit / temperature - log(noise), one read of the logits.

That is the argmax of probability over noise, as layers/sampler.py defines it, since softmax only shifts a row's
logarithms by a constant. The noise is hashed from (seed, position, entry) in registers. A row of temperature 0 takes
the plain argmax. Programs share a row's vocabulary; a second kernel picks among their winners, the lowest entry of
equal scores first.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048
PART = 8 * BLOCK  # vocabulary entries of one program


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


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
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    scale = tl.where(temperature == 0.0, 1.0, 1.0 / tl.maximum(temperature, 1e-10))
    if RANDOM:
        seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
        row_key = _mix(_mix(seed) + tl.load(position_ptr + row).to(tl.uint64, bitcast=True))
    best_score = float("-inf")
    best_index = part * PART
    for start in range(part * PART, tl.minimum(part * PART + PART, vocab_size), BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < vocab_size
        score = tl.load(logits_ptr + row * row_stride + entry, mask=inside, other=float("-inf")).to(tl.float32) * scale
        if RANDOM:
            bits = _mix(row_key + entry.to(tl.uint64) * 0x9E3779B97F4A7C15)
            uniform = ((bits >> 40).to(tl.float32) + 0.5) * 5.9604644775390625e-08  # 2^-24
            noise = tl.where(temperature == 0.0, 0.0, tl.log(-tl.log(uniform)))
            score = score - noise
        top, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        best_index = tl.where(top > best_score, start + at, best_index)
        best_score = tl.maximum(best_score, top)
    tl.store(score_ptr + row * tl.num_programs(0) + part, best_score)
    tl.store(index_ptr + row * tl.num_programs(0) + part, best_index.to(tl.int64))


@triton.jit
def _best_part_kernel(score_ptr, index_ptr, token_ptr, num_parts, BLOCK: tl.constexpr):
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
    num_parts = triton.cdiv(vocab_size, PART)
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
        PART=PART,
        BLOCK=BLOCK,
    )
    _best_part_kernel[(num_rows,)](scores, indices, tokens, num_parts, BLOCK=triton.next_power_of_2(num_parts))
    return tokens
