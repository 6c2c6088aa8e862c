"""CompanionMemory: the half of a companion (kvcache/companion.py) that has memory on a rank.

A CompanionMemory executes the payloads that the planning half decides. All of its work is enqueued on the compute
stream, in order with the steps. Each hook does nothing by default.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from nanovllm.kernels.state_tensors import LayerStates
from nanovllm.plan.step_plan import StepPlan

# Called with a layer, the index of a streamed group, and the group's K and V, each [blocks, block_size, kv_heads,
# head_dim], after attention over the group
GroupHook: TypeAlias = Callable[[int, int, torch.Tensor, torch.Tensor], None]
# Returns the memory of a layer that is not attention, by its index among the layers of its kind
LayerMemoryOf: TypeAlias = Callable[[int], LayerStates]


class CompanionColumns(NamedTuple):
    """Integers that companions provide for each of B sequences, on the device."""

    columns: tuple[torch.Tensor, ...]  # each int32 [B], in the order of the companions
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    max_query_len: int
    plan: StepPlan | None = None  # None inside a graph


class CompanionMemory:
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
        """Return the memory of the layers that are not attention in a step, or None if the companion has none.

        `given`: the companion's columns.
        """
        return None

    def group_hook(self, plan: StepPlan) -> GroupHook | None:
        """Return the companion's hook for the streamed groups of a step, or None if it has none."""
        return None

    def end_step(self) -> None:
        """Enqueue work that takes effect after all layers have run. Hot: once per step."""

    def launch_kernels(
        self, q_1HD: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], max_context_len: int
    ) -> None:
        """Launch every kernel on one block, on a GPU, so that start-up can compile them."""

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
