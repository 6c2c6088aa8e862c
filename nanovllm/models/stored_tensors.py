"""The tensors of a checkpoint's safetensors files. Parts of a tensor are read on demand."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.checkpoint.files import weight_files
from nanovllm.errors import CheckpointError

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
_COMPARED_ROWS = 8192  # rows that are compared at a time


class StoredTensor:
    """A tensor of a checkpoint, whose data is read on demand."""

    def __init__(self, name: str, file: Path, tensors: Any) -> None:
        self.name, self.where = name, f"{name} in {file}"  # `where` is for error messages
        self._tensors, self._slice = tensors, tensors.get_slice(name)
        self.shape = tuple(self._slice.get_shape())
        self.dtype = str(self._slice.get_dtype())  # as safetensors names it

    def read(self, *index: slice) -> torch.Tensor:
        tensor: torch.Tensor = self._slice[index] if index else self._tensors.get_tensor(self.name)
        return tensor

    def copy_to(self, target: torch.Tensor, index: tuple[slice, ...]) -> None:
        """Write the part at `index` to `target`."""
        target.copy_(self.read(*index))

    def equals(self, other: "StoredTensor") -> bool:
        """Compare two matrices, some rows at a time."""
        if self.shape != other.shape:
            return False
        starts = range(0, self.shape[0], _COMPARED_ROWS)
        parts = ((slice(start, start + _COMPARED_ROWS), slice(None)) for start in starts)
        return all(torch.equal(self.read(*part).float(), other.read(*part).float()) for part in parts)


def open_tensors(directory: Path | None, files: ExitStack) -> dict[str, StoredTensor]:
    """Return the tensors of all files by name, without reading data."""
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        try:
            tensors = files.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            found = {name: StoredTensor(name, path, tensors) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}); download it again"
            ) from error
        if twice := sorted(stored.keys() & found.keys()):
            raise CheckpointError(
                f"{found[twice[0]].where} is also in {stored[twice[0]].where}; keep the files of one download"
            )
        stored |= found
    return stored
