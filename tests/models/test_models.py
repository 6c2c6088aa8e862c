"""Logits and greedy tokens of every architecture and rope type, against transformers in fp32."""

from pathlib import Path

import pytest
import torch
from dense_model import load_model, random_prompt, run_greedy, run_logits
from thread_ranks import run_ranks
from tiers import tiered
from tiny_models import ARCHITECTURES as KINDS
from tiny_models import GEMMAS, HYBRIDS, ROPES, greedy_reference, reference_model, write_tiny_model

from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.tp_group import TPGroup
from nanovllm.models import decoder
from nanovllm.models.loader import build_model

TOLERANCE = 1e-4


def assert_same_logits(directory: Path, prompt: list[int], max_model_len: int) -> None:
    with torch.no_grad():
        expected = reference_model(directory)(torch.tensor([prompt])).logits[0]
    model = load_model(directory, max_model_len=max_model_len)
    for chunk in (1000, 37):
        assert (run_logits(model, prompt, chunk) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", KINDS)
def test_logits_every_rope_past_its_original_length_match_transformers(
    tmp_path: Path, architecture: str, rope: str
) -> None:
    assert_same_logits(write_tiny_model(tmp_path, architecture, rope=rope), random_prompt(150), max_model_len=256)


@pytest.mark.parametrize("architecture", KINDS)
def test_logits_tied_and_biased_match_transformers(tmp_path: Path, architecture: str) -> None:
    assert_same_logits(write_tiny_model(tmp_path, architecture, tied=True, bias=True), random_prompt(50), 128)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "qwen3_5_moe"])
def test_logits_where_mlps_take_some_tokens_at_a_time_match_transformers(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "MAX_MLP_TOKENS", 16)
    write_tiny_model(tmp_path, architecture, num_layers=4)
    assert_same_logits(tmp_path, random_prompt(50), max_model_len=128)


@pytest.mark.parametrize("architecture", tiered([*KINDS, *HYBRIDS, *GEMMAS], ("llama", "qwen3_5", "gemma4")))
def test_logits_bfloat16_error_is_at_most_twice_that_of_transformers(tmp_path: Path, architecture: str) -> None:
    write_tiny_model(tmp_path, architecture, num_layers=4, dtype=torch.bfloat16)
    prompt = random_prompt(60)
    reference = reference_model(tmp_path)
    with torch.no_grad():
        exact = reference(torch.tensor([prompt])).logits[0]
        plain = reference.bfloat16()(torch.tensor([prompt])).logits[0]
    for chunk in (1000, 1) if architecture in HYBRIDS else (1000,):
        ours = run_logits(load_model(tmp_path, dtype=torch.bfloat16), prompt, chunk)
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).abs().mean() <= 2 * (plain - exact).abs().mean()


def test_greedy_dynamic_rope_around_the_original_length_matches_transformers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, rope={**ROPES["dynamic"], "factor": 4.0})
    assert not load_model(tmp_path, max_model_len=128).needs_rope_lens
    model = load_model(tmp_path, max_model_len=256)
    assert model.needs_rope_lens and load_model(tmp_path, max_model_len=129).needs_rope_lens
    for num_prompt_tokens in (100, 127, 128, 129, 140):
        prompt = random_prompt(num_prompt_tokens)
        assert run_greedy(model, prompt, 40) == greedy_reference(tmp_path, prompt, 40), num_prompt_tokens


@pytest.mark.parametrize("architecture", tiered([*KINDS, *HYBRIDS, *GEMMAS], ("qwen3", "qwen3_5_moe", "gemma4_moe")))
def test_greedy_tokens_of_the_tiny_models_vary(tmp_path: Path, architecture: str) -> None:
    """Tests that compare tokens would prove little on a model that repeats one."""
    write_tiny_model(tmp_path, architecture, num_layers=4 if architecture in HYBRIDS else 2)
    tokens = run_greedy(load_model(tmp_path), random_prompt(20), 24)
    assert tokens == greedy_reference(tmp_path, random_prompt(20), 24)
    assert len(set(tokens)) >= 12


@pytest.mark.parametrize(
    ("architecture", "num_kv_heads", "num_ranks"),
    [("qwen2", 1, 2), ("qwen3_5", 1, 2), ("gemma4", 1, 2), ("gpt_oss", 1, 4), ("llama", 2, 4)],
)
def test_logits_of_more_ranks_than_kv_heads_match_transformers(
    tmp_path: Path, architecture: str, num_kv_heads: int, num_ranks: int
) -> None:
    """The layers of the Gemma that have a window have two KV heads, one for each rank."""
    write_tiny_model(tmp_path, architecture, num_layers=4, num_kv_heads=num_kv_heads)
    prompt = random_prompt(40)
    with torch.no_grad():
        expected = reference_model(tmp_path)(torch.tensor([prompt])).logits[0]
    for logits in run_ranks(num_ranks, lambda tp: run_logits(load_model(tmp_path, tp), prompt, chunk=23)):
        assert (logits - expected).abs().max() < TOLERANCE


def test_presets_have_the_published_number_of_parameters() -> None:
    """The text part alone, as the names say; some published totals include the vision tower and the draft head."""
    for preset, num_billions, error in (
        ("qwen3-0.6b", 0.596, 0.001),
        ("qwen3-4b", 4.022, 0.001),
        ("qwen3-8b", 8.191, 0.001),
        ("qwen2.5-7b-1m", 7.616, 0.001),
        ("llama-3.1-8b", 8.030, 0.001),
        ("qwen3-30b-a3b", 30.532, 0.001),
        ("gpt-oss-20b", 20.91, 0.01),
        ("gpt-oss-120b", 116.83, 0.01),
        ("qwen3.5-9b", 8.95, 0.09),
        ("qwen3.5-27b", 26.9, 0.27),
        ("qwen3.5-35b-a3b", 34.66, 0.35),
        ("gemma-3-270m", 0.268, 0.001),
        ("gemma-3-1b", 1.000, 0.001),
        ("gemma-3-4b", 3.880, 0.001),
        ("gemma-3-12b", 11.766, 0.001),
        ("gemma-3-27b", 27.009, 0.001),
        ("gemma-4-12b", 11.907, 0.001),
        ("gemma-4-26b-a4b", 25.2, 0.05),
        ("gemma-4-31b", 30.7, 0.05),
    ):
        config, _ = load_config(preset)
        model = build_model(config, TPGroup(), max_model_len=4096, dtype=torch.bfloat16, device="meta")
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        assert num_parameters / 1e9 == pytest.approx(num_billions, abs=error), preset
