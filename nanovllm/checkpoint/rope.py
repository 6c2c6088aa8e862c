"""The rope of a model: how config.json gives it, and the overrides that extend it.

Importing this module loads neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nanovllm.checkpoint.architectures import ARCHITECTURES, Architecture
from nanovllm.checkpoint.model_config import ModelConfig, RopeConfig
from nanovllm.checkpoint.settings import KEPT_ROPE_KEYS, MROPE_KEYS, ROPE_KEYS
from nanovllm.errors import CheckpointError
from nanovllm.utils.arithmetic import ceil_div

ROPE_TYPES = {  # rope type -> the keys that it needs
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}


def read_rope(settings: Mapping[str, Any], architecture: Architecture) -> RopeConfig:
    """Return the rope of the layers that attend to all keys, from `rope_parameters` (transformers 5) or `rope_theta`
    and `rope_scaling` (earlier).
    """
    if settings.get("window_rope_parameters") is not None and not architecture.has_windows:
        raise CheckpointError(
            "rope_parameters in config.json are given per layer type (full_attention, sliding_attention); "
            f"{architecture.model_type} has one rope for all layers"
        )
    entry = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    outside = {name: settings.get(name) for name in KEPT_ROPE_KEYS}
    return read_rope_entry(entry, outside, settings, is_partial=architecture.is_hybrid)


def read_rope_entry(
    entry: Mapping[str, Any], outside: Mapping[str, Any], settings: Mapping[str, Any], *, is_partial: bool
) -> RopeConfig:
    """Read the entry of a rope and keys that are outside the entry. is_partial: the rope may rotate a part of each
    head, and have sections for images.
    """
    given = {name: value for name, value in entry.items() if value is not None}
    if given.get("type") and given.get("rope_type", given["type"]) != given["type"]:
        raise CheckpointError(
            f"rope type={given['type']!r} and rope_type={given['rope_type']!r} mean the same setting and disagree; "
            "remove one of them from config.json"
        )
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    known = ROPE_KEYS.keys() - (set() if is_partial else MROPE_KEYS)
    unknown, missing = sorted(entry.keys() - known), sorted(set(ROPE_TYPES[rope_type]) - given.keys())
    if unknown or missing:
        raise CheckpointError(
            f"rope type {rope_type!r} has unknown keys {unknown} and lacks {missing}; correct config.json"
        )
    given = {name: value for name, value in outside.items() if value is not None} | given
    partial = given.get("partial_rotary_factor") or 1.0
    if partial != 1.0 and not is_partial and rope_type != "proportional":
        raise CheckpointError(f"partial_rotary_factor={partial} is not supported; only 1.0 (rotate the whole head) is")
    names = {each.name for each in fields(RopeConfig)}
    max_position = settings["max_position_embeddings"]
    values = {"original_max_position_embeddings": settings.get("original_max_position_embeddings") or max_position}
    values |= {name: value for name, value in given.items() if name in names} | {"rope_type": rope_type}
    values["partial_rotary_factor"] = partial
    if rope_type == "dynamic":
        values["original_max_position_embeddings"] = max_position  # transformers ignores the file's entry
    rope = RopeConfig(**values | {name: float(values[name]) for name in ("rope_theta", "factor") if name in values})
    for lower, upper in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if getattr(rope, lower) >= getattr(rope, upper):
            raise CheckpointError(
                f"rope {lower}={getattr(rope, lower)} must be below {upper}={getattr(rope, upper)}; correct config.json"
            )
    return rope


def rope_extension(model: ModelConfig, num_tokens: int) -> str:
    """Return the remedy of an error message: an `hf_overrides` to copy, with which the rope covers `num_tokens`."""
    overrides, remark = rope_overrides(model, num_tokens)
    return f"extend the rope ({remark}) with hf_overrides, on the command line --hf-overrides '{json.dumps(overrides)}'"


def rope_overrides(model: ModelConfig, num_tokens: int) -> tuple[dict[str, Any], str]:
    """Return the `hf_overrides` with which the rope covers `num_tokens`, and a remark about them."""
    rope, max_position = model.rope, model.max_position_embeddings
    if rope.rope_type == "default":
        cards = ARCHITECTURES[model.architecture].recommended_yarn
        original, recommended = cards.get(max_position, (max_position, 0))
        factor = ceil_div(num_tokens, original)
        scaling: dict[str, Any] = {"rope_type": "yarn", "rope_theta": rope.rope_theta, "factor": float(factor)}
        scaling["original_max_position_embeddings"] = original
        overrides = {"rope_parameters": scaling, "max_position_embeddings": original * factor}
        remark = "yarn; check whether the model's authors recommend it"
        if recommended:
            remark = f"yarn, which the model's authors recommend up to {recommended} tokens"
    else:
        stretch, kept = ceil_div(num_tokens, model.max_model_len_limit), ("rope_type", *ROPE_TYPES[rope.rope_type])
        values = {each.name: (getattr(rope, each.name), each.default) for each in fields(rope)}
        scaling = {name: value for name, (value, default) in values.items() if name in kept or value != default}
        overrides = {"rope_parameters": scaling | {"factor": rope.factor * stretch}}
        if rope.rope_type in ("yarn", "llama3", "proportional") or model.gemma is not None:
            overrides["max_position_embeddings"] = model.max_model_len_limit * stretch
        remark = f"{rope.rope_type} with a larger factor than the model was trained with"
    return overrides, remark
