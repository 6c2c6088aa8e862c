"""Streams and events for the offload engine: CUDA's, or substitutes on the CPU that copy at once.

There are four queues of work: compute (the model's), h2d, d2h and, with CPU attention, cpu. The work of one queue runs
in order. Work of different queues is ordered only by events, which one queue records and another queue waits for. As in
CUDA, a wait is for what the event has recorded *so far*. A wait for an event that was never recorded does nothing.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from nanovllm.device.cuda import as_int32, copy_rows, new_stream, pinned_view, wait_for_value, write_value
from nanovllm.plan.step_plan import LayerTimes

TIMED_EVERY = 13  # a prime, so that each step times different layers

Event: TypeAlias = Any  # made by Streams.event; a Stream records it or waits for it
CpuJob: TypeAlias = Any  # a CpuWorker's work in each layer of a step; the streams only pass it on


class Stream(Protocol):
    def record(self, event: Event) -> None:
        """Let `event` stand for everything that is enqueued on this stream so far."""

    def wait(self, event: Event) -> None:
        """Let everything that is enqueued on this stream from now on start after `event`."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src. Both have the same shape and are contiguous."""

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue dst <- src for each pair, which takes the host less time than a call of `copy` for each pair."""

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src, for the host as one copy. Both have the same shape [R, ...] and contiguous rows. One side
        is on the GPU.
        """

    def copy_by_kernel(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src for a few rows, without a copy engine. Both have the same shape; `dst` is contiguous."""

    def run(self, target: torch.Tensor, source: torch.Tensor, work: Callable[[], None]) -> None:
        """Enqueue the kernels that `work` launches on the current stream. They read `source` and write `target`."""


class CpuServer(Protocol):
    """Computes attention jobs in the order of submission, each job as soon as its queries have arrived.

    Numbers count up by one from 1 and wrap around in int32. A number is reached when the signed 32-bit difference of
    the flag and the number is not negative. flags[0] is the newest job whose queries have arrived, written by the GPU.
    flags[1] is the newest job whose output is complete, read by the GPU.
    """

    def submit(self, job: CpuJob, layer: int, number: int) -> None:
        """Attend in `layer` when flags[0] has reached `number`, then set flags[1] to `number`. Hot: once per layer.

        The caller keeps the job and its tensors alive until flags[1] has reached `number` or the server is closed.
        Raises RuntimeError if 2,048 jobs are waiting already.
        """

    def close(self) -> None:
        """Finish the job that has started, drop the others, and release all waiters: flags[1] moves far ahead."""


class CpuWorker(Protocol):
    """Threads that attend to keys in CPU memory."""

    def attend(self, job: CpuJob, layer: int) -> None:
        """Do the job's attention in one layer. Returns when the job's output is complete."""

    def serve(self, flags: torch.Tensor) -> CpuServer:
        """Start a server that is driven by `flags`: int32 [2], in CPU memory, pinned if a GPU uses them. Sets both
        flags to 0.
        """
        ...


class CpuStream(Protocol):
    """A queue of attention on the CPU. Threads of the CPU do the work while the host goes on."""

    def record(self, event: Event) -> None:
        """Let `event` stand for everything that this queue has waited for so far."""

    def wait(self, event: Event) -> None:
        """Let everything that is enqueued on this queue from now on start after `event`."""

    def attend(self, job: CpuJob, layer: int) -> Event:
        """Enqueue the job's attention in one layer. The returned event stands for the end of the attention; the caller
        keeps the job alive until then.
        """

    def close(self) -> None:
        """Finish what has begun, and discard queued work."""


class Streams(Protocol):
    @property
    def compute(self) -> Stream: ...

    @property
    def h2d(self) -> Stream: ...

    @property
    def d2h(self) -> Stream: ...

    def cpu(self, worker: CpuWorker) -> CpuStream:
        """Make a queue of attention that `worker` computes."""
        ...

    def on_device(self, host: torch.Tensor) -> torch.Tensor:
        """View host memory, which is pinned if there is a GPU, as a tensor that work on compute reads and writes."""
        ...

    def event(self) -> Event: ...

    def graph_event(self) -> Event:
        """Make an event for recording in CUDA graphs: after each replay it stands for the point of its recording."""
        ...

    def timing_event(self) -> Event:
        """Make an event for `seconds`, or return None if work cannot be timed."""
        ...

    def seconds(self, start: Event, end: Event) -> float | None:
        """Return the time between two recorded timing events, or None if one of them is not known to be done."""

    def is_done(self, event: Event) -> bool:
        """Return True if the work that a recorded event stands for is known to be done. Does not wait for the work."""

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

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def copy_by_kernel(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def run(self, target: torch.Tensor, source: torch.Tensor, work: Callable[[], None]) -> None:
        work()


class ImmediateCpuStream:
    """Computes attention when it is enqueued."""

    def __init__(self, worker: CpuWorker) -> None:
        self._worker = worker

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass

    def attend(self, job: CpuJob, layer: int) -> Event:
        self._worker.attend(job, layer)
        return None

    def close(self) -> None:
        pass


class ImmediateStreams:
    def __init__(self) -> None:
        self.compute = self.h2d = self.d2h = ImmediateStream()

    def cpu(self, worker: CpuWorker) -> ImmediateCpuStream:
        return ImmediateCpuStream(worker)

    def on_device(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def event(self) -> Event:
        return None

    def graph_event(self) -> Event:
        return None

    def timing_event(self) -> Event:
        return None

    def seconds(self, start: Event, end: Event) -> float | None:
        return None

    def is_done(self, event: Event) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CudaStream:
    """A torch stream. None stands for the compute stream: the stream that is current at the time of the call."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream()

    def record(self, event: Event) -> None:
        event.record(self.stream)

    def wait(self, event: Event) -> None:
        event.wait(self.stream)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copy_all([(dst, src)])

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.stream(self.stream):
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        copy_rows(self.stream, dst, src)

    def copy_by_kernel(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            torch.mul(src, 1, out=dst)  # copy_ would use a copy engine

    def run(self, target: torch.Tensor, source: torch.Tensor, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()


class _Attended(NamedTuple):
    """The end of a job, with the methods of torch.cuda.Event: done when `flag` reaches `number`."""

    flag: torch.Tensor
    number: int

    def wait(self, stream: torch.cuda.Stream) -> None:
        wait_for_value(stream, self.flag, self.number)

    def query(self) -> bool:
        return as_int32(int(self.flag) - self.number) >= 0


class CudaCpuStream:
    """A CUDA stream that tells the CPU when to start.

    The GPU writes a value to pinned memory once everything that the stream waits for is done, and a thread of the
    worker watches the value. When the job has ended, the thread writes another value, for which other streams can wait.
    The host only enqueues. A CUDA host function would work as well, but starting one after a kernel takes 0.1 ms.
    """

    def __init__(self, worker: CpuWorker, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        flags = torch.zeros(2, dtype=torch.int32).pin_memory()
        self._may_start, self._has_ended = flags[:1], flags[1:]
        self._server = worker.serve(flags)
        self._num_jobs = 0
        write_value(stream, self._may_start, 0)  # raises where the driver refuses either of the two
        wait_for_value(stream, self._has_ended, 0)

    def record(self, event: Event) -> None:
        event.record(self._stream)

    def wait(self, event: Event) -> None:
        event.wait(self._stream)

    def attend(self, job: CpuJob, layer: int) -> Event:
        self._num_jobs += 1
        number = as_int32(self._num_jobs)
        self._server.submit(job, layer, number)
        write_value(self._stream, self._may_start, number)
        return _Attended(self._has_ended, number)

    def close(self) -> None:
        self._server.close()


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.compute = CudaStream(None)
        self.h2d = CudaStream(new_stream(device, owner=self))
        self.d2h = CudaStream(new_stream(device, owner=self))

    def cpu(self, worker: CpuWorker) -> CudaCpuStream:
        return CudaCpuStream(worker, new_stream(self._device, owner=self))

    def on_device(self, host: torch.Tensor) -> torch.Tensor:
        return pinned_view(host, self._device)

    def event(self) -> Event:
        return torch.cuda.Event()

    def graph_event(self) -> Event:
        return torch.cuda.Event(external=True)

    def timing_event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)

    def seconds(self, start: Event, end: Event) -> float | None:
        return start.elapsed_time(end) / 1000 if self.is_done(end) else None

    def is_done(self, event: Event) -> bool:
        done: bool = event.query()
        return done

    def synchronize(self) -> None:
        self.h2d.stream.synchronize()
        self.d2h.stream.synchronize()


class WorkTimer:
    """Times one in TIMED_EVERY pieces of a stream's work with events on the stream. The host never waits for them."""

    def __init__(self, streams: Streams, stream: Stream | CpuStream) -> None:
        self._streams, self._stream = streams, stream
        self._num_pieces = 0
        self._timed: list[TimedPiece] = []  # since the last `take`

    def begin(self) -> Event | None:
        """Begin a piece of work. Returns None if the piece is not timed. Hot."""
        self._num_pieces += 1
        start = None if self._num_pieces % TIMED_EVERY else self._streams.timing_event()
        if start is not None:
            self._stream.record(start)
        return start

    def end(self, start: Event, num_tokens: int) -> None:
        """End a piece that is timed. Hot."""
        end = self._streams.timing_event()
        self._stream.record(end)
        self._timed.append(TimedPiece(start, end, num_tokens))

    def take(self) -> list["TimedPiece"]:
        """Return the timed pieces since the last call. They may still be running."""
        timed, self._timed = self._timed, []
        return timed


class TimedPiece(NamedTuple):
    start: Event
    end: Event
    num_tokens: int


class TimedPieces(NamedTuple):
    """The timed pieces of a step: streamed groups, and the CPU's attention in a layer."""

    streams: Streams
    link: Sequence[TimedPiece]
    cpu: Sequence[TimedPiece]

    def layer_times(self) -> LayerTimes:
        """Return the measured times. Call this when the step is done."""
        link, cpu = (
            [
                (piece.num_tokens, s)
                for piece in timed
                if (s := self.streams.seconds(piece.start, piece.end)) is not None
            ]
            for timed in (self.link, self.cpu)
        )
        num_tokens, seconds = zip(*link, strict=True) if link else ((), ())
        return LayerTimes(
            (fmean(num_tokens), fmean(seconds)) if link else None, fmean(s for _, s in cpu) if cpu else None
        )


def make_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else ImmediateStreams()


class StreamLog:
    """The events of one stream, whose work comes in batches. A batch has one event per layer, in the order of layers.

    Batches are numbered from 1. The number 0 stands for no work. A stream runs its work in order, so once an event is
    done, all earlier events are done, too. Code that may later have to wait for some work remembers the work's batch
    number; of several batches only the newest matters. The log keeps an event until the event is known to be done.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._events: deque[Event] = deque()  # the newest events, which are not known to be done
        self._num_done = 0

    def __len__(self) -> int:
        return len(self._events)

    @property
    def next_batch(self) -> int:
        """Return the number of the batch that begins now. The previous batch must have the events of all its layers."""
        num_batches, num_in_last = divmod(self._num_done + len(self._events), self._num_layers)
        assert not num_in_last, f"the last batch has the events of {num_in_last} of {self._num_layers} layers"
        return num_batches + 1

    def add(self, event: Event, num_layers: int = 1) -> None:
        """Add an event that was just recorded. It stands for the next `num_layers` layers of the batch. Hot."""
        self._events.extend([event] * num_layers)

    def find(self, batch: int, layer: int) -> Event | None:
        """Return the event of a layer of a batch, or None if the event is known to be done. Hot."""
        index = (batch - 1) * self._num_layers + layer - self._num_done
        return self._events[index] if index >= 0 else None

    def forget_done(self, is_done: Callable[[Event], bool]) -> None:
        """Drop the events that are done by now. They finish in order, so a binary search finds them in few calls."""
        num_done = bisect_left(self._events, True, key=lambda event: not is_done(event))
        for _ in range(num_done):
            self._events.popleft()
        self._num_done += num_done
