"""Attention on the CPU by torch's own operator, where nothing was compiled or no compiled kernel fits."""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch

from nanovllm.cpu_attention.base import FAR_AHEAD, MAX_QUEUED_JOBS, CpuKernel, CpuServer, check_flags
from nanovllm.cpu_attention.job import AttentionJob
from nanovllm.cpu_attention.torch_operator import UNIT_TOKENS, JobViews

_POLL_S = 50e-6


class TorchKernel(CpuKernel):
    """Torch's operator, on threads of torch (torch_operator.py)."""

    name = "torch"
    unit_tokens = UNIT_TOKENS  # a rest would be a call of its own, which costs half a millisecond

    def __init__(self, cpus: Sequence[int], is_pinned: bool = True) -> None:
        assert cpus, "a kernel needs at least one cpu"
        self.num_threads = len(cpus)
        self._cpus = list(cpus) if is_pinned else None
        self._servers: weakref.WeakSet[TorchServer] = weakref.WeakSet()

    @classmethod
    def why_unavailable(cls, head_dim: int, dtype: torch.dtype) -> str | None:
        return None

    def attend(self, job: AttentionJob, layer: int) -> None:
        with _torch_threads(self.num_threads):
            JobViews().attend(job, layer)

    def serve(self, flags: torch.Tensor) -> "TorchServer":
        server = TorchServer(flags, self.num_threads, self._cpus)
        self._servers.add(server)
        return server

    def close(self) -> None:
        """All servers are closed even if this raises the exception of a job."""
        with ExitStack() as closing:
            for server in list(self._servers):
                closing.callback(server.close)


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == num_threads:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _State:
    """What a server shares with its thread. The thread must not keep the server itself alive."""

    def __init__(self, flags: torch.Tensor, num_threads: int, cpus: list[int] | None) -> None:
        self.flags = flags.numpy()
        self.keeps_flags = flags
        self.num_threads = num_threads
        self.cpus = cpus  # None: any
        self.change = threading.Condition()
        self.queue: deque[tuple[AttentionJob, int, int]] = deque()  # the first one may have started
        self.newest_number = 0
        self.is_closing = False
        self.error: BaseException | None = None


class TorchServer(CpuServer):
    """A Python thread. If a job raises, its out is NaN and its lse is 0 when flags[1] is set, so that nobody takes an
    older result for this one. The next `submit` or `close` raises the exception.
    """

    def __init__(self, flags: torch.Tensor, num_threads: int, cpus: list[int] | None) -> None:
        check_flags(flags)
        flags.zero_()
        self._state = _State(flags, num_threads, cpus)
        self._thread = threading.Thread(target=_serve, args=(self._state,), name="cpu-attention", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._state, self._thread)

    def submit(self, job: AttentionJob, layer: int, number: int) -> None:
        state = self._state
        assert not state.is_closing, "the server is closed"
        self._raise_error()
        with state.change:
            if len(state.queue) >= MAX_QUEUED_JOBS:
                raise RuntimeError(
                    f"{MAX_QUEUED_JOBS} jobs are waiting for attention on the CPU; wait for some of them first"
                )
            state.queue.append((job, layer, number))
            state.newest_number = number
            state.change.notify()

    def close(self) -> None:
        """The server is closed even if this raises the exception of a job."""
        self._end()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._state.error = self._state.error, None
        if error is not None:
            raise error


def _end(state: _State, thread: threading.Thread) -> None:
    with state.change:
        state.is_closing = True
        state.change.notify()
    thread.join()
    state.flags[1] = _wrapped(state.newest_number + FAR_AHEAD)


def _serve(state: _State) -> None:
    if state.cpus is not None:
        with suppress(OSError):  # a cpu that went away in the meantime: run anywhere
            os.sched_setaffinity(0, state.cpus)  # this thread's, and that of the OpenMP threads that it starts
    torch.set_num_threads(state.num_threads)
    views = JobViews()
    while True:
        with state.change:
            state.change.wait_for(lambda: state.queue or state.is_closing)
            if state.is_closing:
                return
            job, layer, number = state.queue[0]
        while _wrapped(int(state.flags[0]) - number) < 0:
            if state.is_closing:
                return
            time.sleep(_POLL_S)
        try:
            views.attend(job, layer)
        except BaseException as error:
            state.error = state.error or error
            _spoil(job)
        del job
        state.flags[1] = number
        with state.change:
            state.queue.popleft()


@torch.inference_mode()
def _spoil(job: AttentionJob) -> None:
    """NaN survives every merge, because an LSE of 0 gives it a weight."""
    job.out_THD.fill_(torch.nan)
    job.lse_HT.zero_()


def _wrapped(number: int) -> int:
    """As int32."""
    return (number + 2**31) % 2**32 - 2**31
