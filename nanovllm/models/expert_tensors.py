"""Tensors of all experts of a layer in safetensors, as weights of single experts with the names of a checkpoint of text
alone. Parts are read on demand.

Legend: E experts, H hidden size, I features of an expert. There are two layouts:

- gate_up_proj [E, 2 I, H], first the rows of gate, and down_proj [E, H, I]
- interleaved: rows of gate and up take turns. gate_up_proj [E, H, 2 I] and down_proj [E, I, H] have the columns before
  the rows. Biases are [E, 2 I] and [E, H]. In MXFP4 rows consist of blocks of 32 columns: gate_up_proj_blocks
  [E, 2 I, H / 32, 16] and down_proj_blocks [E, H, I / 32, 16] have two codes in a byte, the first one in the lower
  half, and their .._scales, uint8 without the last dimension, have exponents plus 127
"""

from collections.abc import Iterator, Mapping

import torch

from nanovllm.checkpoint.gguf import TYPES
from nanovllm.errors import CheckpointError
from nanovllm.models.gguf_tensors import BlockWeight
from nanovllm.models.stored_tensors import FLOAT_DTYPES, StoredTensor

_OLD_PREFIXES = ("language_model.", "vision_tower.", "multi_modal_projector.")  # before transformers 4.52
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MXFP4 = next(each for each in TYPES.values() if each.name == "MXFP4")
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"


def with_single_experts(
    stored: Mapping[str, StoredTensor], *, are_interleaved: bool, device: torch.device
) -> dict[str, StoredTensor]:
    """Return the tensors by their names in a checkpoint of text alone, with the experts one by one. device: arranges
    blocks, which takes a CPU minutes for a large model.
    """
    named: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        name = name.replace("model.language_model.", "model.", 1)
        if name.startswith(_OLD_PREFIXES):
            name = name.removeprefix("language_model.")
            name = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
        if are_interleaved:
            name = name.replace(".mlp.router.", ".mlp.gate.", 1)
        named[name] = tensor
    return {
        new: each
        for name, tensor in named.items()
        for new, each in (_interleaved(name, tensor, named, device) if are_interleaved else _joined(name, tensor))
    }


def _joined(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    parent, _, last = name.rpartition(".")
    parts = _PARTS.get(last, ())
    # Rows that cannot be divided stay as they are, so the experts are missing
    if not parts or not parent.endswith(".experts") or len(tensor.shape) != 3 or tensor.shape[1] % len(parts):
        yield name, tensor
        return
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{tensor.where} has dtype {tensor.dtype}, and quantized experts in one tensor are not supported; use a "
            "checkpoint with tensors for each expert"
        )
    size = tensor.shape[1] // len(parts)
    for expert in range(tensor.shape[0]):
        for i, part in enumerate(parts):
            yield f"{parent}.{expert}.{part}.weight", _JoinedRows(tensor, expert, i * size, size)


def _interleaved(
    name: str, tensor: StoredTensor, named: Mapping[str, StoredTensor], device: torch.device
) -> Iterator[tuple[str, StoredTensor]]:
    parent, _, last = name.rpartition(".")
    ending = next((each for each in (_BLOCKS, _SCALES, _BIAS) if last.endswith(each)), "")
    stem, num_dimensions = last.removesuffix(ending), {_BLOCKS: 4, _SCALES: 3, _BIAS: 2, "": 3}[ending]
    parts = _PARTS.get(stem, ()) if parent.endswith(".experts") else ()
    has_blocks = f"{parent}.{stem}{_BLOCKS}" in named
    if not parts or len(tensor.shape) != num_dimensions or (ending == _SCALES and not has_blocks):
        yield name, tensor
        return
    scales = named.get(f"{parent}.{stem}{_SCALES}")
    for expert in range(tensor.shape[0]):
        for i, part in enumerate(parts):
            turn = expert, i, len(parts)
            if ending == _BLOCKS:
                yield f"{parent}.{expert}.{part}.weight", _Blocks(tensor, _checked(scales, tensor), *turn, device)
            elif ending == _BIAS:
                yield f"{parent}.{expert}.{part}.bias", _TurnOfBias(tensor, *turn)
            elif not ending:
                yield f"{parent}.{expert}.{part}.weight", _TurnOfColumns(tensor, *turn)


def _checked(scales: StoredTensor | None, blocks: StoredTensor) -> StoredTensor:
    """Return the scales of blocks. Raises CheckpointError unless both are MXFP4."""
    if scales is None or scales.shape != blocks.shape[:-1] or blocks.shape[-1] != 16:
        raise CheckpointError(
            f"{blocks.where} has shape {list(blocks.shape)}, and its scales have "
            f"{None if scales is None else list(scales.shape)}, but MXFP4 has 16 bytes for each scale; download the "
            "model again"
        )
    if (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise CheckpointError(
            f"{blocks.where} has dtype {blocks.dtype}, and its scales {scales.dtype}, which must be U8; download the "
            "model again"
        )
    return scales


class _JoinedRows(StoredTensor):
    """Some rows of one expert."""

    def __init__(self, experts: StoredTensor, expert: int, first: int, size: int) -> None:
        self.name, self.where, self.dtype = experts.name, experts.where, experts.dtype
        self._experts, self._expert, self._first = experts, slice(expert, expert + 1), first
        self.shape = (size, experts.shape[2])

    def read(self, *index: slice) -> torch.Tensor:
        rows, columns = index or (slice(None), slice(None))
        start, end, _ = rows.indices(self.shape[0])
        return self._experts.read(self._expert, slice(self._first + start, self._first + end), columns)[0]


class _Turns:
    """Every `step`-th row of one expert, from row `first` on."""

    def __init__(self, expert: int, first: int, step: int) -> None:
        self.expert, self.first, self.step = slice(expert, expert + 1), first, step

    def around(self, start: int, end: int) -> slice:
        """Return the rows of the tensor among which rows start to end - 1 of this part are."""
        return slice(start * self.step, end * self.step)

    @property
    def own(self) -> slice:
        """Return the rows of this part among the rows `around`."""
        return slice(self.first, None, self.step)


class _TurnOfColumns(StoredTensor):
    """A weight whose rows are columns of a tensor."""

    def __init__(self, experts: StoredTensor, expert: int, first: int, step: int) -> None:
        self.name, self.where, self.dtype = experts.name, experts.where, experts.dtype
        self._experts, self._turns = experts, _Turns(expert, first, step)
        self.shape = (experts.shape[2] // step, experts.shape[1])

    def read(self, *index: slice) -> torch.Tensor:
        rows, columns = index or (slice(None), slice(None))
        start, end, _ = rows.indices(self.shape[0])
        turns = self._turns
        return self._experts.read(turns.expert, columns, turns.around(start, end))[0, :, turns.own].t()


class _TurnOfBias(StoredTensor):
    def __init__(self, experts: StoredTensor, expert: int, first: int, step: int) -> None:
        self.name, self.where, self.dtype = experts.name, experts.where, experts.dtype
        self._experts, self._turns = experts, _Turns(expert, first, step)
        self.shape = (experts.shape[1] // step,)

    def read(self, *index: slice) -> torch.Tensor:
        start, end, _ = (index[0] if index else slice(None)).indices(self.shape[0])
        turns = self._turns
        return self._experts.read(turns.expert, turns.around(start, end))[0, turns.own]


class _Blocks(BlockWeight):
    """A weight in MXFP4, whose blocks are arranged as in GGUF files: an exponent plus 127, then the codes of columns i
    and i + 16 in byte i.
    """

    def __init__(
        self, blocks: StoredTensor, scales: StoredTensor, expert: int, first: int, step: int, device: torch.device
    ) -> None:
        _, num_rows, num_blocks, _ = blocks.shape
        super().__init__(blocks.name, blocks.where, (num_rows // step, _MXFP4.num_values * num_blocks), _MXFP4)
        self.dtype = blocks.dtype  # the loader wants a quantization_config for it
        self._blocks, self._scales, self._turns = blocks, scales, _Turns(expert, first, step)
        self._device = device

    def _rows(self, start: int, end: int) -> torch.Tensor:
        turns = self._turns
        index = turns.expert, turns.around(start, end)
        parts = (each.read(*index).to(self._device) for each in (self._blocks, self._scales))
        pairs, exponents = (each[0, turns.own] for each in parts)
        blocks = pairs.new_empty(*exponents.shape, _MXFP4.num_bytes)
        first, second = pairs[..., :8], pairs[..., 8:]  # byte i has columns 2 i and 2 i + 1
        blocks[..., 0] = exponents
        blocks[..., 1::2] = (first & 15) | (second << 4)
        blocks[..., 2::2] = (first >> 4) | (second & 0xF0)
        return blocks.flatten(1)
