"""The layers of a model, read from the entries of config.json: their kinds, and the sizes of their parts.

Each concern has one function, which returns a value for ModelConfig or raises CheckpointError. Importing this module
loads neither torch nor transformers.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.architectures import Architecture
from nanovllm.checkpoint.model_config import HEAD_DIMS, ExpertsConfig, RecurrentConfig, RopeConfig, WindowConfig
from nanovllm.checkpoint.rope import read_rope_entry
from nanovllm.checkpoint.settings import MAX_POSITIONS, check_settings
from nanovllm.errors import CheckpointError

RECURRENT_HEAD_DIMS = (16, 32, 64, 128)  # powers of two that fill a tile
LAYER_KINDS = {  # by the names in config.json
    "full_attention": "attention",
    "linear_attention": "recurrent",
    "sliding_attention": "window",
}


def layer_kinds(settings: Mapping[str, Any], given: Mapping[str, Any], architecture: Architecture) -> tuple[str, ...]:
    """Return the kind of each layer. Only hybrid architectures have recurrent layers, and only architectures that mix
    them with attention to all keys have layers with a window.

    given: the entries of config.json, without defaults.
    """
    remedy = "only full attention is supported; use a checkpoint without a sliding window"
    # Qwen's files give a window and disable it with use_sliding_window=false. Without use_sliding_window it is enabled
    use, window = settings.get("use_sliding_window"), settings.get("sliding_window")
    if not architecture.has_windows and (use or (window and use is None)):
        raise CheckpointError(f"use_sliding_window={use}, sliding_window={window} is not supported: {remedy}")
    if chunks := settings.get("dual_chunk_attention_config"):  # transformers ignores the entry; long prompts differ
        raise CheckpointError(
            f"dual_chunk_attention_config={chunks} is not supported; "
            "remove the entry from config.json to run plain attention"
        )
    num_layers, entry = settings["num_hidden_layers"], _interval_entry(architecture)
    interval = settings[entry] if entry else 1  # the distance between layers that attend to all keys
    if interval is None and not settings.get("layer_types"):
        _require_integers(settings, entry)
    other = "linear_attention" if architecture.is_hybrid else "sliding_attention"
    by_interval = [other if interval and (layer + 1) % interval else "full_attention" for layer in range(num_layers)]
    if architecture.ends_with_attention:
        by_interval[-1] = "full_attention"
    types = settings.get("layer_types") or by_interval
    supported = ["full_attention", other] if entry else ["full_attention"]
    if other_types := sorted({str(each) for each in types} - set(supported)):
        raise CheckpointError(f"layer_types {', '.join(other_types)} are not supported: {remedy}")
    if len(types) != num_layers:
        raise CheckpointError(
            f"layer_types has {len(types)} layers, but num_hidden_layers={num_layers}; correct config.json, or give "
            "both in hf_overrides"
        )
    if set(types) != set(supported):
        raise CheckpointError(
            f"layer_types has {types.count('full_attention')} of {num_layers} layers with full_attention; give at "
            f"least one layer of each type: {', '.join(supported)}"
        )
    if architecture.ends_with_attention and types[-1] != "full_attention":
        raise CheckpointError(
            f"layer_types ends with {types[-1]}, and the last layer of {architecture.model_type} has full_attention; "
            "correct config.json, or give layer_types in hf_overrides"
        )
    if given.get(entry) and types != by_interval:
        raise CheckpointError(
            f"{entry}={given[entry]} and layer_types={reprlib.repr(types)} disagree; remove one of them from "
            "config.json, or give one of them in hf_overrides"
        )
    return tuple(LAYER_KINDS[each] for each in types)


def _interval_entry(architecture: Architecture) -> str:
    """Return the entry that gives the distance between layers that attend to all keys, "" if there is none."""
    if architecture.is_hybrid:
        return "full_attention_interval"
    return "sliding_window_pattern" if architecture.has_windows else ""


def attention_scale(settings: Mapping[str, Any], architecture: Architecture) -> float | None:
    """Return the factor of the products of q and k, or None for the usual factor."""
    if architecture.gemma is None:
        return None
    return 1.0 if architecture.gemma.norms_v else float(settings["query_pre_attn_scalar"]) ** -0.5


def read_heads(settings: Mapping[str, Any], layer_kinds: tuple[str, ...]) -> tuple[int, int]:
    """Return num_kv_heads and head_dim of the layers that attend to all keys. In Gemma 4 these layers have other heads
    than the layers with a window; transformers writes `per_layer_config` with what differs in each layer.
    """
    if "global_head_dim" not in settings:
        return _num_heads(settings)[1], _head_dim(settings)
    num_kv_heads = settings["num_global_key_value_heads"] if settings["attention_k_eq_v"] else None
    heads = {"head_dim": settings["global_head_dim"], "num_key_value_heads": num_kv_heads}
    if of_layers := settings.get("per_layer_config"):
        expected = {layer for layer, kind in enumerate(layer_kinds) if kind == "attention"}
        numbers = {int(layer): heads for layer, heads in of_layers.items() if layer.isdecimal()}
        found = {layer: heads for layer, heads in numbers.items() if layer < len(layer_kinds)}  # others: overridden
        heads = next(iter(found.values()), {})
        is_same = found.keys() == expected and all(each == heads for each in found.values())
        if not is_same or set(heads) - {"head_dim", "num_key_value_heads"} or not isinstance(heads, dict):
            raise CheckpointError(
                f"per_layer_config={reprlib.repr(of_layers)} is not supported; supported are head_dim and "
                "num_key_value_heads, equal in all layers with full_attention and absent in the others"
            )
    else:
        _require_integers(settings, "global_head_dim")
    check_settings({**settings, **heads}, Path("per_layer_config"))
    settings = {**settings, **{name: value for name, value in heads.items() if value is not None}}
    return _num_heads(settings)[1], _head_dim(settings)


def read_window(settings: Mapping[str, Any], rope: RopeConfig, scale: float | None) -> WindowConfig:
    """Return the layers with a window. Gemma's have a rope with another theta, which no extension changes."""
    if type(num_tokens := settings["sliding_window"]) is not int or not 1 <= num_tokens <= MAX_POSITIONS:
        raise CheckpointError(
            f"sliding_window={num_tokens!r} must be an integer from 1 to {MAX_POSITIONS}; correct config.json"
        )
    if "rope_local_base_freq" in settings:
        given = settings.get("window_rope_parameters") or {}
        rope = read_rope_entry(given, {"rope_theta": settings["rope_local_base_freq"]}, settings, is_partial=False)
    num_kv_heads, head_dim = _num_heads(settings)[1], _head_dim(settings)
    return WindowConfig(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        scale=head_dim**-0.5 if scale is None else scale,
        num_tokens=num_tokens,
    )


def _require_integers(settings: Mapping[str, Any], *names: str) -> None:
    """Refuse null for these entries. The ranges have been checked."""
    for name in names:
        if settings[name] is None:
            raise CheckpointError(f"{name}=None must be an integer; correct config.json")


def read_recurrent(settings: Mapping[str, Any]) -> RecurrentConfig:
    _require_integers(settings, "linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim")
    key_heads, value_heads = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    if value_heads % key_heads:
        raise CheckpointError(
            f"linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}; correct "
            "config.json"
        )
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if settings[name] not in RECURRENT_HEAD_DIMS:
            raise CheckpointError(
                f"{name}={settings[name]} is not supported; use a checkpoint with one of "
                f"{', '.join(map(str, RECURRENT_HEAD_DIMS))}"
            )
    return RecurrentConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=settings["linear_key_head_dim"],
        value_head_dim=settings["linear_value_head_dim"],
        conv_kernel=settings["linear_conv_kernel_dim"],
    )


def mlp_size(settings: Mapping[str, Any]) -> int:
    """Return the features of the dense MLP, or of the expert that every token uses. Both are gated with SiLU."""
    if settings["hidden_act"] != "silu":
        raise CheckpointError(
            f"hidden_act={settings['hidden_act']!r} is not supported; use a checkpoint with hidden_act='silu'"
        )
    return int(settings.get("shared_expert_intermediate_size") or settings["intermediate_size"])


def read_experts(settings: Mapping[str, Any], architecture: Architecture) -> ExpertsConfig | None:
    """Return the experts, or None if every MLP is dense."""
    if architecture.has_experts:
        return _sparse_layers(settings, architecture)
    return _experts_of_all_layers(settings) if settings.get("enable_moe_block") else None


def _sparse_layers(settings: Mapping[str, Any], architecture: Architecture) -> ExpertsConfig:
    """Return experts that replace the dense MLP of some layers."""
    _require_integers(settings, "num_experts_per_tok", architecture.expert_size, "decoder_sparse_step")
    # transformers 5 writes num_local_experts
    count = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    _require_integers(settings, count)
    _check_chosen("num_experts_per_tok", settings["num_experts_per_tok"], settings[count])
    dense, num_layers = settings["mlp_only_layers"] or [], settings["num_hidden_layers"]
    if wrong := [layer for layer in dense if type(layer) is not int or not 0 <= layer < num_layers]:
        raise CheckpointError(f"mlp_only_layers has {wrong}, but layers are 0 to {num_layers - 1}; correct config.json")
    step = settings["decoder_sparse_step"]
    return ExpertsConfig(
        shared_size=settings.get("shared_expert_intermediate_size") or 0,
        num_experts=settings[count],
        num_experts_per_token=settings["num_experts_per_tok"],
        intermediate_size=settings[architecture.expert_size],
        has_bias=architecture.expert_bias,
        activation=architecture.activation,
        norm_topk_prob=bool(settings["norm_topk_prob"]),
        layers=tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
    )


def _experts_of_all_layers(settings: Mapping[str, Any]) -> ExpertsConfig:
    """Return the experts of Gemma 4. Every layer has a dense MLP and experts."""
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if settings.get(name) is None:
            raise CheckpointError(f"enable_moe_block=True needs {name}, which is missing; correct config.json")
    _check_chosen("top_k_experts", settings["top_k_experts"], settings["num_experts"])
    return ExpertsConfig(
        num_experts=settings["num_experts"],
        num_experts_per_token=settings["top_k_experts"],
        intermediate_size=settings["moe_intermediate_size"],
        norm_topk_prob=True,
        layers=tuple(range(settings["num_hidden_layers"])),
        activation="gelu_tanh",
    )


def _check_chosen(name: str, num_chosen: int, num_experts: int) -> None:
    if num_chosen > num_experts:
        raise CheckpointError(f"{name}={num_chosen} is more than num_experts={num_experts}; correct config.json")


def _num_heads(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of heads of q, and of k and v."""
    heads = settings["num_attention_heads"]
    kv_heads = settings["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}; correct config.json"
        )
    return heads, kv_heads


def _head_dim(settings: Mapping[str, Any]) -> int:
    """Return head_dim, which defaults to hidden_size / num_attention_heads."""
    hidden_size, num_heads = settings["hidden_size"], settings["num_attention_heads"]
    head_dim: int = settings.get("head_dim") or hidden_size // num_heads
    if head_dim not in HEAD_DIMS:
        raise CheckpointError(
            f"head_dim={head_dim} (hidden_size={hidden_size}, num_attention_heads={num_heads}) is not supported; "
            f"use a checkpoint with one of {', '.join(map(str, HEAD_DIMS))}"
        )
    return head_dim
