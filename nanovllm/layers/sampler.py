"""Sampler: logits to token ids, each row by its own parameters and its own noise.

A token is drawn in two steps, first one of the groups that cut the vocabulary, by the sum of its probabilities, then
an entry of that group. Each is an argmax of probability over Exp(1) noise (the exponential race, equal in distribution
to drawing from the probabilities), so noise is needed for the groups and for one group's entries, not for all. The
noise is a hash of the request's seed, the token's position and the vocabulary entry, so a seeded request draws the
same noise whatever it is batched with, on every device and rank.
"""

from typing import NamedTuple

import torch

GROUP_SIZE = 2048  # entries; it decides which tokens a seed draws


class SamplingTensors(NamedTuple):
    """One entry per row, [S], on the device. `filtered`: whether any row that draws cuts its distribution."""

    temperature: torch.Tensor  # float32, 0: greedy
    top_k: torch.Tensor  # int64, 0: all
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64
    filtered: bool


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """logits [S, vocab_size], any float type -> token ids int64 [S]. Of equal candidates the lowest id."""
    if params.filtered:
        logits = filter_logits(logits, params)
    return draw(logits, params.temperature, params.seed, params.position)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sample` without filters. `out` int64 [S]: where the tokens go, on a GPU; None: to a new tensor."""
    if logits.is_cuda:
        from nanovllm.layers import kernels

        return kernels.sample_tokens(logits, temperature, seed, position, out)
    assert out is None, "only a GPU's graphs need their tokens in one place"
    num_groups = -(-logits.shape[1] // GROUP_SIZE)
    padding = num_groups * GROUP_SIZE - logits.shape[1]
    draws = temperature[:, None] != 0
    scaled = logits.float() / torch.where(draws, temperature[:, None].clamp(min=1e-10), 1.0)
    scaled = torch.nn.functional.pad(scaled, (0, padding), value=-torch.inf).unflatten(1, (num_groups, GROUP_SIZE))

    def race(log_weight: torch.Tensor, first_entry: torch.Tensor) -> torch.Tensor:
        """argmax [S] of weight over noise; `first_entry` [S or 1]: where the columns' noise starts."""
        entry = first_entry[:, None] + torch.arange(log_weight.shape[1])
        noise = exponential_noise(seed, position, entry)
        return torch.where(draws, log_weight - noise.log(), log_weight).argmax(dim=-1)

    group_weight = torch.where(draws, scaled.logsumexp(dim=-1), scaled.amax(dim=-1))
    group = race(group_weight, torch.tensor([num_groups * GROUP_SIZE]))  # groups count on where the entries end
    start = group * GROUP_SIZE
    return start + race(scaled[torch.arange(len(group)), group], start)


def filter_logits(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The logits in fp32, with -inf for every token that is cut at the row's temperature.

    top_k first, then top_p of what is left; min_p is relative to the likeliest token, which is never cut.
    """
    temperature = torch.where(params.temperature == 0, 1.0, params.temperature)[:, None]
    ordered, order = logits.float().sort(dim=-1, descending=True)
    scaled = ordered / temperature
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = (rank < params.top_k[:, None]) | (params.top_k[:, None] == 0)
    keep &= scaled >= scaled[:, :1] + params.min_p.log()[:, None]  # log 0 = -inf keeps all
    probs = torch.softmax(scaled.masked_fill(~keep, -torch.inf), dim=-1)
    before = probs.cumsum(dim=-1) - probs
    keep &= (before < params.top_p[:, None]) | (params.top_p[:, None] == 1)  # a sum in fp32 can reach 1 early
    keep[:, 0] = True
    return torch.empty_like(ordered).scatter_(-1, order, ordered.masked_fill(~keep, -torch.inf))


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


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical shift of int64, which torch only shifts arithmetically."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
