"""load_config: a checkpoint's config.json, or the metadata of its GGUF file, as a ModelConfig.

This module, layer_config.py for the layers, rope.py for the rope and quantization_config.py own the list of supported
settings, with the defaults of transformers (architectures.py). Other settings raise CheckpointError here, and no later
code checks them. Importing this module loads neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanovllm.checkpoint import gguf_config
from nanovllm.checkpoint.architectures import ARCHITECTURES, Architecture
from nanovllm.checkpoint.files import INDEX_FILE, find_model, read_json, stored_names
from nanovllm.checkpoint.gguf import GGUFModel, is_gguf, read_model
from nanovllm.checkpoint.gguf_files import find_gguf
from nanovllm.checkpoint.layer_config import (
    attention_scale,
    layer_kinds,
    mlp_size,
    read_experts,
    read_heads,
    read_recurrent,
    read_window,
)
from nanovllm.checkpoint.model_config import DTYPES, ModelConfig
from nanovllm.checkpoint.quantization import gguf_quantization
from nanovllm.checkpoint.quantization_config import parse_quantization
from nanovllm.checkpoint.rope import read_rope
from nanovllm.checkpoint.settings import (
    GENERATION_CONFIG_FILE,
    MAX_POSITIONS,
    SWITCHES,
    check_settings,
    dtype_meaning,
    text_settings,
)
from nanovllm.errors import CheckpointError, ConfigError


def load_config(model: str, hf_overrides: Mapping[str, Any] | None = None) -> tuple[ModelConfig, Path | None]:
    """Return the config of a local directory, a preset or a hub name, and the directory of the weights.

    The directory is None for a preset, which has no weights. For a hub name all files but the weights are downloaded or
    found in the cache; `fetch_weights` downloads the weights.

    hf_overrides: entries that replace entries of config.json (settings.py).

    Raises CheckpointError if the model is not found, and for a setting that is out of range or unsupported. Never runs
    code from the checkpoint and never asks for input on stdin.
    """
    config_path, directory = find_model(model)
    return _config_of_files(config_path, directory, model, hf_overrides), directory


def config_without_weights(model: str, hf_overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the same config as `load_config`, but download only config.json and the list of tensors, or the header of
    a file in GGUF.

    So for a hub name, the config lacks end tokens that only generation_config.json names.
    """
    if (gguf := find_gguf(model)) is not None:
        return config_of_gguf(gguf.header(), hf_overrides)
    config_path, directory = find_model(model, ("config.json", INDEX_FILE))
    return _config_of_files(config_path, directory, model, hf_overrides)


def _config_of_files(
    config_path: Path, directory: Path | None, model: str, hf_overrides: Mapping[str, Any] | None
) -> ModelConfig:
    if is_gguf(directory):
        return config_of_gguf(read_model(directory), hf_overrides)
    return _read_config(read_json(config_path), config_path, hf_overrides, model, directory)


def config_of_gguf(model: GGUFModel, hf_overrides: Mapping[str, Any] | None) -> ModelConfig:
    """Return the config of a model in GGUF, and raise CheckpointError as `load_config` does."""
    if hf_overrides and hf_overrides.get("quantization_config"):
        raise ConfigError(
            f"hf_overrides has quantization_config, but {model.path} has the type of each tensor; leave it out"
        )
    content = gguf_config.settings(model)
    try:
        config = _read_config(content, model.path, hf_overrides, str(model.path), None)
    except CheckpointError as error:
        raise CheckpointError(f"{model.path} has metadata that is, in the terms of config.json: {error}") from error
    formats = gguf_quantization(gguf_config.quantized_layers(model))
    return replace(config, gguf_types=gguf_config.quantized_types(model), quantization=formats)


def _read_config(
    content: dict[str, Any],
    config_path: Path,
    hf_overrides: Mapping[str, Any] | None,
    model: str,
    directory: Path | None,
) -> ModelConfig:
    """Check the content of config.json after the overrides. directory: the model's directory, or None for a preset and
    for a file in GGUF, in which `config_path` and `content` have all there is.
    """
    given, outside = text_settings(content, hf_overrides, config_path)
    name = _architecture_name(given)
    check_settings(given, config_path)
    architecture = ARCHITECTURES[name]
    settings = _with_defaults(given, outside, architecture, config_path)
    _check_fixed(settings, architecture)

    def is_set(switch: bool | str) -> bool:
        return bool(settings.get(switch)) if isinstance(switch, str) else switch

    kinds = layer_kinds(settings, given, architecture)
    num_kv_heads, head_dim = read_heads(settings, kinds)
    rope, scale = read_rope(settings, architecture), attention_scale(settings, architecture)
    gemma = architecture.gemma
    if gemma is not None:
        gemma = replace(gemma, v_from_k=bool(settings.get("attention_k_eq_v")))
    config = ModelConfig(
        architecture=name,
        hidden_size=settings["hidden_size"],
        intermediate_size=mlp_size(settings),
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=settings["vocab_size"],
        rms_norm_eps=float(settings["rms_norm_eps"]),
        max_position_embeddings=settings["max_position_embeddings"],
        tie_word_embeddings=bool(settings["tie_word_embeddings"]),
        qkv_bias=is_set(architecture.qkv_bias),
        o_bias=is_set(architecture.o_bias),
        mlp_bias=is_set(architecture.mlp_bias),
        qk_norm=architecture.has_qk_norm,
        rope=rope,
        torch_dtype=_weight_dtype(settings, architecture),
        eos_token_ids=_eos_token_ids(settings, None if "eos_token_id" in (hf_overrides or {}) else directory),
        quantization=parse_quantization(settings.get("quantization_config") or settings.get("compression_config")),
        experts=read_experts(settings, architecture),
        layer_kinds=kinds,
        has_sinks=architecture.has_sinks,
        recurrent=read_recurrent(settings) if architecture.is_hybrid else None,
        window=read_window(settings, rope, scale) if architecture.has_windows else None,
        attention_scale=scale,
        attention_gate=architecture.is_hybrid,
        norms_add_one=architecture.norms_add_one,
        activation=architecture.activation,
        gemma=gemma,
        logit_softcap=settings.get("final_logit_softcapping"),
        has_mtp=architecture.is_hybrid and _num_mtp_layers(settings) > 0 and _may_have_mtp_weights(model, directory),
        exceeds_float16=architecture.exceeds_float16,
    )
    if config.rotary_dim % 2 or config.rotary_dim < 2:
        raise CheckpointError(
            f"partial_rotary_factor={config.rope.partial_rotary_factor} rotates {config.rotary_dim} of the "
            f"{config.head_dim} elements of a head, which must be an even number; correct config.json"
        )
    if config.max_model_len_limit > MAX_POSITIONS:
        raise CheckpointError(
            f"max_position_embeddings={config.max_position_embeddings} with rope type {config.rope.rope_type!r} and "
            f"factor={config.rope.factor} covers {config.max_model_len_limit} tokens, more than the {MAX_POSITIONS} "
            "positions that fp32 can tell apart; lower the factor in config.json"
        )
    return config


def _with_defaults(
    given: Mapping[str, Any], outside: Mapping[str, Any], architecture: Architecture, path: Path
) -> dict[str, Any]:
    """Return the entries with the architecture's defaults. Null for a switch, hidden_act or the rope counts as absent.

    outside: entries outside `text_config`, which transformers ignores. Raises CheckpointError if an entry outside has
    another value than the entry in the text part.
    """
    defaults = architecture.defaults
    if "head_dim" in given and given["head_dim"] is None and "head_dim" in defaults:
        raise CheckpointError(
            f"head_dim=None can mean hidden_size / num_attention_heads or the default of {architecture.model_type}, "
            f"{defaults['head_dim']}; correct {path}"
        )
    is_absent = {name for name in (*SWITCHES, "hidden_act", "rope_parameters") if given.get(name) is None}
    settings = {**defaults, **{name: value for name, value in given.items() if name not in is_absent}}
    if given.get("rope_scaling") and "rope_parameters" not in given:
        settings.pop("rope_parameters", None)
    for name, value in outside.items():
        if value != settings.get(name):
            raise CheckpointError(
                f"{name}={value!r} is outside text_config, and text_config.{name}={settings.get(name)!r}; the text "
                f"part is read from text_config, so move the entry there or remove it from {path}"
            )
    return settings


def _check_fixed(settings: Mapping[str, Any], architecture: Architecture) -> None:
    for name, supported in architecture.fixed.items():
        if settings.get(name) is not None and settings[name] not in supported:
            remedy = f"use a checkpoint with {name}={' or '.join(map(repr, supported))}"
            raise CheckpointError(
                f"{name}={settings[name]!r} is not supported for model_type={architecture.model_type!r}; "
                f"{architecture.remedies.get(name, remedy)}"
            )


def _architecture_name(settings: Mapping[str, Any]) -> str:
    """Return the architecture. Raises CheckpointError if it is not supported, or needs code from the checkpoint."""
    given = settings.get("architectures")
    name = given[0] if isinstance(given, list) and given else given
    model_type = settings.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES or ARCHITECTURES[name].model_type != model_type:
        supported = ", ".join(f"{name} ({each.model_type})" for name, each in ARCHITECTURES.items())
        raise CheckpointError(
            f"architectures[0]={name!r} with model_type={model_type!r} is not supported; supported are {supported}"
        )
    auto_map = settings.get("auto_map")
    if isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map:
        raise CheckpointError(
            f"auto_map.AutoModelForCausalLM={auto_map['AutoModelForCausalLM']!r} asks for code from the checkpoint, "
            f"which is never run; remove auto_map from config.json if the weights belong to a plain {name}"
        )
    return name


def _weight_dtype(settings: Mapping[str, Any], architecture: Architecture) -> str:
    """Return the type of the weights that are not quantized: one of DTYPES. Files of a model whose activations exceed
    float16 may have its weights in float16, which then become bfloat16.
    """
    dtype = dtype_meaning(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype} in config.json is not supported; use a checkpoint in {', '.join(DTYPES)}")
    return "bfloat16" if dtype == "float16" and architecture.exceeds_float16 else dtype


def _num_mtp_layers(settings: Mapping[str, Any]) -> int:
    num_layers: int = settings.get("mtp_num_hidden_layers") or 0
    if num_layers > 1:
        raise CheckpointError(f"mtp_num_hidden_layers={num_layers} is not supported; use a checkpoint with 0 or 1")
    return num_layers


def _may_have_mtp_weights(model: str, directory: Path | None) -> bool:
    """Return False if the files lack the draft head that config.json describes, because some tools leave it out."""
    if directory is None:
        return True
    names = stored_names(model, directory)
    return names is None or any(name.startswith("mtp.") for name in names)


def _eos_token_ids(settings: Mapping[str, Any], directory: Path | None) -> tuple[int, ...]:
    """Return the end tokens in config.json and in the generation_config.json of `directory`, without duplicates.

    directory: the model's directory, or None to read config.json alone.
    """
    given, vocab_size = {"config.json": settings.get("eos_token_id")}, settings["vocab_size"]
    path = directory / GENERATION_CONFIG_FILE if directory else None
    if path and path.is_file():
        given[path.name] = read_json(path).get("eos_token_id")
    token_ids: dict[int, None] = {}
    for file, value in given.items():
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise CheckpointError(
                    f"eos_token_id={value!r} in {file} must be token ids from 0 to {vocab_size - 1}; correct {file}"
                )
            token_ids[token_id] = None
    return tuple(token_ids)
