"""The weights of a GGUF file as tensors of a checkpoint. Values are computed when they are read."""

from abc import abstractmethod
from math import prod
from pathlib import Path

import numpy as np
import torch

from nanovllm.checkpoint.gguf import BlockType, GGUFTensor, read_model
from nanovllm.checkpoint.gguf_config import Weight, weights
from nanovllm.errors import CheckpointError
from nanovllm.layers.packed_weight import PackedRows, store_blocks
from nanovllm.models.block_quantizing import quantize_to_blocks
from nanovllm.models.gguf_values import are_finite, dequantize, select_columns
from nanovllm.models.stored_tensors import StoredTensor

_LOADED_VALUES, _QUANTIZED_VALUES = 2**24, 2**23  # computed, packed or quantized at a time, to limit memory


def open_gguf(path: Path) -> dict[str, StoredTensor]:
    """Return the weights of all files of a model by their names in a checkpoint. The files are mapped, not read.

    Raises CheckpointError if two tensors are the same weight.
    """
    maps: dict[Path, torch.Tensor] = {}
    model = read_model(path)
    for file in {tensor.path for tensor in model.tensors.values()}:
        maps[file] = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))  # "c": never written to the file
    found: dict[str, StoredTensor] = {}
    for name, weight in weights(model):
        if name in found:
            raise CheckpointError(
                f"{weight.tensor.where} and {found[name].name} are the same weight; download it again"
            )
        found[name] = GGUFWeight(weight, _blocks(weight.tensor, maps))
    return found


def _blocks(tensor: GGUFTensor, maps: dict[Path, torch.Tensor]) -> torch.Tensor:
    """Return the bytes of a tensor as a matrix, uint8 [rows, bytes of a row]."""
    data = maps[tensor.path][tensor.offset : tensor.offset + tensor.num_bytes]
    return data.view(-1, tensor.row_bytes)


class BlockWeight(StoredTensor):
    """A weight whose rows are rows of GGUF's blocks. Its values are fp32."""

    type: BlockType
    column_order: np.ndarray | None = None  # see Weight

    def __init__(self, name: str, where: str, shape: tuple[int, ...], block_type: BlockType) -> None:
        self.name, self.where, self.shape, self.dtype, self.type = name, where, shape, "F32", block_type

    def read(self, *index: slice, device: torch.device | None = None) -> torch.Tensor:
        """Return the values of some rows and columns, or all, computed on `device`, by default on the CPU."""
        rows = index[0] if index else slice(None)
        if len(self.shape) == 1:
            return self._values(self._rows(0, 1), device)[0, rows]
        start, end, _ = rows.indices(self.shape[0])
        values = self._values(self._rows(start, end), device)
        inner = slice(None), *index[1:]
        return values.view(end - start, *self.shape[1:])[inner]

    def copy_to(self, target: torch.Tensor, index: tuple[slice, ...]) -> None:
        """Write the part at `index` to `target`: values, or blocks as they are if `target` consists of bytes."""
        if len(self.shape) == 1:
            target.copy_(self.read(*index, device=target.device))
            return
        first, end, _ = index[0].indices(self.shape[0])
        step = max(1, _LOADED_VALUES // prod(self.shape[1:]))
        for start in range(first, end, step):
            rows = slice(start, min(start + step, end))
            part = target[rows.start - first : rows.stop - first]
            if target.dtype != torch.uint8:
                part.copy_(self.read(rows, *index[1:], device=target.device))
                continue
            assert self.column_order is None, "blocks are stored in the order of the file"
            blocks = self.part(rows, *index[1:])
            _check_finite(self.where, are_finite(blocks, self.type.name))
            part.copy_(blocks)

    def part(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return the blocks of some rows and columns, which consist of whole blocks, uint8 [n, bytes]."""
        start, end, _ = rows.indices(self.shape[0])
        return select_columns(self._rows(start, end), self.type.name, columns)

    @abstractmethod
    def _rows(self, start: int, end: int) -> torch.Tensor:
        """Return the blocks of rows of the weight, uint8 [rows, bytes]."""

    def _values(self, blocks: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        """Return the values of rows of the tensor, fp32 [rows, columns]."""
        values = self._changed(dequantize(blocks.to(device or "cpu"), self.type))
        _check_finite(self.where, bool(values.isfinite().all()))
        return values

    def _changed(self, values: torch.Tensor) -> torch.Tensor:
        return values


class GGUFWeight(BlockWeight):
    """A weight in a GGUF file."""

    def __init__(self, weight: Weight, blocks: torch.Tensor) -> None:
        super().__init__(weight.tensor.name, weight.tensor.where, weight.shape, weight.tensor.type)
        self.column_order = weight.column_order
        self._weight, self._blocks = weight, blocks

    def _rows(self, start: int, end: int) -> torch.Tensor:
        weight = self._weight
        if weight.row_order is None:
            return self._blocks[weight.first_row + start : weight.first_row + end]
        return self._blocks[torch.from_numpy(weight.row_order[start:end])]

    def _changed(self, values: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        if self.column_order is not None:
            values = values[:, torch.from_numpy(self.column_order).to(values.device)]
        if weight.change == "minus one":
            return values - 1
        return (-values).log() if weight.change == "log of minus" else values


class BlockWriter:
    """Packs blocks on a GPU, many rows at a time: a mixture has tens of thousands of matrices, and each time the host
    waits until the GPU has checked the values. Values of other files are quantized to blocks there, in hundreds of
    operations.
    """

    def __init__(self) -> None:
        # By weight and tensor: blocks or values, and the rows that they fill
        self._waiting: dict[tuple[int, str], list[tuple[torch.Tensor, PackedRows]]] = {}

    def add(self, source: BlockWeight, target: PackedRows, rows: slice, columns: slice) -> None:
        """Pack some rows and columns in `target`, now or later. Raises CheckpointError for values that are not finite,
        of these rows or of others.
        """
        assert target.block_type == source.type.name, "the weight has the file's type"
        first, end, _ = rows.indices(source.shape[0])
        step = max(1, _LOADED_VALUES // source.shape[1])
        for start in range(first, end, step):
            some = slice(start, min(start + step, end))
            self._add(source.where, source.part(some, columns), target[some.start - first : some.stop - first], step)
        if source.column_order is not None:
            target.weight.choose_order(torch.from_numpy(np.argsort(source.column_order)), source.where)

    def add_values(self, values: torch.Tensor, target: PackedRows) -> None:
        """Quantize rows of values, which fill `target`, now or later."""
        self._add("", values, target, max(1, _QUANTIZED_VALUES // values.shape[1]))

    def flush(self) -> None:
        """Pack what waits."""
        for key in self._waiting:
            self._write(*key)

    def _add(self, where: str, rows: torch.Tensor, target: PackedRows, step: int) -> None:
        key = id(target.weight), where
        waiting = self._waiting.setdefault(key, [])
        waiting.append((rows, target))
        if sum(len(rows) for rows, _ in waiting) >= step:
            self._write(*key)

    def _write(self, weight: int, where: str) -> None:
        waiting = self._waiting[weight, where]
        if waiting:
            targets = [target for _, target in waiting]
            rows = waiting[0][0] if len(waiting) == 1 else torch.cat([rows for rows, _ in waiting])
            block_type, rows = targets[0].weight.block_type, rows.to(targets[0].device)
            assert block_type is not None, "the weight consists of blocks"
            if rows.dtype == torch.uint8:
                _check_finite(where, are_finite(rows, block_type))
            else:
                rows = quantize_to_blocks(rows, block_type)
            store_blocks(rows, targets)
            waiting.clear()


def _check_finite(where: str, is_finite: bool) -> None:
    if not is_finite:
        raise CheckpointError(f"{where} has values that are not finite numbers; download the file again")
