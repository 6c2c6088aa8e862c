"""Rope extension: which `hf_overrides` would let a model run a context beyond its own limit. Arithmetic only."""

import json
from dataclasses import fields
from typing import Any

from nanovllm.checkpoint.model_config import ModelConfig, RopeConfig

# (architecture, max_position_embeddings) -> the length that YaRN starts from, and the longest context that the model's
# authors recommend it for: the model cards of Qwen3, whose 40,960 positions include room for the answer, and Qwen2.5
RECOMMENDED_YARN = {("Qwen3ForCausalLM", 40960): (32768, 131072), ("Qwen2ForCausalLM", 32768): (32768, 131072)}
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
PARAMETERS = {  # for each type that scales, in addition to the type itself and theta
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", *OPTIONAL),
}


def rope_extension(model: ModelConfig, num_tokens: int) -> str:
    """A remedy, to be put into a message: overrides with which the rope covers `num_tokens`, ready to be copied."""
    overrides, remark = _overrides(model, num_tokens)
    return f"extend the rope ({remark}) with hf_overrides, on the command line --hf-overrides '{json.dumps(overrides)}'"


def _overrides(model: ModelConfig, num_tokens: int) -> tuple[dict[str, Any], str]:
    """(overrides, what speaks for them)."""
    rope, max_position = model.rope, model.max_position_embeddings
    if rope.rope_type == "default":
        known = RECOMMENDED_YARN.get((model.architecture, max_position))
        original, recommended = known or (max_position, 0)
        factor = float(-(-num_tokens // original))
        parameters = {
            "rope_type": "yarn",
            "rope_theta": _number(rope.rope_theta),
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        overrides = {"rope_parameters": parameters, "max_position_embeddings": int(original * factor)}
        if num_tokens <= recommended:
            return overrides, f"yarn, which the model's authors recommend up to {recommended} tokens"
        untested = f"yarn; the model's authors recommend it up to {recommended} tokens, not beyond"
        return overrides, untested if recommended else "yarn; look for what the model's authors say about it"
    stretch = -(-num_tokens // model.max_model_len_limit)
    overrides = {"rope_parameters": _parameters(rope) | {"factor": rope.factor * stretch}}
    if rope.rope_type in ("yarn", "llama3"):
        overrides["max_position_embeddings"] = model.max_model_len_limit * stretch
    return overrides, f"{rope.rope_type} with a larger factor, which the model was not made for"


def _parameters(rope: RopeConfig) -> dict[str, Any]:
    """The equivalent entry of config.json, without optional parameters that have their default values."""
    given = {field.name: getattr(rope, field.name) for field in fields(rope)}
    names = ("rope_type", "rope_theta", *PARAMETERS[rope.rope_type])
    left_out = {field.name for field in fields(rope) if field.name in OPTIONAL and given[field.name] == field.default}
    return {name: _number(given[name]) for name in names if name not in left_out}


def _number(value: Any) -> Any:
    """Whole floats as integers, as config.json has them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
