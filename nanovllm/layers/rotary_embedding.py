"""Rotary position embedding (Su et al. 2021) and its length extensions, with the numbers of transformers.

Pair i of a head (elements i and i + D/2) is turned by position * inv_freq[i]. What differs between the rope types is
inv_freq, and for yarn a factor on cos and sin. cos and sin are computed once per forward from the positions, for all
layers: there is no table, so that memory does not grow with the context (512 bytes a token at D = 128, else).

`rotate_and_store` is all that happens between the qkv product and attention; on a GPU it is one fused kernel.
"""

import math

import torch
from torch import nn

from nanovllm.checkpoint.model_config import RopeConfig
from nanovllm.layers.kv_cells import KVCells, store_kv
from nanovllm.layers.layernorm import rms_norm


class RotaryEmbedding(nn.Module):
    """cos and sin of every position.

    With type `dynamic` the frequencies of a token depend on the length of its sequence when it was first run (Bloc97's
    NTK scaling as transformers runs it): a prompt's tokens use the prompt's length, a generated token at position p
    uses p + 1. `needs_rope_lens` says that a sequence can be long enough for that to matter.
    """

    def __init__(self, config: RopeConfig, head_dim: int, *, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.attention_scaling = _yarn_attention_scaling(config) if config.rope_type == "yarn" else 1.0
        self.needs_rope_lens = config.rope_type == "dynamic" and max_model_len > config.original_max_position_embeddings
        # Computed on the CPU so that every device has the same frequencies, then moved to the current device
        inv_freq = _inv_freq(config, head_dim)
        self.inv_freq = nn.Buffer(inv_freq.to(torch.get_default_device()), persistent=False)

    def cos_sin(self, positions: torch.Tensor, rope_lens: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [T, D]: D/2 cosines, then D/2 sines, of int64 `positions` [T].

        `rope_lens` [T]: max(num_prompt_tokens, position + 1) of each token; read only when `needs_rope_lens`.
        """
        inv_freq: torch.Tensor = self.inv_freq
        if self.needs_rope_lens:
            assert rope_lens is not None, "dynamic rope past the original length needs rope_lens"
            inv_freq = self._dynamic_inv_freq(rope_lens)
        angles = positions.unsqueeze(-1).float() * inv_freq
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return cos_sin if self.attention_scaling == 1.0 else cos_sin * self.attention_scaling

    def _dynamic_inv_freq(self, rope_lens: torch.Tensor) -> torch.Tensor:
        """[T, D/2]: theta' = theta * (factor * L / L0 - (factor - 1)) ** (D / (D - 2)), for L above L0."""
        config, dim = self.config, self.head_dim
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
) -> torch.Tensor:
    """Turn q [T, H, D] and k [T, K, D] by `cos_sin` [T, D], store k and v, return q. Hot: once per layer.

    With weights [D] each head is RMS-normed first. The rotation is computed in fp32 and rounded once; q is contiguous.
    """
    if q.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.norm_rotate_store(q, k, v, q_weight, k_weight, eps, cos_sin, *cells)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = apply_rotary(q, cos_sin), apply_rotary(k, cos_sin)
    store_kv(k, v, cells)
    return q


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Heads [T, H, D] turned by `cos_sin` [T, D], computed in fp32, returned in the dtype of `x`."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def _exponents(dim: int, device: torch.device | str) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _inv_freq(config: RopeConfig, dim: int) -> torch.Tensor:
    """fp32 [D/2] on the CPU. `dynamic` starts as `default`."""
    inv_freq = 1.0 / config.rope_theta ** _exponents(dim, "cpu")
    if config.rope_type == "linear":
        return inv_freq / config.factor
    if config.rope_type == "llama3":
        return _llama3_inv_freq(config, inv_freq)
    if config.rope_type == "yarn":
        return _yarn_inv_freq(config, inv_freq)
    return inv_freq


def _llama3_inv_freq(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: wavelengths above L0 / low_freq_factor are stretched by `factor`, below L0 / high_freq_factor kept,
    and those between interpolated."""
    rotations = config.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original length
    kept = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * inv_freq / config.factor + kept * inv_freq


def _yarn_inv_freq(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023), equations 17 to 23: pairs that turn more than beta_fast times over the original length
    are kept, less than beta_slow times stretched by `factor`, with a linear ramp over the pairs between."""
    num_pairs = len(inv_freq)

    def pair_turning(num_turns: float) -> float:
        original = config.original_max_position_embeddings
        return num_pairs * math.log(original / (num_turns * 2 * math.pi)) / math.log(config.rope_theta)

    first, last = pair_turning(config.beta_fast), pair_turning(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first or 0.001  # transformers' guard against a division by zero
    stretched = ((torch.arange(num_pairs, dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
    return inv_freq / config.factor * stretched + inv_freq * (1 - stretched)


def _yarn_attention_scaling(config: RopeConfig) -> float:
    """The factor on cos and sin: 0.1 ln(factor) + 1, or the ratio of two such with mscale and mscale_all_dim."""

    def scaling(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scaling(config.mscale) / scaling(config.mscale_all_dim)
    return scaling(1.0)
