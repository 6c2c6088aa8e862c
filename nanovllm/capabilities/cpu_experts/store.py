"""The weights of experts in CPU memory: one copy, in the layout that the kernels read (source/formats.h).

A matrix of all experts of a layer that are in CPU memory is [P, N, K]: P places, each with one expert. Its rows consist
of blocks. The types are:

- GGUF's types, whose blocks are the bytes of the file (models/gguf_values.py); F32, F16 and BF16 are among them.
- INT4, INT8 and E4M3: codes in the order of the GPU's kernels (kernels/packed_values.py), so that the GPU can use them
  as they are. Groups of columns in a row share a scale in fp32 and, in INT4 and INT8, a zero.

Biases are fp32 [P, N]. Only the first rank has biases of down, the others have zeros, so that the sum over ranks counts
them once.

Legend: P places, N output features, K input features, G groups of a row.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nanovllm.checkpoint.gguf import BlockType
from nanovllm.errors import CheckpointError
from nanovllm.layers.packed_weight import QuantizedWeight, WeightRows
from nanovllm.models.gguf_values import dequantize
from nanovllm.plan.expert_formats import (
    ALIGNMENT,
    E4M3,
    INT4,
    INT8,
    SLICE,
    TYPE_CODES,
    LayerFormat,
    MatrixFormat,
    aligned,
    layer_bytes,
)

_MAX_INT4_ZERO = 16  # MAX_INT4_ZERO in source/formats.h
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class CMatrix(ctypes.Structure):
    """Matrix in source/formats.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "codes scales zeros biases".split()),
        *((name, ctypes.c_int64) for name in "type num_rows num_columns row_bytes group zero".split()),
    ]


class ExpertMatrix:
    """The same weight, such as gate, of the experts of a layer that are in CPU memory. The loader fills it."""

    def __init__(self, matrix_format: MatrixFormat, num_places: int, memory: torch.Tensor) -> None:
        """memory: uint8, `matrix_format.num_bytes(num_places)` bytes of CPU memory, aligned to 64 bytes."""
        assert memory.dtype == torch.uint8 and memory.device.type == "cpu" and memory.data_ptr() % ALIGNMENT == 0
        assert memory.shape == (matrix_format.num_bytes(num_places),), "the memory is too small or too large"
        self.format, self.num_places = matrix_format, num_places
        self.scale_dtype: torch.dtype | None = None  # of the scales of groups in the checkpoint, once they are stored
        part_bytes = *matrix_format.part_bytes, matrix_format.bias_bytes
        codes, scales, zeros, biases = memory.split([aligned(num_places * part) for part in part_bytes])
        rows = num_places, matrix_format.num_rows
        num_groups = matrix_format.num_groups
        self.codes = _shaped(codes, torch.uint8, *rows, matrix_format.row_bytes)
        self.scales = _shaped(scales, torch.float32, *rows, num_groups) if num_groups else None
        self.zeros = _shaped(zeros, torch.int16, *rows, num_groups) if matrix_format.has_zeros else None
        self.biases = _shaped(biases, torch.float32, *rows).zero_() if matrix_format.has_bias else None

    @property
    def c_matrix(self) -> CMatrix:
        given = self.format
        return CMatrix(
            codes=self.codes.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            zeros=None if self.zeros is None else self.zeros.data_ptr(),
            biases=None if self.biases is None else self.biases.data_ptr(),
            type=TYPE_CODES[given.type],
            num_rows=given.num_rows,
            num_columns=given.num_columns,
            row_bytes=given.row_bytes,
            group=given.group_size,
            zero=self.middle,
        )

    @property
    def middle(self) -> int:
        """The zero of integers without stored zeros."""
        return {INT4: 8, INT8: 128}.get(self.format.type, 0)

    def rows(self, place: int, device: torch.device) -> "torch.Tensor | ExpertRows":
        """Return the target of the shard that fills a place: numbers [N, K], blocks of a GGUF file as bytes, uint8
        [N, bytes of a row], or codes, which `device` computes.
        """
        if self.format.is_grouped:
            return ExpertRows(self, place, range(self.format.num_rows), device)
        codes, dtype = self.codes[place], _FLOATS.get(self.format.type.name)
        return codes if dtype is None else codes.view(dtype)

    def store_quantized(self, place: int, first_row: int, given: QuantizedWeight, where: str) -> None:
        """Store rows of codes, on any device, with the scales of their groups. Raises CheckpointError, which names
        `where`, if the columns are not in the order of their groups, or a zero cannot be stored.
        """
        rows = slice(first_row, first_row + len(given.codes))
        of_groups = given.groups.view(-1, self.format.group_size)
        if not (of_groups == of_groups[:, :1]).all():
            raise CheckpointError(
                f"{where} has columns in another order (desc_act), which is not supported for experts in CPU memory; "
                "use a checkpoint with desc_act=false"
            )
        groups = of_groups[:, 0]
        assert self.scales is not None, f"{self.format.type.name} has no groups"
        self.scales[place, rows] = given.scales.cpu().float()[:, groups]
        self.scale_dtype = given.scales.dtype
        self._store_zeros(place, rows, given, groups, where)
        self.codes[place, rows].copy_(_words_of(given.codes, self.format.type))

    def _store_zeros(self, place: int, rows: slice, given: QuantizedWeight, groups: torch.Tensor, where: str) -> None:
        if given.zeros is None:
            assert self.format.type == E4M3, "integers have zeros"
            return
        zeros = given.zeros.cpu()[:, groups]
        if self.zeros is not None:
            self.zeros[place, rows] = zeros
        most = _MAX_INT4_ZERO if self.format.type == INT4 else 2 * self.middle
        if (self.zeros is None and (zeros != self.middle).any()) or not ((zeros >= 0) & (zeros <= most)).all():
            raise CheckpointError(
                f"{where} has zeros from {zeros.min()} to {zeros.max()}; experts in CPU memory take "
                + (f"zeros from 0 to {most}" if self.format.has_zeros else f"the zero {self.middle} alone")
            )

    def values(self, place: int) -> torch.Tensor:
        """Return the values of an expert, fp32 [N, K]."""
        codes = self.codes[place]
        if not self.format.is_grouped:
            return dequantize(codes, self.format.type)
        assert self.scales is not None, "grouped weights have scales"
        numbers, group_size = _numbers_of(codes, self.format.type), self.format.group_size
        if self.zeros is None:
            numbers -= self.middle
        else:
            numbers -= self.zeros[place].float().repeat_interleave(group_size, 1)
        return numbers * self.scales[place].repeat_interleave(group_size, 1)


@dataclass
class ExpertRows(WeightRows):
    """Rows of the expert at `place`, in INT4, INT8 or E4M3."""

    matrix: ExpertMatrix
    place: int
    rows: range
    device: torch.device

    def __getitem__(self, rows: slice) -> "ExpertRows":
        return replace(self, rows=self.rows[rows])

    @property
    def can_quantize(self) -> bool:
        return self.device.type == "cuda" and self.matrix.format.type == E4M3

    def store(self, given: QuantizedWeight, where: str) -> None:
        assert len(given.codes) == len(self.rows), "the weight must have as many rows as the target"
        self.matrix.store_quantized(self.place, self.rows.start, given, where)

    def quantize(self, values: torch.Tensor, columns: slice) -> None:
        from nanovllm.kernels import packed_values, packed_words, quantizing

        assert len(values) == len(self.rows) and self.matrix.scales is not None
        given, rows = self.matrix.format, slice(self.rows.start, self.rows.stop)
        with self.device:
            codes = torch.empty(len(values), given.row_bytes // 4, dtype=torch.int32)
            scales = packed_values.new_scales(len(values), 1, torch.float32)
        packed = packed_values.Packed(codes, scales, packed_words.E4M3.value, group_size=given.num_columns)
        first_column, _, _ = columns.indices(values.shape[1])
        quantizing.quantize_weight(values, packed, 0, first_column)
        self.matrix.scale_dtype = torch.float32
        self.matrix.scales[self.place, rows].copy_(scales.flatten(0, 1)[: len(values)])
        self.matrix.codes[self.place, rows].copy_(codes.view(torch.uint8))


def _shaped(memory: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _words_of(codes: torch.Tensor, block_type: BlockType) -> torch.Tensor:
    """Pack codes [n, K] -> bytes, uint8 [n, bytes of a row], as `pack_codes` of kernels/packed_values.py does."""
    bits = 512 // block_type.num_values
    slices = codes.contiguous().view(torch.uint8).view(len(codes), -1, 16 // bits, SLICE).int()
    places = torch.arange(0, 16, bits, dtype=torch.int32, device=codes.device)[:, None]
    words = (slices << places).sum(2, dtype=torch.int32)
    return words.to(torch.int16).flatten(1).view(torch.uint8)


def _numbers_of(packed: torch.Tensor, block_type: BlockType) -> torch.Tensor:
    """Unpack rows of bytes: uint8 [n, bytes of a row] -> the codes or the numbers in e4m3, fp32 [n, K]."""
    bits = 512 // block_type.num_values
    words = packed.contiguous().view(torch.int16).view(len(packed), -1, 1, SLICE).int()
    places = torch.arange(0, 16, bits, dtype=torch.int32)[:, None]
    codes = (words >> places & (1 << bits) - 1).to(torch.uint8).flatten(1)
    return (codes.view(torch.float8_e4m3fn) if block_type == E4M3 else codes).float()


class CExpertLayer(ctypes.Structure):
    """ExpertLayer in source/experts.h."""

    _fields_ = [(name, CMatrix) for name in ("gate", "up", "down")] + [("places", ctypes.c_void_p)]


class ExpertLayer:
    """The experts of one layer that are in CPU memory."""

    def __init__(self, formats: LayerFormat, places: torch.Tensor, memory: torch.Tensor) -> None:
        """places: int32 [experts], the place of each expert, or -1 for an expert that is on the GPU. `memory`: as
        many bytes as `layer_bytes` says.
        """
        formats.check()
        self.formats, self.memory = formats, memory
        self.places, num_places = places.contiguous(), int((places >= 0).sum())
        assert places.dtype == torch.int32 and places.device.type == "cpu", "places are int32 in CPU memory"
        used = places[places >= 0].sort().values
        assert used.tolist() == list(range(num_places)), "each place has one expert, and no place is empty"
        parts = memory.split([each.num_bytes(num_places) for each in formats])
        self.gate, self.up, self.down = (
            ExpertMatrix(each, num_places, part) for each, part in zip(formats, parts, strict=True)
        )
        self.num_places, self.size, self.hidden_size = num_places, formats.gate.num_rows, formats.gate.num_columns

    @property
    def matrices(self) -> tuple[ExpertMatrix, ExpertMatrix, ExpertMatrix]:
        return self.gate, self.up, self.down

    @property
    def kind(self) -> tuple[LayerFormat, tuple[torch.dtype | None, ...]]:
        """What tells layers apart that a GPU stores differently. Known once the layer has been filled."""
        return self.formats, tuple(matrix.scale_dtype for matrix in self.matrices)

    @property
    def c_layer(self) -> CExpertLayer:
        return CExpertLayer(*(each.c_matrix for each in self.matrices), self.places.data_ptr())


def store_bytes(formats: Sequence[LayerFormat], places: Sequence[torch.Tensor]) -> int:
    """Return the bytes of CPU memory of an ExpertStore."""
    return sum(layer_bytes(each, int((of >= 0).sum())) for each, of in zip(formats, places, strict=True))


class ExpertStore:
    """The experts of all layers that are in CPU memory."""

    def __init__(
        self,
        formats: Sequence[LayerFormat],
        places: Sequence[torch.Tensor],
        memory: torch.Tensor,
    ) -> None:
        """formats, places: of each layer, see ExpertLayer. memory: uint8, as many bytes as `store_bytes` says, aligned
        to 64 bytes; a HostBuffer's if the GPU reads it, too.
        """
        assert memory.shape == (store_bytes(formats, places),), "the memory is too small or too large"
        sizes = [layer_bytes(each, int((of >= 0).sum())) for each, of in zip(formats, places, strict=True)]
        self.memory = memory
        self.layers = [ExpertLayer(*each) for each in zip(formats, places, memory.split(sizes), strict=True)]
        first = self.layers[0]
        assert all(
            (layer.size, layer.hidden_size, len(layer.places)) == (first.size, first.hidden_size, len(first.places))
            for layer in self.layers
        ), "all layers have experts of one shape"
        self.num_experts = len(first.places)
        self.c_layers = (CExpertLayer * len(self.layers))(*(layer.c_layer for layer in self.layers))
