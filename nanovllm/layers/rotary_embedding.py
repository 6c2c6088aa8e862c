"""Rotary position embedding (Su et al. 2021) and its extensions to longer contexts, with the numerics of transformers.

Pair i of a head (elements i and i + D/2) is rotated by the angle position * inv_freq[i]. The rope types differ in
inv_freq, and yarn also scales cos and sin. Each forward computes cos and sin once for all layers, from the positions.
There is no precomputed table, because at D = 128 it would take 512 bytes per token of context.

Some models rotate only the first R elements of a head, element i with i + R/2. Their q and k store the elements of a
head in another order (`rotary_order`), in which elements i and i + R/2 are D/2 apart as well, and the other pairs have
the angle 0. The order does not change any product of q and k.

`rotate_and_store` does everything between the qkv product and attention. On a GPU it is one fused kernel.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.model_config import RopeConfig
from nanovllm.layers.layernorm import rms_norm


class KVCells(NamedTuple):
    """The cells of one layer's paged cache that new keys and values are written to. A cell holds one token.

    Token t goes into cell `slot_mapping_T[t]` of both caches (int64, block * P + offset), or is not stored if
    `slot_mapping_T[t]` is -1. `slot_mapping_T` is unrelated to the slots of the ring. (N blocks of P tokens, K kv
    heads, D head dim.)
    """

    k_cache_NPKD: torch.Tensor
    v_cache_NPKD: torch.Tensor
    slot_mapping_T: torch.Tensor


def store_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cells: KVCells) -> None:
    """Write each token's K and V into its cell. On a GPU the rotary kernel does this."""
    written_T = cells.slot_mapping_T >= 0
    index = cells.slot_mapping_T[written_T]
    cells.k_cache_NPKD.view(-1, *k_TKD.shape[1:])[index] = k_TKD[written_T]
    cells.v_cache_NPKD.view(-1, *v_TKD.shape[1:])[index] = v_TKD[written_T]


def rotary_order(head_dim: int, rotary_dim: int) -> list[slice]:
    """The elements of a head in the order in which q and k store them, if the first `rotary_dim` are rotated."""
    if rotary_dim == head_dim:
        return [slice(0, head_dim)]
    half, middle = rotary_dim // 2, (head_dim + rotary_dim) // 2
    bounds = (0, half), (rotary_dim, middle), (half, rotary_dim), (middle, head_dim)
    return [slice(start, end) for start, end in bounds]


class RotaryEmbedding(nn.Module):
    """Computes cos and sin for each position.

    With type `dynamic` (Bloc97's NTK scaling as in transformers) the frequencies of a token depend on the length of its
    sequence when it was first run: the tokens of a prompt use the prompt's length, a generated token at position p uses
    p + 1. `needs_rope_lens` tells whether a sequence can be long enough for that to matter.
    """

    def __init__(self, config: RopeConfig, head_dim: int, *, max_model_len: int, rotary_dim: int | None = None) -> None:
        """rotary_dim: number of rotated elements of a head, or None for all."""
        super().__init__()
        self.config = config
        self.rotary_dim = rotary_dim or head_dim
        self.num_unrotated = (head_dim - self.rotary_dim) // 2  # pairs
        self.attention_scaling = _yarn_attention_scaling(config) if config.rope_type == "yarn" else 1.0
        self.needs_rope_lens = config.rope_type == "dynamic" and max_model_len > config.original_max_position_embeddings
        # Compute on the CPU, so that every device has the same frequencies, then move to the current device.
        inv_freq = _inv_freq(config, self.rotary_dim)
        self.inv_freq = nn.Buffer(inv_freq.to(torch.get_default_device()), persistent=False)

    def cos_sin(self, positions: torch.Tensor, rope_lens: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [T, D] with D/2 cosines and then D/2 sines for each of the int64 `positions` [T].

        `rope_lens` [T]: max(num_prompt_tokens, position + 1) of each token; read only if `needs_rope_lens`.
        """
        inv_freq: torch.Tensor = self.inv_freq
        if self.needs_rope_lens:
            assert rope_lens is not None, "dynamic rope beyond the original length needs rope_lens"
            inv_freq = self._dynamic_inv_freq(rope_lens)
        angles = positions.unsqueeze(-1).float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        if self.num_unrotated:
            cos, sin = F.pad(cos, (0, self.num_unrotated), value=1.0), F.pad(sin, (0, self.num_unrotated))
        return torch.cat((cos, sin), dim=-1)

    def _dynamic_inv_freq(self, rope_lens: torch.Tensor) -> torch.Tensor:
        """[T, R/2]: theta' = theta * (factor * L / L0 - (factor - 1)) ** (R / (R - 2)), for L above the original L0."""
        config, dim = self.config, self.rotary_dim
        original = config.original_max_position_embeddings
        stretch = config.factor * rope_lens.clamp(min=original) / original - (config.factor - 1)
        base = config.rope_theta * stretch ** (dim / (dim - 2))
        return 1.0 / base.unsqueeze(-1) ** _exponents(dim, rope_lens.device)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    cells: KVCells,
    *,
    norms_v: bool = False,
) -> torch.Tensor:
    """Rotate q [T, H, D] and k [T, K, D] by `cos_sin` [T, D], store k and v, return q. Hot: once per layer.

    If weights [D] are given, each head is RMS-normed first. With `norms_v`, each head of v is RMS-normed without a
    weight. k and v may be the same tensor. The rotation is computed in fp32 and rounded once. The
    returned q is contiguous.
    """
    if q.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.norm_rotate_store(q, k, v, q_weight, k_weight, eps, cos_sin, *cells, norms_v=norms_v)
    if norms_v:
        v = rms_norm(v, torch.ones(v.shape[-1], dtype=torch.float32), eps)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = apply_rotary(q, cos_sin), apply_rotary(k, cos_sin)
    store_kv(k, v, cells)
    return q


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, H, D] by `cos_sin` [T, D]. Computed in fp32, returned in the dtype of `x`."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def _exponents(dim: int, device: torch.device | str) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _inv_freq(config: RopeConfig, dim: int) -> torch.Tensor:
    """fp32 [D/2] on the CPU. Up to the original length, `dynamic` equals `default`."""
    inv_freq = 1.0 / config.rope_theta ** _exponents(dim, "cpu")
    if config.rope_type == "linear":
        return inv_freq / config.factor
    if config.rope_type == "proportional":  # the other pairs do not rotate
        inv_freq[int(config.partial_rotary_factor * dim // 2) :] = 0
        return inv_freq / config.factor
    if config.rope_type == "llama3":
        return _llama3_inv_freq(config, inv_freq)
    if config.rope_type == "yarn":
        return _yarn_inv_freq(config, inv_freq)
    return inv_freq


def _llama3_inv_freq(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: wavelengths above L0 / low_freq_factor are stretched by `factor`, wavelengths below
    L0 / high_freq_factor are unchanged, and wavelengths between are interpolated. L0 is the original length.
    """
    rotations = config.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original length
    kept = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * inv_freq / config.factor + kept * inv_freq


def _yarn_inv_freq(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023), equations 17 to 23: pairs that rotate more than beta_fast times over the original length
    are unchanged, pairs that rotate less than beta_slow times are stretched by `factor`, and between the two the
    stretch is a linear ramp.
    """
    num_pairs = len(inv_freq)

    def pair_rotating(num_rotations: float) -> float:
        """Fractional index of the pair that rotates this many times over the original length."""
        original = config.original_max_position_embeddings
        return num_pairs * math.log(original / (num_rotations * 2 * math.pi)) / math.log(config.rope_theta)

    first, last = pair_rotating(config.beta_fast), pair_rotating(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first or 0.001  # transformers' guard against a division by zero
    stretched = ((torch.arange(num_pairs, dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
    return inv_freq / config.factor * stretched + inv_freq * (1 - stretched)


def _yarn_attention_scaling(config: RopeConfig) -> float:
    """The factor on cos and sin: 0.1 ln(factor) + 1, or a ratio of two such terms with mscale and mscale_all_dim."""

    def scaling(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scaling(config.mscale) / scaling(config.mscale_all_dim)
    return scaling(1.0)
