"""Overrides of config.json: the option `hf_overrides`, applied to the content of the file before it is checked.

As in vLLM, an entry replaces the one in config.json as a whole; dictionaries are not merged. There is one exception: an
override of the rope keeps the checkpoint's value of every key in `KEPT_ROPE_KEYS` that it does not set itself. With a
wrong rope_theta the model would compute wrong numbers without any error.
"""

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import ConfigError

ROPE_ENTRIES = ("rope_parameters", "rope_scaling")  # the names in transformers 5 and in earlier versions
KEPT_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")  # part of the weights; in older files outside the entry
SYNONYMS = (ROPE_ENTRIES, ("dtype", "torch_dtype"))  # an override of one name removes the other
OVERRIDABLE = {  # the entries of config.json that model_config.py reads
    *("architectures", "model_type", "dtype", "torch_dtype", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "hidden_act"),
    *("max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "eos_token_id"),
    *("sliding_window", "use_sliding_window", "layer_types", "quantization_config", "dual_chunk_attention_config"),
    *(*ROPE_ENTRIES, *KEPT_ROPE_KEYS),
}


def check_overrides(overrides: Mapping[Any, Any]) -> None:
    """Raise ConfigError for an entry that the engine does not read, and for a value that is not JSON."""
    for name, value in overrides.items():
        if name not in OVERRIDABLE:
            known = ", ".join(sorted(OVERRIDABLE))
            raise ConfigError(f"hf_overrides names {name!r}, which the engine does not read; choose from {known}")
        if not _is_json(value):
            raise ConfigError(
                f"hf_overrides[{name!r}]={value!r} is not JSON; use strings, finite numbers, booleans, None, lists, "
                "and dictionaries whose keys are strings"
            )
        if name in ROPE_ENTRIES and not isinstance(value, dict | None):
            raise ConfigError(f"hf_overrides[{name!r}]={value!r} is not a dictionary; give one, or None")
    for names in SYNONYMS:
        if all(name in overrides for name in names):
            raise ConfigError(f"hf_overrides names both {' and '.join(names)}, which mean the same; give one of them")


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def apply_overrides(settings: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The content of config.json after the overrides. Neither argument is changed."""
    if not overrides:
        return settings
    dropped = {name for names in SYNONYMS for name in names if any(other in overrides for other in names)}
    overridden = {name: value for name, value in settings.items() if name not in dropped} | dict(overrides)
    outside = {key: overrides[key] for key in KEPT_ROPE_KEYS if key in overrides}
    if not outside and not set(ROPE_ENTRIES) & set(overrides):
        return overridden
    known = {key: value for entry in ROPE_ENTRIES for key, value in _dict(settings.get(entry)).items()}
    kept = {key: value for key, value in known.items() if key in KEPT_ROPE_KEYS}
    for entry in set(ROPE_ENTRIES) & set(overridden):
        # transformers looks inside the entry first, so the checkpoint's value there would hide an override beside it
        old = kept if entry in overrides else _dict(overridden[entry])
        overridden[entry] = old | outside | _dict(overrides.get(entry)) or None
    return overridden


def _dict(value: Any) -> dict[str, Any]:
    """`value` if it is a dictionary, or an empty one. An entry may be missing, null or, in a damaged file, anything."""
    return value if isinstance(value, dict) else {}
