"""Launching of Triton kernels, compiling them without a launch, and dependent launches.

A kernel is compiled when it is first launched with arguments of new types, which takes 0.1 to 0.8 s. Within
`compile_only` a launch starts the compilation in another thread and returns at once, without running anything. Running
a model once like that finds all the kernels it needs. They are compiled in parallel, on all cores, if there is a
CompileServer: the threads then only wait for its processes.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager

from nanovllm.device import kernel_target
from nanovllm.kernels.compile_server import CompileServer, Job, hash_in_order

logger = logging.getLogger("nanovllm")

LOG2_E = tl.constexpr(1.4426950408889634)  # in a kernel; host code uses `.value`
LN_2 = tl.constexpr(0.6931471805599453)

# Within compile_only, the launches already compiled. Triton would wait if a kernel were compiled a second time.
_compiled: ContextVar[set[Any] | None] = ContextVar("compiled", default=None)


def _parse_in_turn() -> None:
    """Let only one thread at a time parse the source of a kernel, which Triton does to hash and to compile it. In some
    versions of Python 3.11 and 3.12 the parser fails if the garbage collector interrupts it and another thread parses
    meanwhile (python/cpython#106905).
    """
    owner = next(base for base in triton.JITFunction.__mro__ if "parse" in vars(base))
    parse, lock = owner.parse, threading.Lock()

    def parse_alone(kernel: Any) -> Any:
        with lock:
            return parse(kernel)

    owner.parse = parse_alone


_parse_in_turn()


def on_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """A function that launches `kernel` over `grid`: `on_grid(kernel, grid)(*args, **constants_and_options)`. Hot."""
    compiled = _compiled.get()
    if compiled is not None:
        return partial(_compile_once, kernel, grid, compiled)
    launch: Callable[..., Any] = kernel[grid]
    return launch


def _compile_once(kernel: Any, grid: tuple[int, ...], compiled: set[Any], *args: Any, **options: Any) -> None:
    hash_in_order(kernel)
    key = kernel, *map(_kind, args), *sorted(options.items())
    if key not in compiled:
        compiled.add(key)
        kernel.warmup(*args, grid=grid, **options)


def _kind(arg: Any) -> Any:
    """The properties of an argument that Triton specialises on: dtype, alignment, being 1, being divisible by 16."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg < 2**31
    return arg if isinstance(arg, float | None) else type(arg)


class _CompileMode(triton.AsyncCompileMode):
    """Kernels launched inside are compiled by the threads of `executor`, or by `server` while a thread waits."""

    def __init__(self, executor: Executor, server: CompileServer | None) -> None:
        super().__init__(executor)
        self._server = server

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Triton calls this with the kernel's cache key."""
        return super().submit(key, partial(self._compile, key, compile_fn), finalize_fn)

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            active_mode.set(None)  # Triton leaves it set when a kernel cannot be compiled, and no other could start

    def _compile(self, key: str, compile_here: Callable[[], Any]) -> Any:
        if self._server is not None and not triton.knobs.compilation.always_compile:
            try:
                job = _job(key, compile_here)
                if not _is_cached(job):
                    self._server.compile(job)
            except Exception as error:  # whatever it is, compiling here either works or says what is wrong
                logger.debug("a kernel is compiled in the engine's process: %r", error)
        return compile_here()


def _job(key: str, compile_here: Callable[[], Any]) -> Job:
    """Find out what Triton's function would compile. A KeyError or AttributeError: another version of Triton."""
    variables = inspect.getclosurevars(compile_here).nonlocals
    source, target, options = variables["src"], variables["target"], variables["options"]
    return Job(
        module=source.fn.__module__,
        kernel=source.fn.__name__,
        signature=source.signature,
        constants=source.constants,
        attrs=source.attrs,
        target=target,
        options=vars(options),
        cache_key=hashlib.sha256(key.encode()).hexdigest(),
    )


def _is_cached(job: Job) -> bool:
    return get_cache_manager(job.cache_key).get_group(f"{job.kernel[:150]}.json") is not None


class _CompilingThreads(ThreadPoolExecutor):
    """Compiles kernels, and loads them on the current device with the C module that launches them.

    Only one thread loads at a time. Triton gives all of these modules the same name. When Python imports one of them a
    second time, because two kernels share it, it fills the entry of that name in sys.modules and returns that. If two
    threads do so at once, both get the same entry, and one kernel is launched by the other's module.
    """

    _loading: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        super().__init__(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
        self._futures: list[Future[Any]] = []

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self._futures.append(super().submit(self._compile_and_load, compile_kernel))
        return self._futures[-1]

    def is_busy(self) -> bool:
        return not all(future.done() for future in self._futures)

    @classmethod
    def _compile_and_load(cls, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        with cls._loading:
            _ = kernel.run  # reading this attribute makes Triton build the module, unless it is cached, and load both
        return kernel


@contextmanager
def compile_only(server: CompileServer | None = None) -> Iterator[Callable[[], bool]]:
    """Compile and load the kernels that are launched inside, without running them. All are ready when the block ends.

    Their output tensors keep their old content, so nothing computed inside may be used. This affects the current thread
    only. Yields a function that returns whether any kernel is still being compiled.
    """
    with _CompilingThreads() as threads, compiling_in(threads, server):
        yield threads.is_busy


@contextmanager
def compiling_in(threads: Executor, server: CompileServer | None) -> Iterator[None]:
    """Launches inside only submit to `threads` what has to be compiled."""
    token = _compiled.set(set())
    try:
        with _CompileMode(threads, server):
            yield
    finally:
        _compiled.reset(token)


# -- dependent launches ----------------------------------------------------------------------------------------------
#
# A kernel launched with `launch_pdl` (programmatic dependent launch) may start while the one before it in the stream
# still runs: once each of that kernel's programs has called `let_next_start` or ended. An ordinary kernel starts only
# once all of them have ended and their writes are flushed. `wait_for_previous` waits for that point. So everything
# before the wait overlaps with the predecessor: the launch, address arithmetic, and loads of weights, which no kernel
# writes. See the CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization". It needs compute
# capability 9.0.
#
# What always holds in a kernel launched with `pdl_options`:
#
# - Every program calls `wait_for_previous` on every path, even if it has nothing to do. So a kernel that has ended has
#   waited for its predecessor, which had waited for its own. After the wait everything enqueued earlier is done and
#   visible: a kernel may read what any earlier one wrote, and overwrite what any earlier one read, as if PDL were off.
# - Before the wait it loads only weights, and stores nothing. Several predecessors may still be running then, so a
#   weight must be at rest: a copy, a synchronisation or an ordinary kernel must lie between writing it and this kernel.
#   The engine loads weights long before the first step. Biases are loaded after the wait: they are small and needed
#   last.
# - `let_next_start` comes first. That is safe: the next kernel's programs start only once all of ours have, so they
#   take only resources that we leave idle, and then they wait for us.
#
# Experts are the exception to the last two. Their down projection must know which they are before it can load a weight.
# So the kernel before it, which computes gate and up, calls `let_next_start` only after its wait. What the router has
# written is visible then, and the down projection reads it before it waits, past the first-level cache.
#
# Other work in the stream needs no change. An ordinary kernel, a copy, a recorded event and the end of a graph wait
# until the kernel before them is complete, and with it all earlier ones. A PDL kernel after an ordinary kernel starts
# when the programs of that kernel have ended, and waits for its writes. After a copy or a wait for an event it starts
# when those are done. So a wait across streams keeps its meaning: only the edge to the preceding kernel of the same
# stream is relaxed, and later kernels of the chain start after that kernel has. In a CUDA graph that edge becomes a
# programmatic edge and all others stay full ones; successive replays are ordered as a whole.


def is_supported(device: torch.device) -> bool:
    """True on Hopper and later, but not in Triton's interpreter. Tests replace this function to turn PDL off. Hot."""
    return kernel_target.target_of(device).has_dependent_launches


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options for `device`: the kernel's `PDL` argument and, if on, Triton's own option. Hot: every launch."""
    return {"PDL": True, "launch_pdl": True} if is_supported(device) else {"PDL": False}


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel's programs start once all of ours have called this or ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel, hence every earlier one, has ended and its writes are visible."""
    if PDL:
        gdc_wait()
