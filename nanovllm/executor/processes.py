"""ProcessExecutor: several ranks on one machine. Rank 0 is in this process, each other rank in a spawned worker.

Owns the workers, the pipes and shared memory to them, and the TPGroup. What always holds: every rank runs the same
methods of its runner in the same order. If a rank fails, the executor ends: all workers are stopped, and rank 0
raises an exception. No worker outlives rank 0, however rank 0 ends.

The ranks share torch's threads evenly. Rank 0 limits itself to its share only during a call. All other work in the
user's process, including the work of other engines, keeps the number of threads that the user has set.

    rank 0                                    worker
    starts the workers                        imports, reports STARTED
    connects, builds its runner               connects, builds its runner, reports READY
    call: sends the call, makes it itself     receives the call, makes it; reports FAILED and ends when it raises
    close: closes the control pipe            end of file: ends
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Concatenate, NamedTuple, TypeAlias

import torch
from tqdm import tqdm

from nanovllm.device.tp_group import TPGroup, connect, join_store, open_store
from nanovllm.errors import EngineError, WorkerDiedError
from nanovllm.executor.base import Executor, LaunchedStep, P, Result, Runner
from nanovllm.utils.interrupt import end_with_parent

SEGMENT_BYTES = 1 << 20  # shared memory that calls go through; larger calls go in pieces
STOP_TIMEOUT_S = 5.0  # time for a worker to finish its current work
REPORT_TIMEOUT_S = 1.0  # time for a worker to report its exception, once rank 0 has noticed a failure
SPIN_S = 50e-6
MAX_SLEEP_S = 500e-6
CHECK_INTERVAL_S = 0.1
STARTED, READY, FAILED = "started", "ready", "failed"  # the stages that a worker reports
_HEADER = struct.Struct("QQ")  # bytes in this piece, bytes of the message still to come

Segment: TypeAlias = ctypes.Array[ctypes.c_char]


class Call(NamedTuple):
    """A method of the runner, by name, and its arguments."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self, runner: object) -> Any:
        return getattr(runner, self.method)(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Job:
    """Everything a worker needs to start."""

    make_runner: bytes  # pickled separately, so that a failure to unpickle it is reported like any other error
    devices: Sequence[torch.device]  # by rank
    port: int  # where rank 0's store listens
    num_threads: int


class ProcessExecutor(Executor):
    def __init__(
        self,
        make_runner: Callable[[TPGroup], Any],
        devices: Sequence[torch.device],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Start the ranks, and build the runner of each with `make_runner(tp)`. Returns when all are ready.

        `make_runner` is pickled. `devices` has the device of each rank, `tp.device`: two or more devices of one type.
        An exception on rank 0 is raised here as it is; on another rank, it becomes a WorkerDiedError with its
        traceback. Either way all workers have then been stopped.
        """
        self._workers: list[_Worker] = []
        self._failure: str | None = None
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _end_workers, self._workers, STOP_TIMEOUT_S)
        self.tp = TPGroup()
        self._num_threads = threads_per_rank(len(devices))
        with self._watch():
            store = open_store()
            job = Job(pickle.dumps(make_runner), devices, store.port, self._num_threads)
            self._sender = self._start_workers(job, segment_bytes)
            self._wait_for_stage(STARTED)  # rank 0 cannot be interrupted while it connects, so only now
            self.tp = connect(store, 0, len(devices), devices[0])
            self.runner: Runner = make_runner(self.tp)
            self._wait_for_stage(READY)

    def call(self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """See Executor. Raises WorkerDiedError even if rank 0 waits for a dead worker in a collective on the CPU.

        Any exception on rank 0 ends the executor.
        """
        if self._failure is not None:
            raise WorkerDiedError(self._failure)
        if not self._finalizer.alive:
            raise EngineError("the engine's executor is closed")
        call = Call(method.__name__, args, kwargs)
        with self._watch():
            self._sender.send(call)
            result: Result = call.make(self.runner)
            return result

    def wait_for(self, step: LaunchedStep) -> None:
        """Spin briefly, then sleep for 1% of the time waited so far, so that a long step does not occupy a core."""
        start = last_check = time.perf_counter()
        while not step.is_done():
            now = time.perf_counter()
            if now - start > SPIN_S:
                time.sleep(min((now - start) / 100, MAX_SLEEP_S))
            if now - last_check > CHECK_INTERVAL_S:
                self.check()
                last_check = now

    def check(self) -> None:
        if self._failure is None and self._finalizer.alive:
            self._failure = self._find_failure()
        if self._failure is not None:
            self._end(timeout_s=0)
            raise WorkerDiedError(self._failure)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.runner.close()
        finally:
            self._end(STOP_TIMEOUT_S)  # the workers' memory is freed with their processes

    def _start_workers(self, job: Job, segment_bytes: int) -> "Sender":
        """Spawn the workers, which may still be importing on return. Returns the sender of their calls."""
        context = multiprocessing.get_context("spawn")
        segment = context.RawArray(ctypes.c_char, segment_bytes)
        for rank in range(1, len(job.devices)):
            control, worker_control = context.Pipe()
            reports, worker_reports = context.Pipe(duplex=False)
            args = (job, rank, segment, worker_control, worker_reports)
            process = context.Process(target=_worker_main, args=args, name=f"nanovllm-rank{rank}", daemon=True)
            process.start()
            self._workers.append(_Worker(rank, process, control, reports))
            worker_control.close()  # from now on only the worker holds its ends of the pipes, so its death closes them
            worker_reports.close()
        return Sender(segment, [worker.control for worker in self._workers])

    def _end(self, timeout_s: float) -> None:
        if self._finalizer.detach() is not None:
            _end_workers(self._workers, timeout_s)
            self.tp.close()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Run rank 0's part of a call on its share of the threads.

        An exception ends the executor. If a worker has failed, its failure was the cause, and WorkerDiedError is
        raised.
        """
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError | EOFError | OSError) and self._failure is None:
                self._failure = self._find_failure(REPORT_TIMEOUT_S)
            self._end(timeout_s=0)
            if self._failure is None or isinstance(error, WorkerDiedError):
                raise
            raise WorkerDiedError(self._failure) from error
        finally:
            torch.set_num_threads(num_threads)

    def _find_failure(self, timeout_s: float = 0) -> str | None:
        """Return why workers cannot go on, or None if no failure shows up within the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            failed = [(worker.stage == FAILED, text) for worker in self._workers if (text := worker.failure())]
            if failed:  # deaths first: they may be the cause of the other workers' exceptions
                return "\n".join(text for _, text in sorted(failed))
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            wait([worker.reports for worker in self._workers], remaining)

    def _wait_for_stage(self, stage: str) -> None:
        self.check()
        while any(worker.stage != stage for worker in self._workers):
            wait([worker.reports for worker in self._workers], CHECK_INTERVAL_S)  # an exception may be due meanwhile
            self.check()


def threads_per_rank(num_ranks: int) -> int:
    return max(1, torch.get_num_threads() // num_ranks)


@dataclass
class _Worker:
    """Rank 0's handle of a worker."""

    rank: int
    process: SpawnProcess
    control: Connection  # calls out, answers in
    reports: Connection  # (stage, traceback) in
    stage: str = ""
    traceback: str = ""

    def failure(self) -> str | None:
        """Return why this worker cannot go on, or None."""
        exit_code = self.process.exitcode  # read first, so that everything that a dead worker reported is read below
        try:
            while self.reports.poll():
                self.stage, self.traceback = self.reports.recv()
        except (EOFError, OSError):  # the worker is just ending
            self.process.join(REPORT_TIMEOUT_S)
            exit_code = self.process.exitcode
        if self.stage == FAILED:
            return f"worker rank {self.rank} failed:\n{self.traceback}"
        if exit_code is None:
            return None
        how = f"with signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
        if not self.stage:
            how += (
                " before it started. Its output says why; a script that uses tensor_parallel_size > 1 "
                "must start the engine under `if __name__ == '__main__':`"
            )
        return f"worker rank {self.rank} died {how}"


def _end_workers(workers: Sequence[_Worker], timeout_s: float) -> None:
    """Give the workers `timeout_s` to end by themselves, then kill them.

    This function must not refer to the executor, so that an unreferenced executor can be collected.
    """
    for worker in workers:
        worker.control.close()
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.process.kill()
        worker.process.join()
        worker.reports.close()


# -- in a worker -------------------------------------------------------------------------------------------------


def _worker_main(job: Job, rank: int, segment: Segment, control: Connection, reports: Connection) -> None:
    """Build this rank's runner, and make the calls that rank 0 sends until it closes its end of `control`."""
    end_with_parent()  # even if the worker is busy or stuck in a collective
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; rank 0 decides what it means
    tqdm.set_lock(threading.RLock())  # the default lock is a named semaphore, which a killed worker would leak
    try:
        torch.set_num_threads(job.num_threads)
        reports.send((STARTED, ""))
        tp = connect(join_store(job.port), rank, len(job.devices), job.devices[rank])
        runner = pickle.loads(job.make_runner)(tp)
        reports.send((READY, ""))
        receiver = MessageReceiver(segment, control)
        while True:
            try:
                call: Call = receiver.receive()
            except (EOFError, ConnectionError):
                break  # rank 0 has closed the executor, or has died
            call.make(runner)
        tp.close()
    except BaseException:
        with suppress(OSError):  # rank 0 may be gone
            reports.send((FAILED, traceback.format_exc()))
        os._exit(1)  # at once: the other ranks may be waiting for this one in a collective


# -- the transport of calls to the workers ---------------------------------------------------------------------------
#
# A call is pickled and cut into pieces that fit a segment of shared memory. The sender writes a piece and wakes each
# receiver with a header over that receiver's pipe; the receiver copies the piece out and answers with an empty message.
# The sender overwrites the segment only after every receiver has answered. It reads the answers when it next needs the
# segment, so it waits only for slow receivers.
#
# A process that dies closes its ends of the pipes, so the other side gets an EOFError or an OSError instead of waiting.
# The segment has no name, so it is freed with the last process that maps it, however the processes end.


class Sender:
    def __init__(self, segment: Segment, connections: Sequence[Connection]) -> None:
        """`connections`: one end of a duplex pipe to each receiver."""
        self._segment = memoryview(segment).cast("B")
        self._connections = tuple(connections)
        self._unanswered: list[Connection] = []  # receivers that have not yet copied the last piece out

    def send(self, message: object) -> None:
        """Send a message to all receivers. Raises EOFError or OSError when a receiver is gone. Hot: once per step."""
        data = memoryview(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        for start in range(0, len(data), len(self._segment)):
            piece = data[start : start + len(self._segment)]
            while self._unanswered:
                self._unanswered.pop().recv_bytes()
            self._segment[: len(piece)] = piece
            header = _HEADER.pack(len(piece), len(data) - start - len(piece))
            for connection in self._connections:
                connection.send_bytes(header)
                self._unanswered.append(connection)


class MessageReceiver:
    """A worker's end of the channel: receives the messages of rank 0's Sender."""

    def __init__(self, segment: Segment, connection: Connection) -> None:
        self._segment = memoryview(segment).cast("B")
        self._connection = connection

    def receive(self) -> Any:
        """Wait for the next message. Raises EOFError when the sender has closed its end or died."""
        data = bytearray()
        remaining = 1
        while remaining:
            num_bytes, remaining = _HEADER.unpack(self._connection.recv_bytes())
            data += self._segment[:num_bytes]
            self._connection.send_bytes(b"")
        return pickle.loads(data)
