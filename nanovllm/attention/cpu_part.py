"""The keys that the CPU attends to where they lie, as a part of a layer's attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from nanovllm.attention.base import PartialAttention

Job = TypeVar("Job")
Job_contra = TypeVar("Job_contra", contravariant=True)


class CpuWorker(Protocol[Job_contra]):
    """Who attends on the CPU (kvcache/transfer/cpu_attention.py). A job says which rows attend to which keys."""

    def begin_layer(self, job: Job_contra, layer: int, q_THD: torch.Tensor) -> None:
        """Bring the query to the CPU and begin. Enqueues only."""

    def results(self, q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention [T, H, D] and LSE [H, T] of the layer that was begun last, on the device of its query."""
        ...


@dataclass(frozen=True, kw_only=True)
class CpuPart(Generic[Job]):
    """An AttentionPart, to be the last one: the CPU computes beside the others, and `finish` waits for it."""

    worker: CpuWorker[Job]
    job: Job
    num_partials = 1

    def start(self, layer: int, q_THD: torch.Tensor) -> None:
        """Hot: once per layer."""
        self.worker.begin_layer(self.job, layer, q_THD)

    def finish(self, layer: int, q_THD: torch.Tensor) -> Iterator[PartialAttention]:
        """Hot: once per layer."""
        yield PartialAttention(*self.worker.results(q_THD))

    def skip(self, layer: int) -> None:
        """Nothing was begun."""
