"""Sampling as layers/sampler.py defines it, in three kernels.

The first kernel reads the logits once and gives every group of the vocabulary a score: the log of its weight plus
noise, or its largest logit if the temperature is 0. The second picks each row's best group and draws noise for the
entries of that group only. So hashing and logarithms, which cost most, are needed for one group of many. The third
replaces tokens that a filter cuts. Scores are binary logarithms. Among equal scores the lowest entry wins.

A NaN or +inf among the logits of a group makes its score NaN, and a NaN score makes the row invalid. The score gets its
NaN from a sum, because on a GPU a maximum may drop one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import LN_2, LOG2_E, let_next_start, on_grid, pdl_options, wait_for_previous
from nanovllm.kernels.sampling_tensors import GROUP_SIZE, SamplingTensors

_GROUP_SIZE = tl.constexpr(GROUP_SIZE)
_BUCKET_BITS = tl.constexpr(6)
_NUM_BUCKETS = tl.constexpr(64)


# -- noise -----------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(seed_ptr, position_ptr, row):
    """The two halves of a row's 64-bit key."""
    seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
    key = _mix(_mix(seed) + tl.load(position_ptr + row).to(tl.uint64, bitcast=True))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def random_bits(entry, key_low, key_high):
    bits = entry.to(tl.uint32) * 0x9E3779B9 + key_low
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15) ^ key_high) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def log2_noise(bits):
    """log2(-log2(1 - u)) for u an odd multiple of 2^-24. This is log2 of Exp(1) noise, up to a constant."""
    u = ((bits >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    return tl.log2(-tl.log2(1.0 - u))


# -- drawing without filters -----------------------------------------------------------------------------------------


@triton.jit
def _row_scale(temperature_ptr, row):
    """Return whether the row draws (its temperature is not 0), and the factor for its logits."""
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
) -> torch.Tensor:
    """logits [S, vocab_size], any float -> token ids int64 [S], written to `tokens` if given. Hot: once per step."""
    tokens, groups = draw_tokens(logits, params, tokens)
    redraw_cut_tokens(logits, params, groups, tokens)
    return tokens


# -- filters ---------------------------------------------------------------------------------------------------------
#
# The third kernel replaces the tokens that top_k, top_p or min_p cut. One program per row, which does nothing unless
# the row uses filters. A pass over the row reads only those groups of the vocabulary whose largest logit is large
# enough to matter: few with a peaked distribution, all of them with a flat one. The passes of a row are:
#
# - With top_k, the passes that find the k-th largest logit. If there are at least k groups, the k-th largest of their
#   largest logits is a lower bound to start from. Each pass divides the remaining range into 64 buckets. bf16 has
#   65,536 values, so there are at most three passes, and usually one or two.
# - With top_k and top_p, one pass that sums the weights that top_k keeps.
# - With top_p, one pass per attempt, which sums the weights ahead of the drawn token by group. Their total decides
#   whether the token is kept. If it is not, they are the weights of the groups in the next attempt.
# - Without top_p, at most one pass, because every token that the first redraw can draw is kept.
#
# The order of every sum depends on the row alone. The loop ends, because each attempt draws from fewer tokens than the
# one before, and no token is ahead of the first one.


@triton.jit
def _image(value):
    """Map floats to unsigned integers in the same order; -0.0 counts as 0.0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000)


@triton.jit
def _preimage(image, ZERO_BITS: tl.constexpr):
    """The float with this image, of which the low ZERO_BITS were shifted out. Those bits of the float are zeros."""
    image = image << ZERO_BITS
    image = tl.where(image >> 31 != 0, image, image | ((1 << ZERO_BITS) - 1))
    bits = image ^ tl.where(image >> 31 != 0, 0x80000000, 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_groups(row_ptr, vocab_size, chosen, first, TILE: tl.constexpr):
    """Load TILE of the groups that are `chosen` [BLOCK], starting with the `first`-th of them.

    Returns a mask [TILE, BLOCK] of where each group is, and entries and logits [TILE, _GROUP_SIZE]. Logits that do not
    exist are -inf.
    """
    index = tl.arange(0, chosen.shape[0])
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    place = first + tl.arange(0, TILE)
    is_here = (rank[None, :] == place[:, None]) & chosen[None, :]
    group = tl.sum(tl.where(is_here, index[None, :], 0), 1)
    num_chosen = tl.sum(chosen.to(tl.int32), 0)
    entry = group[:, None] * _GROUP_SIZE + tl.arange(0, _GROUP_SIZE)[None, :]
    is_entry = (place < num_chosen)[:, None] & (entry < vocab_size)
    return is_here, entry, tl.load(row_ptr + entry, mask=is_entry, other=float("-inf")).to(tl.float32)


@triton.jit
def _kth_largest(
    row_ptr, vocab_size, k, largest, num_groups, ZERO_BITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr
):
    """The k-th largest logit of a row, counting equal ones; k < vocab_size. `largest` [BLOCK] has one per group."""
    index = tl.arange(0, largest.shape[0])
    ordered = tl.sort(largest, descending=True)
    bound = tl.where(k <= num_groups, tl.sum(tl.where(index == k - 1, ordered, 0.0), 0), float("-inf"))
    low = _image(bound) >> ZERO_BITS  # at least k logits have this image or a larger one
    high = _image(tl.max(largest, 0)) >> ZERO_BITS  # fewer than k have a larger image than this
    while low < high:
        shift = tl.full((), 0, tl.uint32)
        while (high - low) >> shift >= _NUM_BUCKETS:
            shift += _BUCKET_BITS
        chosen = (_image(largest) >> ZERO_BITS >= low) & (index < num_groups)
        counts = tl.zeros((_NUM_BUCKETS,), tl.int32)
        for first in tl.range(0, tl.sum(chosen.to(tl.int32), 0), TILE, num_stages=STAGES):
            _, _, logit = _load_groups(row_ptr, vocab_size, chosen, first, TILE)
            image = _image(logit) >> ZERO_BITS
            bucket = tl.minimum(tl.where(image >= low, image - low, 0) >> shift, _NUM_BUCKETS - 1)
            counts += tl.histogram(tl.reshape(bucket.to(tl.int32), (TILE * _GROUP_SIZE,)), _NUM_BUCKETS)
        from_here = tl.cumsum(counts, 0, reverse=True)  # bucket 0 is wrong: it also counts the logits below `low`
        is_below = (from_here >= k) & (tl.arange(0, _NUM_BUCKETS) > 0)
        low += tl.sum(is_below.to(tl.int32), 0).to(tl.uint32) << shift
        high = low + tl.minimum(high - low, (1 << shift) - 1)
    return _preimage(low, ZERO_BITS)


@triton.jit
def _is_ahead(logit, entry, cut, cut_entry):
    """Return True if an entry is ahead of `cut_entry`, whose logit is `cut`; vocab_size is after all equal entries."""
    return (logit > cut) | ((logit == cut) & (entry < cut_entry))


@triton.jit
def _weigh_groups(row_ptr, vocab_size, largest, top, scale, cut, cut_entry, TILE: tl.constexpr, STAGES: tl.constexpr):
    """The total weight of the entries ahead of `cut_entry`, by group: [BLOCK]."""
    chosen = largest >= cut
    weight = tl.zeros_like(largest)
    for first in tl.range(0, tl.sum(chosen.to(tl.int32), 0), TILE, num_stages=STAGES):
        is_here, entry, logit = _load_groups(row_ptr, vocab_size, chosen, first, TILE)
        is_ahead = _is_ahead(logit, entry, cut, cut_entry)
        part = tl.sum(tl.where(is_ahead, tl.exp2((logit - top) * scale), 0.0), 1)
        weight += tl.sum(tl.where(is_here, part[:, None], 0.0), 0)
    return weight


@triton.jit
def _race(row_ptr, vocab_size, weight, num_groups, top, scale, cut, cut_entry, attempt, key_low, key_high):
    """Draw one of the entries ahead of `cut_entry`. `weight` [BLOCK] is the weight of each group."""
    noise_start = attempt * (num_groups * (_GROUP_SIZE + 1))  # each attempt has its own noise
    bits = random_bits(noise_start + num_groups * _GROUP_SIZE + tl.arange(0, weight.shape[0]), key_low, key_high)
    score = tl.where(weight > 0.0, tl.log2(weight) - log2_noise(bits), float("-inf"))
    _, group = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    entry = group * _GROUP_SIZE + tl.arange(0, _GROUP_SIZE)
    logit = tl.load(row_ptr + entry, mask=entry < vocab_size, other=float("-inf")).to(tl.float32)
    score = (logit - top) * scale - log2_noise(random_bits(noise_start + entry, key_low, key_high))
    score = tl.where(_is_ahead(logit, entry, cut, cut_entry), score, float("-inf"))
    _, best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    return group * _GROUP_SIZE + best


@triton.jit
def _redraw_kernel(
    logits_ptr,  # [S, vocab_size]
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    groups_ptr,  # [S, 3, groups] fp32; [:, 1] is a group's largest logit, [:, 2] its weight relative to it
    token_ptr,  # [S] int64
    row_stride,
    vocab_size,
    num_groups,
    ZERO_BITS: tl.constexpr,
    BLOCK: tl.constexpr,  # num_groups or more
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    token = tl.load(token_ptr + row).to(tl.int32)
    by_k, by_p = (k > 0) & (k < vocab_size), top_p < 1.0
    if (temperature > 0.0) & (token >= 0) & (by_k | by_p | (min_p > 0.0)):
        row_ptr = logits_ptr + row * row_stride
        groups_ptr += row * 3 * num_groups
        index = tl.arange(0, BLOCK)
        largest = tl.load(groups_ptr + num_groups + index, mask=index < num_groups, other=float("-inf"))
        top = tl.max(largest, 0)
        temperature = tl.maximum(temperature, 1e-10)
        scale = LOG2_E / temperature
        key_low, key_high = row_key(seed_ptr, position_ptr, row)

        # top_k and min_p keep logits of at least `floor`. top_p keeps a token if less than `limit` is ahead of it.
        floor = tl.minimum(top, top + temperature * (tl.log2(min_p) * LN_2))  # log 0 is -inf
        kth = tl.full((), float("-inf"), tl.float32)
        limit = tl.full((), float("inf"), tl.float32)
        if by_k:
            kth = _kth_largest(row_ptr, vocab_size, k, largest, num_groups, ZERO_BITS, TILE, STAGES)
            floor = tl.maximum(floor, kth)
        elif by_p:
            weight = tl.load(groups_ptr + 2 * num_groups + index, mask=index < num_groups, other=0.0)
            limit = top_p * tl.sum(weight * tl.exp2((largest - top) * scale), 0)
        lacks_limit = by_k & by_p  # the first pass computes it

        attempt = 0
        value = tl.load(row_ptr + token).to(tl.float32)
        is_kept = (value >= floor) & (by_p == 0)
        while not is_kept:
            is_in = value >= floor
            # The pass sums the weight ahead of the token if `asks`, else the weight that the filters keep.
            asks = is_in & (lacks_limit == 0)
            cut = tl.where(asks, value, tl.where(lacks_limit, kth, floor))
            cut_entry = tl.where(asks, token, vocab_size)
            weight = _weigh_groups(row_ptr, vocab_size, largest, top, scale, cut, cut_entry, TILE, STAGES)
            ahead = tl.sum(weight, 0)
            limit = tl.where(lacks_limit, top_p * ahead, limit)
            lacks_limit = False
            is_kept = asks & ((ahead < limit) | (ahead == 0.0))
            if (is_kept == 0) & (asks | ((is_in == 0) & (cut == floor))):
                attempt += 1
                token = _race(
                    row_ptr, vocab_size, weight, num_groups, top, scale, cut, cut_entry, attempt, key_low, key_high
                )
                value = tl.load(row_ptr + token).to(tl.float32)
                is_kept = by_p == 0
        tl.store(token_ptr + row, token.to(tl.int64))


def redraw_cut_tokens(
    logits: torch.Tensor,
    params: SamplingTensors,
    groups: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Replace the tokens, int64 [S], that the filters cut. `groups` is the result of draw_tokens."""
    num_rows, vocab_size = logits.shape
    num_groups = groups.shape[2]
    on_grid(_redraw_kernel, (num_rows,))(
        logits,
        *params,
        groups,
        tokens,
        logits.stride(0),
        vocab_size,
        num_groups,
        ZERO_BITS=_num_zero_bits(logits.dtype),
        BLOCK=triton.next_power_of_2(num_groups),
        TILE=2,
        STAGES=1,  # reads go to registers; with more stages they would go through shared memory
        num_warps=8,
        **pdl_options(logits.device),
    )


def _num_zero_bits(dtype: torch.dtype) -> int:
    """Count the low bits that are 0 in an fp32 logit converted from this dtype."""
    return {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[dtype]
