"""The attention of a layer as a list of parts, each over some of the keys, and the loop that collects their results.

What a part yields depends on how the step runs. Launched kernel by kernel, it yields partial results, which a
RunningMerge merges. Replayed, it yields CUDA graphs, each of which computes a partial result and merges it in place.
The loop is the same.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

Partial = TypeVar("Partial")
Partial_co = TypeVar("Partial_co", covariant=True)


class AttentionPart(Protocol[Partial_co]):
    """Attention of a layer's queries over some of the keys.

    Every part of a layer is started before the first one is finished, and they are finished in the order of the list.
    A part that works beside the others, on the CPU say, therefore stands last and does its waiting in `finish`.
    """

    @property
    def num_partials(self) -> int:
        """How many partial results `finish` yields in each layer of this step."""
        ...

    def start(self, layer: int, q_THD: torch.Tensor) -> None:
        """Begin what can run beside the other parts. Enqueues only, so that a CUDA graph can capture it."""

    def finish(self, layer: int, q_THD: torch.Tensor) -> Iterable[Partial_co]:
        """The partial results, one after another. What a result was computed from, such as a staging buffer, may be
        overwritten as soon as the next one is asked for.
        """
        ...

    def skip(self, layer: int) -> None:
        """Instead of `start` and `finish` in a layer without queries: release what was brought in for it."""


def finish_parts(
    parts: Iterable[AttentionPart[Partial]], layer: int, q_THD: torch.Tensor, add: Callable[[Partial], object]
) -> None:
    """Hand every partial result to `add`. Hot: once per layer."""
    for part in parts:
        for partial in part.finish(layer, q_THD):
            add(partial)
            del partial  # once merged, its memory is free for the next one
