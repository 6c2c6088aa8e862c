"""Quantization: the format of a checkpoint's quantized weights, from `quantization_config` in config.json.

A quantized weight [N, K] has codes, and scales that blocks of codes share. A value is (code - zero) * scale, where
codes in e4m3 have no zero. A format that is not in this list is refused by name:

- fp8: e4m3, with one scale per tensor, or for each block, most often 128 x 128
- compressed-tensors: pack-quantized, integers of 4 or 8 bits; float-quantized, e4m3. One group of settings for all
  linear layers
- awq: integers of 4 bits (version gemm)
- gptq: integers of 4 or 8 bits, with zeros stored unchanged (gptq_v2) or less one (gptq). Some files have the wrong one
  of these two names, so if all zeros are the middle of the codes (sym), the stored zeros determine the format

A checkpoint that is not quantized can be quantized at loading: QUANTIZATIONS. If a checkpoint in e4m3 asks for dynamic
quantization of activations, some products quantize activations (layers/packed_weight.py). Otherwise activations and the
KV cache have the model's dtype. Importing this module loads no torch.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nanovllm.errors import CheckpointError

WORD_BITS = 32
_ONLINE = "online"
_NESTED, _TEXT_ALONE = "model.language_model.", "model."  # beginnings of the names of layers


@dataclass(frozen=True, kw_only=True)
class Quantization:
    method: str  # as in config.json
    bits: int  # per code
    is_float: bool = False  # e4m3
    block: tuple[int, int] = (1, 0)  # rows and columns that share a scale; 0 for all rows or columns
    has_zeros: bool = False  # False if the zero of integers is the middle of their range
    is_symmetric: bool | None = False  # gptq: all zeros are the middle; None if config.json does not tell
    stores_less_one: bool = False  # zeros are stored less one; a word of zeros is computed modulo 2^32
    has_order: bool = False  # a tensor has the group of each column; if False, the tensor may be missing
    has_fp8_activations: bool = False  # activations are quantized, too, with scales found at each product (dynamic)
    ignored: tuple[str, ...] = ()  # parts of the names of layers that are not quantized; "re:" begins an expression

    @property
    def is_online(self) -> bool:
        """True if the checkpoint is quantized at loading."""
        return self.method == _ONLINE

    @property
    def codes_per_word(self) -> int:
        return WORD_BITS // self.bits

    @property
    def middle(self) -> int:
        """The zero of integers without stored zeros."""
        return 1 << (self.bits - 1)

    def covers(self, layer: str) -> bool:
        """Return True if the linear layer of this name is quantized according to config.json.

        layer: the name in a checkpoint of text alone. Other checkpoints, and their config.json, have nested names.
        """
        nested = layer.replace(_TEXT_ALONE, _NESTED, 1)
        if any(pattern.match(name) for pattern in self._ignored_patterns for name in (layer, nested)):
            return False
        parts = layer.split(".")  # there are tens of thousands of experts, and hundreds of names
        ends = range(1, len(parts) + 1)
        return not any(".".join(parts[i:j]) in self._ignored_names for j in ends for i in range(j))

    def packing_problem(self, num_columns: int) -> str | None:
        """Return the reason why a GPU cannot pack a weight with `num_columns` columns on a rank, or None if it can."""
        least, group = 512 // self.bits, math.gcd(self.block[1], num_columns)
        if num_columns % least == 0 and group % 32 == 0:  # blocks and slices of kernels/packed_values.py
            return None
        return (
            f"a quantized weight has {num_columns} columns on each rank, in groups of {group}; on a GPU the columns "
            f"must be a multiple of {least} and the groups of 32; use fewer ranks, or device='cpu'"
        )

    @cached_property
    def _ignored_patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(part[3:]) for part in self.ignored if part.startswith("re:")]

    @cached_property
    def _ignored_names(self) -> frozenset[str]:
        names = (part.rstrip(".") for part in self.ignored if not part.startswith("re:"))
        return frozenset(name.replace(_NESTED, _TEXT_ALONE, 1) for name in names)


_GATES = ("in_proj_a", "in_proj_b")  # small layers whose errors affect states for thousands of tokens
QUANTIZATIONS = {  # formats to which a checkpoint in a float type can be quantized at loading
    "fp8": Quantization(method=_ONLINE, bits=8, is_float=True, block=(1, 0), ignored=_GATES),
    "int4": Quantization(method=_ONLINE, bits=4, block=(1, 128), ignored=_GATES),
}


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
    for each in names:
        try:
            re.compile(each.removeprefix("re:"))
        except re.error as error:
            raise CheckpointError(
                f"quantization_config.{name} has {each!r}, which is not a regular expression ({error}); correct "
                "config.json"
            ) from error
    return tuple(names)


def _block(block: Any, name: str = "weight_block_size") -> tuple[int, int]:
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise CheckpointError(
            f"quantization_config.{name}={block!r} must be two positive integers; correct config.json"
        )
    return block[0], block[1]


def _compressed_tensors(given: Mapping[str, Any]) -> Quantization:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        names = sorted(groups) if isinstance(groups, dict) else groups
        raise CheckpointError(
            f"quantization_config.config_groups has {names}, and one group is supported; use a checkpoint whose linear "
            "layers all have the same format"
        )
    (name, group), *_ = groups.items()
    where = f"config_groups.{name}."
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"quantization_config.{where}weights={weights!r} must be an object; correct config.json")
    _choose(group, "targets", (["Linear"],), where=where)
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
    named = {f"{where}format": group.get("format"), "format": given.get("format")}
    if named["format"] == "mixed-precision":  # then each group has a format
        del named["format"]
    layout = _either(named, *named)
    name_of_layout = f"{where}format" if "format" not in named or group.get("format") else "format"
    layout = _choose({name_of_layout: layout}, name_of_layout, ("pack-quantized", "float-quantized"))
    is_float, where = layout == "float-quantized", f"{where}weights."
    _choose(weights, "type", ("float" if is_float else "int",), where=where)
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
        ignored=_names(given, "ignore"),
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
    bits = _choose(given, "bits", (4, 8))
    _choose(given, "is_marlin_format", (False,), default=False)
    dynamic = given.get("dynamic") or {}  # a key with "-:" leaves layers out; others must be empty
    if not isinstance(dynamic, dict) or any(value for key, value in dynamic.items() if not key.startswith("-:")):
        raise _refusal("dynamic", dynamic)
    ignored = _names({"dynamic": [f"re:{key[2:]}" for key in dynamic if key.startswith("-:")]}, "dynamic")
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
        ignored=ignored,
    )


_PARSERS = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq}
