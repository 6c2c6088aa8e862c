"""Seams: the interfaces through which the runner calls capabilities. What is absent does nothing.

CompanionMemory is the half of a companion (kvcache/seams.py) that has memory on a rank. RankStore is the half of a
PromptStore (schedule/seams.py) on a rank. CpuPart is the part of a step's attention that the CPU computes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from nanovllm.attention.base import PartialAttention, WindowKeys
from nanovllm.config import Config
from nanovllm.device.tp_group import TPGroup
from nanovllm.kernels.state_tensors import LayerStates
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import TimedPiece, TimedPieces
from nanovllm.plan.step_plan import CpuSpan, StepPlan

# Called with a layer, the index of a streamed group, and the group's K and V, each [blocks, block_size, kv_heads,
# head_dim], after attention over the group
GroupHook: TypeAlias = Callable[[int, int, torch.Tensor, torch.Tensor], None]
# Returns the memory of a layer that does not attend to all keys, by its index among the layers of its kind
LayerMemoryOf: TypeAlias = Callable[[int], LayerStates | WindowKeys]


class CompanionColumns(NamedTuple):
    """Integers that companions provide for each of B sequences, on the device."""

    columns: tuple[torch.Tensor, ...]  # each int32 [B], in the order of the companions
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    max_query_len: int
    plan: StepPlan | None = None  # None inside a graph


class CompanionMemory:
    """Executes the payloads that the planning half decides. All of its work is enqueued on the compute stream, in order
    with the steps. Each hook does nothing by default.
    """

    paddings: tuple[int, ...] = ()  # for each column of the companion, its number in a graph's row of padding
    stored_parts: Sequence[torch.Tensor] = ()  # snapshots that can be stored, each [snapshots, ...]

    def begin_step(self, plan: StepPlan, cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Enqueue work that takes effect before the step. Hot: once per step.

        `cache`: K and V on the GPU, as in KVMemory.
        """

    def columns(self, plan: StepPlan) -> tuple[np.ndarray, ...]:
        """Return the columns for the sequences of a step, each int32 [B]. Hot: once per step."""
        return ()

    def layer_memory(self, given: CompanionColumns) -> LayerMemoryOf | None:
        """Return the memory of the layers that do not attend to all keys in a step, or None if the companion has none.

        `given`: the companion's columns.
        """
        return None

    def group_hook(self, plan: StepPlan) -> GroupHook | None:
        """Return the companion's hook for the streamed groups of a step, or None if it has none."""
        return None

    def end_step(self) -> None:
        """Enqueue work that takes effect after all layers have run. Hot: once per step."""

    def launch_kernels(
        self,
        q_THD: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        max_context_len: int,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """Launch every kernel on one block, on a GPU, so that start-up can compile them.

        `q_THD`: queries of the longest chunk. `sinks_H`: the sinks of a layer, or None. All values are arbitrary.
        """

    def close(self) -> None:
        """Release what the garbage collector would not. The memory must not be used afterwards."""


class RankStore:
    """The half of a PromptStore (schedule/seams.py) on a rank. The base class stores nothing."""

    def submit(self, moves: Any) -> None:
        """Begin to move what PromptStore.next_moves has returned, in other threads. All planned steps were launched."""
        raise AssertionError(f"no store on this rank takes {moves}")

    def stats(self) -> dict[str, Any]:
        """Counters for LLM.stats()."""
        return {}

    def close(self) -> None:
        """Finish what was submitted, and end all threads."""


# -- attention on the CPU (capabilities/cpu_attention) --------------------------------------------------------------


class CpuRows(NamedTuple):
    """The keys that each sequence's queries attend to on the CPU. The rows of a sequence are consecutive."""

    num_queries: tuple[int, ...]
    spans: tuple[tuple[CpuSpan, ...], ...]


class CpuStep(Protocol):
    """The CPU's attention in a step that is launched kernel by kernel."""

    def begin_layer(self, layer: int, q_THD: torch.Tensor) -> None:
        """Enqueue the copy of the layer's query to CPU memory and the attention there. Hot: once per layer."""

    def results(self, q_THD: torch.Tensor) -> PartialAttention:
        """Let compute wait for the results of the last layer that was begun. Hot: once per layer."""
        ...


class CpuGraphs(Protocol):
    """The CPU's attention in one kind of CUDA graphs.

    The pieces copy the query to CPU memory before their paged attention, and one more graph merges the results.
    """

    def capture_query(self, q_BHD: torch.Tensor) -> None:
        """Enqueue the copy of a layer's query to CPU memory, and the event that marks its arrival."""

    def results(self, size: int) -> PartialAttention:
        """Return the static buffers of the results of `size` rows."""
        ...

    def begin_step(self, size: int, rows: CpuRows | None) -> None:
        """Begin a step of `size` rows including padding. `rows` is None if the CPU attends to no key in the step."""

    def begin_layer(self, layer: int) -> None:
        """Let the CPU attend once the query has arrived. Hot: once per layer."""

    def end_layer(self) -> bool:
        """Let compute wait for the results. Returns False if the step has none. Hot: once per layer."""
        ...


class CpuPart(Protocol):
    @property
    def name(self) -> str | None:
        """Describe the kernel and its number of threads, or return None if CPU attention is disabled."""

    def step(self, rows: CpuRows, scale: float) -> CpuStep:
        """Prepare the attention of a step that leaves keys to the CPU."""
        ...

    def graphs(self, scale: float) -> Sequence[CpuGraphs]:
        """Make the CpuGraphs of one kind of CUDA graphs; empty if CPU attention is disabled."""
        ...

    def end_step(self, link_pieces: Sequence[TimedPiece]) -> TimedPieces | None:
        """Return the timed pieces of the step that was just enqueued. `link_pieces`: its streamed groups."""

    def close(self) -> None:
        """End the threads and drop queued work."""


class NoCpuPart:
    """The CpuPart of a rank without CPU attention."""

    name = None

    def step(self, rows: CpuRows, scale: float) -> CpuStep:
        raise AssertionError("the plan leaves keys to the CPU, but CPU attention is disabled")

    def graphs(self, scale: float) -> Sequence[CpuGraphs]:
        return ()

    def end_step(self, link_pieces: Sequence[TimedPiece]) -> None:
        return None

    def close(self) -> None:
        pass


# config, offload, query heads of this rank, tp, a CpuKernel to share or None -> CpuPart
CpuPartFactory: TypeAlias = Callable[[Config, OffloadEngine, int, TPGroup, Any], CpuPart]
