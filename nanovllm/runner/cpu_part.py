"""CpuPart: the part of a step's attention that the CPU computes, as the runner uses it.

The implementation is capabilities/cpu_attention. NoCpuPart replaces it where CPU attention is disabled.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from nanovllm.attention.base import PartialAttention
from nanovllm.config import Config
from nanovllm.device.tp_group import TPGroup
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import TimedPiece
from nanovllm.plan.step_plan import CpuSpan
from nanovllm.runner.step_result import TimedPieces


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


# config, offload, query heads of this rank, tp -> CpuPart
CpuPartFactory: TypeAlias = Callable[[Config, OffloadEngine, int, TPGroup], CpuPart]
