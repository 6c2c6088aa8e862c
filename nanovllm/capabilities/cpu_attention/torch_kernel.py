"""TorchKernel: attention on the CPU in plain torch, the reference for the compiled kernels.

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

from nanovllm.attention.base import merge_parts
from nanovllm.attention.torch_backend import flash_attn_with_lse
from nanovllm.capabilities.cpu_attention.job import (
    FAR_AHEAD,
    MAX_QUEUED_JOBS,
    AttentionJob,
    CpuKernel,
    ExpertServer,
    check_flags,
)
from nanovllm.capabilities.cpu_experts.job import ARRIVED, DONE, LAYER, NUM_TOKENS, ExpertJob
from nanovllm.device.cuda import as_int32
from nanovllm.offload.streams import CpuServer

_POLL_S = 50e-6


@torch.inference_mode()
def attend(job: AttentionJob, layer: int) -> None:
    """Attend to each span separately and merge the results, on torch's threads."""
    assert 0 <= layer < len(job.k_cache), f"layer {layer} of {len(job.k_cache)}"
    k_SKD, v_SKD = job.k_cache[layer].flatten(0, 1), job.v_cache[layer].flatten(0, 1)
    first_row = 0
    for num_rows, spans in job.rows:
        rows = slice(first_row, first_row + num_rows)
        first_row += num_rows
        q_THD = job.q_THD[rows]
        views = [slice(first, first + num_tokens) for first, num_tokens in spans] or [slice(0)]
        parts = [flash_attn_with_lse(q_THD, k_SKD[view], v_SKD[view], job.scale) for view in views]
        job.out_THD[rows], job.lse_HT[:, rows] = merge_parts(parts, q_THD.dtype)


class TorchKernel(CpuKernel):
    name = "torch"

    def __init__(self, cpus: Sequence[int], is_pinned: bool = True) -> None:
        assert cpus, "a kernel needs at least one cpu"
        self.num_threads = len(cpus)
        self._cpus = list(cpus) if is_pinned else None
        self._servers: weakref.WeakSet[TorchServer | TorchExpertServer] = weakref.WeakSet()

    def attend(self, job: AttentionJob, layer: int) -> None:
        with _torch_threads(self.num_threads):
            attend(job, layer)

    def serve(self, flags: torch.Tensor) -> CpuServer:
        server = TorchServer(flags, self.num_threads, self._cpus)
        self._servers.add(server)
        return server

    def compute_experts(self, job: ExpertJob, layer: int) -> None:
        with torch.inference_mode(), _torch_threads(self.num_threads):
            job.run_in_torch(layer)

    def serve_experts(self, job: ExpertJob, exchange: torch.Tensor) -> ExpertServer:
        server = TorchExpertServer(job, exchange, self.num_threads, self._cpus)
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
        self.queue: SimpleQueue[tuple[AttentionJob, int, int] | None] = SimpleQueue()  # None ends the thread
        self.room = threading.Semaphore(MAX_QUEUED_JOBS)
        self.newest_number = 0
        self.is_closing = False
        self.error: BaseException | None = None


class TorchServer:
    """The CpuServer of TorchKernel: a Python thread.

    If a job raises, the thread sets the job's out to NaN and its lse to 0 before it sets flags[1], so that no older
    result is merged instead. The next `submit` or `close` raises the exception.
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

    def submit(self, job: AttentionJob, layer: int, number: int) -> None:
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
    _settle(num_threads, cpus)
    while _serve_next(shared):
        pass


def _settle(num_threads: int, cpus: list[int] | None) -> None:
    """Let this thread, and the OpenMP threads that it starts, run on `cpus`."""
    if cpus is not None:
        with suppress(OSError):  # if a cpu is gone, run on any cpu
            os.sched_setaffinity(0, cpus)
    torch.set_num_threads(num_threads)


def _serve_next(shared: _Shared) -> bool:
    """Wait for a job and its queries, then attend. Returns False if the server is closing."""
    entry = shared.queue.get()
    while not shared.is_closing and entry is not None:
        job, layer, number = entry
        if as_int32(int(shared.flags[0]) - number) < 0:
            time.sleep(_POLL_S)
            continue
        try:
            attend(job, layer)
        except BaseException as error:
            shared.error = shared.error or error
            job.out_THD.fill_(torch.nan)
            job.lse_HT.zero_()  # a finite LSE gives the NaN a weight in every merge
        shared.flags[1] = number
        shared.room.release()
        return True
    return False


class _ExpertState:
    """The state that a TorchExpertServer shares with its thread."""

    def __init__(self, job: ExpertJob, exchange: torch.Tensor) -> None:
        self.job, self.exchange = job, exchange.numpy()  # keeps the tensor alive
        self.is_closing = False
        self.error: BaseException | None = None


class TorchExpertServer:
    """The ExpertServer of TorchKernel: a Python thread. A layer that raises leaves NaN; `close` raises the error."""

    def __init__(self, job: ExpertJob, exchange: torch.Tensor, num_threads: int, cpus: list[int] | None) -> None:
        exchange.zero_()
        self._state = _ExpertState(job, exchange)
        args = self._state, num_threads, cpus
        self._thread = threading.Thread(target=_serve_experts, args=args, name="cpu-experts", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end_experts, self._state, self._thread)

    def close(self) -> None:
        self._end()
        error, self._state.error = self._state.error, None
        if error is not None:
            raise error


def _end_experts(state: _ExpertState, thread: threading.Thread) -> None:
    state.is_closing = True
    thread.join()
    state.exchange[DONE] = as_int32(int(state.exchange[DONE]) + FAR_AHEAD)


@torch.inference_mode()
def _serve_experts(state: _ExpertState, num_threads: int, cpus: list[int] | None) -> None:
    _settle(num_threads, cpus)
    job, exchange = state.job, state.exchange
    while not state.is_closing:
        number = exchange[ARRIVED]  # a step that was cut short may be followed by another one during this layer
        if number == exchange[DONE]:
            time.sleep(_POLL_S)
            continue
        try:
            job.num_tokens = int(exchange[NUM_TOKENS])
            job.run_in_torch(int(exchange[LAYER]))
        except BaseException as error:
            state.error = state.error or error
            job.out.fill_(torch.nan)
        exchange[DONE] = number
