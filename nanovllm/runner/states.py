"""StateMemory: one rank's states of recurrent layers, in slots on the GPU and in snapshots in CPU memory.

Legend: see LayerStates in layers/states.py.

All copies are enqueued on the compute stream, in order with the steps. A state takes a millisecond to cross the link,
and few steps move one.
"""

from typing import NamedTuple

import torch

from nanovllm.core.kv_spec import StateSpec
from nanovllm.core.step_plan import StateSave, StepPlan
from nanovllm.kvcache.transfer.pinned_memory import HostBuffer
from nanovllm.layers.states import HostStateRows, LayerStates, StateRows
from nanovllm.layers.states import StateSave as RowSave
from nanovllm.runner.inputs import StepInputs, state_numbers


class StepStates(NamedTuple):
    """The states of all layers, for the rows of a step."""

    memory: "StateMemory"
    rows: StateRows

    def of_layer(self, layer: int) -> LayerStates:
        """Hot: once per layer."""
        return LayerStates(*self.memory.layers[layer], self.rows)


class StateMemory:
    """A slot is contiguous over all layers, so that a state moves in two copies: the convolution's inputs, and the
    matrices.
    """

    def __init__(
        self, spec: StateSpec, dtype: torch.dtype, device: torch.device, num_slots: int, num_snapshots: int
    ) -> None:
        """`num_slots`: with slot 0, which is nobody's."""
        s = self.spec = spec
        conv_shape = (s.num_layers, s.conv_channels, s.conv_tokens)
        matrix_shape = (s.num_layers, s.num_value_heads, s.key_head_dim, s.value_head_dim)
        pending_shape = (s.num_layers, s.max_guesses, s.input_size)
        self._conv = torch.zeros(num_slots, *conv_shape, dtype=dtype, device=device)
        self._matrix = torch.zeros(num_slots, *matrix_shape, device=device)
        self._pending = torch.zeros(num_slots, *pending_shape, dtype=dtype, device=device)
        self.layers = [
            (self._conv[:, layer], self._matrix[:, layer], self._pending[:, layer]) for layer in range(s.num_layers)
        ]
        pinned_for = device if device.type == "cuda" else None
        self._buffers = [HostBuffer(max(1, num_snapshots * n), pinned_for) for n in (s.conv_bytes, s.matrix_bytes)]
        conv, matrix = (buffer.tensor for buffer in self._buffers)
        self._saved_conv = conv[: num_snapshots * s.conv_bytes].view(dtype).view(num_snapshots, *conv_shape)
        self._saved_matrix = matrix[: num_snapshots * s.matrix_bytes].view(torch.float32).view(-1, *matrix_shape)
        self._saves: list[StateSave] = []  # of the step

    def begin_step(self, plan: StepPlan) -> None:
        """Load the states that the step starts from."""
        states = [step.state for step in plan.sequences if step.state is not None]
        self._saves = [save for state in states for save in state.saves]
        for state in states:
            if state.load >= 0:
                self._conv[state.source].copy_(self._saved_conv[state.load], non_blocking=True)
                self._matrix[state.source].copy_(self._saved_matrix[state.load], non_blocking=True)

    def end_step(self) -> None:
        """Save the states that are kept, after all layers have run."""
        for _, slot, snapshot in self._saves:
            self._saved_conv[snapshot].copy_(self._conv[slot], non_blocking=True)
            self._saved_matrix[snapshot].copy_(self._matrix[slot], non_blocking=True)
        self._saves = []

    def close(self) -> None:
        """Unpin the snapshots. The memory must not be used afterwards."""
        for buffer in self._buffers:
            buffer.close()


def state_rows(plan: StepPlan, tensors: StepInputs) -> StateRows | None:
    """How the sequences of a step use their states. None if no layer is recurrent."""
    if tensors.states is None:
        return None
    saves = tuple(
        RowSave(row, save.num_tokens, save.slot)
        for row, step in enumerate(plan.sequences)
        if step.state is not None
        for save in step.state.saves
        if save.slot != step.state.target
    )
    num_tokens = [step.num_tokens for step in plan.sequences]
    host = HostStateRows(num_tokens, *map(list, zip(*state_numbers(plan), strict=True)), saves)
    return StateRows(tensors.cu_seqlens_q, *tensors.states, max(num_tokens), host)
