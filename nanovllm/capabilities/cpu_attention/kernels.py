"""The compiled kernels (source/), called through ctypes, and the choice of the kernel that attends on the CPU.

A compiled kernel runs a job, from its submission to its end, without Python.
"""

import ctypes
import logging
import os
import weakref
from collections.abc import Sequence

import torch

from nanovllm.capabilities.cpu_attention import build
from nanovllm.capabilities.cpu_attention.build import InstructionSet
from nanovllm.capabilities.cpu_attention.job import (
    DTYPE_CODES,
    MAX_QUEUED_JOBS,
    AttentionJob,
    CJob,
    CpuKernel,
    check_flags,
)
from nanovllm.capabilities.cpu_attention.torch_kernel import TorchKernel
from nanovllm.capabilities.cpu_experts.job import CExpertJob, ExpertJob
from nanovllm.errors import ConfigError

KERNEL_NAMES = (*(variant.name for variant in build.INSTRUCTION_SETS), TorchKernel.name)  # best first

logger = logging.getLogger("nanovllm")

_MAX_HEAD_DIM = 512
_AWAKE_NS = 1_000_000  # time for which threads spin after a job; the next layer's job comes sooner

_SIGNATURES = {
    "nanovllm_open": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]),
    "nanovllm_close": (None, [ctypes.c_void_p]),
    "nanovllm_attend": (None, [ctypes.c_void_p, ctypes.POINTER(CJob), ctypes.c_int64]),
    "nanovllm_read": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]),
    "nanovllm_serve": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
    "nanovllm_submit": (ctypes.c_int64, [ctypes.c_void_p, ctypes.POINTER(CJob), ctypes.c_int64, ctypes.c_int32]),
    "nanovllm_end_server": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "nanovllm_compute_experts": (None, [ctypes.c_void_p, ctypes.POINTER(CExpertJob), ctypes.c_int64]),
    "nanovllm_serve_experts": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.POINTER(CExpertJob), ctypes.c_void_p]),
    "nanovllm_end_expert_server": (None, [ctypes.c_void_p, ctypes.c_void_p]),
}


class UnusableLibraryError(RuntimeError):
    """A kernel cannot run here: its library is unusable, or the system refuses its instructions or threads."""


class NotBuiltError(UnusableLibraryError):
    """A library cannot be compiled or loaded here. The message names the remedy."""


def load_library(variant: InstructionSet) -> ctypes.CDLL:
    """Load the variant's library. Compiles the library first if it is not in the user's cache. Raises NotBuiltError."""
    path = build.library_path(variant)
    if not path.exists() and (problem := build.compile_variant(variant)):
        raise NotBuiltError(problem)
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NotBuiltError(f"{path} cannot be loaded: {error}; run {build.BUILD_COMMAND}") from error
    return library


def why_unfit(head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why no compiled kernel supports such a KV cache, or None if the compiled kernels support it."""
    if dtype not in DTYPE_CODES:
        return f"the compiled kernels are for float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim % 16 or not 0 < head_dim <= _MAX_HEAD_DIM:
        return f"the compiled kernels are for multiples of 16 up to {_MAX_HEAD_DIM}, and the head dim is {head_dim}"
    return None


class _Engine:
    """The threads of a library."""

    def __init__(self, library: ctypes.CDLL, cpus: Sequence[int], is_pinned: bool, stays_awake: bool) -> None:
        self.library = library
        places = (ctypes.c_int64 * len(cpus))(*cpus) if is_pinned else None
        self.handle = library.nanovllm_open(places, len(cpus), _AWAKE_NS if stays_awake else 0)
        if not self.handle:
            raise UnusableLibraryError("the operating system refuses the instructions or the threads")
        self.close = weakref.finalize(self, _close_engine, library, self.handle, os.getpid())

    @property
    def is_open(self) -> bool:
        return self.close.alive


def _close_engine(library: ctypes.CDLL, handle: int, pid: int) -> None:
    if os.getpid() == pid:  # the threads do not exist in a forked process, which would wait for them forever
        library.nanovllm_close(handle)


class CompiledKernel(CpuKernel):
    """One variant of the compiled kernel, with one thread for each of `cpus`. Each thread stays on its cpu if
    `is_pinned`. In `attend`, the caller's thread does the work of the first thread.
    """

    def __init__(
        self, variant: InstructionSet, cpus: Sequence[int], is_pinned: bool = True, stays_awake: bool = True
    ) -> None:
        """Start the threads. Raises UnusableLibraryError. The processor must support the variant's instructions."""
        assert cpus, "a kernel needs at least one cpu"
        self.name, self.num_threads = variant.name, len(cpus)
        self._engine = _Engine(load_library(variant), cpus, is_pinned, stays_awake)

    def attend(self, job: AttentionJob, layer: int) -> None:
        assert self._engine.is_open, "the kernel is closed"
        _check(job, layer)
        self._engine.library.nanovllm_attend(self._engine.handle, job.c_job, layer)

    def read(self, memory: torch.Tensor) -> None:
        """Read every byte once. Benchmarks time this call, because reading bounds the rate of any kernel."""
        assert self._engine.is_open and memory.is_contiguous(), "the kernel is closed, or the tensor is not contiguous"
        self._engine.library.nanovllm_read(self._engine.handle, memory.data_ptr(), memory.nbytes)

    def serve(self, flags: torch.Tensor) -> "CompiledServer":
        return CompiledServer(self._engine, flags)

    def compute_experts(self, job: ExpertJob, layer: int) -> None:
        assert self._engine.is_open, "the kernel is closed"
        job.check(layer)
        self._engine.library.nanovllm_compute_experts(self._engine.handle, job.c_job, layer)

    def serve_experts(self, job: ExpertJob, exchange: torch.Tensor) -> "CompiledExpertServer":
        return CompiledExpertServer(self._engine, job, exchange)

    def close(self) -> None:
        self._engine.close()


class CompiledServer:
    """A thread of the library, on the first cpu if threads are pinned. The server and `attend` share the kernel's other
    threads.
    """

    def __init__(self, engine: _Engine, flags: torch.Tensor) -> None:
        assert engine.is_open, "the kernel is closed"
        check_flags(flags)
        flags.zero_()
        self._engine = engine
        self._handle = engine.library.nanovllm_serve(engine.handle, flags.data_ptr())
        if not self._handle:
            raise RuntimeError("the operating system refuses another thread for attention on the CPU")
        self._end = weakref.finalize(self, _end_server, engine, self._handle, flags, os.getpid())

    def submit(self, job: AttentionJob, layer: int, number: int) -> None:
        """See CpuServer. Hot: once per layer."""
        assert self._end.alive and self._engine.is_open, "the server is closed"
        _check(job, layer)
        if not self._engine.library.nanovllm_submit(self._handle, job.c_job, layer, number):
            raise RuntimeError(
                f"{MAX_QUEUED_JOBS} jobs are waiting for attention on the CPU; wait for some of them first"
            )

    def close(self) -> None:
        self._end()


class CompiledExpertServer:
    """A thread of the library, like CompiledServer."""

    def __init__(self, engine: _Engine, job: ExpertJob, exchange: torch.Tensor) -> None:
        assert engine.is_open, "the kernel is closed"
        exchange.zero_()
        handle = engine.library.nanovllm_serve_experts(engine.handle, job.c_job, exchange.data_ptr())
        if not handle:
            raise RuntimeError("the operating system refuses another thread for experts on the CPU")
        self.close = weakref.finalize(self, _end_expert_server, engine, handle, (job, exchange), os.getpid())


def _end_expert_server(engine: _Engine, handle: int, used: tuple[ExpertJob, torch.Tensor], pid: int) -> None:
    """End the server's thread. `used` lives as long as the thread."""
    if engine.is_open and os.getpid() == pid:
        engine.library.nanovllm_end_expert_server(engine.handle, handle)


def _end_server(engine: _Engine, handle: int, flags: torch.Tensor, pid: int) -> None:
    """End the server's thread. `flags` is an argument so that the tensor lives as long as the thread that reads it."""
    if engine.is_open and os.getpid() == pid:
        engine.library.nanovllm_end_server(engine.handle, handle)


def _check(job: AttentionJob, layer: int) -> None:
    num_layers, _, _, _, head_dim = job.k_cache.shape
    assert 0 <= layer < num_layers, f"layer {layer} of {num_layers}"
    assert job.c_job.dtype >= 0 and head_dim % 16 == 0 and head_dim <= _MAX_HEAD_DIM, (
        "this job is for TorchKernel: see why_unfit"
    )


def choose_kernel(
    cpus: Sequence[int],
    name: str | None = None,
    *,
    head_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    is_pinned: bool = True,
    stays_awake: bool = True,
) -> CpuKernel:
    """Open the kernel `name`, or the best kernel that can run here, with one thread for each of `cpus`.

    head_dim, dtype: of the KV cache, if the kernel attends. is_pinned: True to keep each thread on its cpu, False to
    let the threads run on any cpu that the process may use. stays_awake: True to let the threads spin for a while after
    each job, because the next layer's job comes soon; False if other threads need the cpus between two layers.

    Compiles the kernel on first use, and logs a warning if a faster kernel cannot be compiled. Raises ConfigError if
    the kernel `name` cannot run here.
    """
    if name not in (None, *KERNEL_NAMES):
        raise ConfigError(f"there is no CPU attention kernel {name!r}; choose one of {', '.join(KERNEL_NAMES)}")
    reasons: list[str] = []  # messages, because exceptions would keep the caller's frame, and so the engine, alive
    not_built: list[str] = []
    for kernel_name in KERNEL_NAMES if name is None else (name,):
        try:
            kernel = _open(kernel_name, cpus, head_dim, dtype, is_pinned, stays_awake)
        except UnusableLibraryError as error:
            reasons.append(str(error))
            if isinstance(error, NotBuiltError):
                not_built.append(str(error))
            continue
        if not_built:
            logger.warning(
                "attention on the CPU uses the %s kernel, although this processor can run a faster one: %s",
                *(kernel.name, not_built[0]),
            )
        return kernel
    raise ConfigError(f"the CPU attention kernel {name} cannot run here: {reasons[0]}; choose another one or none")


def _open(
    name: str, cpus: Sequence[int], head_dim: int, dtype: torch.dtype, is_pinned: bool, stays_awake: bool
) -> CpuKernel:
    if name == TorchKernel.name:
        return TorchKernel(cpus, is_pinned)
    variant = next(variant for variant in build.INSTRUCTION_SETS if variant.name == name)
    if missing := build.missing_flags(variant, build.cpu_flags()):
        raise UnusableLibraryError(f"this processor lacks {', '.join(missing)}")
    if reason := why_unfit(head_dim, dtype):
        raise UnusableLibraryError(reason)
    return CompiledKernel(variant, cpus, is_pinned, stays_awake)
