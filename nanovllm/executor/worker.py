"""What a worker process runs: it builds its rank's runner and then makes the calls that rank 0 sends."""

import os
import pickle
import signal
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from nanovllm.device.tp_group import connect, join_store
from nanovllm.executor.channel import Receiver, Segment

STARTED, READY, FAILED = "started", "ready", "failed"  # the stages that a worker reports to rank 0


class Call(NamedTuple):
    """What rank 0 sends: a method of the runner, by name, and its arguments."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self, runner: object) -> Any:
        return getattr(runner, self.method)(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Job:
    """What every worker needs to start."""

    factory: bytes  # pickled separately, so that a failure to unpickle it is reported like any other error
    size: int
    device_type: str
    port: int  # where rank 0's store listens
    num_threads: int


def worker_main(
    job: Job, rank: int, device: torch.device, segment: Segment, control: Connection, reports: Connection
) -> None:
    """Run rank `rank` on `device` until rank 0 closes its end of `control`. Runs in the process's main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; rank 0 decides what it means
    tqdm.set_lock(threading.RLock())  # the default is a named semaphore, which a killed worker would leave behind
    try:
        torch.set_num_threads(job.num_threads)
        reports.send((STARTED, ""))
        tp = connect(join_store(job.port), rank, job.size, device)
        runner = pickle.loads(job.factory)(tp)
        reports.send((READY, ""))
        _serve(runner, Receiver(segment, control))
        tp.close()
    except BaseException:
        with suppress(OSError):  # rank 0 may be gone
            reports.send((FAILED, traceback.format_exc()))
        os._exit(1)  # at once: the other ranks may be waiting for this one in a collective


def _serve(runner: object, receiver: Receiver) -> None:
    """Make rank 0's calls until it closes the group."""
    while True:
        try:
            call: Call = receiver.receive()
        except (EOFError, ConnectionError):
            return
        call.make(runner)
