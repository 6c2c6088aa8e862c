"""ModelConfig: presets, both forms of config.json, and an error for everything that is not implemented."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import ROPES, write_tiny_model
from transformers import AutoConfig

from nanovllm.checkpoint.architectures import ARCHITECTURES
from nanovllm.checkpoint.files import presets
from nanovllm.checkpoint.model_config import ExpertsConfig, ModelConfig, RecurrentConfig, RopeConfig
from nanovllm.checkpoint.read_config import load_config
from nanovllm.checkpoint.settings import SWITCHES
from nanovllm.errors import CheckpointError

QWEN3 = json.loads(presets()["qwen3-0.6b"].read_text())
QWEN2 = json.loads(presets()["qwen2.5-7b-1m"].read_text())
NO_ROPE = {key: value for key, value in QWEN3.items() if not key.startswith("rope_")}
MOE = json.loads(presets()["qwen3-30b-a3b"].read_text())
HYBRID = json.loads(presets()["qwen3.5-9b"].read_text())
HYBRID_MOE = json.loads(presets()["qwen3.5-35b-a3b"].read_text())
LLAMA = json.loads(presets()["llama-3.1-8b"].read_text())
MISTRAL = {  # Mistral-7B-v0.3
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
SEED_OSS = {  # Seed-OSS-36B
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "torch_dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 155136,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "attention_bias": True,
    "attention_out_bias": False,
}


def read(tmp_path: Path, config: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_config(str(tmp_path))[0]


def test_preset_has_the_published_shape_and_no_directory() -> None:
    cases: tuple[Any, ...] = (  # layers, hidden, heads, kv heads, head dim, vocabulary
        ("qwen3-0.6b", (28, 1024, 16, 8, 128, 151936), 40960),
        ("qwen3-4b", (36, 2560, 32, 8, 128, 151936), 40960),
        ("qwen3-8b", (36, 4096, 32, 8, 128, 151936), 40960),
        ("qwen2.5-7b-1m", (28, 3584, 28, 4, 128, 152064), 1010000),
        ("llama-3.1-8b", (32, 4096, 32, 8, 128, 128256), 131072),
        ("gpt-oss-20b", (24, 2880, 64, 8, 64, 201088), 131072),
        ("gpt-oss-120b", (36, 2880, 64, 8, 64, 201088), 131072),
        ("qwen3.5-9b", (32, 4096, 16, 4, 256, 248320), 262144),
        ("qwen3.5-27b", (64, 5120, 24, 4, 256, 248320), 262144),
        ("qwen3.5-35b-a3b", (40, 2048, 16, 2, 256, 248320), 262144),
        ("gemma-3-270m", (18, 640, 4, 1, 256, 262144), 32768),
        ("gemma-3-27b", (62, 5376, 32, 16, 128, 262208), 131072),
        ("gemma-4-12b", (48, 3840, 16, 1, 512, 262144), 262144),
        ("gemma-4-26b-a4b", (30, 2816, 16, 2, 512, 262144), 262144),
        ("gemma-4-31b", (60, 5376, 32, 4, 512, 262144), 262144),
    )
    for name, shape, limit in cases:
        config, directory = load_config(name)
        assert directory is None
        assert shape == (
            *(config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads),
            *(config.head_dim, config.vocab_size),
        )
        assert config.max_model_len_limit == limit
        assert config.torch_dtype == "bfloat16"


def test_architectures_have_their_biases_and_norms(tmp_path: Path) -> None:
    for name, flags in (
        ("qwen3-8b", (False, False, False, True)),
        ("qwen2.5-7b-1m", (True, False, False, False)),
        ("llama-3.1-8b", (False, False, False, False)),
    ):
        config, _ = load_config(name)
        assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == flags
    switches = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True}
    for settings, biases in (
        (QWEN3, (True, True, False)),
        (QWEN2, (True, False, False)),
        (LLAMA, (True, True, True)),
        (MISTRAL, (False, False, False)),
        (SEED_OSS, (True, False, True)),
    ):
        config = read(tmp_path, {**settings, **switches})
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases, settings["model_type"]


def test_layers_with_experts(tmp_path: Path) -> None:
    plain = read(tmp_path, MOE)
    assert plain.experts == ExpertsConfig(
        num_experts=128, num_experts_per_token=8, intermediate_size=768, norm_topk_prob=True, layers=tuple(range(48))
    )
    fewer = read(tmp_path, {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2, 47]}).experts
    assert fewer is not None and fewer.layers == tuple(range(3, 47, 2))
    renamed = {name: value for name, value in MOE.items() if name != "num_experts"} | {"num_local_experts": 16}
    assert (read(tmp_path, renamed).experts or fewer).num_experts == 16
    assert read(tmp_path, QWEN3).experts is None


def with_text(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**settings, "text_config": {**settings["text_config"], **changes}}


def test_hybrid_layers_have_their_kinds_and_sizes(tmp_path: Path) -> None:
    for name, num_layers, value_heads in (("9b", 32, 32), ("27b", 64, 48), ("35b-a3b", 40, 32)):
        config, _ = load_config(f"qwen3.5-{name}")
        assert config.layer_kinds == ("recurrent", "recurrent", "recurrent", "attention") * (num_layers // 4)
        assert (config.num_attention_layers, config.num_recurrent_layers) == (num_layers // 4, num_layers * 3 // 4)
        assert config.recurrent == RecurrentConfig(
            num_key_heads=16, num_value_heads=value_heads, key_head_dim=128, value_head_dim=128, conv_kernel=4
        )
        assert config.recurrent.conv_channels == 4096 + 128 * value_heads
        assert (config.rotary_dim, config.attention_gate, config.norms_add_one, config.has_mtp) == (
            64,
            True,
            True,
            True,
        )
    assert config.experts is not None and (config.experts.shared_size, config.intermediate_size) == (512, 512)
    dense = read(tmp_path, QWEN3)
    assert dense.layer_kinds == ("attention",) * 28 and dense.recurrent is None
    assert (dense.rotary_dim, dense.attention_gate, dense.norms_add_one, dense.has_mtp) == (128, False, False, False)


def test_text_part_has_the_entries_beside_it_and_takes_overrides(tmp_path: Path) -> None:
    plain = read(tmp_path, {**HYBRID["text_config"], "architectures": ["Qwen3_5ForCausalLM"]})
    nested = read(tmp_path, HYBRID)
    assert replace(plain, architecture=nested.architecture) == nested
    outside = {"eos_token_id": [5, 6], "tie_word_embeddings": True, "dtype": "float16", "hidden_size": 4096}
    config = read(tmp_path, {**with_text(HYBRID, tie_word_embeddings=None, dtype=None), **outside})
    assert (config.eos_token_ids, config.tie_word_embeddings, config.torch_dtype) == ((248044, 5, 6), True, "float16")
    with pytest.raises(CheckpointError, match=r"text_config\.hidden_size=4096 and hidden_size=1 .* disagree"):
        read(tmp_path, HYBRID | {"hidden_size": 1})
    types = ["full_attention", "linear_attention"] * 16
    config, _ = load_config(
        "qwen3.5-9b", {"layer_types": types, "mtp_num_hidden_layers": 0, "rope_parameters": {"rope_type": "default"}}
    )
    assert config.layer_kinds == ("attention", "recurrent") * 16 and not config.has_mtp
    assert config.rope == nested.rope
    # Regression: the interval was dropped if config.json gives the types
    stored = with_text(HYBRID, layer_types=types, full_attention_interval=None)
    assert read(tmp_path, stored).layer_kinds == config.layer_kinds
    every_second, _ = load_config(str(tmp_path), {"full_attention_interval": 2})
    assert every_second.layer_kinds == ("recurrent", "attention") * 16


def test_rope_all_forms_on_disk_are_read_alike(tmp_path: Path) -> None:
    sizes = {**LLAMA, "max_position_embeddings": 128}
    del sizes["rope_scaling"], sizes["rope_theta"]
    for rope, scaling in ROPES.items():
        old = read(tmp_path, {**sizes, "rope_theta": 5e5, "rope_scaling": scaling})
        new = read(tmp_path, {**sizes, "rope_parameters": {**scaling, "rope_theta": 5e5}})
        assert old == new
        assert (old.rope.rope_type, old.rope.rope_theta) == (rope, 5e5)
        assert old.rope.factor == scaling.get("factor", 1.0)
    oldest = read(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 3.0}})
    assert (oldest.rope.rope_type, oldest.rope.factor) == ("linear", 3.0)


def test_max_model_len_limit_is_what_the_rope_covers(tmp_path: Path) -> None:
    cases: tuple[Any, ...] = (
        (None, 1000),
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "dynamic", "factor": 2.5}, 2500),
        ({"rope_type": "yarn", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 800}, 3200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 1000),
    )
    for scaling, limit in cases:
        config = read(tmp_path, {**QWEN3, "max_position_embeddings": 1000, "rope_scaling": scaling})
        assert config.max_model_len_limit == limit


def test_eos_of_both_files_each_once(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert read(tmp_path, QWEN3).eos_token_ids == (151645, 151643)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not JSON"):
        read(tmp_path, QWEN3)


def test_saved_by_transformers_is_read(tmp_path: Path) -> None:
    config, directory = load_config(str(write_tiny_model(tmp_path, "qwen3", tied=True, head_dim=32)))
    assert directory == tmp_path
    assert (config.head_dim, config.tie_word_embeddings, config.torch_dtype) == (32, True, "float32")
    assert config.rope == RopeConfig(original_max_position_embeddings=128)
    assert config.eos_token_ids == (319,)


def rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_scaling": scaling}


def test_not_implemented_setting_raises_value_error(tmp_path: Path) -> None:
    """Null for a size of recurrent layers, or for the number of experts, was a TypeError; a hybrid model without
    recurrent layers was a ZeroDivisionError.
    """
    cases: tuple[Any, ...] = (
        ({**QWEN3, "architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM.*supported are Qwen3ForCausalLM"),
        ({**MOE, "decoder_sparse_step": None}, "decoder_sparse_step=None must be an integer"),
        ({**MOE, "num_experts_per_tok": 129}, "num_experts_per_tok=129 is more than num_experts=128"),
        ({**MOE, "mlp_only_layers": [0, 48, "1"]}, r"mlp_only_layers has \[48, '1'\], but layers are 0 to 47"),
        ({**QWEN3, "architectures": None}, "architectures"),
        ({**QWEN3, "model_type": "mistral"}, "model_type='mistral'"),
        ({**QWEN3, "head_dim": 72}, "head_dim=72 .* is not supported; use a checkpoint with one of 16, .* 96, .* 256"),
        ({**LLAMA, "hidden_size": 3200}, "head_dim=100 .* is not supported"),
        ({**QWEN3, "model_type": "no-such-type"}, "no-such-type"),
        ({**QWEN3, "quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq'.*supported are 'fp8'"),
        ({**QWEN2, "dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config.*remove"),
        ({**QWEN2, "use_sliding_window": True}, "use_sliding_window=True.*full attention"),
        ({**QWEN3, "layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "layer_types sliding_attention"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window=4096"),
        ({name: value for name, value in MISTRAL.items() if name != "sliding_window"}, "sliding_window=4096"),
        ({**LLAMA, "layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({**LLAMA, **rope(rope_type="longrope", short_factor=[1.0] * 64, long_factor=[1.0] * 64)}, "longrope"),
        ({**LLAMA, **rope(rope_type="mrope", mrope_section=[1, 2])}, "mrope"),
        ({**LLAMA, **rope(rope_type="default", mrope_section=[1, 2])}, "mrope_section"),
        (with_text(HYBRID, attn_output_gate=False), "attn_output_gate=False is not supported for model_type='qwen3_5'"),
        (with_text(HYBRID, mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype='bfloat16' is not supported"),
        (with_text(HYBRID, output_gate_type="sigmoid"), "output_gate_type='sigmoid' .*='swish' or 'silu'"),
        (with_text(HYBRID, mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings=True"),
        (with_text(HYBRID, mtp_num_hidden_layers=2), "mtp_num_hidden_layers=2 is not supported"),
        (with_text(HYBRID, linear_num_value_heads=24), "linear_num_value_heads=24 is not a multiple"),
        (with_text(HYBRID, linear_key_head_dim=96), "linear_key_head_dim=96 is not supported; .* 128"),
        (with_text(HYBRID, linear_conv_kernel_dim=1), "linear_conv_kernel_dim=1 must be an integer from 2"),
        (with_text(HYBRID, linear_conv_kernel_dim=None), "linear_conv_kernel_dim=None must be an integer"),
        (with_text(HYBRID, linear_num_key_heads=None), "linear_num_key_heads=None must be an integer"),
        (with_text(HYBRID, layer_types=None, full_attention_interval=None), "full_attention_interval=None must be"),
        ({**MOE, "num_experts": None}, "num_experts=None must be an integer"),
        (
            with_text(HYBRID, layer_types=["full_attention"] * 31),
            "layer_types has 31 layers, but num_hidden_layers=32; .*give both",
        ),
        (with_text(HYBRID, layer_types=["linear_attention"] * 32), "0 of 32 layers with full_attention"),
        (
            with_text(HYBRID, layer_types=["full_attention"] * 32),
            "32 of 32 layers with full_attention.* each type: .*linear",
        ),
        (with_text(HYBRID, layer_types=["full_attention", "mamba"] * 16), "layer_types mamba are not supported"),
        (
            with_text(HYBRID, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.02}),
            r"partial_rotary_factor=0\.02 rotates 5 of the 256 elements",
        ),
        (with_text(HYBRID_MOE, norm_topk_prob=False), "norm_topk_prob=False is not supported"),
        (with_text(HYBRID_MOE, mlp_only_layers=[1]), r"mlp_only_layers=\[1\] is not supported"),
        ({**LLAMA, **rope(rope_type="linear")}, "factor"),
        ({**LLAMA, **rope(rope_type="linear", factor=0.5)}, r"factor=0\.5"),
        ({**LLAMA, **rope(rope_type="llama3", factor=8.0)}, "low_freq_factor"),
        (
            {**NO_ROPE, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            "per layer type",
        ),
    )
    for config, message in cases:
        with pytest.raises(CheckpointError, match=f"(?s){message}"):
            read(tmp_path, config)
    unused = {"use_sliding_window": False, "sliding_window": 32768}
    assert read(tmp_path, {**QWEN2, **unused}).num_layers == 28


def test_model_not_found_raises_with_the_ways_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist.*qwen3-0\.6b"):
        load_config(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load_config(str(tmp_path))

    def no_network(*args: Any, **kwargs: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(CheckpointError, match=r"owner/model.*preset.*no network"):
        load_config("owner/model")


# tests/models/test_gpt_oss.py and test_gemma.py have the same test for their defaults
@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if not each.has_windows])
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """Settings that are absent: config.json is read without transformers, which takes seconds to import."""
    is_hybrid, defaults = ARCHITECTURES[architecture].is_hybrid, ARCHITECTURES[architecture].defaults
    theirs = getattr(transformers, architecture.split("For")[0] + ("TextConfig" if is_hybrid else "Config"))()
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if is_hybrid:
        rope |= {"partial_rotary_factor": defaults["partial_rotary_factor"]}
        assert theirs.layer_types[:4] == ["linear_attention"] * 3 + ["full_attention"]
        no_entry = {"partial_rotary_factor", "full_attention_interval", *ARCHITECTURES[architecture].fixed}
        no_entry |= {"intermediate_size"} if "num_experts" in defaults else set()
        defaults = {name: value for name, value in defaults.items() if name not in no_entry}
    for name, value in defaults.items():
        expected = theirs.num_attention_heads if value is None else value
        assert getattr(theirs, name) == expected, name
    for name in {*SWITCHES, "quantization_config", "sliding_window"} - defaults.keys():
        assert not getattr(theirs, name, None), name
    if "head_dim" not in defaults:
        assert getattr(theirs, "head_dim", None) in (None, theirs.hidden_size // theirs.num_attention_heads)
    assert theirs.rope_parameters == rope


def test_defaults_of_gemma_are_those_of_transformers(tmp_path: Path) -> None:
    """A file without entries, and what transformers writes when it has read such a file."""
    for architecture in (name for name in ARCHITECTURES if name.startswith("Gemma")):
        text = {"hidden_size_per_layer_input": 0, "dtype": "bfloat16"}  # not 0 by default, and refused
        named = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
        is_nested = architecture.endswith("ForConditionalGeneration")
        plain = read(tmp_path, named | ({"text_config": text} if is_nested else text))
        theirs = getattr(transformers, architecture.partition("For")[0] + "TextConfig")(**text).to_dict()
        written = {**named, "text_config": theirs} if is_nested else {**theirs, **named}
        assert plain == read(tmp_path, json.loads(json.dumps(written))), architecture


def test_config_equals_what_transformers_reads(tmp_path: Path) -> None:
    """The file as it is, and as transformers writes it once it has read it: with every default and its own names."""
    for settings in (QWEN3, QWEN2, LLAMA, MISTRAL, SEED_OSS, MOE):
        for rope in (None, *ROPES.values()):
            given = dict(settings)
            if rope is not None:
                given["rope_scaling"] = rope
                given.pop("rope_parameters", None)
            plain = read(tmp_path, given)
            AutoConfig.from_pretrained(str(tmp_path / "config.json")).save_pretrained(tmp_path)
            assert read(tmp_path, json.loads((tmp_path / "config.json").read_text())) == plain, (settings, rope)
    for settings in (HYBRID, HYBRID_MOE):
        for entry in ({"rope_type": "default"}, ROPES["yarn"]):
            kept = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
            plain = read(tmp_path, with_text(settings, rope_parameters=entry | kept))
            AutoConfig.from_pretrained(str(tmp_path / "config.json")).save_pretrained(tmp_path)
            assert read(tmp_path, json.loads((tmp_path / "config.json").read_text())) == plain, (settings, entry)


def test_config_of_gemma_equals_what_transformers_reads(tmp_path: Path) -> None:
    for name in (name for name in presets() if name.startswith("gemma")):
        plain = read(tmp_path, json.loads(presets()[name].read_text()))
        AutoConfig.from_pretrained(str(tmp_path / "config.json")).save_pretrained(tmp_path)
        assert read(tmp_path, json.loads((tmp_path / "config.json").read_text())) == plain, name
    published = {  # gemma-3-4b-it: what is missing has the default of transformers
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    assert read(tmp_path, published) == load_config("gemma-3-4b")[0]


def test_reading_a_config_imports_neither_torch_nor_transformers() -> None:
    """Regression: reading config.json took 9 s of the first start on a machine."""
    code = (
        "import sys; from nanovllm.checkpoint.read_config import load_config; "
        "load_config('qwen3-0.6b'); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
