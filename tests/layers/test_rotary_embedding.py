"""Frequencies, cos and sin of every rope type against transformers."""

from typing import Any

import pytest
import torch
from tiny_models import ROPES
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanovllm.checkpoint.model_config import RopeConfig
from nanovllm.layers.rotary_embedding import KVCells, RotaryEmbedding, apply_rotary, rotate_and_store

HEAD_DIM = 64
MAX_POSITION = 4096


def scaled(rope_type: str, **changes: Any) -> dict[str, Any]:
    """The rope of the tiny models at a real size."""
    scaling = dict(ROPES[rope_type])
    if "original_max_position_embeddings" in scaling:
        scaling["original_max_position_embeddings"] = 1024
    return {**scaling, **changes}


def both(scaling: dict[str, Any], max_model_len: int = 65536) -> tuple[RotaryEmbedding, LlamaRotaryEmbedding]:
    hf = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_theta=500000.0,
        rope_scaling=dict(scaling),
    )
    fields = {"original_max_position_embeddings": MAX_POSITION, **scaling}
    config = RopeConfig(rope_theta=500000.0, **fields)
    return RotaryEmbedding(config, HEAD_DIM, max_model_len=max_model_len), LlamaRotaryEmbedding(config=hf)


def reference_cos_sin(reference: LlamaRotaryEmbedding, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = reference(torch.zeros(1), positions[None])
    return torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), -1)


YARN_VARIANTS = [
    {"truncate": False},
    {"beta_fast": 20.0, "beta_slow": 2.0},
    {"attention_factor": 0.7},
    {"mscale": 1.2, "mscale_all_dim": 0.8},
]
VARIANTS = [scaled(rope_type) for rope_type in ROPES] + [scaled("yarn", **changes) for changes in YARN_VARIANTS]


@pytest.mark.parametrize("scaling", VARIANTS, ids=str)
def test_cos_sin_up_to_four_times_the_original_length_match_transformers(scaling: dict[str, Any]) -> None:
    rotary, reference = both(scaling)
    positions = torch.arange(0, 4 * MAX_POSITION, 7)
    rope_lens = torch.full_like(positions, int(positions[-1]) + 1)
    expected = reference_cos_sin(reference, positions)
    got = rotary.cos_sin(positions, rope_lens)
    assert got.dtype == torch.float32
    # a frequency off by one rounding is off by that times the position in the angle
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_dynamic_each_token_uses_the_length_it_was_first_run_at() -> None:
    for num_prompt_tokens in (MAX_POSITION - 1, MAX_POSITION, MAX_POSITION + 1):
        rotary, reference = both(scaled("dynamic"))  # the reference keeps the frequencies of its longest sequence
        prompt = torch.arange(num_prompt_tokens)
        expected = [reference_cos_sin(reference, prompt)]
        expected += [reference_cos_sin(reference, torch.tensor([num_prompt_tokens + i])) for i in range(3)]
        positions = torch.arange(num_prompt_tokens + 3)
        got = rotary.cos_sin(positions, (positions + 1).clamp(min=num_prompt_tokens))
        torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=1e-6)
    with pytest.raises(AssertionError, match="rope_lens"):
        rotary.cos_sin(torch.arange(3))


def test_apply_rotary_matches_transformers() -> None:
    rotary, reference = both(scaled("default"))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, heads, HEAD_DIM, generator=generator) for heads in (4, 2))
    positions = torch.tensor([0, 9, 9, 4000, 123])
    cos, sin = reference(torch.zeros(1), positions[None])
    expected = apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in (q, k)), cos, sin)
    for x, want in zip((q, k), expected, strict=True):
        got = apply_rotary(x, rotary.cos_sin(positions))
        torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=0, atol=1e-6)
        rounded = apply_rotary(x.bfloat16(), rotary.cos_sin(positions))  # once
        assert torch.equal(rounded, apply_rotary(x.bfloat16().float(), rotary.cos_sin(positions)).bfloat16())


@pytest.mark.parametrize("normed", [True, False])
def test_rotate_and_store_norms_first_and_skips_minus_one(normed: bool) -> None:
    rotary, _ = both(scaled("default"))
    q, k, v = torch.randn(3, 8, HEAD_DIM, generator=torch.Generator().manual_seed(0)).split((4, 2, 2), dim=1)
    cos_sin = rotary.cos_sin(torch.tensor([4000, 0, 123]))
    weight = torch.linspace(0.5, 1.5, HEAD_DIM)
    cells = KVCells(*torch.zeros(2, 3, 4, 2, HEAD_DIM), torch.tensor([9, -1, 0]))
    weights = (weight, weight) if normed else (None, None)
    got_q = rotate_and_store(q, k, v, *weights, 1e-6, cos_sin, cells)
    if normed:
        q, k = (torch.nn.functional.rms_norm(x, (HEAD_DIM,), weight, 1e-6) for x in (q, k))
    torch.testing.assert_close(got_q, apply_rotary(q, cos_sin))
    for cache, want in zip(cells[:2], (apply_rotary(k, cos_sin), v), strict=True):
        flat = cache.flatten(0, 1)
        torch.testing.assert_close(flat[[9, 0]], want[[0, 2]])
        assert flat.abs().sum((1, 2)).count_nonzero() == 2
