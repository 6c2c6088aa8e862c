"""Workers: how the processes of ranks 1 and up are started, watched and ended. Two kinds exist.

ProcessWorkers (process_workers.py) spawns them, and RayWorkers (ray_workers.py) lets Ray place them. WorkerGroup uses
both in the same way: calls go through shared memory and a pipe to each worker.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from nanovllm.executor.channel import Segment
from nanovllm.executor.worker import FAILED, Job

REPORT_TIMEOUT_S = 1.0  # for a worker to report its exception, once rank 0 has noticed that something is wrong


class WorkerProcess(Protocol):
    @property
    def pid(self) -> int | None: ...

    def wait(self, timeout_s: float) -> None:
        """Return when the process has ended, or after the timeout."""

    def ending(self, has_started: bool) -> str | None:
        """How the process ended, such as "with exit code 1"; None while it runs. `has_started`: it has reported."""

    def kill(self) -> None:
        """End the process at once. Returns when it has ended."""


@dataclass
class Worker:
    """Rank 0's view of a worker."""

    rank: int
    process: WorkerProcess
    control: Connection  # calls out, answers in
    reports: Connection  # (stage, traceback) in
    stage: str = ""
    traceback: str = ""

    def failure(self) -> str | None:
        """Why this worker cannot go on, or None."""
        ending = self.process.ending(bool(self.stage))  # asked first: all that a dead worker reported is read below
        try:
            while self.reports.poll():
                self.stage, self.traceback = self.reports.recv()
        except (EOFError, OSError):  # the worker is just ending
            self.process.wait(REPORT_TIMEOUT_S)
            ending = self.process.ending(bool(self.stage))
        if self.stage == FAILED:
            return f"worker rank {self.rank} failed:\n{self.traceback}"
        return None if ending is None else f"worker rank {self.rank} died {ending}"


class Workers(ABC):
    """The workers of one group. Refers to no group, so that a group that is forgotten can be collected."""

    def __init__(self) -> None:
        self.members: list[Worker] = []  # those that run
        self.rank_0_device = torch.device("cpu")  # chosen by `start`

    @abstractmethod
    def start(self, job: Job, segment_bytes: int) -> Segment:
        """Start ranks 1 to job.size - 1, and choose rank 0's device. Returns the shared memory for calls.

        The workers may still be importing. If this raises, `end` stops those that have been started.
        """

    def end(self, timeout_s: float) -> None:
        """Give the workers `timeout_s` to end by themselves, then kill them."""
        for worker in self.members:
            worker.control.close()
        deadline = time.monotonic() + timeout_s
        for worker in self.members:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        for worker in self.members:
            worker.process.kill()
            worker.reports.close()
