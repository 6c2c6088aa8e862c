"""Every setting of config.json that is out of its range is refused, by name, before transformers or torch act on it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.checkpoint.files import presets
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.settings import MAX_POSITIONS
from nanovllm.engine import startup
from nanovllm.errors import CheckpointError

QWEN3 = json.loads(presets()["qwen3-0.6b"].read_text())
LLAMA = json.loads(presets()["llama-3.1-8b"].read_text())
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = LLAMA["rope_scaling"]


def write(directory: Path, config: dict[str, Any]) -> str:
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
    *((rope(YARN, factor=factor), "rope_scaling.factor=") for factor in (math.nan, math.inf, 0, 0.5, -4, "4", 1e39)),
    (rope(YARN, factor=1000), "covers 32768000 tokens, more than the 16777216 .* lower the factor"),
    (rope(YARN, original_max_position_embeddings=0), "rope_scaling.original_max_position_embeddings=0"),
    (rope(YARN, original_max_position_embeddings=32768.5), "original_max_position_embeddings=32768.5 must be an int"),
    (rope(YARN, beta_fast=math.nan), "rope_scaling.beta_fast=nan"),
    (rope(YARN, beta_slow=0), "rope_scaling.beta_slow=0"),
    (rope(YARN, beta_slow=40.0), "rope beta_slow=40.0 must be below beta_fast=32.0"),
    (rope(YARN, attention_factor=-1.0), "rope_scaling.attention_factor=-1.0"),
    (rope(YARN, mscale=math.nan), "rope_scaling.mscale=nan"),
    (rope(YARN, truncate="no"), "rope_scaling.truncate='no'"),
    (rope(YARN, rope_type=5), "rope_scaling.rope_type=5"),
    (rope(YARN, factor=None), r"lacks \['factor'\]"),
    (rope(LLAMA3, low_freq_factor=0), "rope_scaling.low_freq_factor=0"),
    (rope(LLAMA3, low_freq_factor=4.0), "rope low_freq_factor=4.0 must be below high_freq_factor=4.0"),
    (rope(LLAMA3, partial_rotary_factor=0), "rope_scaling.partial_rotary_factor=0"),
    ({"rope_parameters": rope(YARN, factor=math.nan)["rope_scaling"]}, "rope_parameters.factor=nan"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS, ids=[message[:60] for _, message in BAD_SETTINGS])
def test_setting_out_of_range_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """Regression: RuntimeError from the allocator, MemoryError or OverflowError from a table, a division by zero, or
    NaN in every answer."""

    def refuse(*args: object) -> None:
        raise AssertionError("a runner was made")

    monkeypatch.setattr(startup, "make_runner", refuse)
    with pytest.raises(CheckpointError, match=message):
        LLM(write(tmp_path, QWEN3 | changes), device="cpu", load_format="dummy")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": None},
        {"head_dim": 16},
        {"head_dim": 256},
        {"rms_norm_eps": 1.0},
        {"rope_theta": 10000},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default", "factor": None}},
        {"max_position_embeddings": MAX_POSITIONS},
        {"num_hidden_layers": 1, "layer_types": None},
    ],
)
def test_setting_at_the_end_of_its_range_is_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    config, _ = ModelConfig.from_pretrained(write(tmp_path, QWEN3 | changes))
    for name in changes.keys() & {"head_dim", "rms_norm_eps", "max_position_embeddings"}:
        assert getattr(config, name) == changes[name]


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "message"),
    [(60, 4, r"head_dim=15 \(hidden_size=60, num_attention_heads=4\)"), (8, 16, "not a multiple|head_dim=0")],
)
def test_head_dim_that_follows_from_hidden_size_is_checked(
    tmp_path: Path, hidden_size: int, num_heads: int, message: str
) -> None:
    sizes = {"hidden_size": hidden_size, "num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    without_head_dim = {name: value for name, value in LLAMA.items() if name != "head_dim"}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_pretrained(write(tmp_path, without_head_dim | sizes))


@pytest.mark.parametrize("value", [-1, 151936, True, "2", 2.0, [1, -1], [[1]], {"a": 1}])
def test_end_token_outside_the_vocabulary_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):  # by transformers, or here
        ModelConfig.from_pretrained(write(tmp_path, QWEN3 | {"eos_token_id": value}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"in generation_config\.json must be token ids from 0 to 151935"):
        ModelConfig.from_pretrained(write(tmp_path, QWEN3))


def test_config_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    """Regression: RecursionError."""
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        ModelConfig.from_pretrained(str(tmp_path))
