"""SlotMemory: one rank's states of sequences, in slots on the GPU and in snapshots in CPU memory. StateMemory: the
states of recurrent layers.

Legend: see LayerStates in kernels/state_tensors.py.

All copies between slots and snapshots are enqueued on the compute stream, in order with the steps. A state crosses the
link in a millisecond, and few steps copy a state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.capabilities.recurrent.places import SnapshotSave, StateFlushes, StateStep
from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.kernels.state_tensors import HostStateRows, LayerStates, StateRows, StateSave
from nanovllm.plan.kv_spec import StateSpec
from nanovllm.plan.step_plan import StepPlan, find_payload
from nanovllm.runner.kv_memory import KVMemory
from nanovllm.runner.seams import CompanionColumns, CompanionMemory, LayerMemoryOf


class StepStates(NamedTuple):
    """The states of all layers, for the rows of a step."""

    memory: "StateMemory"
    rows: StateRows

    def of_layer(self, layer: int) -> LayerStates:
        """Return the states of one layer. Hot: once per layer."""
        conv_NWC, matrix_NHKV, pending_NGI = self.memory.layers[layer]
        return LayerStates(conv_NWC, matrix_NHKV, pending_NGI, self.rows)


NO_STATE = StateStep(source=-1, target=0)  # for steps that start-up measures


class SlotMemory(CompanionMemory):
    """The states of sequences in slots on the GPU, and snapshots of them in CPU memory."""

    def __init__(
        self,
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        num_slots: int,
        num_snapshots: int,
    ) -> None:
        """`shapes`: the parts of a state, each of which is copied by one copy."""
        self.slots = [torch.zeros(num_slots, *shape, dtype=kind, device=device) for shape, kind in shapes]
        pinned_for = device if device.type == "cuda" else None
        sizes = [num_snapshots * math.prod(shape) * kind.itemsize for shape, kind in shapes]
        self._buffers = [HostBuffer(max(1, size), pinned_for) for size in sizes]
        self.snapshots = [
            buffer.tensor[:size].view(kind).view(num_snapshots, *shape)
            for buffer, size, (shape, kind) in zip(self._buffers, sizes, shapes, strict=True)
        ]
        self.stored_parts = self.snapshots
        self._saves: list[SnapshotSave] = []  # saves of the step

    def begin_step(self, plan: StepPlan, cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Save the states of preempted sequences, and load the states that the step starts from."""
        flushes = find_payload(plan.moves.payloads, StateFlushes)
        for slot, snapshot in flushes.flushes if flushes is not None else ():
            self._save(slot, snapshot)
        states = [state for step in plan.sequences if (state := step.payload(StateStep)) is not None]
        self._saves = [save for state in states for save in state.saves if save.slot >= 0]
        for state in states:
            if state.load >= 0:
                for slots, snapshots in zip(self.slots, self.snapshots, strict=True):
                    slots[state.source].copy_(snapshots[state.load], non_blocking=True)

    def end_step(self) -> None:
        """Copy states to snapshots, after all layers have run."""
        for _, slot, snapshot in self._saves:
            self._save(slot, snapshot)
        self._saves = []

    def _save(self, slot: int, snapshot: int) -> None:
        for slots, snapshots in zip(self.slots, self.snapshots, strict=True):
            snapshots[snapshot].copy_(slots[slot], non_blocking=True)

    def close(self) -> None:
        """Unpin the snapshots. The memory must not be used afterwards."""
        for buffer in self._buffers:
            buffer.close()


class StateMemory(SlotMemory):
    """The states of the recurrent layers of a rank. A slot is contiguous over all layers, so that a state is copied in
    three copies: the inputs of the convolution, the matrices, and the pending inputs.
    """

    paddings = (-1, 0, 0, 0)  # padding rows start from zeros and leave their states in slot 0

    def __init__(
        self, spec: StateSpec, dtype: torch.dtype, device: torch.device, num_slots: int, num_snapshots: int
    ) -> None:
        """`num_slots`: including slot 0, which no sequence owns."""
        s = self.spec = spec
        conv_shape = (s.num_layers, s.conv_tokens, s.conv_channels)
        matrix_shape = (s.num_layers, s.num_value_heads, s.key_head_dim, s.value_head_dim)
        pending_shape = (s.num_layers, s.max_guesses, s.input_size)
        shapes = ((conv_shape, dtype), (matrix_shape, torch.float32), (pending_shape, dtype))
        super().__init__(shapes, device, num_slots, num_snapshots)
        self.layers = [tuple(each[:, layer] for each in self.slots) for layer in range(s.num_layers)]
        self.stored_parts = self.stored_parts[:2]  # nothing is pending where later prompts continue

    def columns(self, plan: StepPlan) -> tuple[np.ndarray, ...]:
        """The fields of StateRows (kernels/state_tensors.py) that have one number per sequence."""
        return tuple(np.array(column, np.int32) for column in zip(*_numbers(plan), strict=True))

    def layer_memory(self, given: CompanionColumns) -> LayerMemoryOf:
        host = None if given.plan is None else _host_rows(given.plan)
        sources, targets, num_replayed, num_guesses = given.columns
        rows = StateRows(given.cu_seqlens_q, sources, targets, num_replayed, num_guesses, given.max_query_len, host)
        return StepStates(self, rows).of_layer


def _numbers(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """For each sequence: source slot, target slot, number of replayed tokens, number of draft tokens."""
    states = (step.payload(StateStep) or NO_STATE for step in plan.sequences)
    return [(*state[:3], step.num_guesses) for state, step in zip(states, plan.sequences, strict=True)]


def _host_rows(plan: StepPlan) -> HostStateRows:
    saves = tuple(
        StateSave(row, save.num_tokens, save.slot)
        for row, step in enumerate(plan.sequences)
        if (state := step.payload(StateStep)) is not None
        for save in state.saves
        if save.slot != state.target
    )
    num_tokens = tuple(step.num_tokens for step in plan.sequences)
    sources, targets, num_replayed, num_guesses = zip(*_numbers(plan), strict=True)
    return HostStateRows(num_tokens, sources, targets, num_replayed, num_guesses, saves)


@dataclass(frozen=True)
class StateSetup:
    """A CompanionSetup."""

    num_slots: int
    num_snapshots: int

    def allocate(self, memory: KVMemory) -> StateMemory:
        assert isinstance(memory.spec.states, StateSpec), "the model has recurrent layers"
        return StateMemory(memory.spec.states, memory.dtype, memory.device, self.num_slots, self.num_snapshots)

    def make_drafts(self, companion: CompanionMemory) -> None:
        return None
