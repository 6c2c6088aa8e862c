"""The entries of config.json and generation_config.json: ranges, overrides, extending the rope, sampling defaults."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checked_engine import CheckedLLM, Reference, cache_options
from dense_model import random_prompt
from tiny_models import ROPES, write_tiny_model, write_tiny_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import architectures, layer_config, read_config
from nanovllm.checkpoint import rope as rope_module
from nanovllm.checkpoint.files import presets
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.read_config import config_without_weights, load_config
from nanovllm.checkpoint.rope import rope_extension
from nanovllm.checkpoint.settings import ENTRIES, MAX_POSITIONS, apply_overrides, read_sampling_defaults
from nanovllm.config import Config
from nanovllm.engine import startup
from nanovllm.entrypoints.cli import main as cli
from nanovllm.errors import CheckpointError, ConfigError, RequestError
from nanovllm.plan.step_limits import max_model_len

QWEN3 = json.loads(presets()["qwen3-0.6b"].read_text())
LLAMA = json.loads(presets()["llama-3.1-8b"].read_text())
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA_ROPE = LLAMA["rope_scaling"]


def write(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def rope(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"rope_scaling": base | changes}


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"{name}={value}") for name in SIZES for value in (-64, 0)),
    *(({name: value}, f"{name}={value!r}") for name in SIZES for value in ("64", 64.0, True, None)),
    ({"vocab_size": [64]}, r"vocab_size=\[64\] must be an integer"),
    ({"vocab_size": 10**13}, "vocab_size=10000000000000 must be an integer from 1 to 16777216"),
    ({"vocab_size": 1e13}, "vocab_size=10000000000000.0 must be an integer"),
    ({"intermediate_size": 10**11}, "intermediate_size=100000000000 must be an integer from 1 to 1048576"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000"),
    ({"max_position_embeddings": 2**62}, "max_position_embeddings=4611686018427387904 .* from 1 to 16777216"),
    ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
    ({"num_key_value_heads": 3}, "num_attention_heads=16 is not a multiple of num_key_value_heads=3"),
    ({"num_key_value_heads": "8"}, "num_key_value_heads='8'"),
    ({"head_dim": 63}, r"head_dim=63 .* is not supported; use a checkpoint with one of 16, 32, 64, .* 192, 256"),
    ({"head_dim": 0}, "head_dim=0 must be an integer from 1 to 1024"),
    ({"head_dim": -128}, "head_dim=-128"),
    ({"head_dim": 4096}, "head_dim=4096"),
    ({"num_labels": 10**9}, "num_labels=1000000000"),
    *(({"rms_norm_eps": eps}, f"rms_norm_eps={eps} must be a number") for eps in (math.nan, math.inf, -1e-6, 0, 1e-45)),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'"),
    ({"rms_norm_eps": None}, "rms_norm_eps=None"),
    *(({"rope_theta": theta}, "rope_theta=") for theta in (math.nan, math.inf, -1e4, 0, 1, 1e39, "1e6")),
    *(({name: "false"}, f"{name}='false' must be true or false") for name in ("tie_word_embeddings", "attention_bias")),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
    ({"hidden_act": 5}, "hidden_act=5 must be a string"),
    ({"torch_dtype": 16}, "torch_dtype=16 must be a string"),
    ({"layer_types": "full_attention"}, "layer_types='full_attention' must be a list"),
    ({"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object"),
    ({"rope_scaling": [1]}, r"rope_scaling=\[1\] must be an object"),
    *(
        (rope(QWEN_YARN, factor=factor), "rope_scaling.factor=")
        for factor in (math.nan, math.inf, 0, 0.5, -4, "4", 1e39)
    ),
    (rope(QWEN_YARN, factor=1000), "covers 32768000 tokens, more than the 16777216 .* lower the factor"),
    (rope(QWEN_YARN, original_max_position_embeddings=0), "rope_scaling.original_max_position_embeddings=0"),
    (
        rope(QWEN_YARN, original_max_position_embeddings=32768.5),
        "original_max_position_embeddings=32768.5 must be an int",
    ),
    (rope(QWEN_YARN, beta_fast=math.nan), "rope_scaling.beta_fast=nan"),
    (rope(QWEN_YARN, beta_slow=0), "rope_scaling.beta_slow=0"),
    (rope(QWEN_YARN, beta_slow=40.0), "rope beta_slow=40.0 must be below beta_fast=32.0"),
    (rope(QWEN_YARN, attention_factor=-1.0), "rope_scaling.attention_factor=-1.0"),
    (rope(QWEN_YARN, mscale=math.nan), "rope_scaling.mscale=nan"),
    (rope(QWEN_YARN, truncate="no"), "rope_scaling.truncate='no'"),
    (rope(QWEN_YARN, rope_type=5), "rope_scaling.rope_type=5"),
    (rope(QWEN_YARN, factor=None), r"lacks \['factor'\]"),
    (rope(LLAMA_ROPE, low_freq_factor=0), "rope_scaling.low_freq_factor=0"),
    (rope(LLAMA_ROPE, low_freq_factor=4.0), "rope low_freq_factor=4.0 must be below high_freq_factor=4.0"),
    (rope(LLAMA_ROPE, partial_rotary_factor=0), "rope_scaling.partial_rotary_factor=0"),
    ({"rope_parameters": rope(QWEN_YARN, factor=math.nan)["rope_scaling"]}, "rope_parameters.factor=nan"),
]


def test_setting_out_of_range_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: RuntimeError from the allocator, MemoryError or OverflowError from a table, a division by zero, or
    NaN in every answer."""

    def refuse(*args: object) -> None:
        raise AssertionError("a runner was made")

    monkeypatch.setattr(startup, "make_runner", refuse)
    for changes, message in BAD_SETTINGS:
        with pytest.raises(CheckpointError, match=message):
            LLM(write(tmp_path, QWEN3 | changes), device="cpu", load_format="dummy")


def test_setting_at_the_end_of_its_range_is_read(tmp_path: Path) -> None:
    cases: tuple[Any, ...] = (
        {"num_key_value_heads": None},
        {"head_dim": 16},
        {"head_dim": 256},
        {"rms_norm_eps": 1.0},
        {"rope_theta": 10000},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default", "factor": None}},
        {"max_position_embeddings": MAX_POSITIONS},
        {"num_hidden_layers": 1, "layer_types": None},
    )
    for changes in cases:
        config, _ = load_config(write(tmp_path, QWEN3 | changes))
        for name in changes.keys() & {"head_dim", "rms_norm_eps", "max_position_embeddings"}:
            assert getattr(config, name) == changes[name]


def test_head_dim_that_follows_from_hidden_size_is_checked(tmp_path: Path) -> None:
    cases: tuple[Any, ...] = (
        (60, 4, r"head_dim=15 \(hidden_size=60, num_attention_heads=4\)"),
        (8, 16, "not a multiple|head_dim=0"),
    )
    for hidden_size, num_heads, message in cases:
        sizes = {"hidden_size": hidden_size, "num_attention_heads": num_heads, "num_key_value_heads": num_heads}
        without_head_dim = {name: value for name, value in LLAMA.items() if name != "head_dim"}
        with pytest.raises(CheckpointError, match=message):
            load_config(write(tmp_path, without_head_dim | sizes))


def test_end_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    for value in (-1, 151936, True, "2", 2.0, [1, -1], [[1]], {"a": 1}):
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        with pytest.raises(
            CheckpointError, match=r"eos_token_id=.* in config\.json must be token ids from 0 to 151935"
        ):
            load_config(write(tmp_path, QWEN3 | {"eos_token_id": value}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(CheckpointError, match=r"in generation_config\.json must be token ids from 0 to 151935"):
            load_config(write(tmp_path, QWEN3))


def test_config_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    """Regression: RecursionError."""
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load_config(str(tmp_path))


# -- overrides -------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


OLD, NEW = "rope_scaling", "rope_parameters"
THETA_5, THETA_7 = {"rope_theta": 5e5}, {"rope_theta": 7e5}
PLAIN_ENTRIES = {"max_position_embeddings": 999, "tie_word_embeddings": True}


def test_overrides_equal_a_config_json_that_says_the_same(tmp_path: Path) -> None:
    """An entry left beside its other name decided in its place, and a rope without theta fell back to 10000."""
    base = {name: value for name, value in QWEN3.items() if not name.startswith("rope_")}
    base = {name: value for name, value in base.items() if name != "torch_dtype"} | {"max_position_embeddings": 128}
    cases: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
        (THETA_5 | {OLD: None}, {OLD: YARN}, THETA_5 | {OLD: YARN}),
        (THETA_5 | {OLD: LLAMA3}, {NEW: YARN}, THETA_5 | {NEW: YARN}),  # the new form replaces the old
        ({NEW: {"rope_type": "default"} | THETA_5}, {OLD: YARN}, {NEW: YARN | THETA_5}),
        ({NEW: LLAMA3 | THETA_5}, {NEW: YARN | THETA_7}, {NEW: YARN | THETA_7}),
        ({NEW: LLAMA3 | THETA_5}, {NEW: None}, THETA_5 | {NEW: None}),
        ({NEW: YARN | THETA_5}, THETA_7, {NEW: YARN | THETA_7}),  # theta alone, which is in an entry
        (THETA_5, THETA_7, THETA_7),
        ({"dtype": "float16"}, {"torch_dtype": "float32"}, {"torch_dtype": "float32"}),
        ({}, PLAIN_ENTRIES, PLAIN_ENTRIES),
    )
    for settings, overrides, same_as in cases:
        model = write(tmp_path / "model", base | settings)
        want, _ = load_config(write(tmp_path / "same", base | same_as))
        before, _ = load_config(model)
        got, _ = load_config(model, overrides)
        assert got == want == config_without_weights(model, overrides), (settings, overrides)
        assert got != before
        assert not any("rope" in name for name in settings) or got.rope.rope_theta in (5e5, 7e5)


PACKED = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8"}
# Two places of one setting: base, place and value, a value that means the same in the other place, and one that differs
Place = tuple[str, ...]
PAIRS: tuple[tuple[str, tuple[Place, Any], tuple[Place, Any, Any]], ...] = (
    ("plain", (("dtype",), "float16"), (("torch_dtype",), "torch.float16", "float32")),
    ("plain", ((NEW,), YARN | THETA_5), ((OLD,), {"type": "yarn", **YARN} | {"factor": 4}, LLAMA3)),
    ("plain", ((NEW,), {"rope_type": "default"} | THETA_5), ((OLD,), {"type": "default"}, YARN)),
    ("plain", ((NEW,), THETA_5), ((OLD,), {"rope_type": "default"}, YARN)),
    ("plain", ((NEW,), YARN | THETA_5), ((OLD,), YARN | THETA_5, YARN | THETA_7)),
    ("plain", ((NEW,), YARN | THETA_5), (("rope_theta",), 500000, 7e5)),
    ("plain", ((OLD,), YARN | THETA_5), (("rope_theta",), 500000, 7e5)),
    ("plain", ((NEW,), YARN | THETA_5), (("original_max_position_embeddings",), 32, 64)),
    ("plain", ((NEW, "rope_type"), "linear"), ((NEW, "type"), "linear", "dynamic")),
    ("plain", (("num_hidden_layers",), 2), (("layer_types",), ["full_attention"] * 2, ["full_attention"] * 3)),
    ("plain", (("quantization_config",), PACKED), (("compression_config",), PACKED | {"sym": None}, FP8)),
    ("gptq", (("quantization_config", "format"), "gptq_v2"),
     (("quantization_config", "checkpoint_format"), "gptq_v2", "gptq")),
    ("awq", (("quantization_config", "bits"), 4), (("quantization_config", "w_bit"), 4, 8)),
    ("awq", (("quantization_config", "group_size"), 64), (("quantization_config", "q_group_size"), 64, 128)),
    ("experts", (("num_experts",), 64), (("num_local_experts",), 64, 128)),
    ("hybrid", (("text_config", "partial_rotary_factor"), 0.5),
     (("text_config", NEW, "partial_rotary_factor"), 0.5, 0.25)),
    ("hybrid", (("text_config", "full_attention_interval"), 2),
     (("text_config", "layer_types"), ["linear_attention", "full_attention"] * 16,
      ["full_attention"] + ["linear_attention"] * 31)),
    *(("hybrid", (("text_config", name), value), ((name,), same, other)) for name, value, same, other in (
        ("dtype", "float16", "torch.float16", "float32"),
        ("tie_word_embeddings", True, True, False),
        ("quantization_config", FP8, FP8 | {"fmt": "e4m3"}, PACKED),
        ("hidden_size", 2048, 2048, 1024),
        (NEW, {"rope_type": "yarn", "factor": 4.0}, {"type": "yarn", "factor": 4}, {"type": "linear", "factor": 4.0}),
        ("rope_theta", 5e5, 500000, 7e5),
    )),
    ("hybrid", (("text_config", "torch_dtype"), "float16"), (("dtype",), "float16", "float32")),
    ("hybrid", (("text_config", "quantization_config"), FP8), (("compression_config",), FP8, PACKED)),
)  # fmt: skip


MOVED = ("dtype", "torch_dtype", NEW, OLD, "rope_theta", "layer_types", "full_attention_interval", "num_experts")
MOVED += ("tie_word_embeddings", "partial_rotary_factor")


# Others are read from one of their places only, or need more than one entry
ONE_ALONE_WORKS = ("dtype", "torch_dtype", "tie_word_embeddings", "num_experts", "quantization_config", "bits")
ONE_ALONE_WORKS += ("group_size", "format", "partial_rotary_factor", "full_attention_interval")


def pair_base(kind: str) -> dict[str, Any]:
    """A config.json without the settings of PAIRS."""
    name = {"experts": "qwen3-30b-a3b", "hybrid": "qwen3.5-9b"}.get(kind, "qwen3-0.6b")
    base: dict[str, Any] = json.loads(presets()[name].read_text())
    for level in (base, base.get("text_config", {})):
        for entry in MOVED:
            level.pop(entry, None)
    if kind == "hybrid":
        base["text_config"]["mtp_num_hidden_layers"] = 0
    return base | ({"quantization_config": PACKED | {"quant_method": kind}} if kind in ("gptq", "awq") else {})


def with_values(base: dict[str, Any], *places: tuple[Place, Any]) -> dict[str, Any]:
    """`base` with values at these places. What the places of a pair had before is removed."""
    content: dict[str, Any] = json.loads(json.dumps(base))
    for (*path, last), value in places:
        level = content
        for name in path:
            level = level.setdefault(name, {})
        level[last] = value
        if last in ("rope_type", "type"):
            level["factor"] = 4.0
    return content


def test_two_places_of_one_setting_agree_or_are_refused_by_name(tmp_path: Path) -> None:
    """Regression: of `rope_scaling` that an owner had added to a file of transformers 5, which has `rope_parameters`,
    nothing was used, without a word.
    """

    def read(content: dict[str, Any], **overrides: Any) -> ModelConfig:
        return load_config(write(tmp_path, content), overrides or None)[0]

    for kind, (place, value), (second, same, other) in PAIRS:
        base = pair_base(kind)
        for last in (place[-1], second[-1]):
            base.get("quantization_config", {}).pop(last, None)
        first = place, value
        both = read(with_values(base, first, (second, same)))
        if second[-1] != "layer_types":  # the types alone leave the number of layers open
            assert both == read(with_values(base, first)), (place, second)
        if place[-1] in ONE_ALONE_WORKS:
            assert read(with_values(base, (second, same))) == both, (place, second)
        for places in ((first, (second, other)), ((second, other), first)):
            with pytest.raises(CheckpointError, match=r"disagree|has 3 layers") as error:
                read(with_values(base, *places))
            assert place[-1] in str(error.value) and second[-1] in str(error.value), (place, str(error.value))
        if len(place) == 1 and place[0] in MOVED and place[0] not in (NEW, OLD):  # an override wins over both
            assert read(with_values(base, first, (second, other)), **{place[0]: value}) == both, place
    for override in ({NEW: YARN | THETA_7}, {OLD: YARN | THETA_7}):
        stored = pair_base("plain") | {NEW: LLAMA3 | THETA_5, OLD: YARN, "rope_theta": 3e5}
        assert read(stored, **override) == read(pair_base("plain") | override)
    with pytest.raises(
        CheckpointError, match=r"rope_theta=300000.0 and rope_parameters.rope_theta=500000.0 .* disagree"
    ):
        read(pair_base("plain") | {NEW: LLAMA3 | THETA_5, "rope_theta": 3e5}, **{NEW: YARN})


def test_entries_beside_text_config_that_say_something_else_are_refused(tmp_path: Path) -> None:
    """transformers reads the text part from text_config alone, so YaRN outside it would be ignored."""
    content = json.loads(presets()["qwen3.5-9b"].read_text())
    content["text_config"].pop("rms_norm_eps", None)
    for name, value in ((OLD, YARN), ("rms_norm_eps", 1e-5), ("rope_theta", 5e5)):
        with pytest.raises(CheckpointError, match=rf"{name}=.*text_config\.{name}|text_config.*{name}=.* disagree"):
            load_config(write(tmp_path, content | {name: value}))
    plain, _ = load_config(write(tmp_path, content))
    with_default, _ = load_config(write(tmp_path, content | {"rms_norm_eps": 1e-6, "num_labels": 2}))
    assert with_default == plain
    ended = content | {"eos_token_id": [5, 6]}
    ended["text_config"] = ended["text_config"] | {"eos_token_id": 7}
    assert load_config(write(tmp_path, ended))[0].eos_token_ids == (7, 5, 6)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert load_config(write(tmp_path, ended))[0].eos_token_ids == (7, 5, 6, 8)
    assert load_config(write(tmp_path, ended), {"eos_token_id": 9})[0].eos_token_ids == (9,)


def test_numbers_and_nulls_are_read_as_transformers_means_them(tmp_path: Path) -> None:
    """Regression: null for a switch was false, also where the default is true."""
    plain, _ = load_config(write(tmp_path, QWEN3))
    for changes in (
        {"torch_dtype": "torch.bfloat16"},
        {"dtype": "torch.bfloat16", "torch_dtype": None},
        {"rope_theta": 1000000},
        {"attention_bias": None},
        {"hidden_act": None},
    ):
        assert load_config(write(tmp_path, QWEN3 | changes))[0] == plain, changes
    half, _ = load_config(write(tmp_path, QWEN3 | {"torch_dtype": "half", "dtype": "torch.float16"}))
    assert half.torch_dtype == "float16"
    epsilon = load_config(write(tmp_path, QWEN3 | {"rms_norm_eps": 1}))[0].rms_norm_eps
    assert epsilon == 1.0 and type(epsilon) is float
    with pytest.raises(
        CheckpointError, match=r"head_dim=None can mean .* default of qwen3, 128; correct .*config\.json"
    ):
        load_config(write(tmp_path, QWEN3 | {"head_dim": None}))


def test_overrides_that_disagree_with_each_other_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"names rope_theta=500000.0 and rope_scaling.rope_theta=700000.0, .* give one"
    ):
        Config(model="m", hf_overrides={OLD: YARN | THETA_7} | THETA_5)
    Config(model="m", hf_overrides={OLD: YARN | THETA_5} | THETA_5)


def test_fewer_layers_by_an_override_keep_the_types_of_the_first_ones() -> None:
    model, _ = load_config("qwen3.5-9b", {"num_hidden_layers": 8, "mtp_num_hidden_layers": 0})
    assert model.layer_kinds == ("recurrent", "recurrent", "recurrent", "attention") * 2


def test_apply_overrides_changes_neither_argument() -> None:
    settings = {"rope_parameters": {"rope_theta": 5e5}, "vocab_size": 7}
    overrides = {"rope_scaling": {"rope_type": "yarn"}, "vocab_size": 8}
    before = json.dumps([settings, overrides])
    assert apply_overrides(settings, overrides) == {
        "rope_scaling": {"rope_theta": 5e5, "rope_type": "yarn"},
        "vocab_size": 8,
    }
    assert json.dumps([settings, overrides]) == before
    assert apply_overrides(settings, None) is settings


def test_overridable_are_the_entries_that_the_config_is_read_from() -> None:
    modules = (read_config, layer_config, rope_module, architectures)
    source = "".join(Path(each.__file__).read_text() for each in modules)
    assert all(name in source for name in ENTRIES)


# -- the gate --------------------------------------------------------------------------------------------------------


def test_config_bad_overrides_say_why() -> None:
    cases: tuple[Any, ...] = (
        (
            {"rope_paramters": YARN},
            "names 'rope_paramters', which the engine does not read; choose from architectures, .*rope_",
        ),
        ({1: 2}, "names 1, which the engine does not read"),
        ({"vocab_size": object()}, r"hf_overrides\['vocab_size'\]=<object .* is not JSON"),
        ({"rms_norm_eps": float("nan")}, "is not JSON"),
        ({"rope_parameters": {1: 2}}, "is not JSON"),
        ({"layer_types": ("full_attention",)}, "is not JSON"),
        ({"rope_scaling": [YARN]}, r"hf_overrides\['rope_scaling'\]=.* is not a dictionary"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "names both rope_parameters and rope_scaling"),
        ({"dtype": "float16", "torch_dtype": "float16"}, "names both dtype and torch_dtype"),
        ([("vocab_size", 1)], "hf_overrides=.* must be a dict or None"),
        ('{"vocab_size": 1}', "must be a dict or None"),
    )
    for overrides, message in cases:
        with pytest.raises(ConfigError, match=message):
            Config(model="m", hf_overrides=overrides)
    for overrides, message in (
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({OLD: {"rope_type": "mrope"}}, "'mrope' is"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_config("qwen3-0.6b", overrides)


# -- in the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_engine_with_overridden_yarn_has_the_logits_of_transformers(
    tmp_path: Path, architecture: str, num_gpu_blocks: int | None
) -> None:
    """The checkpoint says default rope over 512 tokens; the prompts are longer than that."""
    yarn = YARN | {"original_max_position_embeddings": 512}
    plain, extended = tmp_path / "plain", tmp_path / "extended"
    write_tiny_model(plain, architecture, max_position_embeddings=512)
    write_tiny_model(extended, architecture, max_position_embeddings=2048, rope=yarn)
    reference = Reference(extended)
    reference.directory = plain  # read by the engine; the logits come from the extended one
    overrides = {"rope_parameters": yarn, "max_position_embeddings": 2048}
    with CheckedLLM(reference, hf_overrides=overrides, **cache_options(num_gpu_blocks)) as llm:
        assert llm.max_model_len == 2048 and llm.model_config.rope.rope_theta == 10000.0
        llm.answer_and_check([random_prompt(n, seed=n) for n in (700, 1300, 30)])
    with pytest.raises(ConfigError, match="max_model_len=2048 is more than the 512 tokens"):
        LLM(str(plain), device="cpu", max_model_len=2048)


def test_overridden_yarn_differs_from_the_checkpoint_rope(tmp_path: Path) -> None:
    """The test above can tell: the two ropes give other logits."""
    logits = []
    for name, rope in (("plain", "default"), ("yarn", YARN | {"original_max_position_embeddings": 512})):
        write_tiny_model(tmp_path / name, max_position_embeddings=2048, rope=rope)
        logits.append(Reference(tmp_path / name).logits(random_prompt(700, seed=700), 1))
    assert (logits[0] - logits[1]).abs().max() > 0.01


# -- extending the rope ----------------------------------------------------------------------------------------------


def copied(message: str) -> dict[str, Any]:
    """The value that a message offers."""
    found = re.search(r"--hf-overrides '(\{.*\})'", message)
    assert found is not None, message
    overrides: dict[str, Any] = json.loads(found[1])
    return overrides


def test_extension_of_qwen3_is_its_model_cards_and_covers_the_tokens() -> None:
    model, _ = load_config("qwen3-8b")
    for num_tokens in (40_961, 65_536, 100_000, 131_072, 131_073, 1_000_000):
        message = rope_extension(model, num_tokens)
        extended, _ = load_config("qwen3-8b", copied(message))
        assert num_tokens <= extended.max_model_len_limit < num_tokens + 32768
        assert "authors recommend up to 131072 tokens" in message
    rope = {"rope_type": "yarn", "rope_theta": 1000000, "factor": 4.0, "original_max_position_embeddings": 32768}
    card = {"rope_parameters": rope, "max_position_embeddings": 131072}
    assert copied(rope_extension(model, 131_072)) == card


@pytest.mark.parametrize("rope", ROPES)
def test_extension_of_every_rope_covers_the_tokens_and_keeps_the_rest(tmp_path: Path, rope: str) -> None:
    given = ROPES[rope] | ({"beta_fast": 16.0} if rope == "yarn" else {})
    model, _ = load_config(str(write_tiny_model(tmp_path, rope=given)))
    for num_tokens in (1000, 5000):
        extended, _ = load_config(str(tmp_path), copied(rope_extension(model, num_tokens)))
        assert extended.max_model_len_limit >= num_tokens
        assert extended.rope.rope_type == ("yarn" if rope == "default" else rope)
        kept = ["rope_theta", "beta_fast", "low_freq_factor"]
        kept += ["original_max_position_embeddings"] if rope in ("dynamic", "llama3") else []
        assert all(getattr(extended.rope, name) == getattr(model.rope, name) for name in kept)


def test_max_model_len_beyond_the_rope_offers_overrides_that_work() -> None:
    """M8: the message said "extend the rope" and not how."""
    model, _ = load_config("qwen3-0.6b")
    config = Config(model="qwen3-0.6b", max_model_len=100_000)
    with pytest.raises(ConfigError, match="more than the 40960 tokens that the model's rope covers") as error:
        max_model_len(config, model)
    extended, _ = load_config("qwen3-0.6b", copied(str(error.value)))
    assert max_model_len(config, extended) == 100_000


# -- sampling defaults -----------------------------------------------------------------------------------------------


USER = [{"role": "user", "content": "Hello"}]
FILE = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3], "transformers": "5"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


def with_file(tiny: Path, tmp_path: Path, content: dict[str, Any] | str) -> Path:
    directory = shutil.copytree(tiny, tmp_path / "model")
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "generation_config.json").write_text(text)
    return directory


def make_llm(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), **({"device": "cpu", "num_kvcache_blocks": 4} | options))


def test_defaults_are_the_entries_that_sampling_params_has(tmp_path: Path) -> None:
    cases: tuple[Any, ...] = (
        (FILE, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"min_p": 0.05, "max_new_tokens": 2048}, {"min_p": 0.05, "max_tokens": 2048}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"repetition_penalty": 1.1, "max_length": 20}, {"repetition_penalty": 1.1}),
        ({}, {}),
    )
    for content, expected in cases:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        assert read_sampling_defaults(tmp_path) == expected
    (tmp_path / "generation_config.json").unlink()
    assert read_sampling_defaults(tmp_path) == {} and read_sampling_defaults(None) == {}


def test_bad_value_is_refused_with_the_file_unless_the_file_is_left_out(tiny: Path, tmp_path: Path) -> None:
    directory = with_file(tiny, tmp_path, "")
    cases: tuple[tuple[dict[str, Any] | str, str], ...] = (
        ({"temperature": -1}, r"temperature=-1: .* must be 0 \(greedy\), or from .*; correct .*generation_config.json"),
        ({"top_k": "20"}, "top_k='20': .* must be an integer; correct"),
        ({"top_p": 1.5}, "top_p=1.5: .* at most 1; correct"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: .*1 or more.*; correct"),
        ({"do_sample": 1}, "do_sample=1 must be true or false; correct"),
        ("{", "generation_config.json is not JSON"),
        ("[]", "generation_config.json holds a list"),
    )
    for content, message in cases:
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / "generation_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            make_llm(directory)
        if isinstance(content, dict):  # where its end tokens are cannot be left out
            with make_llm(directory, generation_config="none") as llm:
                assert llm.get_default_sampling_params() == SamplingParams()


def test_chat_uses_the_defaults_and_generate_does_not(tiny: Path, tmp_path: Path) -> None:
    """M6: every call sampled at temperature 1, whatever the model's authors recommend."""
    directory = with_file(tiny, tmp_path, {"do_sample": False, "max_new_tokens": 5})
    with make_llm(directory) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=5)
        (prompt,) = llm.chat_token_ids(USER)
        greedy = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0]["token_ids"]
        assert [llm.chat(USER, use_tqdm=False)[0]["token_ids"] for _ in range(2)] == [greedy] * 2
        sampled = llm.generate([prompt] * 2, use_tqdm=False)
        assert sampled[0]["token_ids"] != sampled[1]["token_ids"]
        given = SamplingParams(temperature=0, max_tokens=2)
        assert llm.chat(USER, given, use_tqdm=False)[0]["token_ids"] == greedy[:2]


@pytest.mark.slow
def test_limit_of_the_file_is_shortened_to_what_fits_and_a_users_is_not(tiny: Path, tmp_path: Path) -> None:
    """Regression: max_new_tokens of the file counted as the user's own limit, so `chat`, and `generate` with
    get_default_sampling_params(), refused every prompt with which it did not fit. The server shortened it.
    """
    directory = with_file(tiny, tmp_path, {"do_sample": False, "max_new_tokens": 100_000})
    with make_llm(directory, num_kvcache_blocks=2) as llm:
        (prompt,) = llm.chat_token_ids(USER)
        room = llm.max_request_tokens - len(prompt)
        defaults = llm.get_default_sampling_params()
        assert defaults.max_tokens == 100_000
        endless = replace(defaults, ignore_eos=True)
        for output in (llm.generate([prompt], endless, use_tqdm=False)[0], llm.chat(USER, endless, use_tqdm=False)[0]):
            assert len(output["token_ids"]) == room and output["finish_reason"] == "length"
        llm.chat(USER, use_tqdm=False)
        for limit in (replace(endless, max_tokens=100_000), SamplingParams(max_tokens=100_000)):
            with pytest.raises(RequestError, match=r"max_tokens=100000 exceeds max_model_len=512"):
                llm.generate([prompt], limit, use_tqdm=False)
        (output,) = llm.generate([prompt], replace(endless, max_tokens=3), use_tqdm=False)
        assert len(output["token_ids"]) == 3
    directory.joinpath("generation_config.json").write_text('{"max_new_tokens": 3}')
    with make_llm(directory) as llm:  # fewer than the user's least
        least = replace(llm.get_default_sampling_params(), min_tokens=5, seed=0)
        assert len(llm.generate([prompt], least, use_tqdm=False)[0]["token_ids"]) == 5
        with pytest.raises(RequestError, match=r"min_tokens=600 must be at most max_tokens"):
            llm.generate([prompt], replace(least, min_tokens=600), use_tqdm=False)


def test_command_line_shortens_the_limit_of_the_file(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = with_file(tiny, tmp_path, {"do_sample": False, "max_new_tokens": 100_000})
    assert run_generate(directory, "--max-model-len", "64", "--ignore-eos") == 0
    assert "finish reason: length" in capsys.readouterr().err
    assert run_generate(directory, "--max-model-len", "64", "--max-tokens", "100000") == 2
    assert "--max-tokens=100000 exceeds --max-model-len=64" in capsys.readouterr().err


def run_generate(directory: Path, *flags: str) -> int:
    argv = ["generate", "--model", str(directory), "--prompt", "Hello", "--device", "cpu", "--num-kvcache-blocks", "4"]
    return cli.main([*argv, *flags])


def test_command_line_uses_shows_and_can_switch_off_the_defaults(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = with_file(tiny, tmp_path, {"temperature": 0.6, "top_k": 1, "max_new_tokens": 3})
    shown = "from the model's generation_config.json: "
    assert run_generate(directory) == 0
    err = capsys.readouterr().err
    assert f"{shown}--temperature 0.6 --top-k 1 --max-tokens 3\n" in err and " 3 new;" in err
    assert run_generate(directory, "--max-tokens", "2", "--temperature", "0") == 0
    err = capsys.readouterr().err
    assert f"{shown}--top-k 1\n" in err and " 2 new;" in err
    assert run_generate(directory, "--generation-config", "none", "--ignore-eos") == 0
    err = capsys.readouterr().err
    assert shown not in err and " 64 new;" in err


def test_command_line_bad_file_exits_2_and_names_the_flag(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate(with_file(tiny, tmp_path, {"top_k": -5})) == 2
    err = capsys.readouterr().err
    assert "top_k=-5" in err or "--top-k=-5" in err
    assert "ignore it with --generation-config='none'" in err and "generation_config.json" in err
