"""ExpertStaging: the experts of layers in CPU memory, streamed to the GPU for steps with many rows.

Two buffers on the GPU hold the experts of one layer each. While the GPU computes a layer, the experts of the next layer
in CPU memory are copied to the other buffer, and arranged there as the GPU's kernels read them.

Stream edges:
  E15  experts arranged -> multiplied    h2d -> compute  experts_ready
  E16  multiplied -> next layer's copies compute -> h2d  experts_done, in the beginning for allocated buffers
No other edge is needed: the experts in CPU memory never change.

Legend: E experts of a layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.capabilities.cpu_experts.store import ExpertLayer, ExpertMatrix
from nanovllm.layers.linear import StackedWeight
from nanovllm.layers.moe import Experts
from nanovllm.layers.packed_weight import PackedWeight, packed
from nanovllm.offload.streams import Streams
from nanovllm.plan.expert_formats import STAGED_PIECE_BYTES

if TYPE_CHECKING:
    from nanovllm.kernels.gguf_pack import PartRows  # needs triton

NUM_BUFFERS = 2
_ALIGNMENT = 256


class TargetRows:
    """The rows of a weight on the GPU that all gates, all ups or all downs of a layer fill."""

    def __init__(self, weight: nn.Parameter | PackedWeight, num_experts: int, part: int, num_parts: int) -> None:
        """The rows of an expert have `num_parts` parts, of which this is number `part`."""
        self.weight, self.num_experts, self.part, self.num_parts = weight, num_experts, part, num_parts

    def of_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Select this part in a tensor with a first dimension of rows: [E, rows of the part, ..]."""
        return rows.unflatten(0, (self.num_experts, self.num_parts, -1))[:, self.part]

    def part_rows(self, scale_rows: int = 1) -> "PartRows":
        """Return the place of these rows, or of their scales, which `scale_rows` rows share."""
        from nanovllm.kernels.gguf_pack import PartRows

        num_rows = self.weight.shape[0] // (self.num_experts * self.num_parts * scale_rows)
        return PartRows(self.part * num_rows, num_rows, self.num_parts * num_rows)


def target_rows(experts: Experts) -> tuple[TargetRows, TargetRows, TargetRows]:
    """Return the targets of gate, up and down."""
    count = experts.num_experts
    if isinstance(experts.gate_up, StackedWeight):  # gates of all experts, then ups
        gate, up = (TargetRows(weight, count, 0, 1) for weight in experts.gate_up.weights)
    else:
        gate, up = (TargetRows(experts.gate_up, count, part, 2) for part in range(2))
    assert not isinstance(experts.down, StackedWeight)
    return gate, up, TargetRows(experts.down, count, 0, 1)


class ExpertStaging:
    """The buffers, on the device of `streams`. Layers are numbered as in the ExpertStore."""

    def __init__(self, layers: Sequence[ExpertLayer], make_experts: Callable[[int], Experts], streams: Streams) -> None:
        """`make_experts(layer)` allocates the weights of a layer's experts on the GPU, which layers with experts of the
        same kind share. The layers have been filled.
        """
        self.layers, self.streams = layers, streams
        kinds = {layer.kind: number for number, layer in enumerate(layers)}
        # Experts have memory of their own until they are moved. No two have it at a time
        size, device = max((_memory_of(make_experts(number)) for number in kinds.values()), key=itemgetter(0))
        self._arenas = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._experts: list[dict[object, Experts]] = [{} for _ in range(NUM_BUFFERS)]
        for arena, by_kind in zip(self._arenas, self._experts, strict=True):
            for kind, number in kinds.items():
                by_kind[kind] = make_experts(number)
                _move(by_kind[kind], arena)
        self._raw = torch.zeros(max(STAGED_PIECE_BYTES, _least_piece(layers)), dtype=torch.uint8, device=device)
        self.num_fetched = 0  # layers
        self._held: list[int | None] = [None] * NUM_BUFFERS  # the layer in each buffer, or on its way there
        self._experts_ready = [streams.event() for _ in range(NUM_BUFFERS)]
        self._experts_done = [streams.event() for _ in range(NUM_BUFFERS)]
        for event in self._experts_done:
            streams.compute.record(event)

    def experts(self, layer: int) -> Experts:
        """Return the layer's experts, for which the compute stream waits. Hot: once per layer."""
        self._fetch(layer)
        buffer = layer % NUM_BUFFERS
        self.streams.compute.wait(self._experts_ready[buffer])  # E15: experts arranged -> multiplied
        return self._experts[buffer][self.layers[layer].kind]

    def multiplied(self, layer: int) -> None:
        """Begin to copy the next layer, now that the products of this one are enqueued. Hot: once per layer."""
        self.streams.compute.record(self._experts_done[layer % NUM_BUFFERS])
        if layer + 1 < len(self.layers):
            self._fetch(layer + 1)

    def fetch_again(self, layer: int) -> None:
        """Copy a layer that may be in its buffer already, and wait until it is there. Start-up times this."""
        self._held[layer % NUM_BUFFERS] = None
        self._fetch(layer)
        self.streams.synchronize()

    def _fetch(self, layer: int) -> None:
        """Enqueue the copies of a layer unless its buffer has it."""
        buffer = layer % NUM_BUFFERS
        if self._held[buffer] == layer:
            return
        from nanovllm.kernels import launch

        is_filled = launch.kernels_run()  # not while kernels are only compiled
        self._held[buffer] = layer if is_filled else None
        self.num_fetched += is_filled
        self.streams.h2d.wait(self._experts_done[buffer])  # E16: multiplied -> next layer's copies
        given = self.layers[layer]
        for matrix, rows in zip(given.matrices, target_rows(self._experts[buffer][given.kind]), strict=True):
            self._fill(matrix, rows)
        self.streams.h2d.record(self._experts_ready[buffer])

    def _fill(self, matrix: ExpertMatrix, rows: TargetRows) -> None:
        weight = rows.weight
        if isinstance(weight, PackedWeight) and weight.block_type is not None:
            self._fill_blocks(matrix, rows, weight)
            return
        codes = rows.of_experts(weight.codes if isinstance(weight, PackedWeight) else weight).flatten(1)
        self.streams.h2d.copy_rows(codes.view(torch.uint8), matrix.codes.flatten(1))
        if isinstance(weight, PackedWeight):
            self._fill_scales(matrix, rows, weight)

    def _fill_scales(self, matrix: ExpertMatrix, rows: TargetRows, weight: PackedWeight) -> None:
        """Arrange scales as the GPU's kernels read them, integers' zeros in the same words."""
        from nanovllm.kernels import read_experts

        assert matrix.scales is not None, "a packed weight has scales"
        step = max(1, STAGED_PIECE_BYTES // sum(matrix.format.part_bytes[1:]))
        for first in range(0, rows.num_experts, step):
            experts = slice(first, first + step)
            scales = self._on_device(matrix.scales[experts])
            zeros = None if matrix.zeros is None else self._on_device(matrix.zeros[experts], scales.nbytes)
            target = packed(weight), rows.part_rows(weight.scale_rows)
            work = partial(read_experts.arrange_scales, scales, zeros, *target, middle=matrix.middle, first=first)
            self.streams.h2d.run(weight.scales.transpose(1, 2), self._raw, work)

    def _fill_blocks(self, matrix: ExpertMatrix, rows: TargetRows, weight: PackedWeight) -> None:
        from nanovllm.kernels import gguf_pack

        row_bytes, target, start = matrix.format.row_bytes, rows.part_rows(), 0
        for part in matrix.codes.view(-1, row_bytes).split(max(1, STAGED_PIECE_BYTES // row_bytes)):
            blocks = self._on_device(part)
            work = partial(gguf_pack.pack_blocks, blocks, packed(weight), target, start)
            self.streams.h2d.run(weight.codes, self._raw, work)
            start += len(part)

    def _on_device(self, part: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Enqueue the copy of a part of a matrix to the raw memory from byte `start` on. Returns the copy."""
        copy = self._raw[start : start + part.nbytes].view(part.dtype).view(part.shape)
        self.streams.h2d.copy(copy, part)
        return copy


def _least_piece(layers: Sequence[ExpertLayer]) -> int:
    """Return the most bytes of what no piece may divide: a row of blocks, or the scales of an expert."""
    formats = (matrix.format for layer in layers for matrix in layer.matrices)
    return max(max(each.row_bytes, sum(each.part_bytes[1:])) for each in formats)


def _memory_of(experts: nn.Module) -> tuple[int, torch.device]:
    """Return the bytes that the parameters take in an arena, and their device."""
    parameters = list(experts.parameters())
    num_bytes = (-(-each.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT for each in parameters)
    return sum(num_bytes), parameters[0].device


def _move(experts: nn.Module, arena: torch.Tensor) -> None:
    """Move the parameters into the arena, in which layers with other formats have theirs, too."""
    start = 0
    for each in experts.parameters():
        storage = each.untyped_storage()
        own = arena[start : start + storage.nbytes()]
        moved = own.view(each.dtype).as_strided(each.shape, each.stride())
        each.data = moved
        start += -(-own.numel() // _ALIGNMENT) * _ALIGNMENT
