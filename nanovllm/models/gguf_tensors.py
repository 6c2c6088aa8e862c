"""The weights of a GGUF file as tensors of a checkpoint. Values are computed when they are read."""

from math import prod
from pathlib import Path

import numpy as np
import torch

from nanovllm.checkpoint.gguf import GGUFTensor, read_model
from nanovllm.checkpoint.gguf_config import Weight, weights
from nanovllm.errors import CheckpointError
from nanovllm.models.gguf_values import dequantize
from nanovllm.models.stored_tensors import StoredTensor

_COPIED_VALUES = 2**24  # computed at a time, to limit the memory on top of the model


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


class GGUFWeight(StoredTensor):
    """A weight whose rows are rows of blocks in a file. Its values are fp32."""

    def __init__(self, weight: Weight, blocks: torch.Tensor) -> None:
        self.name, self.where, self.shape = weight.tensor.name, weight.tensor.where, weight.shape
        self.dtype = "F32"
        self._weight, self._blocks = weight, blocks

    def read(self, *index: slice, device: torch.device | None = None) -> torch.Tensor:
        """Return the values of some rows and columns, or all, computed on `device`, by default on the CPU."""
        weight, rows = self._weight, index[0] if index else slice(None)
        if len(self.shape) == 1:
            return self._values(slice(0, 1), device)[0, rows]
        start, end, _ = rows.indices(self.shape[0])
        wanted = slice(weight.first_row + start, weight.first_row + end)
        values = self._values(wanted if weight.row_order is None else weight.row_order[start:end], device)
        inner = slice(None), *index[1:]
        return values.view(end - start, *self.shape[1:])[inner]

    def copy_to(self, target: torch.Tensor, index: tuple[slice, ...]) -> None:
        if len(self.shape) == 1:
            target.copy_(self.read(*index, device=target.device))
            return
        first, end, _ = index[0].indices(self.shape[0])
        step = max(1, _COPIED_VALUES // prod(self.shape[1:]))
        for start in range(first, end, step):
            rows = slice(start, min(start + step, end))
            target[rows.start - first : rows.stop - first] = self.read(rows, *index[1:], device=target.device)

    def _values(self, rows: slice | np.ndarray, device: torch.device | None) -> torch.Tensor:
        """Return the values of rows of the tensor, fp32 [rows, columns]."""
        weight = self._weight
        blocks = self._blocks[rows if isinstance(rows, slice) else torch.from_numpy(rows)].to(device or "cpu")
        values = dequantize(blocks, weight.tensor.type)
        if weight.column_order is not None:
            values = values[:, torch.from_numpy(weight.column_order).to(values.device)]
        if weight.change == "minus one":
            values = values - 1
        elif weight.change == "log of minus":
            values = (-values).log()
        if not values.isfinite().all():
            raise CheckpointError(f"{self.where} has values that are not finite numbers; download the file again")
        return values
