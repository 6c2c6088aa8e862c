"""RayWorkers: each worker is a Ray actor on rank 0's machine. Ray finds it a GPU, and starts and ends its process.

Calls go through shared memory and pipes, as to a spawned process, because a call of an actor takes many times as long.
An actor inherits neither, so it takes them over from rank 0 (handover.py). This module and the other `ray_` modules are
loaded only where Ray is chosen.
"""

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import RayError

from nanovllm.errors import WorkerDiedError
from nanovllm.executor.channel import Segment
from nanovllm.executor.handover import Handover, take_over
from nanovllm.executor.rank_resources import rank_environment
from nanovllm.executor.ray_placement import Placement, has_reservations, own_device, place_ranks, release
from nanovllm.executor.ray_session import join_ray, leave_ray
from nanovllm.executor.worker import Job, worker_main
from nanovllm.executor.workers import REPORT_TIMEOUT_S, Worker, Workers

RESERVE_TIMEOUT_S = 30.0  # an engine that was closed just now gives its GPUs back within seconds
START_TIMEOUT_S = 120.0  # for an actor to start, which imports torch
_POLL_S = 0.2


class RayWorkers(Workers):
    def __init__(self) -> None:
        super().__init__()
        self._has_joined = False
        self._placement: Placement | None = None
        self._actors: dict[int, tuple[Any, Any]] = {}  # rank -> the actor, and what its `run` will return

    def start(self, job: Job, segment_bytes: int) -> Segment:
        join_ray()
        self._has_joined = True
        self._placement = place_ranks(job, RESERVE_TIMEOUT_S)
        self.rank_0_device = self._placement.rank_0_device
        environment = {"env_vars": rank_environment(os.environ, sys.path)}
        handover = Handover(segment_bytes)
        try:
            for rank in range(1, job.size):
                options = self._placement.options(rank)
                actor = ray.remote(_RankActor).options(runtime_env=environment, **options).remote()
                self._actors[rank] = actor, actor.run.remote(job, rank, handover.address)
            self._connect(handover)
        finally:
            handover.close()
        return handover.segment

    def _connect(self, handover: Handover) -> None:
        """Wait until every actor runs and has been connected."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while missing := self._actors.keys() - {worker.rank for worker in self.members}:
            connected = handover.serve_one(_POLL_S)
            if connected is not None:
                process = _ActorProcess(connected.pid, connected.pidfd, self._actors[connected.rank][1])
                self.members.append(Worker(connected.rank, process, connected.control, connected.reports))
                continue
            for rank in missing:
                if ending := _ending_of(self._actors[rank][1], timeout_s=0):
                    raise WorkerDiedError(f"worker rank {rank} died {ending}")
            if time.monotonic() > deadline:
                raise WorkerDiedError(
                    f"Ray did not start worker rank {min(missing)} within {START_TIMEOUT_S:.0f} s; `ray status` and "
                    "the logs of Ray say what it waits for"
                )

    def end(self, timeout_s: float) -> None:
        super().end(timeout_s)
        if not self._has_joined or not ray.is_initialized():
            return  # without Ray, its actors have ended too
        for rank in self._actors.keys() - {worker.rank for worker in self.members}:
            ray.kill(self._actors[rank][0])
        if self._placement is not None:
            release(self._placement)
        if not has_reservations():
            leave_ray()


class _ActorProcess:
    """The process of an actor. Rank 0 watches it by a pidfd, since it is on the same machine but not rank 0's child."""

    def __init__(self, pid: int, pidfd: int, run: Any) -> None:
        self.pid, self._pidfd, self._run = pid, pidfd, run
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)  # readable once the process has ended

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1000)

    def ending(self, has_started: bool) -> str | None:
        if not self._poll.poll(0):
            return None
        return _ending_of(self._run, REPORT_TIMEOUT_S) or "for a reason that Ray does not know yet"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._poll.poll()

    def __del__(self) -> None:
        os.close(self._pidfd)


class _RankActor:
    """The worker process of one rank."""

    def run(self, job: Job, rank: int, address: str) -> None:
        device = own_device(job.device_type)
        ends = take_over(address, rank)
        threading.Thread(target=_exit_with_rank_0, args=(ends.reports,), daemon=True).start()
        worker_main(job, rank, device, ends.segment, ends.control, ends.reports)
        ray.actor.exit_actor()


def _exit_with_rank_0(reports: Connection) -> None:
    """End this process when rank 0's process ends, even if the worker is busy, and even if Ray goes on.

    Rank 0 sends nothing through this pipe, so it becomes readable only when rank 0's end is closed.
    """
    reports.poll(None)
    os._exit(1)


def _ending_of(run: Any, timeout_s: float) -> str | None:
    """What Ray says about an actor whose `run` has ended; None if it has not."""
    if not ray.is_initialized():
        return "because Ray was shut down"
    if not ray.wait([run], timeout=timeout_s)[0]:
        return None
    try:
        ray.get(run)
    except RayError as error:
        return f"unexpectedly. Ray says: {error}"
    return "by itself"
