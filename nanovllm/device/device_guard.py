"""Which GPU and stream a rank's work goes to, whatever thread calls and whatever its current device is.

Both are settings of a thread. Kernels, events and allocations go to the current ones, so steps that come from different
threads would otherwise run on different GPUs, or on streams that do not wait for each other.
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
    """Make `device` and its default stream the current ones. Nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.default_stream(device)):
        yield


def on_own_device(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Run a method with the device of its object as the current one."""

    @wraps(method)
    def wrapper(self: Owner, *args: P.args, **kwargs: P.kwargs) -> R:
        with current_device(self.device):
            return method(self, *args, **kwargs)

    return wrapper
