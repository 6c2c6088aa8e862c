"""hf_overrides: what may be given, that it equals a config.json that says the same, and which rope it reaches."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checked_engine import CheckedLLM, Reference, cache_options
from dense_model import random_prompt
from tiny_models import ROPES, write_tiny_model

from nanovllm import LLM
from nanovllm.checkpoint import model_config
from nanovllm.checkpoint.files import presets
from nanovllm.checkpoint.model_config import ModelConfig, rope_extension
from nanovllm.checkpoint.settings import READ, apply_overrides
from nanovllm.config import Config
from nanovllm.core.step_limits import max_model_len
from nanovllm.errors import CheckpointError, ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def write(directory: Path, settings: dict[str, Any]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings))
    return str(directory)


# -- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "overrides", "same_as"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_scaling": YARN}, {"rope_theta": 5e5, "rope_scaling": YARN}),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope_parameters": YARN},
            {"rope_theta": 5e5, "rope_parameters": YARN},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_scaling": YARN},
            {"rope_parameters": YARN | {"rope_theta": 5e5}},
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
            {"rope_parameters": YARN | {"rope_theta": 7e5}},
            {"rope_parameters": YARN | {"rope_theta": 7e5}},
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
            {"rope_parameters": None},
            {"rope_theta": 5e5, "rope_parameters": None},
        ),
        (
            {"rope_parameters": YARN | {"rope_theta": 5e5}},
            {"rope_theta": 7e5},
            {"rope_parameters": YARN | {"rope_theta": 7e5}},
        ),
        ({"rope_theta": 5e5}, {"rope_theta": 7e5}, {"rope_theta": 7e5}),
        ({"dtype": "float16"}, {"torch_dtype": "float32"}, {"torch_dtype": "float32"}),
        (
            {},
            {"max_position_embeddings": 999, "tie_word_embeddings": True},
            {"max_position_embeddings": 999} | {"tie_word_embeddings": True},
        ),
    ],
    ids=[
        *("old form", "the new form replaces the old", "the old form replaces the new", "theta given", "no scaling"),
        *("theta alone, of an entry", "theta alone, outside", "dtype", "plain entries"),
    ],
)
def test_overrides_equal_a_config_json_that_says_the_same(
    tmp_path: Path, settings: dict[str, Any], overrides: dict[str, Any], same_as: dict[str, Any]
) -> None:
    """An entry left beside its other name decided in its place, and a rope without theta fell back to 10000."""
    base = json.loads(presets()["qwen3-0.6b"].read_text())
    base = {name: value for name, value in base.items() if not name.startswith("rope_")}
    base |= {"max_position_embeddings": 128}
    model = write(tmp_path / "model", base | settings)
    want, _ = ModelConfig.from_pretrained(write(tmp_path / "same", base | same_as))
    before, _ = ModelConfig.from_pretrained(model)
    got, _ = ModelConfig.from_pretrained(model, overrides)
    assert got == want == ModelConfig.without_weights(model, overrides)
    assert got != before
    assert not any("rope" in name for name in settings) or got.rope.rope_theta in (5e5, 7e5)


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


def test_overrides_are_checked_as_config_json_is() -> None:
    with pytest.raises(CheckpointError, match="rope type 'mrope' is not supported"):
        ModelConfig.from_pretrained("qwen3-0.6b", {"rope_scaling": {"rope_type": "mrope"}})
    with pytest.raises(CheckpointError, match="hidden_act='gelu'"):
        ModelConfig.from_pretrained("qwen3-0.6b", {"hidden_act": "gelu"})


def test_overridable_are_the_entries_that_model_config_reads() -> None:
    source = Path(model_config.__file__).read_text()
    assert all(name in source for name in READ)


# -- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
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
    ],
)
def test_config_bad_overrides_say_why(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(model="m", hf_overrides=overrides)


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
    reference.directory = plain  # what the engine reads; the logits are those of the extended one
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


@pytest.mark.parametrize("num_tokens", [40_961, 65_536, 100_000, 131_072, 131_073, 1_000_000])
def test_extension_of_qwen3_is_its_model_cards_and_covers_the_tokens(num_tokens: int) -> None:
    model, _ = ModelConfig.from_pretrained("qwen3-8b")
    message = rope_extension(model, num_tokens)
    overrides = copied(message)
    extended, _ = ModelConfig.from_pretrained("qwen3-8b", overrides)
    assert num_tokens <= extended.max_model_len_limit < num_tokens + 32768
    assert (extended.rope.rope_type, extended.rope.rope_theta) == ("yarn", 1e6)
    assert extended.rope.original_max_position_embeddings == 32768
    assert "authors recommend up to 131072 tokens" in message


def test_extension_of_qwen3_to_131072_is_what_the_model_card_says() -> None:
    model, _ = ModelConfig.from_pretrained("qwen3-8b")
    assert copied(rope_extension(model, 131_072)) == {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
        "max_position_embeddings": 131072,
    }


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("num_tokens", [1000, 5000])
def test_extension_of_every_rope_covers_the_tokens_and_keeps_the_rest(
    tmp_path: Path, rope: str, num_tokens: int
) -> None:
    given = ROPES[rope] | ({"beta_fast": 16.0} if rope == "yarn" else {})
    model, _ = ModelConfig.from_pretrained(str(write_tiny_model(tmp_path, rope=given)))
    overrides = copied(rope_extension(model, num_tokens))
    extended, _ = ModelConfig.from_pretrained(str(tmp_path), overrides)
    assert extended.max_model_len_limit >= num_tokens
    assert extended.rope.rope_type == ("yarn" if rope == "default" else rope)
    assert extended.rope.rope_theta == model.rope.rope_theta
    assert extended.rope.beta_fast == model.rope.beta_fast
    assert extended.rope.low_freq_factor == model.rope.low_freq_factor
    if rope in ("dynamic", "llama3"):
        assert extended.rope.original_max_position_embeddings == model.rope.original_max_position_embeddings


def test_max_model_len_beyond_the_rope_offers_overrides_that_work() -> None:
    """M8: the message said "extend the rope" and not how."""
    model, _ = ModelConfig.from_pretrained("qwen3-0.6b")
    config = Config(model="qwen3-0.6b", max_model_len=100_000)
    with pytest.raises(ConfigError, match="more than the 40960 tokens that the model's rope covers") as error:
        max_model_len(config, model)
    extended, _ = ModelConfig.from_pretrained("qwen3-0.6b", copied(str(error.value)))
    assert max_model_len(config, extended) == 100_000
