"""ExpertLink: in steps with few tokens the GPU reads some of the chosen experts over the link, while the CPU computes
the others.

The CPU's threads compute less than they could read, where instructions limit them and not memory. Then both sides
together get more experts from memory than the CPU alone. The kernels are part of the step's CUDA graph, and run in the
order of the compute stream, so no edge is needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanovllm.capabilities.cpu_experts.staging import TargetRows, target_rows
from nanovllm.capabilities.cpu_experts.store import ExpertLayer
from nanovllm.layers.moe import ExpertBiases, Experts
from nanovllm.layers.packed_weight import PackedWeight, packed
from nanovllm.offload.streams import Streams
from nanovllm.plan.expert_formats import LINK_SHARES, num_link_slots


@dataclass(frozen=True)
class _Source:
    """A matrix of a layer in pinned memory, as the GPU sees it."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    middle: int


class ExpertLink:
    """Slots on the GPU for experts of any layer."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        make_experts: Callable[[int, int], Experts],
        streams: Streams,
        share: int,
    ) -> None:
        """make_experts(layer, n): allocates the weights of n of a layer's experts on the GPU. share: of the chosen
        experts, in LINK_SHARES.
        """
        self.share, self._layers, self._num_experts = share, layers, layers[0].num_places
        self._num_slots = num_link_slots((layer.memory.nbytes for layer in layers), self._num_experts)
        kinds = {layer.kind: number for number, layer in enumerate(layers)}
        self._experts = {kind: make_experts(number, self._num_slots) for kind, number in kinds.items()}
        for experts in self._experts.values():
            for parameter in experts.parameters():
                parameter.data.zero_()  # unused slots are multiplied by 0
        formats = {matrix.format for layer in layers for matrix in layer.matrices}
        block_bytes = (each.num_rows * each.row_bytes for each in formats if each.is_of_blocks)
        device = next(next(iter(self._experts.values())).parameters()).device
        # GGUF's blocks are packed from here, for unused slots, too
        self._raw = torch.zeros(self._num_slots * max(block_bytes, default=0), dtype=torch.uint8, device=device)

        def view(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else streams.on_device(tensor)

        self._sources = [
            [_Source(streams.on_device(m.codes), view(m.scales), view(m.zeros), m.middle) for m in layer.matrices]
            for layer in layers
        ]

    def begin(
        self,
        layer: int,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        cells: torch.Tensor | None,
        send: Callable[[torch.Tensor], None],
        biases: ExpertBiases | None,
    ) -> torch.Tensor:
        """`send` the experts that the CPU computes, int64 [T, C], and return the sums over the others, [T, H]. Hot.

        biases: of all experts of the layer.
        """
        from nanovllm.kernels import read_experts

        num_slots = min(self._num_slots, experts.numel() * self.share // LINK_SHARES)
        divided = read_experts.divide(
            experts, cells, num_experts=self._num_experts, num_slots=num_slots, share=self.share
        )
        send(divided.on_cpu)
        own = self._experts[self._layers[layer].kind]
        for source, rows in zip(self._sources[layer], target_rows(own), strict=True):
            self._fill(source, rows, divided.slot_experts)
        # These ordinary kernels start once all slots are written. The kernels that multiply may read weights early
        own_weights, slots = weights.masked_fill(divided.slots < 0, 0.0), divided.slots.clamp(min=0)
        if biases is not None:
            # -1 for slots without an expert; uninitialized while kernels are only compiled
            biases = biases.select(divided.slot_experts.clamp(0, self._num_experts - 1))
        return own.sums(x, slots, own_weights, biases)

    def _fill(self, source: _Source, rows: TargetRows, slot_experts: torch.Tensor) -> None:
        """Enqueue the kernels that fill the slots with a matrix of these experts, int32 [S]."""
        from nanovllm.kernels import gguf_pack, read_experts

        weight, num_slots = rows.weight, len(slot_experts)
        if isinstance(weight, PackedWeight) and weight.block_type is not None:
            raw = self._raw[: num_slots * source.codes[0].nbytes].view(num_slots, *source.codes.shape[1:])
            read_experts.read_rows(source.codes, slot_experts, raw)
            gguf_pack.pack_blocks(raw.flatten(0, 1), packed(weight), rows.part_rows())
            return
        codes = rows.of_experts(weight.codes if isinstance(weight, PackedWeight) else weight)
        read_experts.read_rows(source.codes, slot_experts, codes[:num_slots])
        if isinstance(weight, PackedWeight):
            assert source.scales is not None, "a packed weight has scales"
            target = packed(weight), rows.part_rows(weight.scale_rows)
            read_experts.arrange_scales(
                source.scales, source.zeros, *target, middle=source.middle, experts=slot_experts
            )
