"""WorkerGroup: one runner per tensor-parallel rank. Rank 0's is in this process, each other rank's in a worker process.

Owns the workers, the pipes and shared memory to them, and the TPGroup. What always holds: every rank runs the same
methods of its runner in the same order. If one rank cannot, the group ends: all workers are stopped, and rank 0 raises
an exception. No worker outlives rank 0, however rank 0 ends. Workers (workers.py) says how the worker processes are
started and ended: they are spawned, or placed by Ray.

The ranks share torch's threads evenly. Rank 0 limits itself to its share only during a call. All other work in the
user's process, including that of other engines, keeps the number of threads that the user has set.

    rank 0                                    worker (worker.py)
    starts the workers                        imports, reports STARTED
    connects, builds its runner               connects, builds its runner, reports READY
    call: sends the call, makes it itself     receives the call, makes it; reports FAILED and ends when it raises
    close: closes the control pipe            end of file: ends
"""

import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch

from nanovllm.device.tp_group import TPGroup, connect, open_store
from nanovllm.errors import EngineError, WorkerDiedError
from nanovllm.executor.channel import Sender
from nanovllm.executor.worker import FAILED, READY, STARTED, Call, Job
from nanovllm.executor.workers import REPORT_TIMEOUT_S, Workers

SEGMENT_BYTES = 1 << 20  # of the shared memory that calls go through; larger calls go in pieces
STOP_TIMEOUT_S = 5.0  # for a worker to finish what it is doing
SPIN_S = 50e-6
MAX_SLEEP_S = 500e-6
CHECK_INTERVAL_S = 0.1

RunnerT = TypeVar("RunnerT")
P = ParamSpec("P")
Result = TypeVar("Result")


class WorkerGroup(Generic[RunnerT]):
    def __init__(
        self,
        factory: Callable[[TPGroup], RunnerT],
        size: int,
        device_type: str,
        workers: Workers,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Start ranks 1..size-1, and build every rank's runner with `factory(tp)`. Returns when all are ready.

        `factory` is pickled. `size` is 2 or more (executor/local.py runs a single rank). `device_type`: "cuda" or
        "cpu"; `workers` gives each rank its own device of that type, `tp.device`. An exception of the factory on rank 0
        is raised here as it is; on another rank, it becomes a WorkerDiedError with its traceback. Either way all
        workers have then been stopped.
        """
        self._workers = workers
        self._num_threads = max(1, torch.get_num_threads() // size)  # per rank
        self._failure: str | None = None
        self._finalizer = weakref.finalize(self, workers.end, STOP_TIMEOUT_S)
        self.tp = TPGroup()
        with self._watch():
            store = open_store()
            job = Job(pickle.dumps(factory), size, device_type, store.port, self._num_threads)
            segment = workers.start(job, segment_bytes)
            self._sender = Sender(segment, [worker.control for worker in workers.members])
            self._wait_for_stage(STARTED)  # rank 0 cannot be interrupted while it connects, so only now
            self.tp = connect(store, 0, size, workers.rank_0_device)
            self.runner = factory(self.tp)
            self._wait_for_stage(READY)

    def call(self, method: Callable[Concatenate[RunnerT, P], Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call `runner.method(*args, **kwargs)` on every rank; returns rank 0's result. Hot: once per step.

        `method` belongs to the runners' class or protocol, so that the call can be type checked. Raises EngineError if
        the group is closed, and WorkerDiedError if a worker has died, even while rank 0 waits for it in a collective on
        the CPU. Any exception on rank 0 ends the group, because the ranks no longer agree on what has run.
        """
        if self._failure is not None:
            raise WorkerDiedError(self._failure)
        if not self._finalizer.alive:
            raise EngineError("the engine's worker group is closed")
        call = Call(method.__name__, args, kwargs)
        with self._watch():
            self._sender.send(call)
            return call.make(self.runner)

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Return when `done()`, for example an event's query, is true. Raises WorkerDiedError if a worker has died.

        Spins briefly, then sleeps for 1% of the time waited so far, so that a long step does not keep a core busy.
        """
        start = last_check = time.perf_counter()
        while not done():
            now = time.perf_counter()
            if now - start > SPIN_S:
                time.sleep(min((now - start) / 100, MAX_SLEEP_S))
            if now - last_check > CHECK_INTERVAL_S:
                self.check()
                last_check = now

    def check(self) -> None:
        """Raise WorkerDiedError if a worker has died or has reported an exception."""
        if self._failure is None and self._finalizer.alive:
            self._failure = self._find_failure()
        if self._failure is not None:
            self._end(timeout_s=0)
            raise WorkerDiedError(self._failure)

    def close(self) -> None:
        """Stop the workers. The group cannot be used afterwards; closing twice is fine."""
        self._end(STOP_TIMEOUT_S)

    def _end(self, timeout_s: float) -> None:
        if self._finalizer.detach() is not None:
            self._workers.end(timeout_s)
            self.tp.close()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Run rank 0's part of a call on its share of the threads.

        An exception ends the group. If a worker has failed, that was the cause, and WorkerDiedError is raised instead.
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
        """What happened to the workers that cannot go on. None if no failure shows up within the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            failed = [(worker.stage == FAILED, text) for worker in self._workers.members if (text := worker.failure())]
            if failed:  # deaths first: they may be the cause of the other workers' exceptions
                return "\n".join(text for _, text in sorted(failed))
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            wait([worker.reports for worker in self._workers.members], remaining)

    def _wait_for_stage(self, stage: str) -> None:
        self.check()
        while any(worker.stage != stage for worker in self._workers.members):
            wait([worker.reports for worker in self._workers.members])
            self.check()
