"""Quantization: the format of quantized weights, and the formats of this engine.

A quantized weight [N, K] has codes, and scales that blocks of codes share. A value is (code - zero) * scale, where
codes in e4m3 have no zero. quantization_config.py reads the formats of checkpoints from config.json; a GGUF file has a
type for each tensor.

A checkpoint that is not quantized can be quantized at loading: QUANTIZATIONS, and HEAD_QUANTIZATIONS for the output
head. int4 to int8 are sizes: each layer becomes the first of a list of GGUF's types whose blocks fit its columns. With
fp8_dynamic, or if a checkpoint in e4m3 asks for dynamic quantization of activations, some products quantize activations
(layers/packed_weight.py). Otherwise activations and the KV cache have the model's dtype. Importing this module loads no
torch.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

WORD_BITS = 32
_ONLINE, _GGUF, MXFP4 = "online", "gguf", "mxfp4"
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
        return self.method in (_GGUF, MXFP4) or bool(self.block_types)

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
    **{name: name for name in ("awq", "gptq", "compressed-tensors", "modelopt", MXFP4, _GGUF)},
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
