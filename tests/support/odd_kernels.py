"""Kernels for tests of compiling. The process that compiles imports this module, so it imports little but Triton."""

import os
import time

import triton
import triton.language as tl


@triton.jit
def failing_kernel(x_ptr):
    tl.static_assert(False, "this kernel cannot be compiled")


class Held:
    """A tag that a process cannot unpickle before the file is gone."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return wait_for_end, (self.file,)

    def __repr__(self) -> str:
        return "held"


def wait_for_end(file: str) -> Held:
    while os.path.exists(file):
        time.sleep(0.01)
    return Held(file)


@triton.jit
def tagged_kernel(x_ptr, TAG: tl.constexpr):
    tl.store(x_ptr, 1.0)
