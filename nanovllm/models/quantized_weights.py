"""Reads quantized weights in a checkpoint's format (checkpoint/quantization.py), and quantizes other weights.

N output features, K input features, G groups of columns that share a scale. The layouts, from the sources of
transformers, compressed-tensors, AutoAWQ and AutoGPTQ:

| method | codes | scales | zeros |
|---|---|---|---|
| e4m3 | weight e4m3 [N, K] | weight_scale_inv or weight_scale, per block | |
| e2m1 | weight_packed or weight, [N, K / 2] | weight_scale [N, G] / weight_global_scale, or * weight_scale_2 | |
| pack-quantized | weight_packed [N, K words] | weight_scale [N, G] | weight_zero_point [N words, G] |
| awq | qweight [K, N words] | scales [G, N] | qzeros [G, N words] |
| gptq | qweight [K words, N] | scales [G, N] | qzeros [G, N words] |

A word is an int32 with the codes of neighbours, the first code in the lowest bits; awq has another order. Two codes in
e2m1 are a byte, the first one in the lower half; their scales are in e4m3, or are exponents of powers of two (MXFP4).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from nanovllm.checkpoint.quantization import Quantization
from nanovllm.errors import CheckpointError
from nanovllm.layers.packed_weight import QuantizedWeight
from nanovllm.models.stored_tensors import StoredTensor
from nanovllm.utils.arithmetic import ceil_div

_SCALE_DTYPES = ("F32", "F16", "BF16")  # as safetensors names them
_COMPARED_PARTS, _COMPARED_ROWS = 16, 64  # of an output head, to choose its groups
_WORTHWHILE_ERROR = 0.75  # largest mean square error with groups of half the size, relative to the whole size
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in a word of each of 8 neighbours


def quantize(values: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """Quantize `values` [n, K], whose first row is the first row of a block of scales. Each block's largest value
    becomes the largest code, and zeros are the middle of the codes (round to nearest, as compressed-tensors does).

    On a GPU, `quantize_weight` in kernels/quantizing.py does the same for e4m3.
    """
    (n, k), (block_rows, block_columns) = values.shape, quantization.block
    block_rows, block_columns = block_rows or n, block_columns or k
    most = torch.finfo(torch.float8_e4m3fn).max if quantization.is_float else quantization.middle - 0.5
    magnitudes = values.abs()
    if k % block_columns or n % block_rows:
        magnitudes = F.pad(magnitudes, (0, -k % block_columns, 0, -n % block_rows))
    largest = magnitudes.unflatten(1, (-1, block_columns)).amax(2)
    if block_rows > 1:
        largest = largest.unflatten(0, (-1, block_rows)).amax(1).repeat_interleave(block_rows, 0)[:n]
    # The product with the reciprocal is what torch computes on a GPU for a quotient, and the same on all devices
    scales = (largest.float() * (1 / most)).clamp_(min=torch.finfo(torch.float32).tiny)
    if not quantization.is_float:
        scales = scales.to(torch.bfloat16)
    codes = values.float() / scales.float().repeat_interleave(block_columns, 1)[:, :k]
    groups = _regular_groups(k, block_columns)
    if quantization.is_float:
        return QuantizedWeight(codes.clamp_(-most, most).to(torch.float8_e4m3fn), scales, None, groups)
    codes = codes.round_().add_(quantization.middle).clamp_(0, 2 * quantization.middle - 1).to(torch.uint8)
    zeros = torch.full(scales.shape, quantization.middle, dtype=torch.int16, device=scales.device)
    return QuantizedWeight(codes, scales, zeros, groups)


def head_format(head: StoredTensor, quantization: Quantization) -> Quantization:
    """Return the format of an output head that is quantized at loading: `quantization`, or the same with groups of half
    the size, which take 6% more memory, if that lowers the mean square error by a quarter or more.

    For normal values it lowers the error by a sixth, and by more if a few values are far larger than their neighbours.
    Every rank compares the same rows, taken from all parts of the head.
    """
    formats = quantization, replace(quantization, block=(1, quantization.block[1] // 2))
    errors, num_rows = [0.0, 0.0], head.shape[0]
    for start in range(0, num_rows, max(_COMPARED_ROWS, num_rows // _COMPARED_PARTS)):
        values = head.read(slice(start, min(start + _COMPARED_ROWS, num_rows)), slice(None)).float()
        for i, each in enumerate(formats):
            quantize(values, each).copy_values(rounded := torch.empty_like(values))
            errors[i] += float((rounded - values).square().sum())
    return formats[1] if errors[1] <= _WORTHWHILE_ERROR * errors[0] else formats[0]


@functools.cache
def _regular_groups(num_columns: int, block_columns: int) -> torch.Tensor:
    """Return the group of each column if groups are `block_columns` neighbours. Do not write to the cached result."""
    return torch.arange(num_columns) // block_columns


_MAIN = {"awq": "qweight", "gptq": "qweight", "modelopt": "weight"}
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are negative
_MX_BIAS = 127  # of an exponent in E8M0
_OTHERS = {  # parts, some of which a checkpoint may lack
    "fp8": ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
    "compressed-tensors": (
        *("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale"),
        *("weight_global_scale", "input_global_scale"),
    ),
    "modelopt": ("weight_scale", "weight_scale_2", "input_scale"),
    "awq": ("scales", "qzeros"),
    "gptq": ("scales", "qzeros", "g_idx"),
}


def stored_parts(quantization: Quantization, name: str, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the weight `name` by the last part of their names, or {} if the weight is not quantized.

    A module is not quantized if the checkpoint has the module's weight in a float type.
    """
    prefix, _, last = name.rpartition(".")
    main = _MAIN.get(quantization.method, "weight" if quantization.is_float else "weight_packed")
    if quantization.is_online or last != "weight" or f"{prefix}.{main}" not in stored:
        return {}
    parts = {
        part: stored[f"{prefix}.{part}"]
        for part in (main, *_OTHERS[quantization.method])
        if f"{prefix}.{part}" in stored
    }
    dtype = "U8" if quantization.is_fp4 else "F8_E4M3" if quantization.is_float else parts[main].dtype
    return parts if parts[main].dtype == dtype else {}


class QuantizedReader:
    """Reads parts of a weight of this shape, [N, K], and unpacks them on `device`.

    Raises CheckpointError, with the tensor's name: the constructor for a missing tensor and for a wrong shape or type;
    reading for scales that are not finite, and for a column of a group that does not exist.
    """

    def __init__(
        self,
        quantization: Quantization,
        parts: Mapping[str, StoredTensor],
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.format, self.parts, self.device = quantization, parts, device
        self.num_rows, self.num_columns = n, k = shape
        main = next(iter(parts))
        self.main = parts[main]
        self.block_columns = quantization.block[1] or k
        if not quantization.is_float and k % self.block_columns:  # also for e2m1
            raise CheckpointError(
                f"{self.main.where} has {k} columns, which groups of {self.block_columns} do not divide; use a "
                "checkpoint with another group_size"
            )
        self.num_groups = g = ceil_div(k, self.block_columns)
        n_words, k_words = ceil_div(n, quantization.codes_per_word), ceil_div(k, quantization.codes_per_word)
        self._zeros: StoredTensor | None = None
        self._order: StoredTensor | None = None
        if quantization.is_fp4:
            self._check(main, ("U8",), (n, k // 2))
            self._scales = self._check("weight_scale", ("U8" if self.block_columns == 32 else "F8_E4M3",), (n, g))
            return
        if quantization.is_float:
            self._check(main, ("F8_E4M3",), (n, k))
            scales = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
            blocks = ceil_div(n, quantization.block[0] or n), g
            shapes = [
                blocks[:i] for i in (2, 1, 0) if math.prod(blocks[i:]) == 1
            ]  # dimensions of size 1 may be missing
            self._scales = self._check(scales, _SCALE_DTYPES, *shapes)
            return
        scales, zeros, order = "scales", "qzeros", "g_idx"
        shapes = [(k, n_words) if quantization.method == "awq" else (k_words, n), (g, n), (g, n_words)]
        if quantization.method == "compressed-tensors":
            scales, zeros, order = "weight_scale", "weight_zero_point", "weight_g_idx"
            shapes = [(n, k_words), (n, g), (n_words, g)]
        self._check(main, ("I32",), shapes[0])
        self._scales = self._check(scales, _SCALE_DTYPES, shapes[1])
        if quantization.has_zeros:
            self._zeros = self._check(zeros, ("I32",), shapes[2])
        if order in parts or (quantization.has_order and g > 1):
            self._order = self._check(order, ("I32", "I64"), (k,))

    def read(self, rows: slice, columns: slice) -> QuantizedWeight:
        groups, unused = self._groups()[columns], self.parts.get("weight_zero_point")
        if unused is not None and not self.format.has_zeros and unused.read().float().any():
            raise CheckpointError(
                f"{unused.where} is not 0, but quantization_config has symmetric=true; check that config.json belongs "
                "to these files"
            )
        if self.format.is_fp4:
            return QuantizedWeight(self._e2m1(rows)[:, columns], self._fp4_scales(rows), None, groups)
        if self.format.is_float:
            codes = self.main.read(rows, columns).to(self.device)
            if (codes.view(torch.uint8) & 0x7F == 0x7F).any():
                raise CheckpointError(f"{self.main.where} has codes that are NaN; download the model again")
            return QuantizedWeight(codes, self._block_scales()[rows], None, groups)
        if self.format.method == "compressed-tensors":
            words = self.main.read(rows, slice(None)).to(self.device)
            codes, scales = self._unpack(words, 1)[:, : self.num_columns][:, columns], self._finite_scales()
        else:
            codes, scales = self._transposed_codes()[columns, rows].t(), self._finite_scales().t()
        return QuantizedWeight(codes, scales[rows], self._read_zeros()[rows], groups)

    def _e2m1(self, rows: slice) -> torch.Tensor:
        """Return the numbers that codes in e2m1 stand for, bf16 [n, K]."""
        values = torch.tensor((*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)), dtype=torch.bfloat16)
        pairs = self.main.read(rows, slice(None)).to(self.device)
        return values.to(self.device)[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1).int()]

    def _fp4_scales(self, rows: slice) -> torch.Tensor:
        """Return the scales, fp32 [n, G], multiplied by the scale of the weight."""
        stored = self._scales.read(rows, slice(None)).to(self.device)
        if stored.dtype == torch.uint8:
            scales = torch.exp2(stored.float() - _MX_BIAS)
        else:
            scales = stored.float()
        if self.format.method == "modelopt":
            scales = scales * self._scale_of_weight("weight_scale_2")
        elif self.block_columns == 16:
            scales = scales / self._scale_of_weight("weight_global_scale")
        if not scales.isfinite().all():
            raise CheckpointError(f"{self._scales.where} has scales that are not finite; download the model again")
        return scales

    def _scale_of_weight(self, part: str) -> torch.Tensor:
        return self._check(part, ("F32",), (1,), ()).read().to(self.device)

    def _transposed_codes(self) -> torch.Tensor:
        """Return all codes, uint8 [K, N]."""
        words = self.main.read().to(self.device)
        if self.format.method == "awq":
            return self._unpack(words, 1, _AWQ_ORDER)[:, : self.num_rows]
        return self._unpack(words, 0)[: self.num_columns]

    def _read_zeros(self) -> torch.Tensor:
        """Return all zeros, int16 [N, G]."""
        if self._zeros is None:
            shape = self.num_rows, self.num_groups
            return torch.full(shape, self.format.middle, dtype=torch.int16, device=self.device)
        words = self._zeros.read().to(self.device)
        if self.format.method == "compressed-tensors":
            return self._unpack(words, 0)[: self.num_rows].short()
        order = _AWQ_ORDER if self.format.method == "awq" else None
        zeros = self._unpack(words, 1, order).t()[: self.num_rows].short()
        if self.format.is_symmetric is not False and self._are_middle(zeros):
            return torch.full_like(zeros, self.format.middle)
        if self.format.stores_less_one:  # words were decremented as integers, so a zero of 0 has borrowed
            words = words + sum(1 << place for place in range(0, 31, self.format.bits))
            zeros = self._unpack(words, 1).t()[: self.num_rows].short()
        return zeros

    def _are_middle(self, zeros: torch.Tensor) -> bool:
        """Return True if all stored zeros are the middle of the codes, unchanged or less one.

        AutoGPTQ stored zeros less one. The successors of AutoGPTQ store zeros unchanged, and some keep the old name of
        the format. Raises CheckpointError for other zeros if config.json says that all zeros are the middle.
        """
        least, most, middle = int(zeros.min()), int(zeros.max()), self.format.middle
        if least == most and least in (middle - 1, middle):
            return True
        if self.format.is_symmetric:
            assert self._zeros is not None, "the caller has read them"
            raise CheckpointError(
                f"{self._zeros.where} has zeros from {least} to {most}, but quantization_config has sym=true, with "
                f"which all are {middle} or all are {middle - 1}; check that config.json belongs to these files"
            )
        return False

    def _block_scales(self) -> torch.Tensor:
        """Return the scales [N, G] of codes in e4m3."""
        block_rows = self.format.block[0] or self.num_rows
        scales = self._finite_scales().reshape(ceil_div(self.num_rows, block_rows), self.num_groups)
        return scales[torch.arange(self.num_rows, device=self.device) // block_rows]

    def _finite_scales(self) -> torch.Tensor:
        """Return the scales in the checkpoint's shape and type."""
        scales = self._scales.read().to(self.device)
        if not scales.isfinite().all():
            raise CheckpointError(f"{self._scales.where} has scales that are not finite; download the model again")
        return scales

    def _groups(self) -> torch.Tensor:
        """Return the group of each column, int64 [K] on the CPU. An order of only -1 counts as missing."""
        groups = _regular_groups(self.num_columns, self.block_columns)
        if self._order is None:
            return groups
        order = self._order.read().long()
        if (order == -1).all():
            return groups
        if len(order) and not 0 <= int(order.min()) <= int(order.max()) < self.num_groups:
            raise CheckpointError(
                f"{self._order.where} has groups {int(order.min())} to {int(order.max())}, but there are "
                f"{self.num_groups}, of {self.block_columns} columns each; download the model again"
            )
        return order

    def _check(self, part: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> StoredTensor:
        """Return the tensor `part`. Raises CheckpointError unless it has one of the types and shapes."""
        if part not in self.parts:
            raise CheckpointError(
                f"{self.main.where} has no {part}, which quant_method={self.format.method!r} needs; download the model "
                "again"
            )
        stored = self.parts[part]
        if stored.shape not in shapes or stored.dtype not in dtypes:
            raise CheckpointError(
                f"{stored.where} has shape {list(stored.shape)} and dtype {stored.dtype}, but config.json asks for "
                f"{list(shapes[0])} and {' or '.join(dtypes)}; check that config.json belongs to these files"
            )
        return stored

    def _unpack(self, words: torch.Tensor, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return the codes of int32 words [A, B] as uint8, unpacked along `dim`."""
        bits, per_word = self.format.bits, self.format.codes_per_word
        places = [bits * i for i in order or range(per_word)]
        codes = [((words >> place) & ((1 << bits) - 1)).to(torch.uint8) for place in places]
        return torch.stack(codes, dim=dim + 1).flatten(dim, dim + 1)
