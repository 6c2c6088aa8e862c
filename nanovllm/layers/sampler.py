"""Sampler: logits to token ids, each row by its own parameters and its own noise.

A token is drawn in two steps: first one of the groups that the vocabulary is divided into, by the sum of its
probabilities, then an entry of that group. Each step is an argmax of probability over Exp(1) noise (the exponential
race, which has the same distribution as drawing from the probabilities), so noise is needed only for the groups and for
one group's entries. The noise is a hash of the request's seed, the token's position and the vocabulary entry, so a
seeded request draws the same noise whatever it is batched with, on every device and rank.

Filters do not sort the vocabulary. A token is drawn from the whole distribution first, and only then is it asked
whether the filters keep that one token. If they cut it, they also cut everything less likely, so the next attempt draws
from what is ahead of it, with noise of its own, and so on. Rejecting a draw leaves the probabilities of the kept tokens
in proportion, so the tokens are distributed as if the others had been masked beforehand; a token that is kept is the
one the request would have drawn without filters. top_p takes 1 + ln(1 / top_p) attempts on average, whatever the
logits: the probability ahead of a draw is uniformly distributed below what was ahead of the one before.

Which tokens are kept follows the order of transformers' logits processors: temperature, then top_k, then top_p of what
top_k left, then min_p.

- Tokens are ordered by logit, the largest first, and by id where logits are equal, the lowest first.
- top_k keeps every token whose logit is at least the k-th largest, so ties may make it more than k.
- top_p keeps a token if the probability of the tokens ahead of it is below top_p, where the tokens that top_k keeps
  sum to 1. It splits ties: as many of them are kept as top_p needs. (transformers keeps as many, but which of them
  depends on an unstable sort.) Sums are fp32, in an order that does not depend on the batch; where the probability
  ahead of a token is within their rounding of top_p, devices may disagree about that token.
- min_p keeps a token whose logit is at least the largest one + temperature * ln(min_p).
- The first token in the order is always kept, and greedy rows ignore filters.
"""

import itertools

import torch

from nanovllm.kernels.sampling_tensors import GROUP_SIZE, SamplingTensors
from nanovllm.sampling_params import INVALID_TOKEN


def sample(logits: torch.Tensor, params: SamplingTensors, out: torch.Tensor | None = None) -> torch.Tensor:
    """logits [S, vocab_size] of any float type -> token ids int64 [S], written to `out` if given.

    A row gets INVALID_TOKEN if one of its logits is NaN or +inf, or all of them are -inf. A greedy row gets the lowest
    id among its largest logits. Hot: once per step; on a GPU nothing here waits for it or depends on what it computes.
    """
    if logits.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.sample_tokens(logits, params, out)
    values = logits.float()
    tokens = _race(values, params, attempt=0)
    is_valid = (values < torch.inf).all(dim=-1) & (values > -torch.inf).any(dim=-1)  # NaN compares false
    rows = (is_valid & _filters(params, logits.shape[1])).nonzero()[:, 0]
    if len(rows):
        tokens[rows] = redraw_cut_tokens(values[rows], _take(params, rows), tokens[rows])
    tokens = torch.where(is_valid, tokens, INVALID_TOKEN)
    return tokens if out is None else out.copy_(tokens)


def redraw_cut_tokens(values: torch.Tensor, params: SamplingTensors, tokens: torch.Tensor) -> torch.Tensor:
    """`tokens` [S], with those that the filters cut replaced by others.

    values: valid logits in fp32, [S, vocab_size]; every temperature is above 0.
    """
    tokens = tokens.clone()
    temperature = params.temperature.clamp(min=_LEAST_TEMPERATURE)[:, None]
    top = values.amax(dim=-1, keepdim=True)
    weights = ((values - top) / temperature).exp()
    kth = _kth_largest(values, params.top_k)
    total = torch.where(values >= kth, weights, 0.0).sum(dim=-1)
    limit = torch.where(params.top_p < 1, params.top_p * total, torch.inf)
    floor = torch.maximum(kth, top + temperature * params.min_p.log()[:, None])  # log 0 = -inf keeps all
    entry = torch.arange(values.shape[1])
    for attempt in itertools.count(1):
        value = values.gather(1, tokens[:, None])
        is_ahead = (values > value) | ((values == value) & (entry < tokens[:, None]))
        weight_ahead = torch.where(is_ahead, weights, 0.0).sum(dim=-1)
        is_kept = (value >= floor)[:, 0] & ((weight_ahead < limit) | (weight_ahead == 0))
        if is_kept.all():
            break
        candidates = torch.where(is_ahead & (values >= floor), values, -torch.inf)
        tokens[~is_kept] = _race(candidates[~is_kept], _take(params, ~is_kept), attempt)
    return tokens


def _take(params: SamplingTensors, rows: torch.Tensor) -> SamplingTensors:
    return SamplingTensors(*(column[rows] for column in params))


def _filters(params: SamplingTensors, vocab_size: int) -> torch.Tensor:
    """bool [S]: whether the row draws from less than the whole distribution."""
    cuts = ((params.top_k > 0) & (params.top_k < vocab_size)) | (params.top_p < 1) | (params.min_p > 0)
    return cuts & (params.temperature > 0)


def _kth_largest(values: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[S, 1]; -inf for a row that keeps all."""
    filters = (top_k > 0) & (top_k < values.shape[1])
    k = torch.where(filters, top_k, 1)
    largest = values.topk(int(k.max()), dim=-1).values
    return torch.where(filters, largest.gather(1, k[:, None] - 1)[:, 0], -torch.inf)[:, None]


def _race(values: torch.Tensor, params: SamplingTensors, attempt: int) -> torch.Tensor:
    """One draw of each row, [S]: its group, then the entry. The largest value of a greedy row."""
    num_groups = -(-values.shape[1] // GROUP_SIZE)
    num_entries = num_groups * GROUP_SIZE
    first = attempt * (num_entries + num_groups)  # where the attempt's noise starts, and every entry has its own
    draws = params.temperature[:, None] != 0
    scaled = values / torch.where(draws, params.temperature[:, None].clamp(min=_LEAST_TEMPERATURE), 1.0)
    scaled = torch.nn.functional.pad(scaled, (0, num_entries - values.shape[1]), value=-torch.inf)
    scaled = scaled.unflatten(1, (num_groups, GROUP_SIZE))

    def best(log_weight: torch.Tensor, first_entry: torch.Tensor) -> torch.Tensor:
        """argmax [S] of weight over noise; `first_entry` [S or 1]: where the columns' noise starts."""
        entry = first_entry[:, None] + torch.arange(log_weight.shape[1])
        noise = exponential_noise(params.seed, params.position, entry)
        return torch.where(draws, log_weight - noise.log(), log_weight).argmax(dim=-1)

    group_weight = torch.where(draws, scaled.logsumexp(dim=-1), scaled.amax(dim=-1))
    group = best(group_weight, torch.tensor([first + num_entries]))  # groups count on where the entries end
    start = group * GROUP_SIZE
    return start + best(scaled[torch.arange(len(group)), group], first + start)


def exponential_noise(seed: torch.Tensor, position: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """Exp(1) noise [S, N] in fp32, from 6e-8 to 16.6: of each of the entries [S or 1, N], as `random_bits`.

    -log1p of an odd multiple of 2^-24: those in (0, 1) are exact in fp32, so that the noise is never 0 or infinite.
    """
    uniform = ((random_bits(seed, position, entry) >> 8) | 1).float() * 2.0**-24
    return -torch.log1p(-uniform)


def random_bits(seed: torch.Tensor, position: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """32 random bits [S, N], as int64: the row's 64-bit key, then entries [S or 1, N] by a hash in 32-bit arithmetic.

    The key is mixed by splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014). Its low half is where the row's Weyl sequence over the entries starts; each term is mixed by lowbias32
    (Wellons: Prospecting for hash functions, https://nullprogram.com/blog/2018/07/31/), between whose multiplications
    the key's high half comes in. kernels/sampler.py computes the same; a GPU multiplies 32 bits several times faster
    than 64.
    """
    key = _mix(_mix(seed) + position)[:, None]
    bits = (entry * 0x9E3779B9 + key) & _LOW_32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _LOW_32
    bits = ((bits ^ (bits >> 15) ^ _shift_right(key, 32)) * 0x846CA68B) & _LOW_32
    return bits ^ (bits >> 16)


_LOW_32 = (1 << 32) - 1
_LEAST_TEMPERATURE = 1e-10  # smaller ones count as this, because dividing by them overflows


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical shift of int64, which torch only shifts arithmetically."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
