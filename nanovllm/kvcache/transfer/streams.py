"""Streams and events, as the offload engine uses them: CUDA's, or stand-ins that run everything at once.

Three queues of work: compute (the model's own), h2d and d2h. Work of one queue runs in order; an event recorded on
one and waited for on another is the only order between them. As in CUDA, waiting for an event means waiting for the
work recorded *so far*; an event never recorded is not waited for.
"""

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import torch

from nanovllm.device.cuda_streams import new_stream

Event: TypeAlias = Any  # made by Streams.event, recorded and waited for through a Stream


class Stream(Protocol):
    def record(self, event: Event) -> None:
        """`event` now stands for everything enqueued on this stream so far."""

    def wait(self, event: Event) -> None:
        """Work enqueued on this stream from here on starts after `event`."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src (same shape, both contiguous)."""

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue dst <- src of each pair. Takes the host less time than calling `copy` for each."""


class Streams(Protocol):
    @property
    def compute(self) -> Stream: ...

    @property
    def h2d(self) -> Stream: ...

    @property
    def d2h(self) -> Stream: ...

    def event(self) -> Event: ...

    def is_done(self, event: Event) -> bool:
        """Whether the work that a recorded event stands for is known to have run. The host does not wait for it."""

    def synchronize(self) -> None:
        """Return when all work enqueued on h2d and d2h is done."""


class ImmediateStream:
    """Runs each copy when it is enqueued; there is nothing left to wait for."""

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for dst, src in pairs:
            dst.copy_(src)


class ImmediateStreams:
    def __init__(self) -> None:
        self.compute = self.h2d = self.d2h = ImmediateStream()

    def event(self) -> Event:
        return None

    def is_done(self, event: Event) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CudaStream:
    """A torch stream. The compute stream is whatever stream is current when it is used."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream()

    def record(self, event: Event) -> None:
        event.record(self.stream)

    def wait(self, event: Event) -> None:
        self.stream.wait_event(event)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copy_all([(dst, src)])

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.stream(self.stream):
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self.compute = CudaStream(None)
        self.h2d = CudaStream(new_stream(device, owner=self))
        self.d2h = CudaStream(new_stream(device, owner=self))

    def event(self) -> Event:
        return torch.cuda.Event()

    def is_done(self, event: Event) -> bool:
        done: bool = event.query()
        return done

    def synchronize(self) -> None:
        self.h2d.stream.synchronize()
        self.d2h.stream.synchronize()


def make_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else ImmediateStreams()
