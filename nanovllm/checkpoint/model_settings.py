"""The types and ranges of the settings in a config.json, checked before anything uses them.

The upper limits are above every known model, and low enough that neither arithmetic nor a table of that size fails. The
planner decides whether a model fits the machine. Settings that are absent get the defaults of transformers.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError

MAX_POSITIONS = 2**24  # rope takes positions in fp32, which is exact for integers up to this

# Setting -> its minimum and maximum. Optional settings may be null, which counts as absent.
_INTEGERS = {
    "hidden_size": (1, 2**18),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**12),
    "vocab_size": (1, 2**24),
    "max_position_embeddings": (1, MAX_POSITIONS),
}
_OPTIONAL_INTEGERS = {
    "num_key_value_heads": (1, 2**12),
    "head_dim": (1, 2**10),
    "num_labels": (0, 2**20),  # unused, but transformers makes a table of this size
}
_NUMBERS = {"rms_norm_eps": (1e-30, 1.0)}
_OPTIONAL_NUMBERS = {"rope_theta": (2.0, 1e37), "partial_rotary_factor": (1e-6, 1.0)}
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_STRINGS = ("model_type", "hidden_act", "dtype", "torch_dtype")
_ROPE_INTEGERS = {"original_max_position_embeddings": (1, MAX_POSITIONS)}
_ROPE_NUMBERS = {
    **_OPTIONAL_NUMBERS,
    "factor": (1.0, float(MAX_POSITIONS)),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
}


def check_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError for a wrong type or a value out of range, with the setting, its value and what is allowed.

    settings: the content of the config.json at `path`.
    """
    _check_ranges(settings, _INTEGERS, int, path)
    _check_ranges(settings, _NUMBERS, float, path)
    settings = _without_nulls(settings)
    _check_ranges(settings, _OPTIONAL_INTEGERS, int, path)
    _check_ranges(settings, _OPTIONAL_NUMBERS, float, path)
    _check_types(settings, _FLAGS, bool, "true or false", path)
    _check_types(settings, _STRINGS, str, "a string", path)
    _check_types(settings, ("architectures", "layer_types"), list, "a list", path)
    _check_types(settings, ("rope_parameters", "rope_scaling", "auto_map"), dict, "an object", path)
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(_without_nulls(settings.get(name, {})), name, path)


def _check_rope(rope: Mapping[str, Any], name: str, path: Path) -> None:
    if any(isinstance(value, dict) for value in rope.values()):  # transformers fails on it with an unrelated error
        raise CheckpointError(
            f"{name} of {path} is given per layer type ({', '.join(rope)}); only one rope for all layers is supported"
        )
    prefix = f"{name}."
    _check_ranges(rope, _ROPE_INTEGERS, int, path, prefix)
    _check_ranges(rope, _ROPE_NUMBERS, float, path, prefix)
    _check_types(rope, ("truncate",), bool, "true or false", path, prefix)
    _check_types(rope, ("rope_type", "type"), str, "a string", path, prefix)


def _check_ranges(
    settings: Mapping[str, Any],
    ranges: Mapping[str, tuple[float, float]],
    kind: type[int] | type[float],
    path: Path,
    prefix: str = "",
) -> None:
    """An integer is also a number. NaN is out of every range, and a boolean is not a number."""
    for name, (least, most) in ranges.items():
        if name not in settings:
            continue
        value = settings[name]
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            noun = "an integer" if kind is int else "a number"
            raise CheckpointError(
                f"{prefix}{name}={reprlib.repr(value)} must be {noun} from {least} to {most}; correct {path}, "
                "or download it again"
            )


def _check_types(
    settings: Mapping[str, Any], names: tuple[str, ...], kind: type, noun: str, path: Path, prefix: str = ""
) -> None:
    for name in names:
        if name in settings and not isinstance(settings[name], kind):
            raise CheckpointError(
                f"{prefix}{name}={reprlib.repr(settings[name])} must be {noun}; correct {path}, or download it again"
            )


def _without_nulls(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
