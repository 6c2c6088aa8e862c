"""TorchKernel: runs jobs on the CPU in plain torch, the reference for the compiled kernels.

TorchKernel is used where no compiled kernel can run: without a compiler, on processors other than x86-64 with AVX2, and
for head dims and dtypes that the compiled kernels do not support.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue

import torch

from nanovllm.capabilities.cpu_attention.job import FAR_AHEAD, MAX_QUEUED_JOBS, CpuJob, CpuKernel, check_flags
from nanovllm.device.cuda import as_int32
from nanovllm.offload.streams import CpuServer

_POLL_S = 50e-6


class TorchKernel(CpuKernel):
    name = "torch"

    def __init__(self, cpus: Sequence[int], is_pinned: bool = True) -> None:
        assert cpus, "a kernel needs at least one cpu"
        self.num_threads = len(cpus)
        self._cpus = list(cpus) if is_pinned else None
        self._servers: weakref.WeakSet[TorchServer] = weakref.WeakSet()

    def attend(self, job: CpuJob, layer: int) -> None:
        with torch.inference_mode(), _torch_threads(self.num_threads):
            job.run_in_torch(layer)

    def serve(self, flags: torch.Tensor) -> CpuServer:
        server = TorchServer(flags, self.num_threads, self._cpus)
        self._servers.add(server)
        return server

    def close(self) -> None:
        """Close all servers, even if this raises the exception of a job."""
        with ExitStack() as closing:
            for server in list(self._servers):
                closing.callback(server.close)


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Shared:
    """The state that a server shares with its thread. The thread must not keep the server itself alive."""

    def __init__(self, flags: torch.Tensor) -> None:
        self.flags = flags.numpy()  # keeps the tensor alive
        self.queue: SimpleQueue[tuple[CpuJob, int, int] | None] = SimpleQueue()  # None ends the thread
        self.room = threading.Semaphore(MAX_QUEUED_JOBS)
        self.newest_number = 0
        self.is_closing = False
        self.error: BaseException | None = None


class TorchServer:
    """The CpuServer of TorchKernel: a Python thread.

    If a job raises, the thread spoils the job's output before it sets flags[1], so that no older result is used
    instead. The next `submit` or `close` raises the exception.
    """

    def __init__(self, flags: torch.Tensor, num_threads: int, cpus: list[int] | None) -> None:
        """Start the thread. cpus: the cpus of the thread and its OpenMP threads, or None for any cpu."""
        check_flags(flags)
        flags.zero_()
        self._shared = _Shared(flags)
        args = self._shared, num_threads, cpus
        self._thread = threading.Thread(target=_serve, args=args, name="cpu-attention", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._shared, self._thread)

    def submit(self, job: CpuJob, layer: int, number: int) -> None:
        shared = self._shared
        assert not shared.is_closing, "the server is closed"
        self._raise_error()
        if not shared.room.acquire(blocking=False):
            raise RuntimeError(
                f"{MAX_QUEUED_JOBS} jobs are waiting for attention on the CPU; wait for some of them first"
            )
        shared.newest_number = number
        shared.queue.put((job, layer, number))

    def close(self) -> None:
        """Close the server, even if this raises the exception of a job."""
        self._end()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._shared.error = self._shared.error, None
        if error is not None:
            raise error


def _end(shared: _Shared, thread: threading.Thread) -> None:
    shared.is_closing = True
    shared.queue.put(None)
    thread.join()
    shared.flags[1] = as_int32(shared.newest_number + FAR_AHEAD)


@torch.inference_mode()
def _serve(shared: _Shared, num_threads: int, cpus: list[int] | None) -> None:
    if cpus is not None:
        with suppress(OSError):  # if a cpu is gone, run on any cpu
            os.sched_setaffinity(0, cpus)  # applies to this thread, and to the OpenMP threads that it starts
    torch.set_num_threads(num_threads)
    while _serve_next(shared):
        pass


def _serve_next(shared: _Shared) -> bool:
    """Wait for a job and its queries, then attend. Returns False if the server is closing."""
    entry = shared.queue.get()
    while not shared.is_closing and entry is not None:
        job, layer, number = entry
        if as_int32(int(shared.flags[0]) - number) < 0:
            time.sleep(_POLL_S)
            continue
        try:
            job.run_in_torch(layer)
        except BaseException as error:
            shared.error = shared.error or error
            job.spoil_output()
        shared.flags[1] = number
        shared.room.release()
        return True
    return False
