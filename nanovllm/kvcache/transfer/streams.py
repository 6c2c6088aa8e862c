"""Streams and events as the offload engine uses them: CUDA's, or stand-ins for the CPU that copy at once.

There are three queues of work: compute (the model's own), h2d and d2h. The work of one queue runs in order. Work of
different queues is ordered only by events, which one queue records and another waits for. As in CUDA, a wait is for
what the event has recorded *so far*. A wait for an event that was never recorded does nothing.
"""

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import torch

from nanovllm.device.cuda_streams import new_stream

Event: TypeAlias = Any  # made by Streams.event; a Stream records it or waits for it


class Stream(Protocol):
    def record(self, event: Event) -> None:
        """Let `event` stand for everything that is enqueued on this stream so far."""

    def wait(self, event: Event) -> None:
        """Let everything that is enqueued on this stream from here on start after `event`."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src. They have the same shape, and both are contiguous."""

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue dst <- src for each pair. This takes the host less time than a call of `copy` for each."""


class Streams(Protocol):
    @property
    def compute(self) -> Stream: ...

    @property
    def h2d(self) -> Stream: ...

    @property
    def d2h(self) -> Stream: ...

    def event(self) -> Event: ...

    def is_done(self, event: Event) -> bool:
        """Whether the work that a recorded event stands for is known to be done. The host does not wait for it."""

    def synchronize(self) -> None:
        """Return once all work that is enqueued on h2d and d2h is done."""


class ImmediateStream:
    """Runs each copy when it is enqueued, so every wait is over at once."""

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
    """A torch stream. None stands for the compute stream: whichever stream is current at the time of the call."""

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
