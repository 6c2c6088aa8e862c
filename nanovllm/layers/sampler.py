"""Sampler: logits to token ids, each row by its own parameters and its own noise.

A token is the argmax of probability over Exp(1) noise (the exponential race, equal in distribution to drawing from
the probabilities). The noise is a hash of the request's seed, the token's position and the vocabulary entry, so a
seeded request draws the same noise whatever it is batched with, on every device and rank.
"""

from typing import NamedTuple

import torch


class SamplingTensors(NamedTuple):
    """One entry per row, [S], on the device. `filtered`, `random`: whether any row cuts its distribution or draws."""

    temperature: torch.Tensor  # float32, 0: greedy
    top_k: torch.Tensor  # int64, 0: all
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int64
    filtered: bool
    random: bool


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """logits [S, vocab_size], any float type -> token ids int64 [S]."""
    if params.filtered:
        logits = filter_logits(logits, params)
    if logits.is_cuda:
        from nanovllm.layers import kernels

        return kernels.sample_tokens(logits, params.temperature, params.seed, params.position, params.random)
    greedy = logits.argmax(dim=-1)
    if not params.random:
        return greedy
    scaled = logits.float() / params.temperature.clamp(min=1e-10)[:, None]
    probs = torch.softmax(scaled, dim=-1)
    drawn = (probs / exponential_noise(params.seed, params.position, logits.shape[-1])).argmax(dim=-1)
    return torch.where(params.temperature == 0, greedy, drawn)


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


def exponential_noise(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exp(1) noise [S, vocab_size] in fp32, from 6e-8 to 16.6: a function of (seed, position, entry).

    -log1p of an odd multiple of 2^-24: those in (0, 1) are exact in fp32, so that the noise is never 0 or infinite.
    """
    uniform = ((random_bits(seed, position, vocab_size) >> 8) | 1).float() * 2.0**-24
    return -torch.log1p(-uniform)


def random_bits(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """32 random bits [S, vocab_size], as int64: the row's 64-bit key, then entries by a hash in 32-bit arithmetic.

    The key is mixed by splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014). Its low half is where the row's Weyl sequence over the entries starts; each term is mixed by lowbias32
    (Wellons: Prospecting for hash functions, https://nullprogram.com/blog/2018/07/31/), between whose multiplications
    the key's high half comes in. kernels/sampler.py computes the same; a GPU multiplies 32 bits several times faster
    than 64.
    """
    entry = torch.arange(vocab_size, device=seed.device)
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
