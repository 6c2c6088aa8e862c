"""ProcessWorkers: each worker is a process that rank 0's process spawns. Rank r of an engine on GPUs uses cuda:r."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch

from nanovllm.executor.channel import Segment, make_segment
from nanovllm.executor.worker import Job, worker_main
from nanovllm.executor.workers import Worker, Workers


class ProcessWorkers(Workers):
    def start(self, job: Job, segment_bytes: int) -> Segment:
        self.rank_0_device = _device(job, rank=0)
        context = multiprocessing.get_context("spawn")
        segment = make_segment(context, segment_bytes)
        for rank in range(1, job.size):
            control, worker_control = context.Pipe()
            reports, worker_reports = context.Pipe(duplex=False)
            args = (job, rank, segment, worker_control, worker_reports)
            process = context.Process(target=_process_main, args=args, name=f"nanovllm-rank{rank}", daemon=True)
            process.start()
            self.members.append(Worker(rank, _SpawnedProcess(process), control, reports))
            worker_control.close()  # from here on the worker alone holds its ends, so its death closes them
            worker_reports.close()
        return segment


class _SpawnedProcess:
    def __init__(self, process: SpawnProcess) -> None:
        self._process, self.pid = process, process.pid

    def wait(self, timeout_s: float) -> None:
        self._process.join(timeout_s)

    def ending(self, has_started: bool) -> str | None:
        exit_code = self._process.exitcode
        if exit_code is None:
            return None
        reason = f"with signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
        if not has_started:
            reason += (
                " before it started. Its output says why; a script that uses tensor_parallel_size > 1 "
                "must start the engine under `if __name__ == '__main__':`"
            )
        return reason

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _process_main(job: Job, rank: int, segment: Segment, control: Connection, reports: Connection) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    worker_main(job, rank, _device(job, rank), segment, control, reports)


def _device(job: Job, rank: int) -> torch.device:
    return torch.device("cuda", rank) if job.device_type == "cuda" else torch.device("cpu")


def _exit_with_parent() -> None:
    """End this process when rank 0's process ends, even if the worker is busy or stuck in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a child process"
    parent.join()
    os._exit(1)
