"""The entries of a model's config.json and generation_config.json: types, ranges, overrides, sampling defaults.

Every entry is checked before its first use. The upper limits are above the values of every known model, and low enough
that neither arithmetic nor a table of this size fails. The planner decides whether a model fits the machine. Importing
this module loads neither torch nor transformers.

A config.json can give a setting in several places: under two names (SYNONYMS, ROPE_ENTRIES), outside and inside the
entry of the rope, and outside and inside `text_config`. Values that disagree are refused, because either value may be
the author's latest. End tokens are an exception: all end tokens of all places end an answer.

The option `hf_overrides` replaces entries of config.json, under all their names and in all places, and an override of
eos_token_id also replaces the end tokens of generation_config.json. As in vLLM, an entry is replaced as a whole;
dictionaries are not merged. There is one exception: an override of the rope keeps the checkpoint's value of every key
in `KEPT_ROPE_KEYS` that the override does not set. With a wrong rope_theta the model would compute wrong numbers
without any error.
"""

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.files import read_json
from nanovllm.checkpoint.gguf import is_gguf, read_model
from nanovllm.checkpoint.gguf_config import generation_settings
from nanovllm.checkpoint.quantization_config import parse_quantization
from nanovllm.errors import CheckpointError, ConfigError, RequestError
from nanovllm.sampling_params import ModelLimit, SamplingParams

MAX_POSITIONS = 2**24  # rope computes with positions in fp32, which is exact for integers up to this limit
_NOUNS = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}

# Entry -> the type, or the minimum and maximum of an integer, or of any number if the limits are floats. Null counts
# as absent, except for _REQUIRED. `object`: the reader checks the entry
_KEPT = {"rope_theta": (2.0, 1e37), "partial_rotary_factor": (1e-6, 1.0)}
_REQUIRED = {
    "hidden_size": (1, 2**18),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**12),
    "vocab_size": (1, 2**24),
    "max_position_embeddings": (1, MAX_POSITIONS),
    "rms_norm_eps": (1e-30, 1.0),
}
SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "use_sliding_window"),
    *("norm_topk_prob", "attn_output_gate", "mtp_use_dedicated_embeddings", "attention_k_eq_v", "enable_moe_block"),
)
ENTRIES: dict[str, Any] = {  # the entries that read_config.py, layer_config.py and rope.py read
    **_REQUIRED,
    **_KEPT,
    **dict.fromkeys(SWITCHES, bool),
    **dict.fromkeys(("model_type", "hidden_act", "dtype", "torch_dtype", "mamba_ssm_dtype", "output_gate_type"), str),
    **dict.fromkeys(("architectures", "layer_types", "mlp_only_layers"), list),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
    **dict.fromkeys(("eos_token_id", "sliding_window", "quantization_config", "dual_chunk_attention_config"), object),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (1, 2**10),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "decoder_sparse_step"), (1, 2**12)),
    "moe_intermediate_size": (1, 2**20),
    "shared_expert_intermediate_size": (1, 2**20),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "full_attention_interval"), (1, 2**12)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (1, 2**10)),
    "linear_conv_kernel_dim": (2, 2**4),
    "swiglu_limit": (1e-6, 1e6),
    "mtp_num_hidden_layers": (0, 2**12),
    # Gemma
    "hidden_activation": str,
    "sliding_window_pattern": (1, 2**12),
    "rope_local_base_freq": _KEPT["rope_theta"],
    "query_pre_attn_scalar": (1e-6, 1e6),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (1e-6, 1e6)),
    "use_bidirectional_attention": object,
    "global_head_dim": (1, 2**10),
    "num_global_key_value_heads": (1, 2**12),
    "per_layer_config": dict,
    "top_k_experts": (1, 2**12),
    "num_kv_shared_layers": (0, 2**12),
    "hidden_size_per_layer_input": (0, 2**16),
}
_MAX_LABELS = 2**20  # transformers makes a table of all labels
_NOT_OVERRIDABLE = {
    "auto_map": dict,
    "text_config": dict,
    "compression_config": dict,
    "original_max_position_embeddings": (1, MAX_POSITIONS),  # outside the rope's entry
    "num_labels": (0, _MAX_LABELS),
    "window_rope_parameters": dict,
}
ROPE_KEYS: dict[str, Any] = {
    **_KEPT,
    "rope_type": str,
    "type": str,  # in the oldest files
    "factor": (1.0, float(MAX_POSITIONS)),
    "original_max_position_embeddings": (1, MAX_POSITIONS),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), (1e-6, 1e6)),
    "attention_factor": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "truncate": bool,
    "mrope_section": list,
    "mrope_interleaved": bool,
}
MROPE_KEYS = {"mrope_section", "mrope_interleaved"}  # pairs that rotate by rows and columns of images; texts have none

ROPE_ENTRIES = ("rope_parameters", "rope_scaling")  # the names in transformers 5 and in earlier versions
KEPT_ROPE_KEYS = tuple(_KEPT)  # part of the weights; in older files outside the entry
_LAYERS = ("layer_types", "full_attention_interval", "sliding_window_pattern")  # layer_config.py compares them
SYNONYMS = (
    ROPE_ENTRIES,
    ("dtype", "torch_dtype"),
    ("num_experts", "num_local_experts"),
    _LAYERS,
    ("quantization_config", "compression_config"),  # llm-compressor wrote compression_config until the end of 2024
)  # an override of one name removes the other
# Entries that may be outside `text_config`: the kind of file, and settings of the text part
_OF_FILE = ("architectures", "auto_map", "model_type")
_OUTER = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "compression_config")
_READ_TOO = ("compression_config", "original_max_position_embeddings", "window_rope_parameters")
_ROPE_PLACES = (*KEPT_ROPE_KEYS, "original_max_position_embeddings")  # may be inside the rope's entry or outside

GENERATION_CONFIG_FILE = "generation_config.json"
_SAMPLING_FIELDS = {  # entry of the file -> field of SamplingParams
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def text_settings(
    content: dict[str, Any], overrides: Mapping[str, Any] | None, path: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of the model's text part after the overrides, and entries outside `text_config` that the text
    part does not have.

    content: the object in the config.json at `path`. Raises CheckpointError for values of one setting that disagree.
    """
    content, overrides = _with_ropes_apart(content), _with_ropes_apart(overrides or {})
    replaced = {name for name in overrides if name not in _ROPE_PLACES}
    replaced |= {name for names in SYNONYMS for name in names if any(other in overrides for other in names)}
    text, read = content.get("text_config"), (*ENTRIES, *_READ_TOO)
    text = _with_ropes_apart(text) if isinstance(text, dict) else text
    stored = {"": content} if not isinstance(text, dict) else {"text_config.": text, "": content}
    levels = {prefix: {k: v for k, v in level.items() if k not in replaced} for prefix, level in stored.items()}
    names_of = {name: names for names in SYNONYMS for name in names if name not in _LAYERS}
    kept_apart = {*_OF_FILE, "eos_token_id", *ROPE_ENTRIES, *_ROPE_PLACES}
    for names in dict.fromkeys(names_of.get(name, (name,)) for name in read if name not in kept_apart):
        _check_agreement(_places(levels, names), path, _MEANINGS.get(names[0], lambda value: value))
    _check_agreement(_rope_entries(levels), path, _rope_meaning)
    for key in _ROPE_PLACES:
        if key not in overrides and not any(key in _dict(overrides.get(entry)) for entry in ROPE_ENTRIES):
            entries = _rope_entries(stored if key in KEPT_ROPE_KEYS else levels)
            inside = [(f"{name}.{key}", entry.get(key)) for name, entry in entries]
            _check_agreement([*_places(levels, [key]), *inside], path)
    if not isinstance(text, dict):
        return apply_overrides(content, overrides), {}
    outer = {name: content[name] for name in read if content.get(name) is not None}
    settings = text | {name: outer[name] for name in (*_OF_FILE, *_OUTER) if name in outer}
    if "eos_token_id" in outer and text.get("eos_token_id") is not None:
        settings["eos_token_id"] = [*_list(text["eos_token_id"]), *_list(outer["eos_token_id"])]
    said = {name for name in read if settings.get(name) is not None}
    said |= {key for name in ROPE_ENTRIES for key in _dict(text.get(name))}
    said |= {name for names in SYNONYMS for name in names if said.intersection(names)}
    outside = {name: value for name, value in outer.items() if name not in said | replaced | overrides.keys()}
    return apply_overrides(settings, overrides), outside


def _with_ropes_apart(level: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with the rope of the layers that attend to all keys under its usual name, and the rope of the
    layers with a window as `window_rope_parameters`, if one entry has the ropes of both by the type of the layer.
    """
    apart = dict(level)
    for name in ROPE_ENTRIES:
        rope = _dict(level.get(name))
        if rope and rope.keys() <= {"full_attention", "sliding_attention"}:
            apart[name] = rope.get("full_attention")
            apart["window_rope_parameters"] = rope.get("sliding_attention") or {}
    return apart


def _places(levels: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> list[tuple[str, Any]]:
    """Return the values of a setting with the places where they are."""
    return [(prefix + name, level.get(name)) for prefix, level in levels.items() for name in names]


def _rope_entries(levels: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the given ropes with their places."""
    return [(name, entry) for name, entry in _places(levels, ROPE_ENTRIES) if isinstance(entry, dict) and entry]


def _check_agreement(
    places: Iterable[tuple[str, Any]], path: Path, meaning: Callable[[Any], Any] = lambda value: value
) -> None:
    """Raise CheckpointError if two of the places have values with different meanings. Null and {} count as absent."""
    given = [(name, value) for name, value in places if value is not None and value != {}]
    for name, value in given[1:]:
        first, expected = given[0]
        if meaning(value) != meaning(expected):
            raise CheckpointError(
                f"{first}={reprlib.repr(expected)} and {name}={reprlib.repr(value)} mean the same setting and "
                f"disagree; remove one of them from {path}, or replace both with hf_overrides"
            )


def _rope_meaning(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a rope that cannot be outside the rope's entry."""
    keys = {key: value for key, value in entry.items() if value is not None and key not in ("type", *_ROPE_PLACES)}
    return {"rope_type": entry.get("type") or "default"} | keys


def dtype_meaning(value: Any) -> str:
    """Return the name of a dtype of config.json, which may be a synonym of torch or begin with "torch."."""
    name = str(value).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


_MEANINGS: dict[str, Callable[[Any], Any]] = {
    "dtype": dtype_meaning,
    "quantization_config": parse_quantization,
}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_settings(settings: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError for a wrong type or a value out of range, with the entry, its value and the allowed range.

    settings: the content of the config.json at `path`.
    """
    _check_entries(settings, ENTRIES | _NOT_OVERRIDABLE, path)
    for name in (*ROPE_ENTRIES, "window_rope_parameters"):
        rope = settings.get(name) or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise CheckpointError(
                f"{name} of {path} is given per layer type ({', '.join(rope)}); supported are one rope for all layers, "
                "and one each for full_attention and sliding_attention"
            )
        _check_entries(rope, ROPE_KEYS, path, f"{name}.")


def _check_entries(settings: Mapping[str, Any], rules: Mapping[str, Any], path: Path, prefix: str = "") -> None:
    """Raise CheckpointError for an entry that breaks its rule. An integer is also a number. NaN is out of every range,
    and a boolean is not a number.
    """
    for name, rule in rules.items():
        value = settings.get(name)
        if name not in settings or (value is None and name not in _REQUIRED):
            continue
        if isinstance(rule, type):
            is_right, wanted = isinstance(value, rule), _NOUNS.get(rule, "")
        else:
            least, most = rule
            is_right = isinstance(value, int if isinstance(least, int) else int | float) and not isinstance(value, bool)
            is_right = is_right and least <= value <= most
            wanted = f"{'an integer' if isinstance(least, int) else 'a number'} from {least} to {most}"
        if not is_right:
            shown = f"{prefix}{name}={reprlib.repr(value)}"
            raise CheckpointError(f"{shown} must be {wanted}; correct {path}, or download it again")


def check_overrides(overrides: Mapping[Any, Any]) -> None:
    """Raise ConfigError for an entry that the engine does not read, and for a value that is not JSON."""
    for name, value in overrides.items():
        if name not in ENTRIES:
            known = ", ".join(sorted(ENTRIES))
            raise ConfigError(f"hf_overrides names {name!r}, which the engine does not read; choose from {known}")
        if not _is_json(value):
            raise ConfigError(
                f"hf_overrides[{name!r}]={value!r} is not JSON; use strings, finite numbers, booleans, None, lists, "
                "and dictionaries whose keys are strings"
            )
        if name in ROPE_ENTRIES and not isinstance(value, dict | None):
            raise ConfigError(f"hf_overrides[{name!r}]={value!r} is not a dictionary; give one, or None")
    for entry in set(ROPE_ENTRIES) & set(overrides):
        for key in KEPT_ROPE_KEYS:
            inside, outside = _dict(overrides[entry]).get(key), overrides.get(key)
            if None not in (inside, outside) and inside != outside:
                raise ConfigError(
                    f"hf_overrides names {key}={outside!r} and {entry}.{key}={inside!r}, which mean the same; give one "
                    "of them"
                )
    for names in SYNONYMS:
        if all(name in overrides for name in names):
            raise ConfigError(f"hf_overrides names both {' and '.join(names)}, which mean the same; give one of them")


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def apply_overrides(settings: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of config.json after the overrides. Neither argument is changed."""
    if not overrides:
        return settings
    dropped = {name for names in SYNONYMS for name in names if any(other in overrides for other in names)}
    overridden = {name: value for name, value in settings.items() if name not in dropped} | dict(overrides)
    types, num_layers = overridden.get("layer_types"), overrides.get("num_hidden_layers")
    if isinstance(types, list) and isinstance(num_layers, int) and "layer_types" not in overrides:
        overridden["layer_types"] = types[: max(0, num_layers)]
    outside = {key: overrides[key] for key in KEPT_ROPE_KEYS if key in overrides}
    if not outside and not set(ROPE_ENTRIES) & set(overrides):
        return overridden
    known = {key: value for entry in ROPE_ENTRIES for key, value in _dict(settings.get(entry)).items()}
    kept = {key: value for key, value in known.items() if key in KEPT_ROPE_KEYS}
    for entry in set(ROPE_ENTRIES) & set(overridden):
        # transformers looks inside the rope's entry first, so the checkpoint's value would hide an override outside
        old = kept if entry in overrides else _dict(overridden[entry])
        overridden[entry] = old | outside | _dict(overrides.get(entry)) or None
    return overridden


def _dict(value: Any) -> dict[str, Any]:
    """Return `value` if it is a dictionary, or an empty dictionary if the entry is missing, null or malformed."""
    return value if isinstance(value, dict) else {}


def read_sampling_defaults(directory: Path | None) -> dict[str, Any]:
    """Return field of SamplingParams -> value in the generation_config.json of `directory`, or {} without this file.
    A GGUF file has such values in its metadata.

    Null entries count as absent. "do_sample": false asks for greedy decoding, which is temperature 0. `max_new_tokens`
    is lowered to the tokens that fit in the context (ModelLimit), and `max_length` is not read, as in vLLM. The file's
    end tokens are not defaults; they belong to the model (read_config.py). Raises CheckpointError, with the file and
    the entry, for a value that SamplingParams refuses.
    """
    if is_gguf(directory):
        path, content = directory, generation_settings(read_model(directory))
    elif directory is not None and (directory / GENERATION_CONFIG_FILE).is_file():
        path = directory / GENERATION_CONFIG_FILE
        content = read_json(path)
    else:
        return {}
    remedy = f"correct {path}, or ignore it with generation_config='none'"
    do_sample = content.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise CheckpointError(f"do_sample={do_sample!r} must be true or false; {remedy}")
    defaults = {}
    for entry, field in _SAMPLING_FIELDS.items():
        if (value := content.get(entry)) is None:
            continue
        try:
            SamplingParams(**{field: value})
        except RequestError as error:
            raise CheckpointError(f"{entry}={value!r}: {error}; {remedy}") from error
        defaults[field] = ModelLimit(value) if field == "max_tokens" else value
    return defaults | ({"temperature": 0.0} if do_sample is False else {})
