"""Streams on the CPU whose copies run as late or as early as the events allow, and a race detector on top.

Work of the compute stream runs on the host at once. h2d and d2h are queues of copies and waits, cpu is one of attention
and waits, and the mode says when queued work runs:

- late: when something that must come after it forces it: `compute.wait` on an event recorded after it, directly or
  through waits of the other queues, or `synchronize`;
- early: as soon as its waits are satisfied, which here is when it is enqueued;
- random: at every call some prefix of the queues that the waits allow is run, drawn from `seed`; so is how eager each
  of these queues is, from one that runs only when forced to one that runs at every call.

The host may ask whether an event is done. It learns of it late, by chance: at each question with a probability of 1/2
once the work has run. What is enqueued after it has learned of it comes after that work.

Compute that runs at once cannot show a load that overtakes a late *reader*. So every access to memory is also checked
by happens-before, whatever the mode: two accesses of one byte by different streams, at least one of them a write,
that no chain of events orders raise `race_detector.StreamRaceError` at the call that enqueues the second. What copies
touch is known; what compute touches is declared, by `TrackedAttention`, `TrackedBackend` or by
`streams.compute.read(tensor)` and `.write`.

A wait can be cut out to show that it is needed: run once, then again for each edge of `streams.edges_seen`:

    streams = SimulatedStreams("early", drop={edge})
    streams.name_region("k_cache_gpu", engine.k_cache_gpu)  # messages then say k_cache_gpu[layer, slot, tokens]
"""

import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from race_detector import Access, RaceDetector, Site

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention, StepAttention
from nanovllm.capabilities.cpu_attention.job import AttentionJob
from nanovllm.capabilities.shadow.memory import ShadowMoves
from nanovllm.kernels.state_tensors import LayerStates
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.offload.streams import CpuWorker, Event

Mode = Literal["late", "early", "random"]
MODES: tuple[Mode, ...] = get_args(Mode)
WAIT_HELPERS = frozenset({"_wait"})  # functions that only pass a wait on: the line that calls them makes the edge


class Edge(NamedTuple):
    """A wait in the source: which stream waits, for work of which stream, and where it says so."""

    waiting: str
    recorded_on: str
    site: Site

    def __str__(self) -> str:
        return f"{self.waiting} waits for {self.recorded_on} at {self.site}"


def _caller() -> Site:
    """The innermost line that is neither in this file nor in a helper."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_name in WAIT_HELPERS:
        assert frame.f_back is not None
        frame = frame.f_back
    return Site(Path(frame.f_code.co_filename).name, frame.f_lineno)


class _Point(NamedTuple):
    """An event's meaning when it was recorded: a length of a queue, and a vector clock for the detector."""

    stream: "SimulatedStream"
    position: int
    clock: tuple[int, ...]


class _Attention(NamedTuple):
    worker: CpuWorker
    job: AttentionJob
    layer: int


class SimulatedEvent:
    """Stands for nothing until it is recorded; recorded again, it stands for the newer point only."""

    point: _Point | None = None


class _Copy(NamedTuple):
    dst: torch.Tensor
    src: torch.Tensor


class _Work(NamedTuple):
    run: Callable[[], None]


class SimulatedStream:
    """One queue of work, in the calls of `offload.streams.Stream`, with `read` and `write` declared beside.

    `clock[i]` is the last epoch of stream i whose work is ordered before what is enqueued here next. An epoch of a
    stream is its work between two records.
    """

    def __init__(self, streams: "SimulatedStreams", name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.queue: deque[_Copy | _Work | _Attention | _Point] = deque()
        self.num_enqueued = 0
        self.num_done = 0
        self.num_known_done = 0  # to the host
        self.clock = [0, 0, 0, 0]
        self.epoch_closed = True
        self._streams = streams

    def record(self, event: Event) -> None:
        """`event` now stands for everything enqueued on this stream so far."""
        assert isinstance(event, SimulatedEvent), f"{event!r} was not made by SimulatedStreams.event()"
        self._streams.advance(self)
        if self is self._streams.compute:  # the host can be late to learn of work that has run, too
            self.num_enqueued = self.num_done = self.num_enqueued + 1
        event.point = _Point(self, self.num_enqueued, tuple(self.clock))
        self.epoch_closed = True

    def wait(self, event: Event) -> None:
        """Work enqueued from here on starts after what `event` has recorded so far, unless the edge is in `drop`."""
        assert isinstance(event, SimulatedEvent), f"{event!r} was not made by SimulatedStreams.event()"
        point = event.point  # a later record of the event does not change what is waited for
        if point is None or point.stream is self:
            return
        edge = Edge(self.name, point.stream.name, _caller())
        self._streams.edges_seen[edge] += any(new > old for new, old in zip(point.clock, self.clock, strict=True))
        if edge in self._streams.drop:
            return
        self.join(point.clock)
        if self is self._streams.compute:
            self._streams.run(point.stream, point.position)
        else:
            self._enqueue(point)
        self._streams.advance(self)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src, on the compute stream at once. Raises StreamRaceError."""
        assert dst.shape == src.shape, f"copy of {tuple(src.shape)} to {tuple(dst.shape)}: shapes must be equal"
        assert dst.dtype == src.dtype, f"copy of {src.dtype} to {dst.dtype}: dtypes must be equal"
        self.read(src)
        self.write(dst)
        if self is self._streams.compute:
            dst.copy_(src)
        else:
            self._enqueue(_Copy(dst, src))
            self._streams.advance(self)

    copy_by_kernel = copy

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue dst <- src of each pair."""
        for dst, src in pairs:
            self.copy(dst, src)

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src of each row."""
        self.copy_all(zip(dst, src, strict=True))

    def run(self, target: torch.Tensor, source: torch.Tensor, work: Callable[[], None]) -> None:
        """Enqueue work that reads `source` and writes `target`, on the compute stream at once."""
        self.read(source)
        self.write(target)
        if self is self._streams.compute:
            work()
        else:
            self._enqueue(_Work(work))
            self._streams.advance(self)

    def read(self, tensor: torch.Tensor) -> None:
        """Declare that work enqueued here now reads all of a contiguous tensor. Raises StreamRaceError."""
        self._access(tensor, "reads")

    def write(self, tensor: torch.Tensor) -> None:
        """Declare that work enqueued here now writes all of a contiguous tensor. Raises StreamRaceError."""
        self._access(tensor, "writes")

    def join(self, clock: tuple[int, ...]) -> None:
        self.clock = [max(pair) for pair in zip(self.clock, clock, strict=True)]

    def _access(self, tensor: torch.Tensor, verb: Literal["reads", "writes"]) -> None:
        shape, strides = tuple(tensor.shape), tensor.stride()
        assert tensor.is_contiguous(), f"{self.name} {verb} {shape} with strides {strides}: must be contiguous"
        self._streams.advance(self)
        if tensor.numel() == 0:
            return
        if self.epoch_closed:
            self.clock[self.index] += 1
            self.epoch_closed = False
        if self._streams.detector is not None:
            access = Access(self.name, self.index, self.clock[self.index], verb, _caller())
            self._streams.detector.check(tensor, access, self.clock)

    def _enqueue(self, work: _Copy | _Attention | _Point) -> None:
        self.queue.append(work)
        self.num_enqueued += 1


class SimulatedCpuStream(SimulatedStream):
    """A queue of attention, which knows what each job reads and writes."""

    worker: CpuWorker

    def attend(self, job: AttentionJob, layer: int) -> SimulatedEvent:
        """Enqueue a job. The event stands for its end. Raises StreamRaceError."""
        self.read(job.q_THD)
        for row in job.rows:
            for span in row.spans:
                for cache in (job.k_cache, job.v_cache):
                    self.read(cache[layer].flatten(0, 1)[span.first_token : span.first_token + span.num_tokens])
        self.write(job.out_THD)
        self.write(job.lse_HT)
        self._enqueue(_Attention(self.worker, job, layer))
        event = self._streams.event()
        self.record(event)
        return event

    def close(self) -> None:
        """Nothing is left that the host must let go."""


class SimulatedStreams:
    """The `Streams` of a test.

    mode, seed: when queued copies run, see the module.
    drop: edges whose waits are ignored, taken from `edges_seen` of an earlier run of the same code.
    check_races: False leaves only what a missing edge does to the values.

    `edges_seen` counts for each edge how often it ordered what was not ordered yet. An edge that is there with a count
    of 0 was redundant in this run, and dropping it cannot be noticed.
    """

    def __init__(
        self, mode: Mode = "late", seed: int = 0, drop: Collection[Edge] = frozenset(), check_races: bool = True
    ) -> None:
        assert mode in MODES, f"mode {mode!r} is none of {MODES}"
        self.mode = mode
        self.drop = frozenset(drop)
        self.edges_seen: Counter[Edge] = Counter()
        self.compute = SimulatedStream(self, "compute", 0)
        self.h2d = SimulatedStream(self, "h2d", 1)
        self.d2h = SimulatedStream(self, "d2h", 2)
        self._cpu = SimulatedCpuStream(self, "cpu", 3)
        self._queued = (self.h2d, self.d2h, self._cpu)
        self.detector = RaceDetector() if check_races else None
        self._random = random.Random(seed)
        self._host_random = random.Random(seed)
        self._eagerness = {stream: self._random.choice((0.0, 0.05, 0.3, 1.0)) for stream in self._queued}

    def name_region(self, name: str, tensor: torch.Tensor) -> None:
        """Call the memory of a contiguous tensor `name[...]` in messages."""
        if self.detector is not None:
            self.detector.name_region(name, tensor)

    def cpu(self, worker: CpuWorker) -> SimulatedCpuStream:
        """The queue of attention; every caller gets the same one."""
        self._cpu.worker = worker
        return self._cpu

    def on_device(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def event(self) -> SimulatedEvent:
        return SimulatedEvent()

    graph_event = event

    def timing_event(self) -> SimulatedEvent | None:
        """Nothing is timed; a test may do so."""
        return None

    def seconds(self, start: Event, end: Event) -> float | None:
        return None

    def is_done(self, event: Event) -> bool:
        """Return True if the host knows that the work of a recorded event has run."""
        assert isinstance(event, SimulatedEvent) and event.point is not None, f"{event!r} was not recorded"
        stream, position, clock = event.point
        if stream.num_done >= position > stream.num_known_done and self._host_random.random() < 0.5:
            stream.num_known_done = position
        if position > stream.num_known_done:
            return False
        for waiting in (self.compute, *self._queued):
            waiting.join(clock)
        return True

    def synchronize(self) -> None:
        """Run all queued work. Whatever any stream does from here on is ordered after it."""
        for stream in self._queued:
            self.run(stream, stream.num_enqueued)
            stream.epoch_closed = True
        for stream in (self.compute, *self._queued):
            for done in self._queued:
                stream.join(tuple(done.clock))

    def run(self, stream: SimulatedStream, position: int) -> None:
        """Run the first `position` entries of a stream and whatever they wait for.

        Ends always: a wait is for work that was enqueued before it.
        """
        goals = [(stream, position)]
        while goals:
            stream, position = goals[-1]
            if stream.num_done >= position:
                goals.pop()
                continue
            work = stream.queue[0]
            if isinstance(work, _Copy):
                work.dst.copy_(work.src)
            elif isinstance(work, _Work):
                work.run()
            elif isinstance(work, _Attention):
                work.worker.attend(work.job, work.layer)
            elif work.stream.num_done < work.position:
                goals.append((work.stream, work.position))
                continue
            stream.queue.popleft()
            stream.num_done += 1

    def advance(self, caller: SimulatedStream) -> None:
        """Run what the mode runs at a call on `caller`."""
        if self.mode == "early":
            self.run(caller, caller.num_enqueued)
        elif self.mode == "random":
            for stream, eagerness in self._eagerness.items():
                if stream.queue and self._random.random() < eagerness:
                    self.run(stream, stream.num_done + self._random.randint(1, len(stream.queue)))


class TrackedAttention(StepAttention):
    """The attention of a step, which tells the compute stream of a simulation what each layer writes to the caches."""

    def __init__(self, attention: StepAttention, streams: SimulatedStreams) -> None:
        self._attention = attention
        self._streams = streams

    def cells(self, layer: int) -> KVCells:
        """The layer writes them as soon as this returns."""
        cells = self._attention.cells(layer)
        write_cells(self._streams, cells)
        return cells

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        return self._attention.attend(layer, q_THD, sinks_H)

    def layer_memory(self, layer: int) -> LayerStates:
        return self._attention.layer_memory(layer)


def write_cells(streams: SimulatedStreams, cells: KVCells) -> None:
    """Declare that the compute stream writes these cells: each run of neighbours as one access."""
    index = np.unique(cells.slot_mapping_T.numpy())
    index = index[index >= 0]
    for run in np.split(index, np.flatnonzero(np.diff(index) != 1) + 1):
        for cache_NPKD in (cells.k_cache_NPKD, cells.v_cache_NPKD):
            if len(run):
                streams.compute.write(cache_NPKD.view(-1, *cache_NPKD.shape[2:])[run[0] : run[-1] + 1])


def tracked_fill(fill: Callable[..., None], streams: SimulatedStreams) -> Callable[..., None]:
    """Shadow._fill, which declares what it reads."""

    def read_and_fill(moves: ShadowMoves, k_LNPKD: torch.Tensor, v_LNPKD: torch.Tensor, layers: slice) -> None:
        for block in moves.pages[:, 0].tolist():
            for layer in range(len(k_LNPKD)):
                for cache_LNPKD in (k_LNPKD, v_LNPKD):
                    streams.compute.read(cache_LNPKD[layer, block])
        fill(moves, k_LNPKD, v_LNPKD, layers)

    return read_and_fill


class TrackedBackend(AttentionBackend):
    """A backend that tells the compute stream of a simulation what it reads of the caches."""

    name = "tracked"

    def __init__(self, backend: AttentionBackend, streams: SimulatedStreams) -> None:
        self._backend = backend
        self._streams = streams

    @classmethod
    def why_unavailable(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        """Reads the valid tokens of every block that a query sees."""
        assert batch.host is not None, "a simulated step needs PagedBatch.host"
        block_size = k_cache_NPKD.shape[1]
        valid_tokens: dict[int, int] = {}
        host = batch.host
        for query_len, context_len, table in zip(host.query_lens, host.context_lens, host.block_tables, strict=True):
            starts = range(0, context_len if query_len else 0, block_size)
            assert len(table) >= len(starts), f"a table of {len(table)} blocks for {context_len} tokens"
            unseen = 0 if batch.window is None else max(0, context_len - query_len - batch.window + 1)
            for block_idx, start in enumerate(starts):
                num_tokens = min(block_size, context_len - start)
                if start + num_tokens <= unseen:
                    continue
                valid_tokens[table[block_idx]] = max(num_tokens, valid_tokens.get(table[block_idx], 0))
        for gpu_block_id, num_tokens in valid_tokens.items():
            for cache_NPKD in (k_cache_NPKD, v_cache_NPKD):
                self._streams.compute.read(cache_NPKD[gpu_block_id, :num_tokens])
        return self._backend.attend(q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale, sinks_H)

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        """Reads the parts, one of which may lie where the CPU has put it."""
        for part in parts:
            for tensor in part:
                self._streams.compute.read(tensor.contiguous())
        return self._backend.merge(parts, dtype)
