"""gpt-oss: windows, sinks, biases and the clamped activation of experts, against transformers in fp32."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import load_model, random_prompt, run_greedy, run_logits
from gguf_files import write_gguf
from mxfp4_files import write_mxfp4
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tiny_models import greedy_reference, reference_model, write_tiny_model

from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.errors import CheckpointError
from nanovllm.layers import linear

PROMPT = random_prompt(40)  # more than three windows


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "gpt_oss", rope="yarn")


def reference_logits(directory: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return reference_model(directory).to(dtype)(torch.tensor([PROMPT])).logits[0]


def test_logits_and_tokens_match_transformers(plain: Path) -> None:
    expected, model = reference_logits(plain), load_model(plain)
    for chunk in (1000, 12, 7):
        assert (run_logits(model, PROMPT, chunk) - expected).abs().max() < 2e-5
    tokens = run_greedy(model, PROMPT[:20], 24)
    assert tokens == greedy_reference(plain, PROMPT[:20], 24) and len(set(tokens)) >= 12


def test_the_test_model_depends_on_sinks_windows_biases_and_limits(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its logits would prove little."""
    expected = run_logits(load_model(plain), PROMPT)
    for part in ("sinks", "gate.bias", "gate_up_bias", "down_bias", "o_proj.bias"):
        model = load_model(plain)
        for name, parameter in model.named_parameters():
            if name.endswith(part):
                parameter.zero_()
        assert (run_logits(model, PROMPT) - expected).abs().max() > 0.01, part
    for constant, value in (("SWIGLU_LIMIT", 20.0), ("SWIGLU_ALPHA", 1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(linear, constant, value)
            assert (run_logits(load_model(plain), PROMPT) - expected).abs().max() > 0.01, constant


def test_bfloat16_error_is_at_most_twice_that_of_transformers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "gpt_oss", rope="yarn", dtype=torch.bfloat16)
    exact, rounded = reference_logits(tmp_path), reference_logits(tmp_path, torch.bfloat16)
    ours = run_logits(load_model(tmp_path, dtype=torch.bfloat16), PROMPT)
    assert (ours - exact).abs().mean() <= 2 * (rounded - exact).abs().mean()


def test_two_ranks_have_the_logits_of_one(plain: Path) -> None:
    expected = run_logits(load_model(plain), PROMPT)
    for logits in run_ranks(2, lambda tp: run_logits(load_model(plain, tp), PROMPT)):
        assert (logits - expected).abs().max() < 2e-5


def test_mxfp4_has_the_values_of_its_codes(tmp_path: Path, plain: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    quantized, values = write_mxfp4(tmp_path / "quantized", plain, tmp_path / "values"), tmp_path / "values"
    stored, same = (load_file(path / "model.safetensors") for path in (quantized, values))
    for name in ("gate_up_proj", "down_proj"):
        full = f"model.layers.0.mlp.experts.{name}"
        theirs = convert_moe_packed_tensors(stored[f"{full}_blocks"], stored[f"{full}_scales"], dtype=torch.float32)
        assert torch.equal(same[full], theirs)
    expected = run_logits(load_model(values), PROMPT)
    assert (expected - run_logits(load_model(plain), PROMPT)).abs().max() > 0.1
    assert (reference_logits(values) - expected).abs().max() < 2e-5
    assert torch.equal(run_logits(load_model(quantized), PROMPT), expected)
    of_ranks = [
        run_ranks(2, lambda tp, path=path: run_logits(load_model(path, tp), PROMPT)) for path in (quantized, values)
    ]
    assert all(torch.equal(*logits) for logits in zip(*of_ranks, strict=True))


def test_gguf_has_the_values_of_its_blocks(tmp_path: Path, plain: Path) -> None:
    """Also attention in other types, and files without an entry for truncation."""
    content = json.loads((plain / "config.json").read_text())
    content["rope_parameters"]["truncate"] = False
    source = tmp_path / "source"
    shutil.copytree(plain, source)
    (source / "config.json").write_text(json.dumps(content))
    for types in (["MXFP4"], ["F32"], ["Q8_0", "MXFP4", "F16"]):
        values = tmp_path / "-".join(types)
        file = write_gguf(tmp_path / f"{values.name}.gguf", source, types=types, same_values=values)
        logits = run_logits(load_model(file), PROMPT)
        assert torch.equal(logits, run_logits(load_model(values), PROMPT)), types
        assert (logits - reference_logits(values)).abs().max() < 3e-5
    config = config_without_weights(str(file))
    assert config == replace(
        config_without_weights(str(values)),
        torch_dtype=config.torch_dtype,
        quantization=config.quantization,
        gguf_types=config.gguf_types,
    )


def test_end_tokens_of_gguf_are_of_the_harmony_format(tmp_path: Path, plain: Path) -> None:
    """<|end|> ends a message, not the answer, whatever it is in other models."""
    texts = ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "<|start|>"]

    def add_vocabulary(writer: Any) -> None:
        writer.add_token_list([*map(str, range(315)), *texts])
        writer.add_token_types([1] * 315 + [3] * 5)

    write_gguf(tmp_path / "x.gguf", plain, metadata=add_vocabulary)
    assert sorted(config_without_weights(str(tmp_path / "x.gguf")).eos_token_ids) == [315, 316, 318, 319]


def test_dummy_weights_of_mxfp4_do_not_depend_on_the_number_of_ranks(tmp_path: Path, plain: Path) -> None:
    quantized = write_mxfp4(tmp_path / "quantized", plain, tmp_path / "values")
    expected = run_logits(load_model(quantized, load_format="dummy"), PROMPT)
    assert expected.isfinite().all() and expected.std() > 0.1
    for logits in run_ranks(2, lambda tp: run_logits(load_model(quantized, tp, load_format="dummy"), PROMPT)):
        assert (logits - expected).abs().max() < 2e-5


def test_experts_in_mxfp4_without_their_config_or_scales_are_refused(tmp_path: Path, plain: Path) -> None:
    quantized = write_mxfp4(tmp_path / "quantized", plain, tmp_path / "values")
    config = (quantized / "config.json").read_text()
    (quantized / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"has dtype U8, but config\.json has no quantization_config"):
        load_model(quantized)
    (quantized / "config.json").write_text(config)
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for changed in (None, tensors[name][:, :-1].contiguous(), tensors[name].to(torch.int32)):
        kept = {each: tensor for each, tensor in tensors.items() if each != name}
        save_file(kept if changed is None else kept | {name: changed}, quantized / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"down_proj_blocks in .*; download the model again"):
            load_model(quantized)


def test_settings_that_change_answers_are_refused(tmp_path: Path, plain: Path) -> None:
    content = json.loads((plain / "config.json").read_text())
    for changed, message in (
        ({"swiglu_limit": 5.0}, r"swiglu_limit=5.0 is not supported .* use a checkpoint with swiglu_limit=7.0"),
        ({"sliding_window": None}, "sliding_window=None must be an integer from 1 to"),
        ({"sliding_window": True}, "sliding_window=True must be an integer"),
        ({"layer_types": ["full_attention"] * 2}, "at least one layer of each type: full_attention, sliding_attention"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_experts=8"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content | changed))
        with pytest.raises(CheckpointError, match=message):
            config_without_weights(str(tmp_path))


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import GptOssConfig

    given = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "swiglu_limit": 7.0}
    (tmp_path / "config.json").write_text(json.dumps(given | {"initial_context_length": 4096, "experts_per_token": 4}))
    ours, theirs = config_without_weights(str(tmp_path)), GptOssConfig()
    kinds = {"attention": "full_attention", "window": "sliding_attention"}
    assert [kinds[each] for each in ours.layer_kinds] == theirs.layer_types
    assert ours.window is not None and ours.experts is not None
    assert ours.window.num_tokens == theirs.sliding_window and ours.window.rope == ours.rope
    for ours_is, theirs_is in (
        (ours.experts.num_experts, theirs.num_local_experts),
        (ours.experts.num_experts_per_token, theirs.num_experts_per_tok),
        (ours.experts.intermediate_size, theirs.intermediate_size),
        (ours.rope.rope_theta, theirs.rope_parameters["rope_theta"]),
        (ours.rope.truncate, theirs.rope_parameters["truncate"]),
        (ours.rope.factor, theirs.rope_parameters["factor"]),
        (ours.rope.original_max_position_embeddings, theirs.rope_parameters["original_max_position_embeddings"]),
        (ours.qkv_bias and ours.o_bias, theirs.attention_bias),
        *((getattr(ours, name), getattr(theirs, name)) for name in ("hidden_size", "head_dim", "vocab_size")),
        *((getattr(ours, name), getattr(theirs, name)) for name in ("max_position_embeddings", "rms_norm_eps")),
    ):
        assert ours_is == theirs_is
    assert ours.max_model_len_limit == 131072 and ours.torch_dtype == "bfloat16"
