"""The formats of quantized checkpoints, as `quantization_config` in config.json describes them.

A format that is not in this list is refused by name:

- fp8: e4m3, with one scale per tensor, or for each block, most often 128 x 128
- compressed-tensors: pack-quantized, integers of 4 or 8 bits; float-quantized, e4m3; nvfp4-pack-quantized and
  mxfp4-pack-quantized, e2m1. Each group of settings has its layers
- awq: integers of 4 bits (version gemm)
- gptq: integers of 4 or 8 bits, with zeros stored unchanged (gptq_v2) or less one (gptq). Some files have the wrong one
  of these two names, so if all zeros are the middle of the codes (sym), the stored zeros determine the format.
  `dynamic` has other settings for some layers, in awq too
- auto-round: packed as gptq or awq. `extra_config` has other settings for some layers
- modelopt: NVFP4, e2m1
- mxfp4: the experts of gpt-oss, e2m1. Loading arranges them as GGUF's blocks of this type (models/expert_tensors.py)

A weight in e2m1 (FP4) has a scale in e4m3 for 16 columns and a scale for the whole weight (NVFP4), or a power of two
for 32 columns (MXFP4). Its values replace it when it is loaded, on a GPU too. Importing this module loads no torch.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import translate
from typing import Any

from nanovllm.checkpoint.quantization import BLOCK_TYPES, MXFP4, Quantization
from nanovllm.errors import CheckpointError


def parse_quantization(given: Any) -> Quantization | None:
    """Return the format that `quantization_config` describes, or None if `given` is None. Raises CheckpointError for a
    format that is not supported.
    """
    if not given:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"quantization_config={given!r} must be an object; correct config.json")
    return _PARSERS[_choose(given, "quant_method", tuple(_PARSERS))](given)


def _refusal(name: str, value: Any, *supported: Any) -> CheckpointError:
    choices = f"supported are {', '.join(map(repr, supported))}" if supported else "use a checkpoint without it"
    return CheckpointError(f"quantization_config.{name}={value!r} is not supported; {choices}")


def _choose(
    given: Mapping[str, Any], name: str, supported: tuple[Any, ...], default: Any = None, where: str = ""
) -> Any:
    value = given.get(name)
    value = default if value is None else value
    if value not in supported or type(value) is not type(supported[0]):
        raise _refusal(where + name, value, *supported)
    return value


def _either(given: Mapping[str, Any], *names: str) -> Any:
    """Return the value of a setting that has several names. Raises CheckpointError if two values disagree."""
    found = [(name, given[name]) for name in names if given.get(name) is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise CheckpointError(
                f"quantization_config.{found[0][0]}={found[0][1]!r} and {name}={value!r} mean the same setting and "
                "disagree; remove the wrong one from config.json"
            )
    return found[0][1] if found else None


def _group_size(given: Mapping[str, Any], where: str = "") -> int:
    """Return the number of columns of a group, or 0 for all columns, for which the file has -1."""
    size = _either(given, "group_size", "q_group_size")
    if type(size) is not int or not (size == -1 or 0 < size <= 2**20):
        raise CheckpointError(
            f"quantization_config.{where}group_size={size!r} must be a number of columns, or -1 for whole rows; "
            "correct config.json"
        )
    return max(0, size)


def _fp8(given: Mapping[str, Any]) -> Quantization:
    _choose(given, "fmt", ("e4m3",), default="e4m3")
    is_dynamic = _choose(given, "activation_scheme", ("dynamic", "static"), default="dynamic") == "dynamic"
    block = (0, 0) if given.get("weight_block_size") is None else _block(given["weight_block_size"])
    ignored = _names(given, "modules_to_not_convert") + _names(given, "ignored_layers")  # AutoFP8 writes ignored_layers
    return Quantization(
        method="fp8", bits=8, is_float=True, block=block, has_fp8_activations=is_dynamic, ignored=ignored
    )


def _names(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = given.get(name) or []
    if not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
        raise CheckpointError(f"quantization_config.{name}={names!r} must be a list of names; correct config.json")
    return _checked(name, names)


def _checked(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names after checking the expressions after "re:"."""
    names = tuple(names)
    for each in names:
        try:
            re.compile(each[3:] if each.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(
                f"quantization_config.{name} has {each!r}, which is not a regular expression ({error}); correct "
                "config.json"
            ) from error
    return names


def _block(block: Any, name: str = "weight_block_size") -> tuple[int, int]:
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise CheckpointError(
            f"quantization_config.{name}={block!r} must be two positive integers; correct config.json"
        )
    return block[0], block[1]


_CLASSES = ("Linear",)  # targets that stand for all layers


def _compressed_tensors(given: Mapping[str, Any]) -> Quantization:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(
            f"quantization_config.config_groups={groups!r} must be an object with groups of settings; correct "
            "config.json"
        )
    if sparsity := given.get("sparsity_config"):
        _choose(
            sparsity if isinstance(sparsity, dict) else {"format": sparsity},
            "format",
            ("dense",),
            "dense",
            "sparsity_config.",
        )
    if given.get("transform_config"):
        raise _refusal("transform_config", given["transform_config"])
    formats: list[tuple[str, Quantization]] = []
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            weights = group.get("weights") if isinstance(group, dict) else None
            raise CheckpointError(
                f"quantization_config.config_groups.{name}.weights={weights!r} must be an object; correct config.json"
            )
        targets = _names(group, "targets")
        if not targets:
            raise _refusal(f"config_groups.{name}.targets", group.get("targets"), ["Linear"])
        formats += [(target, _group_format(given, name, group)) for target in targets]
    ignored = _names(given, "ignore")
    others = [each for target, each in formats if target in _CLASSES]
    exceptions = [(target, each) for target, each in formats if target not in _CLASSES]
    exceptions.sort(key=lambda each: each[0].startswith("re:"))  # names count before expressions
    default = others[0] if others else formats[0][1]
    return replace(default, ignored=ignored, exceptions=tuple(exceptions), is_for_others=bool(others))


def _group_format(given: Mapping[str, Any], name: str, group: Mapping[str, Any]) -> Quantization:
    """Return the format of a group of layers."""
    where, weights = f"config_groups.{name}.", group["weights"]
    named = {f"{where}format": group.get("format"), "format": given.get("format")}
    if named["format"] == "mixed-precision":  # then each group has a format
        del named["format"]
    layout = _either(named, *named)
    name_of_layout = f"{where}format" if "format" not in named or group.get("format") else "format"
    layouts = ("pack-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
    layout = _choose({name_of_layout: layout}, name_of_layout, layouts)
    is_fp4, is_float, where = layout.endswith("fp4-pack-quantized"), layout == "float-quantized", f"{where}weights."
    _choose(weights, "type", ("float" if is_float or is_fp4 else "int",), where=where)
    if is_fp4:
        size = 16 if layout.startswith("nvfp4") else 32
        _choose(weights, "num_bits", (4,), where=where)
        _choose(weights, "group_size", (size,), default=size, where=where)
        return Quantization(method="compressed-tensors", bits=4, is_fp4=True, block=(1, size))
    bits = _choose(weights, "num_bits", (8,) if is_float else (4, 8), where=where)
    strategies = ("tensor", "channel", "block") if is_float else ("group", "channel")
    strategy = _choose(weights, "strategy", strategies, where=where)
    block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy)
    if strategy == "group":
        block = (1, _group_size(weights, where))
    elif block is None:
        block = _block(weights.get("block_structure"), f"{where}block_structure")
    is_symmetric = _choose(weights, "symmetric", (True,) if is_float else (True, False), default=True, where=where)
    if not is_float and group.get("input_activations"):
        raise _refusal(f"config_groups.{name}.input_activations", group["input_activations"])
    return Quantization(
        method="compressed-tensors",
        bits=bits,
        is_float=is_float,
        block=block,
        has_zeros=not is_symmetric,
        has_order=str(weights.get("actorder")).lower() in ("group", "dynamic", "true"),  # true means group
        has_fp8_activations=is_float and _is_dynamic(group.get("input_activations"), strategy),
    )


def _is_dynamic(activations: Any, weight_strategy: str) -> bool:
    """Return True if each product computes the scales of activations: one scale per token or, with weights in blocks,
    per token and 128 columns.
    """
    if not isinstance(activations, dict):
        return False
    wanted = {"type": "float", "num_bits": 8, "dynamic": True}
    wanted |= {"strategy": "group", "group_size": 128} if weight_strategy == "block" else {"strategy": "token"}
    return all(activations.get(name) == value for name, value in wanted.items())


def _awq(given: Mapping[str, Any]) -> Quantization:
    return _with_dynamic(given, _awq_format)


def _awq_format(given: Mapping[str, Any]) -> Quantization:
    bits = _choose({"bits": _either(given, "bits", "w_bit")}, "bits", (4,))
    for name in ("version", "format", "checkpoint_format"):  # GPTQModel writes the last two
        if str(given.get(name) or "gemm").lower() != "gemm":
            raise _refusal(name, given[name], "gemm")
    _choose(
        given, "zero_point", (True, False), default=True
    )  # without zero points, GPTQModel stores the middle as zeros
    ignored = _names(given, "modules_to_not_convert")
    return Quantization(method="awq", bits=bits, block=(1, _group_size(given)), has_zeros=True, ignored=ignored)


def _gptq(given: Mapping[str, Any]) -> Quantization:
    return _with_dynamic(given, _gptq_format)


def _with_dynamic(given: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], Quantization]) -> Quantization:
    """Parse settings of which `dynamic`, written by GPTQModel, changes some for layers whose names match a key. A key
    with "-:" leaves layers out, and an empty value changes nothing.
    """
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(value, dict | None) for value in dynamic.values()):
        raise _refusal("dynamic", dynamic)
    ignored = _checked("dynamic", [f"re:{key[2:]}" for key in dynamic if key.startswith("-:")])
    others = {f"re:{key.removeprefix('+:')}": value for key, value in dynamic.items() if value and key[:2] != "-:"}
    exceptions = ((name, parse({**given, **others[name]})) for name in _checked("dynamic", others))
    default = parse(given)
    return replace(default, ignored=(*default.ignored, *ignored), exceptions=tuple(exceptions))


def _gptq_format(given: Mapping[str, Any]) -> Quantization:
    bits = _choose(given, "bits", (4, 8))
    _choose(given, "is_marlin_format", (False,), default=False)
    # GPTQModel and transformers write both names, and read either
    layout = _either(given, "checkpoint_format", "format")
    layout = _choose({"checkpoint_format": layout}, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    return Quantization(
        method="gptq",
        bits=bits,
        block=(1, _group_size(given)),
        has_zeros=True,
        is_symmetric=None if given.get("sym") is None else _choose(given, "sym", (True, False)),
        stores_less_one=layout == "gptq",
        # With static groups columns are quantized in another order, but a group consists of neighbours
        has_order=_choose(given, "desc_act", (False, True), default=False)
        and not _choose(given, "static_groups", (False, True), default=False),
    )


_EXPRESSION = re.compile(r"[*+?^$()\[\]|\\]")  # a name with one of these characters is a regular expression


def _auto_round(given: Mapping[str, Any]) -> Quantization:
    """Parse the settings of AutoRound. Layers of `extra_config` with 16 or more bits are not quantized."""
    extra = given.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(value, dict) for value in extra.values()):
        raise _refusal("extra_config", extra)
    named = {f"re:{name}" if _EXPRESSION.search(name) else name: value for name, value in extra.items()}
    names = _checked("extra_config", named)
    left = [name for name in names if _number_of_bits(named[name]) >= 16]
    changed = [name for name in names if name not in left and named[name]]
    exceptions = ((name, _auto_round_format({**given, **named[name]})) for name in changed)
    return replace(_auto_round_format(given), ignored=tuple(left), exceptions=tuple(exceptions))


def _number_of_bits(settings: Mapping[str, Any]) -> int:
    bits = settings.get("bits", 0)
    return bits if isinstance(bits, int) else 0


def _auto_round_format(given: Mapping[str, Any]) -> Quantization:
    _choose(given, "data_type", ("int",), default="int")
    is_symmetric = _choose(given, "sym", (True, False), default=True)
    default = "auto_round:auto_gptq" if is_symmetric else "auto_round:auto_awq"
    layouts = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq")
    if _choose(given, "packing_format", layouts, default=default).endswith("gptq"):
        return _gptq_format({**given, "desc_act": False, "checkpoint_format": "gptq"})
    return _awq_format({**given, "zero_point": True})


def _mxfp4(given: Mapping[str, Any]) -> Quantization:
    """Parse the settings of files whose experts are MXFP4, unless `modules_to_not_convert` has them."""
    names = _names(given, "modules_to_not_convert")
    ignored = tuple(f"re:{translate(name + '*')}" if "*" in name else name for name in names)
    experts = (r"re:.*\.experts\.", BLOCK_TYPES["MXFP4"])
    return Quantization(method=MXFP4, bits=4, ignored=ignored, exceptions=(experts,), is_for_others=False)


def _modelopt(given: Mapping[str, Any]) -> Quantization:
    _choose(given, "quant_algo", ("NVFP4", "W4A16_NVFP4"))
    names = (*_names(given, "ignore"), *_names(given, "exclude_modules"))
    ignored = (f"re:{translate(name)}" if "*" in name else name for name in names)
    return Quantization(method="modelopt", bits=4, is_fp4=True, block=(1, 16), ignored=tuple(ignored))


_PARSERS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "modelopt": _modelopt,
    MXFP4: _mxfp4,
}
