"""RayWorkers: each worker is a Ray actor on rank 0's machine. Ray reserves a GPU for every rank and starts the actors.

Calls go through shared memory and pipes, as to a spawned process, because a call of an actor takes many times as long.
An actor inherits neither, so it takes them over from rank 0 (handover.py). Rank 0 stays in its own process:

- In a plain process it has no part in Ray's accounts. A placement group then reserves a bundle for every rank, and rank
  0 uses the GPU of bundle 0.
- In an actor it uses the actor's GPU. The other ranks take further bundles of the actor's placement group, or bundles
  that are reserved for them if the actor has no group.

Nobody else on the machine who asks Ray for GPUs gets these. This module is imported only where Ray is chosen.
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
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanovllm.errors import WorkerDiedError
from nanovllm.executor.channel import Segment
from nanovllm.executor.handover import Handover, take_over
from nanovllm.executor.rank_resources import (
    check_bundles,
    check_held,
    check_machine,
    rank_device,
    rank_environment,
    rank_resources,
)
from nanovllm.executor.ray_session import join_ray, node_resources, release_and_leave, reserve, this_node
from nanovllm.executor.worker import Job, worker_main
from nanovllm.executor.workers import REPORT_TIMEOUT_S, Worker, Workers

START_TIMEOUT_S = 120.0  # for an actor to start, in which it imports torch
_POLL_S = 0.2


class RayWorkers(Workers):
    def __init__(self) -> None:
        super().__init__()
        self._reserved: PlacementGroup | None = None
        self._actors: dict[int, tuple[Any, Any]] = {}  # rank -> the actor, and what its `run` will return

    def start(self, job: Job, segment_bytes: int) -> Segment:
        join_ray()
        needs = rank_resources(job.device_type, job.num_threads)
        group, first_bundle = self._find_room(job, needs)
        environment = {"env_vars": rank_environment(os.environ, sys.path)}
        handover = Handover(segment_bytes)
        try:
            for rank in range(1, job.size):
                bundle = -1 if first_bundle is None else first_bundle + rank - 1  # -1: any that is free
                options = _placed(group, bundle, needs) | {"runtime_env": environment}
                handle = ray.remote(_RankActor).options(**options).remote()
                self._actors[rank] = handle, handle.run.remote(job, rank, handover.address)
            self._connect(handover)
        finally:
            handover.close()
        return handover.segment

    def _find_room(self, job: Job, needs: dict[str, float]) -> tuple[PlacementGroup, int | None]:
        """The placement group of the workers, and rank 1's bundle in it, which the other ranks' follow; None: any."""
        if ray.get_runtime_context().get_actor_id() is None:
            check_machine(job.size, needs, node_resources(this_node()))
            self._reserved = reserve(job.size, needs)
            gpu_ids = _gpu_ids_of_bundle(self._reserved, 0, needs) if job.device_type == "cuda" else []
            self.rank_0_device = rank_device(job.device_type, gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES"))
            return self._reserved, 1
        gpu_ids = _own_gpu_ids()
        check_held(job.size, gpu_ids)
        self.rank_0_device = rank_device(job.device_type, gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES"))
        current = get_current_placement_group()
        if current is None:
            check_machine(job.size, needs, node_resources(this_node()))
            self._reserved = reserve(job.size - 1, needs)
            return self._reserved, 0
        check_bundles(job.size, needs, _bundles_here(current))
        return current, None

    def _connect(self, handover: Handover) -> None:
        """Wait until every actor runs and has been connected."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self.members) < len(self._actors):
            connected = handover.serve_one(_POLL_S)
            if connected is not None:
                run = self._actors[connected.rank][1]
                process = _ActorProcess(connected.pid, run)
                self.members.append(Worker(connected.rank, process, connected.control, connected.reports))
            started = {worker.rank for worker in self.members}
            for rank in self._actors.keys() - started:
                if ending := _ending_of(self._actors[rank][1], timeout_s=0):
                    raise WorkerDiedError(f"worker rank {rank} died {ending}")
                if time.monotonic() > deadline:
                    raise WorkerDiedError(f"Ray did not start worker rank {rank} within {START_TIMEOUT_S:.0f} s")

    def end(self, timeout_s: float) -> None:
        super().end(timeout_s)
        started = {worker.rank for worker in self.members}
        for rank, (actor, _) in self._actors.items():
            if rank not in started and ray.is_initialized():
                ray.kill(actor)
        self._actors.clear()
        if self._reserved is not None:
            release_and_leave(self._reserved)


class _ActorProcess:
    """The process of an actor. Rank 0 watches it by a pidfd, since it is on the same machine but not rank 0's child."""

    def __init__(self, pid: int, run: Any) -> None:
        self.pid, self._run = pid, run
        self._pidfd = os.pidfd_open(pid)
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
        device = rank_device(job.device_type, _own_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
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


def _placed(group: PlacementGroup, bundle: int, needs: dict[str, float]) -> dict[str, Any]:
    """Options of a task or an actor that takes `needs` from a bundle; -1: from any."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "scheduling_strategy": strategy}


def _own_gpu_ids() -> list[str]:
    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def _gpu_ids_of_bundle(group: PlacementGroup, bundle: int, needs: dict[str, float]) -> list[str]:
    """The GPUs of a bundle stay the same as long as the group exists, so any task in it can tell them."""
    return ray.get(ray.remote(_own_gpu_ids).options(**_placed(group, bundle, needs)).remote())


def _bundles_here(group: PlacementGroup) -> list[dict[str, float]]:
    table = placement_group_table(group)
    here = this_node()
    return [table["bundles"][index] for index, node_id in table["bundles_to_node_id"].items() if node_id == here]
