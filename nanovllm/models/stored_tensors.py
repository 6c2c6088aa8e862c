"""The tensors of a checkpoint's safetensors files, by the model's names. Parts of a tensor are read on demand."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.checkpoint.files import weight_files
from nanovllm.errors import CheckpointError

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
_OLD_PREFIXES = ("language_model.", "vision_tower.", "multi_modal_projector.")  # before transformers 4.52
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
    return {name: tensor for each in stored.values() for name, tensor in _as_named_here(each)}


def _as_named_here(tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensor under its name in a checkpoint of text alone, or each expert of a tensor of all experts."""
    name = tensor.name.replace("model.language_model.", "model.", 1)
    if name.startswith(_OLD_PREFIXES):
        name = name.removeprefix("language_model.")
        name = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
    parent, _, last = name.rpartition(".")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
    # Rows that cannot be divided stay as they are, so the experts are missing
    if kinds is None or not parent.endswith(".experts") or len(tensor.shape) != 3 or tensor.shape[1] % len(kinds):
        yield name, tensor
        return
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{tensor.where} has dtype {tensor.dtype}, and quantized experts in one tensor are not supported; use a "
            "checkpoint with tensors for each expert"
        )
    size = tensor.shape[1] // len(kinds)
    for expert in range(tensor.shape[0]):
        for i, kind in enumerate(kinds):
            yield f"{parent}.{expert}.{kind}.weight", _OfExpert(tensor, expert, slice(i * size, (i + 1) * size))


class _OfExpert(StoredTensor):
    """Some rows of one expert in a tensor of all experts."""

    def __init__(self, experts: StoredTensor, expert: int, rows: slice) -> None:
        self.name, self.where, self.dtype = experts.name, experts.where, experts.dtype
        self._experts, self._expert, self._rows = experts, slice(expert, expert + 1), rows
        self.shape = (rows.stop - rows.start, experts.shape[2])

    def read(self, *index: slice) -> torch.Tensor:
        rows, columns = index or (slice(None), slice(None))
        start, end, _ = rows.indices(self.shape[0])
        first = self._rows.start
        return self._experts.read(self._expert, slice(first + start, first + end), columns)[0]
