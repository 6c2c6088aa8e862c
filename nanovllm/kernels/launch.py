"""Launch Triton kernels, compile kernels without launching them, and launch dependent kernels.

A kernel is compiled when it is first launched with arguments of new types, which takes 0.1 to 0.8 s. Within
`compile_only` a launch starts the compilation in another thread and returns at once, without running anything. Running
a model once within `compile_only` finds all the kernels that the model needs. The kernels are compiled in parallel: on
all cores if there is a CompileServer, in which case the threads only wait for its processes.
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
from nanovllm.kernels.compile_server import CompileJob, CompileServer, hash_in_order

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
    """Return a launcher of `kernel` over `grid`: `on_grid(kernel, grid)(*args, **constants_and_options)`. Hot."""
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
            # Triton leaves the mode set when a kernel cannot be compiled, and no other mode could start
            active_mode.set(None)

    def _compile(self, key: str, compile_here: Callable[[], Any]) -> Any:
        if self._server is not None and not triton.knobs.compilation.always_compile:
            try:
                job = _job(key, compile_here)
                if not _is_cached(job):
                    self._server.compile(job)
            except Exception as error:  # of any kind: compiling here either works or raises the error
                logger.debug("a kernel is compiled in the engine's process: %r", error)
        return compile_here()


def _job(key: str, compile_here: Callable[[], Any]) -> CompileJob:
    """Find out what Triton's function would compile. Raises KeyError or AttributeError if Triton's internals differ."""
    variables = inspect.getclosurevars(compile_here).nonlocals
    source, target, options = variables["src"], variables["target"], variables["options"]
    return CompileJob(
        module=source.fn.__module__,
        kernel=source.fn.__name__,
        signature=source.signature,
        constants=source.constants,
        attrs=source.attrs,
        target=target,
        options=vars(options),
        cache_key=hashlib.sha256(key.encode()).hexdigest(),
    )


def _is_cached(job: CompileJob) -> bool:
    return get_cache_manager(job.cache_key).get_group(f"{job.kernel[:150]}.json") is not None


class _CompilingThreads(ThreadPoolExecutor):
    """Compiles kernels, and loads them on the current device with the C module that launches them.

    Only one thread loads at a time. Triton gives all launching modules the same name. When two kernels share a module,
    Python imports the module a second time: it fills the entry of that name in sys.modules and returns the entry. If
    two threads do so at once, both get the same entry, and one kernel is launched by the other kernel's module.
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
            # Reading this attribute makes Triton build the module unless it is cached, and load module and kernel
            _ = kernel.run
        return kernel


@contextmanager
def compile_only(server: CompileServer | None = None) -> Iterator[Callable[[], bool]]:
    """Compile and load the kernels that are launched inside, without running them. All are ready when the block ends.

    The kernels' output tensors keep their old content, so nothing computed inside may be used. This affects the current
    thread only. Yields a function that returns whether any kernel is still being compiled.
    """
    with _CompilingThreads() as threads, compiling_in(threads, server):
        yield threads.is_busy


def kernels_run() -> bool:
    """Return False within `compile_only`."""
    return _compiled.get() is None


@contextmanager
def compiling_in(threads: Executor, server: CompileServer | None) -> Iterator[None]:
    """Make launches inside only submit their compilation to `threads`."""
    token = _compiled.set(set())
    try:
        with _CompileMode(threads, server):
            yield
    finally:
        _compiled.reset(token)


# A kernel launched with `launch_pdl` (programmatic dependent launch) may start while its predecessor in the stream
# still runs: once each of the predecessor's programs has called `let_next_start` or ended. An ordinary kernel starts
# only once all programs of the predecessor have ended and their writes are flushed. `wait_for_previous` waits for that
# point. So everything before the wait overlaps with the predecessor: the launch, address arithmetic, and loads of
# weights, which no kernel writes. See the CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
# Dependent launches need compute capability 9.0.
#
# What always holds in a kernel launched with `pdl_options`:
#
# - Every program calls `wait_for_previous` on every path, even if it has nothing to do. So a kernel that has ended has
#   waited for its predecessor, which had waited for its own predecessor. After the wait everything enqueued earlier is
#   done and visible: a kernel may read what any earlier kernel wrote, and overwrite what any earlier kernel read, as if
#   PDL were off.
# - Before the wait a kernel loads only weights, and stores nothing. Several predecessors may still be running then, so
#   a weight must be at rest: a copy, a synchronisation or an ordinary kernel must lie between writing the weight and
#   this kernel. The engine loads weights long before the first step. Biases are loaded after the wait: they are small
#   and needed last.
# - `let_next_start` is called first. That is safe: the next kernel's programs start only once all of ours have started,
#   so they take only resources that we leave idle, and then they wait for us.
#
# Experts are the exception to the last two rules. The down projection must know the chosen experts before it can load a
# weight. So the kernel before it, which computes gate and up, calls `let_next_start` only after its own wait. The
# router's choice is visible then, and the down projection reads the choice before its own wait, past the L1 cache.
#
# Other work in the stream needs no change. An ordinary kernel, a copy, a recorded event and the end of a graph wait
# until the kernel before them is complete, and with it all earlier kernels. A PDL kernel after an ordinary kernel
# starts when the programs of the ordinary kernel have ended, and waits for its writes. After a copy or a wait for an
# event, a PDL kernel starts when the copy or the wait is done. So a wait across streams keeps its meaning: only the
# edge to the preceding kernel of the same stream is relaxed, and later kernels of the chain start after that kernel has
# started. In a CUDA graph the relaxed edge becomes a programmatic edge and all others stay full edges; successive
# replays are ordered as a whole.


def is_supported(device: torch.device) -> bool:
    """True on Hopper and later, but not in Triton's interpreter. Tests replace this function to turn PDL off. Hot."""
    return kernel_target.target_of(device).has_dependent_launches


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options for `device`: the kernel's `PDL` argument and Triton's own option. Hot: every launch."""
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
