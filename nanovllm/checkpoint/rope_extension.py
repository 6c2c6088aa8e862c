"""Rope extension: the `hf_overrides` with which a model can run a context beyond its own limit. Arithmetic only."""

import json
from dataclasses import fields
from typing import Any

from nanovllm.checkpoint.model_config import ModelConfig, RopeConfig
from nanovllm.utils.arithmetic import ceil_div

# (architecture, max_position_embeddings) -> the length from which YaRN extends, and the longest context for which the
# model's authors recommend it. From the model cards of Qwen3, whose 40,960 positions include the answer, and Qwen2.5
RECOMMENDED_YARN = {("Qwen3ForCausalLM", 40960): (32768, 131072), ("Qwen2ForCausalLM", 32768): (32768, 131072)}
OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
PARAMETERS = {  # rope type -> its parameters besides the type and theta
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", *OPTIONAL),
}


def rope_extension(model: ModelConfig, num_tokens: int) -> str:
    """A remedy for an error message: overrides with which the rope covers `num_tokens`, ready to be copied."""
    overrides, remark = _overrides(model, num_tokens)
    return f"extend the rope ({remark}) with hf_overrides, on the command line --hf-overrides '{json.dumps(overrides)}'"


def _overrides(model: ModelConfig, num_tokens: int) -> tuple[dict[str, Any], str]:
    """The overrides, and a remark on whether the model's authors recommend them."""
    rope, max_position = model.rope, model.max_position_embeddings
    if rope.rope_type == "default":
        known = RECOMMENDED_YARN.get((model.architecture, max_position))
        original, recommended = known or (max_position, 0)
        factor = float(ceil_div(num_tokens, original))
        parameters = {
            "rope_type": "yarn",
            "rope_theta": _number(rope.rope_theta),
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        overrides = {"rope_parameters": parameters, "max_position_embeddings": int(original * factor)}
        if num_tokens <= recommended:
            return overrides, f"yarn, which the model's authors recommend up to {recommended} tokens"
        untested = f"yarn; the model's authors recommend it only up to {recommended} tokens"
        return overrides, untested if recommended else "yarn; check whether the model's authors recommend it"
    stretch = ceil_div(num_tokens, model.max_model_len_limit)
    overrides = {"rope_parameters": _parameters(rope) | {"factor": rope.factor * stretch}}
    if rope.rope_type in ("yarn", "llama3"):
        overrides["max_position_embeddings"] = model.max_model_len_limit * stretch
    return overrides, f"{rope.rope_type} with a larger factor than the model was trained with"


def _parameters(rope: RopeConfig) -> dict[str, Any]:
    """The equivalent entry of config.json. Optional parameters with their default values are left out."""
    given = {field.name: getattr(rope, field.name) for field in fields(rope)}
    names = ("rope_type", "rope_theta", *PARAMETERS[rope.rope_type])
    left_out = {field.name for field in fields(rope) if field.name in OPTIONAL and given[field.name] == field.default}
    return {name: _number(given[name]) for name in names if name not in left_out}


def _number(value: Any) -> Any:
    """A float without a fraction as an integer, as in config.json."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
