"""Reads the quantized weights of a checkpoint and computes their values (checkpoint/quantization.py).

Legend: N output features, K input features, G groups of columns that share a scale. The layouts, from the sources of
transformers, compressed-tensors, AutoAWQ and AutoGPTQ:

| method | codes | scales | zeros |
|---|---|---|---|
| e4m3 | weight e4m3 [N, K] | weight_scale_inv or weight_scale, per block | |
| pack-quantized | weight_packed [N, K words] | weight_scale [N, G] | weight_zero_point [N words, G] |
| awq | qweight [K, N words] | scales [G, N] | qzeros [G, N words] |
| gptq | qweight [K words, N] | scales [G, N] | qzeros [G, N words] |

A word is an int32 with the codes of neighbours, the first in its lowest bits; awq has an order of its own.
"""

import functools
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from nanovllm.checkpoint.quantization import Quantization
from nanovllm.errors import CheckpointError
from nanovllm.layers.packed_weight import QuantizedWeight
from nanovllm.utils.arithmetic import ceil_div

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of 8 neighbours is


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of which nothing is read until it is indexed."""

    name: str
    where: str  # its name and file, for an error message

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...  # as safetensors names it

    def read(self, *index: slice) -> torch.Tensor: ...


def quantize(values: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """Quantize `values` [n, K], which begin at a row where a block of scales begins. Each block's largest value becomes
    the largest code, and zeros are the middle of the codes (round to nearest, as compressed-tensors does).
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
    scales = (largest.float() / most).clamp_(min=torch.finfo(torch.float32).tiny)
    if not quantization.is_float:
        scales = scales.to(torch.bfloat16).clamp_(min=torch.finfo(torch.bfloat16).tiny)
    codes = values.float() / scales.float().repeat_interleave(block_columns, 1)[:, :k]
    groups = regular_groups(k, block_columns)
    if quantization.is_float:
        return QuantizedWeight(codes.clamp_(-most, most).to(torch.float8_e4m3fn), scales, None, groups)
    codes = codes.round_().add_(quantization.middle).clamp_(0, 2 * quantization.middle - 1).to(torch.uint8)
    zeros = torch.full(scales.shape, quantization.middle, dtype=torch.int16, device=scales.device)
    return QuantizedWeight(codes, scales, zeros, groups)


@functools.cache
def regular_groups(num_columns: int, block_columns: int) -> torch.Tensor:
    """The group of each column if `block_columns` neighbours are one; nothing may write to it."""
    return torch.arange(num_columns) // block_columns


_MAIN = {"awq": "qweight", "gptq": "qweight"}
_OTHERS = {  # of which a checkpoint may lack some
    "fp8": ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
    "compressed-tensors": ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale"),
    "awq": ("scales", "qzeros"),
    "gptq": ("scales", "qzeros", "g_idx"),
}


def stored_parts(quantization: Quantization, name: str, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the weight `name`, by the last part of their names, if the checkpoint has it quantized; else none.

    A module whose weight is stored as it is, is one that the checkpoint leaves unquantized.
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
    return {} if quantization.is_float and parts[main].dtype != "F8_E4M3" else parts


def read_quantized(
    quantization: Quantization,
    parts: Mapping[str, StoredTensor],
    num_rows: int,
    num_columns: int,
    rows: slice,
    columns: slice,
    device: torch.device,
) -> QuantizedWeight:
    """Read part of a weight [num_rows, num_columns], and unpack it on `device`.

    Raises CheckpointError, with the tensor's name, if one is missing or has a wrong shape or type, for scales that are
    not finite, and for a column of a group that does not exist.
    """
    return _Reader(quantization, parts, num_rows, num_columns, device).read(rows, columns)


class _Reader:
    def __init__(
        self,
        quantization: Quantization,
        parts: Mapping[str, StoredTensor],
        num_rows: int,
        num_columns: int,
        device: torch.device,
    ) -> None:
        self.format, self.parts, self.num_rows, self.num_columns = quantization, parts, num_rows, num_columns
        self.device = device
        self.main = next(iter(parts.values()))
        block_columns = quantization.block[1] or self.num_columns
        if not quantization.is_float and self.num_columns % block_columns:
            raise CheckpointError(
                f"{self.main.where} has {self.num_columns} columns, which groups of {block_columns} do not divide; use "
                "a checkpoint with another group_size"
            )
        self.block_columns, self.num_groups = block_columns, ceil_div(self.num_columns, block_columns)

    def read(self, rows: slice, columns: slice) -> QuantizedWeight:
        method, order = self.format.method, "g_idx"
        if self.format.is_float:
            stored = self._part(self.main, (self.num_rows, self.num_columns), "F8_E4M3")
            codes = stored.read(rows, columns).to(self.device)
            if (codes.view(torch.uint8) & 0x7F == 0x7F).any():
                raise CheckpointError(f"{self.main.where} has codes that are NaN; download the model again")
            return QuantizedWeight(codes, self._block_scales()[rows], None, self._groups()[columns])
        if method == "compressed-tensors":
            num_words = ceil_div(self.num_columns, self.format.codes_per_word)
            words = self._part(self.main, (self.num_rows, num_words), "I32").read(rows, slice(None))
            words = words.to(self.device)
            codes, order = self._unpack(words, 1)[:, : self.num_columns][:, columns], "weight_g_idx"
            scales = self._finite(self._get("weight_scale"), (self.num_rows, self.num_groups))
        else:
            codes = self._transposed_codes()[columns, rows].t()
            scales = self._finite(self._get("scales"), (self.num_groups, self.num_rows)).t()
        zeros = self._zeros() if self.format.has_zeros else torch.full_like(scales, self.format.middle).short()
        return QuantizedWeight(codes, scales[rows], zeros[rows], self._groups(order)[columns])

    def _transposed_codes(self) -> torch.Tensor:
        """uint8 [K, N], all of them."""
        per_word = self.format.codes_per_word
        if self.format.method == "awq":
            words = self._whole(self.main, (self.num_columns, ceil_div(self.num_rows, per_word)), "I32")
            return self._unpack(words, 1, _AWQ_ORDER)[:, : self.num_rows]
        words = self._whole(self.main, (ceil_div(self.num_columns, per_word), self.num_rows), "I32")
        return self._unpack(words, 0)[: self.num_columns]

    def _zeros(self) -> torch.Tensor:
        """int16 [N, G], all of them."""
        num_words = ceil_div(self.num_rows, self.format.codes_per_word)
        if self.format.method == "compressed-tensors":
            words = self._whole(self._get("weight_zero_point"), (num_words, self.num_groups), "I32")
            zeros = self._unpack(words, 0)
        else:
            words = self._whole(self._get("qzeros"), (self.num_groups, num_words), "I32")
            if self.format.stores_less_one:  # one was subtracted from words as a whole, so a zero of 0 has borrowed
                words = words + sum(1 << place for place in range(0, 31, self.format.bits))
            zeros = self._unpack(words, 1, _AWQ_ORDER if self.format.method == "awq" else None).t()
        return zeros[: self.num_rows].short()

    def _block_scales(self) -> torch.Tensor:
        """[N, G] of codes in e4m3."""
        stored = self.parts.get("weight_scale_inv") or self._get("weight_scale")
        block_rows = self.format.block[0] or self.num_rows
        num_blocks = ceil_div(self.num_rows, block_rows), self.num_groups
        shapes: list[tuple[int, ...]] = [num_blocks]
        if self.num_groups == 1:  # dimensions of size 1 may be missing
            shapes += [num_blocks[:1], ()] if num_blocks[0] == 1 else [num_blocks[:1]]
        scales = self._finite(stored, stored.shape if stored.shape in shapes else num_blocks).reshape(num_blocks)
        return scales[torch.arange(self.num_rows, device=self.device) // block_rows]

    def _groups(self, order: str = "") -> torch.Tensor:
        """int64 [K] on the CPU: the group of each column. `order`: the tensor that says so, if there is one; -1 in all
        of it says nothing.
        """
        groups = regular_groups(self.num_columns, self.block_columns)
        if self.format.has_order and self.num_groups > 1:
            self._get(order)
        if order in self.parts:
            stored = self._part(self.parts[order], (self.num_columns,), "I32", "I64").read().long()
            groups = groups if bool((stored == -1).all()) else stored
            if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < self.num_groups:
                raise CheckpointError(
                    f"{self.parts[order].where} has groups {int(groups.min())} to {int(groups.max())}, but there are "
                    f"{self.num_groups}, of {self.block_columns} columns each; download the model again"
                )
        return groups

    # -- checked tensors -------------------------------------------------------------------------------------------

    def _get(self, part: str) -> StoredTensor:
        if part not in self.parts:
            raise CheckpointError(
                f"{self.main.where} has no {part} beside it, which quant_method={self.format.method!r} needs; download "
                "the model again"
            )
        return self.parts[part]

    def _part(self, stored: StoredTensor, shape: tuple[int, ...], *dtypes: str) -> StoredTensor:
        if stored.shape != shape or stored.dtype not in dtypes:
            raise CheckpointError(
                f"{stored.where} has shape {list(stored.shape)} and dtype {stored.dtype}, but config.json asks for "
                f"{list(shape)} and {' or '.join(dtypes)}; check that config.json belongs to these files"
            )
        return stored

    def _whole(self, stored: StoredTensor, shape: tuple[int, ...], *dtypes: str) -> torch.Tensor:
        return self._part(stored, shape, *dtypes).read().to(self.device)

    def _finite(self, stored: StoredTensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Scales, in the type that they have in the checkpoint."""
        scales = self._whole(stored, shape, "F32", "F16", "BF16")
        if not scales.isfinite().all():
            raise CheckpointError(f"{stored.where} has scales that are not finite; download the model again")
        return scales

    def _unpack(self, words: torch.Tensor, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
        """The codes of int32 words [A, B] as uint8, in the place of `dim`."""
        bits, per_word = self.format.bits, self.format.codes_per_word
        places = [bits * i for i in order or range(per_word)]
        codes = [((words >> place) & ((1 << bits) - 1)).to(torch.uint8) for place in places]
        return torch.stack(codes, dim=dim + 1).flatten(dim, dim + 1)
