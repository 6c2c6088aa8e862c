"""Gemma 3, Gemma 4 and its mixture of experts: logits against transformers in fp32, and what the engine makes of their
files.
"""

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import DenseAttention, load_model, random_prompt, run_logits
from gemma3 import reference
from gguf_files import write_gguf
from quantized_models import write_quantized
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tiny_models import GEMMA_WINDOW, GEMMAS, reference_model, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.gguf import read_model
from nanovllm.checkpoint.read_config import config_of_gguf, load_config
from nanovllm.checkpoint.rope import rope_overrides
from nanovllm.errors import CheckpointError
from nanovllm.models import gemma

TOLERANCE = 1e-4


def expected_logits(directory: Path, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference_model(directory)(torch.tensor([prompt])).logits[0]
    return logits


def assert_same_logits(directory: Path, num_tokens: int = 3 * GEMMA_WINDOW + 5) -> None:
    """All at once, and in chunks that are longer than the window."""
    prompt = random_prompt(num_tokens)
    expected, model = expected_logits(directory, prompt), load_model(directory)
    for chunk in (1000, GEMMA_WINDOW + 1):
        assert (run_logits(model, prompt, chunk) - expected).abs().max() < TOLERANCE, chunk


@pytest.mark.parametrize("architecture", GEMMAS)
def test_logits_of_prompts_around_the_window_match_transformers(tmp_path: Path, architecture: str) -> None:
    write_tiny_model(tmp_path, architecture, num_layers=4)
    prompt = random_prompt(3 * GEMMA_WINDOW + 5)
    expected, model = expected_logits(tmp_path, prompt), load_model(tmp_path)
    for chunk in (1000, GEMMA_WINDOW + 1, 1):
        assert (run_logits(model, prompt, chunk) - expected).abs().max() < TOLERANCE, chunk
    for length in (1, GEMMA_WINDOW - 1, GEMMA_WINDOW, GEMMA_WINDOW + 1):
        assert (run_logits(model, prompt[:length]) - expected[:length]).abs().max() < TOLERANCE, length


@pytest.mark.parametrize("architecture", GEMMAS)
def test_logits_tied_biased_and_nested_match_transformers(tmp_path: Path, architecture: str) -> None:
    assert_same_logits(write_tiny_model(tmp_path / "tied", architecture, tied=True, bias=True, num_layers=3))
    assert_same_logits(write_tiny_model(tmp_path / "nested", architecture, with_vision=True))


def test_logits_with_other_settings_match_transformers(tmp_path: Path) -> None:
    ropes: dict[str, Any] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 3e4, "partial_rotary_factor": 0.6, "factor": 2.0},
    }
    for i, (architecture, changes) in enumerate(
        (
            (
                "gemma3",
                {
                    "final_logit_softcapping": 3.0,
                    "head_dim": 32,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                },
            ),
            ("gemma3", {"sliding_window": 1, "num_key_value_heads": 1}),
            ("gemma4", {"attention_k_eq_v": False, "final_logit_softcapping": None, "rope_parameters": ropes}),
            ("gemma4", {"global_head_dim": 80, "head_dim": 32, "num_global_key_value_heads": 1}),
            ("gemma4_moe", {"top_k_experts": 1, "moe_intermediate_size": 16}),
        )
    ):
        assert_same_logits(write_tiny_model(tmp_path / str(i), architecture, gemma=changes))


def test_logits_where_mlps_take_some_tokens_at_a_time_match_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma, "MAX_MLP_TOKENS", 16)
    assert_same_logits(write_tiny_model(tmp_path, "gemma4_moe"))


def test_rows_of_the_last_layer_are_the_rows_of_all(tmp_path: Path) -> None:
    """A last layer with or without a window computes the selected tokens only."""
    for name in ("gemma3", "gemma4_moe"):
        model, prompt = load_model(write_tiny_model(tmp_path / name, name)), torch.tensor(random_prompt(20))
        outputs = []
        for rows in (None, torch.tensor([18, 19])):
            attn = DenseAttention(model, 20)
            attn.positions = torch.arange(20)
            outputs.append(model(prompt, attn.positions, attn, rows=rows))
        torch.testing.assert_close(outputs[0][18:], outputs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", GEMMAS)
def test_two_ranks_compute_what_one_computes(tmp_path: Path, architecture: str) -> None:
    write_tiny_model(tmp_path, architecture)
    prompt = random_prompt(30)
    expected = run_logits(load_model(tmp_path), prompt)
    for logits in run_ranks(2, lambda tp: run_logits(load_model(tmp_path, tp), prompt)):
        assert (logits - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("architecture", GEMMAS)
def test_weights_quantized_at_loading_are_near_the_weights(tmp_path: Path, architecture: str) -> None:
    """The output without quantization is the measure; a wrong scale or order would give unrelated logits."""
    write_tiny_model(tmp_path, architecture, hidden_size=128, head_dim=32, intermediate_size=128)
    prompt = random_prompt(20)
    expected = run_logits(load_model(tmp_path), prompt)
    for name, least in (("int4", 0.85), ("fp8", 0.94)):
        logits = run_logits(load_model(tmp_path, quantization=name), prompt)
        likeness = torch.cosine_similarity(logits.flatten(), expected.flatten(), dim=0)
        assert least < likeness < 0.99999, (name, likeness)


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4"])
def test_quantized_checkpoints_give_the_logits_of_their_values(tmp_path: Path, architecture: str) -> None:
    plain = write_tiny_model(tmp_path / "plain", architecture)
    prompt = random_prompt(20)
    for name in ("packed 4", "gptq", "awq", "fp8 blocks", "auto-round"):
        (tmp_path / name).mkdir()
        quantized, values = write_quantized(plain, tmp_path / name, name)
        expected = run_logits(load_model(values), prompt)
        assert (run_logits(load_model(quantized), prompt) - expected).abs().max() < TOLERANCE, name


def test_random_weights_give_logits_within_the_softcap(tmp_path: Path) -> None:
    """For benchmarks of presets, which have no weights; and with an output head quantized apart from the embedding."""
    write_tiny_model(tmp_path, "gemma4_moe", tied=True)
    for head in (None, "int8"):
        logits = run_logits(load_model(tmp_path, load_format="dummy", quantize_head=head), random_prompt(20))
        assert logits.isfinite().all() and logits.std() > 0.1 and logits.abs().max() <= 5.0


def test_files_with_either_prefix_of_the_text_part_are_read(tmp_path: Path) -> None:
    """transformers has written model.language_model. for some versions, and language_model.model. before and after."""
    write_tiny_model(tmp_path, "gemma3", with_vision=True)
    prompt, file = random_prompt(20), tmp_path / "model.safetensors"
    expected = run_logits(load_model(tmp_path), prompt)
    new = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    renamed = {}
    for name, tensor in load_file(file).items():
        prefix = next((prefix for prefix in new if name.startswith(prefix)), "")
        renamed[new.get(prefix, "model.") + name.removeprefix(prefix)] = tensor
    assert {name.partition(".")[0] for name in renamed} == {"model", "lm_head"}
    save_file(renamed, file, metadata={"format": "pt"})
    assert torch.equal(run_logits(load_model(tmp_path), prompt), expected)


def test_config_of_older_versions_is_read_like_the_config_of_today(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "gemma3", num_layers=6, rope="linear", gemma={"layer_types": None})
    path = tmp_path / "config.json"
    new = json.loads(path.read_text())
    expected, _ = load_config(str(tmp_path))
    assert expected.layer_kinds == ("window",) * 5 + ("attention",)
    assert (expected.rope.rope_type, expected.rope.rope_theta) == ("linear", 1e6)
    assert expected.window is not None and (expected.window.rope.rope_type, expected.window.rope.rope_theta) == (
        "default",
        1e4,
    )
    old = {name: value for name, value in new.items() if name not in ("layer_types", "rope_parameters")}
    old |= {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    path.write_text(json.dumps(old | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    assert load_config(str(tmp_path))[0] == expected
    # An override of the rope is for the layers that attend to all keys; it keeps their theta
    changed, _ = load_config(str(tmp_path), {"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
    assert (changed.rope.factor, changed.rope.rope_theta, changed.window) == (4.0, 1e6, expected.window)
    # The file's number of positions is after the extension, unlike a Llama's
    assert changed.max_model_len_limit == expected.max_model_len_limit == new["max_position_embeddings"]


def test_rope_that_an_error_recommends_covers_the_context() -> None:
    for name, kind in (("gemma-3-270m", "yarn"), ("gemma-3-4b", "linear"), ("gemma-4-31b", "proportional")):
        model, _ = load_config(name)
        overrides, _ = rope_overrides(model, 3 * model.max_model_len_limit)
        extended, _ = load_config(name, overrides)
        assert (extended.rope.rope_type, extended.rope.rope_theta) == (kind, 1e6)
        assert extended.max_model_len_limit >= 3 * model.max_model_len_limit and model.window and extended.window
        assert extended.window.rope.rope_theta == model.window.rope.rope_theta == 1e4


def test_settings_that_change_answers_are_refused_by_name(tmp_path: Path) -> None:
    for name in GEMMAS:
        write_tiny_model(tmp_path / name, name)
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation='gelu' .*='gelu_pytorch_tanh'"),
        ("gemma3", {"sliding_window": None}, "sliding_window=None must be an integer from 1"),
        ("gemma3", {"sliding_window": 0}, "sliding_window=0 must be an integer from 1"),
        ("gemma3", {"sliding_window_pattern": 3}, "sliding_window_pattern=3 and layer_types=.* disagree"),
        ("gemma3", {"layer_types": ["full_attention"] * 2}, "2 of 2 layers with full_attention"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' .*'vision'"),
        (
            "gemma4",
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input=256 .* E2B and E4B .* use Gemma 4",
        ),
        ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 is not supported"),
        ("gemma4", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types ends with sliding_attention"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config=.* is not supported"),
        ("gemma4", {"per_layer_config": {"1": {"sliding_window": 16}}}, "per_layer_config=.* is not supported"),
        ("gemma4", {"per_layer_config": None, "global_head_dim": 24}, "head_dim=24 .* is not supported"),
        ("gemma4_moe", {"num_experts": None}, "enable_moe_block=True needs num_experts"),
        ("gemma4_moe", {"top_k_experts": 9}, "top_k_experts=9 is more than num_experts=8"),
    )
    for name, changes, message in cases:
        path = tmp_path / name / "config.json"
        content = path.read_text()
        path.write_text(json.dumps(json.loads(content) | changes))
        with pytest.raises(CheckpointError, match=message):
            load_config(str(path.parent))
        path.write_text(content)


def test_weights_of_gemma_3_in_float16_become_bfloat16(tmp_path: Path) -> None:
    """The outputs of the layers of gemma-3-270m reach 100,000, so every answer in float16 ended with an error."""
    for name, expected in (("gemma3", "bfloat16"), ("gemma4", "float16")):
        write_tiny_model(tmp_path / name, name, dtype=torch.float16)
        assert load_config(str(tmp_path / name))[0].torch_dtype == expected


def test_missing_or_unknown_weights_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "gemma4_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("layer_scalar", "router.per_expert_scale", "post_feedforward_layernorm_2.weight"):
        kept = {key: tensor for key, tensor in tensors.items() if key != f"model.layers.1.{name}"}
        save_file(kept, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"misses weights: model.layers.1.{name}"):
            load_model(tmp_path)
    save_file(
        {**tensors, "model.layers.1.self_attn.v_proj.weight": torch.zeros(64, 64)}, file, metadata={"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"weights unknown to the model: model\.layers\.1\.self_attn\.v_proj"):
        load_model(tmp_path)


@pytest.mark.parametrize("architecture", GEMMAS)
def test_gguf_gives_the_logits_of_transformers(tmp_path: Path, architecture: str) -> None:
    """A file of llama.cpp has every sixth layer without a window if it is of Gemma 3."""
    num_layers = 6 if architecture == "gemma3" else 2
    sizes: dict[str, Any] = {"gemma": {"layer_types": None}} if architecture == "gemma3" else {}
    directory = write_tiny_model(tmp_path / "model", architecture, num_layers=num_layers, tied=True, **sizes)
    changed = json.loads((directory / "config.json").read_text())
    if architecture == "gemma3":  # the file has no entry for it
        (directory / "config.json").write_text(json.dumps(changed | {"query_pre_attn_scalar": 16}))
    prompt = random_prompt(3 * GEMMA_WINDOW)
    logits = run_logits(load_model(write_gguf(tmp_path / "model.gguf", directory)), prompt)
    assert (logits - expected_logits(directory, prompt)).abs().max() < TOLERANCE


def test_gguf_of_mixed_types_gives_the_logits_of_its_values(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    directory = write_tiny_model(tmp_path / "model", "gemma4_moe", **sizes)
    types = ["Q4_0", "Q8_0", "Q5_1", "IQ4_NL", "F16"]
    file = write_gguf(tmp_path / "model.gguf", directory, types=types, same_values=tmp_path / "same")
    prompt = random_prompt(20, vocab_size=64)
    expected = run_logits(load_model(tmp_path / "same"), prompt)
    assert (run_logits(load_model(file), prompt) - expected).abs().max() < TOLERANCE
    assert (expected_logits(tmp_path / "same", prompt) - expected).abs().max() < TOLERANCE


def test_gguf_with_settings_that_are_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "gemma4")
    file = write_gguf(tmp_path / "model.gguf", directory)
    model = read_model(file)
    for entry, value, message in (
        ("attention.shared_kv_layers", 1, "num_kv_shared_layers=1 is not supported"),
        ("embedding_length_per_layer_input", 256, "hidden_size_per_layer_input=256 is not supported"),
        ("attention.head_count_kv", [4, 3], r"num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ("attention.sliding_window_pattern", [True, True], "layers of a kind must have equally many heads"),
        ("attention.sliding_window_pattern", [False, True], "layers with attn_v must have equally many heads"),
    ):
        changed = model._replace(metadata=model.metadata | {f"gemma4.{entry}": value})
        with pytest.raises(CheckpointError, match=message):
            config_of_gguf(changed, None)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", GEMMAS)
def test_gpu_in_bf16_errs_at_most_twice_as_much_as_transformers(tmp_path: Path, architecture: str) -> None:
    """In prompts, and token by token, where other kernels multiply. The head dims are those of real models."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "head_dim": 256, "num_layers": 4}
    experts = {"moe_intermediate_size": 256} if architecture == "gemma4_moe" else {}
    write_tiny_model(tmp_path, architecture, dtype=torch.bfloat16, gemma=experts, **sizes)  # type: ignore[arg-type]
    prompt = random_prompt(90)
    reference_in_fp32 = reference_model(tmp_path)
    with torch.no_grad():
        exact = reference_in_fp32(torch.tensor([prompt])).logits[0]
        plain = reference_in_fp32.bfloat16()(torch.tensor([prompt])).logits[0].float()
    model = load_model(tmp_path, dtype=torch.bfloat16, device="cuda")
    for chunk in (1000, 37, 1):
        ours = run_logits(model, prompt, chunk).cpu().float()
        assert (ours - exact).abs().mean() <= 2 * (plain - exact).abs().mean(), chunk


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", GEMMAS)
def test_gpu_with_packed_weights_computes_what_a_cpu_computes(tmp_path: Path, architecture: str) -> None:
    """The kernels of packed weights end with GELU. A CPU has the values of the same codes, and with SiLU it has others.

    Most tokens are compared: for some tokens of the mixture, rounding chooses another expert.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "head_dim": 128}
    experts = {"moe_intermediate_size": 256} if architecture == "gemma4_moe" else {}
    write_tiny_model(tmp_path, architecture, gemma=experts, **sizes)  # type: ignore[arg-type]
    prompt = random_prompt(90)
    for name in ("int4", "int8", "fp8"):
        exact, other = load_model(tmp_path, quantization=name), load_model(tmp_path, quantization=name)
        for module in other.modules():
            if getattr(module, "activation", None) == "gelu_tanh":
                module.activation = "silu"
        expected, wrong = run_logits(exact, prompt), run_logits(other, prompt)
        model = load_model(tmp_path, quantization=name, dtype=torch.bfloat16, device="cuda")
        for chunk in (1000, 1):
            ours = run_logits(model, prompt, chunk).cpu().float()
            error, of_wrong = ((ours - each).norm(dim=1).median() for each in (expected, wrong))
            assert error < of_wrong / 1.5 and error < 0.1 * expected.norm(dim=1).median(), (name, chunk, error)


# -- a real model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_model_has_the_log_probabilities_of_transformers(gemma3: Path) -> None:
    """Of 700 tokens of real text, more than the window, in fp32. The model knows the text."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(gemma3), device="cpu", dtype="float32", max_model_len=1024, max_num_batched_tokens=300) as llm:
        ids = llm.text.tokenizer.encode(inspect.getsource(argparse))[:700]
        (output,) = llm.generate([ids], params)
    given = zip(ids[1:], output["prompt_logprobs"][1:], strict=True)
    found = torch.tensor([entry[token_id][0] for token_id, entry in given])
    with torch.inference_mode():
        logprobs = reference(gemma3)(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (found - expected).abs().max() <= 1e-3
    assert found.mean() > -2.5
