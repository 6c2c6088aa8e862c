"""Launches Triton kernels, or only compiles them.

A kernel is compiled when it is first launched with arguments of new types, which takes 0.1 to 0.8 s. Within
`compile_only` a launch starts the compilation in another thread and returns at once, without running anything. Running
a model once like that finds all the kernels it needs and compiles them in parallel, on all cores.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton

# Within compile_only, the launches already compiled. Triton would wait if a kernel were compiled a second time.
_compiled: ContextVar[set[Any] | None] = ContextVar("compiled", default=None)


def on_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """A function that launches `kernel` over `grid`: `on_grid(kernel, grid)(*args, **constants_and_options)`. Hot."""
    compiled = _compiled.get()
    if compiled is not None:
        return partial(_compile_once, kernel, grid, compiled)
    launch: Callable[..., Any] = kernel[grid]
    return launch


def _compile_once(kernel: Any, grid: tuple[int, ...], compiled: set[Any], *args: Any, **options: Any) -> None:
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


class _CompilingThreads(ThreadPoolExecutor):
    """Compiles kernels, and loads them on the current device with the C stub that launches them."""

    def __init__(self) -> None:
        super().__init__(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
        self._futures: list[Future[Any]] = []

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self._futures.append(super().submit(self._compile_and_load, compile_kernel))
        return self._futures[-1]

    def is_busy(self) -> bool:
        return not all(future.done() for future in self._futures)

    @staticmethod
    def _compile_and_load(compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        _ = kernel.run  # reading this attribute makes Triton build the stub and load the kernel
        return kernel


@contextmanager
def compile_only() -> Iterator[Callable[[], bool]]:
    """Compile and load the kernels that are launched inside, without running them. All are ready when the block ends.

    Their output tensors keep their old content, so nothing computed inside may be used. This affects the current thread
    only. Yields a function that returns whether any kernel is still being compiled.
    """
    token = _compiled.set(set())
    try:
        with _CompilingThreads() as threads, triton.AsyncCompileMode(threads):
            yield threads.is_busy
    finally:
        _compiled.reset(token)
