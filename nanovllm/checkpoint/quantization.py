"""Quantization: the format of a checkpoint's quantized weights, from `quantization_config` in config.json.

A quantized weight [N, K] has codes, and scales that blocks of codes share. A value is (code - zero) * scale, where
codes in e4m3 have no zero. A format that is not in this list is refused by name:

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

- gguf: the types of GGUF's blocks. The file has a type for each tensor

A weight in e2m1 (FP4) has a scale in e4m3 for 16 columns and a scale for the whole weight (NVFP4), or a power of two
for 32 columns (MXFP4). Its values replace it when it is loaded, on a GPU too.

A checkpoint that is not quantized can be quantized at loading: QUANTIZATIONS, and HEAD_QUANTIZATIONS for the output
head. int4 to int8 are sizes: each layer becomes the first of a list of GGUF's types whose blocks fit its columns. With
fp8_dynamic, or if a checkpoint in e4m3 asks for dynamic quantization of activations, some products quantize activations
(layers/packed_weight.py). Otherwise activations and the KV cache have the model's dtype. Importing this module loads no
torch.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property
from typing import Any, NamedTuple

from nanovllm.errors import CheckpointError

WORD_BITS = 32
_ONLINE, _GGUF, _MXFP4 = "online", "gguf", "mxfp4"
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")
_NESTED, _TEXT_ALONE = "model.language_model.", "model."  # beginnings of the names of layers


@dataclass(frozen=True, kw_only=True)
class Quantization:
    method: str  # as in config.json
    bits: int  # per code
    is_float: bool = False  # e4m3
    is_fp4: bool = False  # e2m1
    block: tuple[int, int] = (1, 0)  # rows and columns that share a scale; 0 for all rows or columns
    has_zeros: bool = False  # False if the zero of integers is the middle of their range
    is_symmetric: bool | None = False  # gptq: all zeros are the middle; None if config.json does not tell
    stores_less_one: bool = False  # zeros are stored less one; a word of zeros is computed modulo 2^32
    has_order: bool = False  # a tensor has the group of each column; if False, the tensor may be missing
    # Products of many rows quantize activations, too, with scales found at each product (dynamic)
    has_fp8_activations: bool = False
    ignored: tuple[str, ...] = ()  # parts of the names of layers that are not quantized; "re:" begins an expression
    # Names of layers with other formats, or expressions after "re:". The first that matches counts.
    exceptions: tuple[tuple[str, "Quantization"], ...] = ()
    is_for_others: bool = True  # False if only the layers of `exceptions` are quantized
    # gguf: the quantized layers. All experts of a layer are one. Hashing hundreds of names takes long
    layers: tuple["GGUFLayer", ...] = field(default=(), hash=False)
    block_type: str | None = None  # the type of a layer's blocks, in a GGUF file or quantized to blocks
    scale_words: int = 0  # of a type of blocks: words of 32 bits that a GPU needs for the scales of a block of a row
    # online: types of blocks. A layer gets the first whose blocks fit its columns on each of `num_ranks` ranks
    block_types: tuple[str, ...] = ()
    num_ranks: int = 1

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

    @property
    def is_gguf(self) -> bool:
        """True for the format of a GGUF file, and of its layers."""
        return self.method == _GGUF

    @property
    def has_equal_experts(self) -> bool:
        """True if all experts of a layer have the formats of the first one."""
        return self.method in (_GGUF, _MXFP4) or bool(self.block_types)

    def stays_packed(self, num_columns: int, num_ranks: int = 1) -> bool:
        """Return True if a GPU keeps a weight packed whose columns `num_ranks` share: `num_columns` on each rank.

        A GPU keeps whole blocks of GGUF's types, and pads rows of blocks with 32 columns. Other formats that cannot be
        packed are refused (`packing_problem`).
        """
        if self.block_type is None:
            return not self.is_fp4
        of_file = 256 if self.block[1] == 256 else 32
        return num_columns % of_file == 0 and (num_ranks == 1 or not self.has_order)

    def format_of(self, layer: str) -> "Quantization | None":
        """Return the format of the linear layer of this name according to config.json, or None if it is not quantized.

        layer: the name in a checkpoint of text alone. Other checkpoints, and their config.json, have nested names.
        """
        nested = layer.replace(_TEXT_ALONE, _NESTED, 1)
        if any(pattern.match(name) for pattern in self._ignored_patterns for name in (layer, nested)):
            return None
        parts = layer.split(".") if self._ignored_names else []  # there are tens of thousands of experts
        ends = range(1, len(parts) + 1)
        if any(".".join(parts[i:j]) in self._ignored_names for j in ends for i in range(j)):
            return None
        if self.is_gguf:
            return self._formats.get(without_expert(layer))
        found = self.exception(layer)
        return found or (self if self.is_for_others else None)

    def exception(self, layer: str) -> "Quantization | None":
        """Return the format that `exceptions` have for a layer, or None if they have none."""
        nested = layer.replace(_TEXT_ALONE, _NESTED, 1)
        return next((each for match, each in self._exceptions if match(layer) or match(nested)), None)

    def for_columns(self, num_columns: int) -> "Quantization | None":
        """Return the format of a layer with this number of columns on each rank, or None if no type of blocks fits."""
        if not self.block_types:
            return self
        formats = (BLOCK_TYPES[each] for each in self.block_types)
        found = next((each for each in formats if num_columns % each.block[1] == 0), None)
        return found and replace(found, method=self.method)

    @property
    def needs_fp8_products(self) -> bool:
        """True if the user has asked for activations in fp8, so that a GPU without them must be refused. For a
        checkpoint that asks for them, such a GPU keeps activations in 16 bits.
        """
        return self.is_online and self.has_fp8_activations

    def has_fp8_products(self, capability: tuple[int, int]) -> bool:
        """Return True if GPUs of this compute capability multiply activations in fp8 by weights of this format. Blocks
        need 9.0.
        """
        is_able = capability == (9, 0) if self.block[1] else can_multiply_fp8(capability)
        return self.has_fp8_activations and is_able

    def packing_problem(self, num_columns: int) -> str | None:
        """Return the reason why a GPU cannot pack a weight with `num_columns` columns on a rank, or None if it can."""
        if self.is_fp4 or self.is_gguf or self.block_type is not None:
            return None
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
    def _exceptions(self) -> list[tuple[Callable[[str], Any], "Quantization"]]:
        return [
            (re.compile(name[3:]).match if name.startswith("re:") else name.__eq__, each)
            for name, each in self.exceptions
        ]

    @cached_property
    def _formats(self) -> dict[str, "Quantization"]:
        return {
            name: replace(BLOCK_TYPES[block_type], has_order=has_order) for name, block_type, has_order in self.layers
        }

    @cached_property
    def _ignored_names(self) -> frozenset[str]:
        names = (part.rstrip(".") for part in self.ignored if not part.startswith("re:"))
        return frozenset(name.replace(_NESTED, _TEXT_ALONE, 1) for name in names)


class GGUFLayer(NamedTuple):
    name: str  # without the number of an expert
    block_type: str
    has_order: bool  # the columns are in another order than in the model


BLOCK_TYPES = {  # bits of a code, columns of a block as kernels/gguf_words.py arranges it, and words with its scales
    name: Quantization(method=_GGUF, bits=bits, block=(1, columns), block_type=name, scale_words=num_words)
    for name, bits, columns, num_words in (
        ("Q4_0", 4, 128, 2),
        ("Q4_1", 4, 128, 4),
        ("Q5_0", 5, 128, 2),
        ("Q5_1", 5, 128, 4),
        ("Q8_0", 8, 64, 1),
        ("Q4_K", 4, 256, 5),
        ("Q5_K", 5, 256, 5),
        ("Q6_K", 6, 256, 5),
        ("IQ4_NL", 4, 128, 2),
        ("IQ4_XS", 4, 256, 3),
        ("MXFP4", 4, 128, 1),
    )
}
# torch.nn.functional.scaled_mm with a scale per row: cuBLAS multiplies on 9.0, CUTLASS on the others
FP8_CAPABILITIES = "8.9, 9.0, 10.0 or 12.0"


def can_multiply_fp8(capability: tuple[int, int]) -> bool:
    """Return True if torch multiplies codes in fp8 with a scale per row on GPUs of this compute capability."""
    return capability == (8, 9) or capability[0] in (9, 10, 12)


_GATES = ("in_proj_a", "in_proj_b")  # small layers whose errors affect states for thousands of tokens
_FP8 = Quantization(method=_ONLINE, bits=8, is_float=True, block=(1, 0), ignored=_GATES)


def _size(bits: int, *block_types: str, exceptions: tuple[tuple[str, Quantization], ...] = ()) -> Quantization:
    return Quantization(method=_ONLINE, bits=bits, block_types=block_types, ignored=_GATES, exceptions=exceptions)


_INT8 = _size(8, "Q8_0")
_INT6 = _size(6, "Q6_K", "Q8_0")
_INT5 = _size(5, "Q5_K", "Q5_1", "Q8_0")
QUANTIZATIONS = {  # formats to which a checkpoint in a float type can be quantized at loading
    "int8": _INT8,
    "int6": _INT6,
    "int5": _INT5,
    # The rows of values are few, and carry more of the error than others
    "int4": _size(4, "Q4_K", "Q4_1", "Q8_0", exceptions=((r"re:.*\.v_proj$", _INT6),)),
    "fp8": _FP8,
    "fp8_dynamic": replace(_FP8, has_fp8_activations=True),  # llm-compressor's FP8_DYNAMIC
}
CHECKPOINT_FORMATS = {  # vLLM's names for the formats of checkpoints -> Quantization.method
    **{name: name for name in ("awq", "gptq", "compressed-tensors", "modelopt", _MXFP4, _GGUF)},
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "modelopt_fp4": "modelopt",
}
# What the formats cost: the mean KL divergence of a token's probabilities from what the weights in 16 bits give, for
# SmolLM2-135M-Instruct on real text (python -m benchmarks.real_formats)
KL_ON_SMOLLM2 = {"int8": 0.0011, "int6": 0.013, "int5": 0.045, "int4": 0.13, "fp8": 0.017}
# Formats that plans propose, most bits first. int8 decodes at 0.86 of fp8's rate (docs/benchmarks/h200-2026-11-27.md)
WEIGHTS_ALONE = ("fp8", "int6", "int5", "int4")
# Formats to which an output head can be quantized at loading. Loading halves the groups where that pays (`head_format`
# in models/quantized_weights.py)
HEAD_QUANTIZATIONS = {"int8": Quantization(method=_ONLINE, bits=8, block=(1, 64))}


def without_expert(layer: str) -> str:
    """Return the name of a layer without the number of an expert."""
    return _OF_EXPERT.sub(".experts.", layer)


def gguf_quantization(layers: Iterable[GGUFLayer]) -> Quantization | None:
    """Return the format of a GGUF file with these quantized layers, or None if there are none."""
    found = tuple(sorted(layers))
    # Gates are small, and one weight in the model has both
    return Quantization(method=_GGUF, bits=8, layers=found, ignored=_GATES, is_for_others=False) if found else None


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
    return Quantization(method=_MXFP4, bits=4, ignored=ignored, exceptions=(experts,), is_for_others=False)


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
    _MXFP4: _mxfp4,
}
