"""Runs a rank's work on its own GPU and stream, whichever thread calls it and whatever device is current there.

The current device and stream are settings of a thread. Kernels, events and allocations use them, so steps from
different threads could otherwise run on different GPUs, or on streams that do not wait for each other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch


class HasDevice(Protocol):
    device: torch.device


P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner", bound=HasDevice)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make `device` and its default stream the current ones. Does nothing for the CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.default_stream(device)):
        yield


def on_own_device(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Decorator: run a method with its object's device as the current one."""

    @wraps(method)
    def wrapper(self: Owner, *args: P.args, **kwargs: P.kwargs) -> R:
        with current_device(self.device):
            return method(self, *args, **kwargs)

    return wrapper
