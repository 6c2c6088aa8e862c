"""Tensor-parallel ranks as threads of one process, for tests of what is computed rather than how it is sent."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import torch

from nanovllm.device.tp_group import TPGroup

Result = TypeVar("Result")


class _Exchange:
    """Every rank gives a tensor and gets all of them, in rank order."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=240)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size

    def swap(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = x.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


@dataclass(frozen=True)
class ThreadGroup(TPGroup):
    exchange: _Exchange = field(default_factory=lambda: _Exchange(1))
    calls: list[str] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        return x.copy_(torch.stack(self.exchange.swap(self.rank, x)).sum(0))

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.calls.append("all_gather")
        return torch.cat(self.exchange.swap(self.rank, x), dim=-1, out=out)


def run_ranks(size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """`work(tp)` of every rank at once; their results in rank order."""
    exchange = _Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadGroup(rank, size, exchange=exchange) for rank in range(size)]))
