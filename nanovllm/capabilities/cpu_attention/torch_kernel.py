"""Attention on the CPU by torch's `_scaled_dot_product_flash_attention_for_cpu`, or where that is missing by matmul and
logsumexp. It serves where nothing was compiled or no compiled kernel fits.

Legend: U units of tokens, R query vectors of one kv head (rows x query heads per kv head), T query rows, G query heads
per kv head, K kv heads, D head dim, N tokens.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.capabilities.cpu_attention.job import (
    FAR_AHEAD,
    MAX_QUEUED_JOBS,
    AttentionJob,
    CpuKernel,
    TokenSpan,
    check_flags,
)
from nanovllm.offload.streams import CpuServer

_POLL_S = 50e-6
UNIT_TOKENS = 512  # a unit is one entry of the operator's batch dimension, over which it divides its threads


class _Part(NamedTuple):
    """Attention over U units: out_UKRD in the dtype of the queries, lse_UKR in fp32."""

    out_UKRD: torch.Tensor
    lse_UKR: torch.Tensor


class _RowViews:
    """Some rows of a job in one layer: everything but the arithmetic, made once."""

    def __init__(self, job: AttentionJob, layer: int, rows: slice, spans: Sequence[TokenSpan]) -> None:
        _, _, _, num_kv_heads, head_dim = job.k_cache.shape
        num_rows = rows.stop - rows.start
        self.out_TKGD = job.out_THD[rows].view(num_rows, num_kv_heads, -1, head_dim)
        self.lse_KGT = job.lse_HT[:, rows].view(num_kv_heads, -1, num_rows)
        # The query heads of a kv head become rows, so that K and V need not be repeated for them.
        self.q_KTGD = job.q_THD[rows].view_as(self.out_TKGD).transpose(0, 1)
        self.own_q_KTGD = torch.empty(self.q_KTGD.shape, dtype=self.q_KTGD.dtype)
        q_KRD = self.own_q_KTGD.view(num_kv_heads, -1, head_dim)
        k_NKD, v_NKD = (cache[layer].view(-1, num_kv_heads, head_dim) for cache in (job.k_cache, job.v_cache))
        self.units = [
            (q_KRD.expand(units[1], *q_KRD.shape), _unit_view(k_NKD, *units), _unit_view(v_NKD, *units))
            for span in spans
            for units in _units(span)
        ]

    def attend(self, scale: float) -> None:
        if not self.units:
            self.out_TKGD.zero_()
            self.lse_KGT.fill_(-torch.inf)
            return
        self.own_q_KTGD.copy_(self.q_KTGD)
        out_KRD, lse_KR = _merge([_attend_units(*unit, scale) for unit in self.units])
        self.out_TKGD.copy_(out_KRD.view_as(self.own_q_KTGD).transpose(0, 1))
        self.lse_KGT.copy_(lse_KR.view(self.own_q_KTGD.shape[:3]).transpose(1, 2))


def _units(span: TokenSpan) -> list[tuple[int, int, int]]:
    """The span as (first token, number of units, tokens of a unit): the whole units, and the rest as one more."""
    num_units, num_rest = divmod(span.num_tokens, UNIT_TOKENS)
    parts = [(span.first_token, num_units, UNIT_TOKENS)] if num_units else []
    return parts + ([(span.first_token + num_units * UNIT_TOKENS, 1, num_rest)] if num_rest else [])


def _unit_view(cache_NKD: torch.Tensor, first: int, num_units: int, size: int) -> torch.Tensor:
    """K or V where they lie, [U, K, tokens of a unit, D]."""
    tokens = cache_NKD[first : first + num_units * size]
    return tokens.view(num_units, size, *cache_NKD.shape[1:]).transpose(1, 2)


class JobViews:
    """The views of the job that was attended to last. Most jobs run in many steps, and a call of torch costs as much as
    reading some 100 KiB, more if another thread holds the interpreter.
    """

    def __init__(self) -> None:
        self._job: AttentionJob | None = None
        self._layers: dict[int, list[_RowViews]] = {}

    @torch.inference_mode()
    def attend(self, job: AttentionJob, layer: int) -> None:
        """Attend on the current thread and its OpenMP team."""
        if self._job is not job:
            self._job, self._layers = job, {}
        if layer not in self._layers:
            self._layers[layer] = self._views(job, layer)
        for rows in self._layers[layer]:
            rows.attend(job.scale)

    @staticmethod
    def _views(job: AttentionJob, layer: int) -> list[_RowViews]:
        assert 0 <= layer < job.k_cache.shape[0], f"layer {layer} of {job.k_cache.shape[0]}"
        views = []
        first_row = 0
        for row in job.rows:
            views.append(_RowViews(job, layer, slice(first_row, first_row + row.num_rows), row.spans))
            first_row += row.num_rows
        return views


def _attend_units(q_UKRD: torch.Tensor, k_UKND: torch.Tensor, v_UKND: torch.Tensor, scale: float) -> _Part:
    if q_UKRD.shape[2] == 1 and _two_rows_are_faster(q_UKRD.dtype, q_UKRD.shape[-1]):
        out_UKRD, lse_UKR = _attend_units(q_UKRD.expand(-1, -1, 2, -1), k_UKND, v_UKND, scale)
        return _Part(out_UKRD[:, :, :1], lse_UKR[:, :, :1])
    if _operator_serves(q_UKRD.dtype, q_UKRD.shape[-1]):
        return _Part(*_operator(q_UKRD, k_UKND, v_UKND, scale))
    scores_UKRN = q_UKRD.float() @ k_UKND.float().transpose(-1, -2) * scale
    lse_UKR = scores_UKRN.logsumexp(-1)
    return _Part(scores_UKRN.softmax(-1) @ v_UKND.float(), lse_UKR)


def _operator(
    q_UKRD: torch.Tensor, k_UKND: torch.Tensor, v_UKND: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out_UKRD, lse_UKR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_UKRD, k_UKND, v_UKND, scale=scale)
    return out_UKRD, lse_UKR


@cache
def _operator_serves(dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if this torch has the operator and it takes such tensors. Asked once, to hide no later error."""
    token = torch.zeros(1, 1, 1, head_dim, dtype=dtype)
    try:
        _operator(token, token, token, scale=1.0)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


@cache
def _two_rows_are_faster(dtype: torch.dtype, head_dim: int) -> bool:
    """Return True if the operator takes longer for a single row than for two. Without AMX it takes six times as long in
    bfloat16, and with AMX two thirds of the time. Measured once.
    """
    if not _operator_serves(dtype, head_dim):
        return False
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, head_dim, generator=generator).to(dtype) for n in (2, UNIT_TOKENS, UNIT_TOKENS))

    def least_s(num_rows: int) -> float:
        times = []
        for _ in range(5):
            start_s = time.perf_counter()
            _operator(q[:, :, :num_rows], k, v, 1.0)
            times.append(time.perf_counter() - start_s)
        return min(times)

    return least_s(1) > least_s(2)


def _merge(parts: list[_Part]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out_KRD and lse_KR over the keys of all parts, in fp32.

    In numpy: torch wakes its whole team of threads for each of these small operations, and takes 1.4 to 2.1 times as
    long.
    """
    out_UKRD = np.concatenate([part.out_UKRD.float().numpy() for part in parts])
    lse_UKR = np.concatenate([part.lse_UKR.float().numpy() for part in parts])
    with np.errstate(invalid="ignore"):  # scores that are not finite make the result NaN
        most_KR = lse_UKR.max(axis=0)
        weights_UKR = np.exp(lse_UKR - most_KR)
        sums_KR = weights_UKR.sum(axis=0)
        out_KRD = np.einsum("ukr,ukrd->krd", weights_UKR / sums_KR, out_UKRD)
        return torch.from_numpy(out_KRD), torch.from_numpy(most_KR + np.log(sums_KR))


class TorchKernel(CpuKernel):
    """Torch's operator, on threads of torch."""

    name = "torch"
    unit_tokens = UNIT_TOKENS  # a rest would be a call of its own, which costs half a millisecond

    def __init__(self, cpus: Sequence[int], is_pinned: bool = True) -> None:
        assert cpus, "a kernel needs at least one cpu"
        self.num_threads = len(cpus)
        self._cpus = list(cpus) if is_pinned else None
        self._servers: weakref.WeakSet[TorchServer] = weakref.WeakSet()

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
    """State that a server shares with its thread. The thread must not keep the server itself alive."""

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
    """Return the number as int32."""
    return (number + 2**31) % 2**32 - 2**31
