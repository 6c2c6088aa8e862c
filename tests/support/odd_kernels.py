"""Kernels for tests of compiling. The process that compiles imports this module, so it imports nothing but Triton."""

import triton
import triton.language as tl


@triton.jit
def failing_kernel(x_ptr):
    tl.static_assert(False, "this kernel cannot be compiled")


@triton.jit
def tagged_kernel(x_ptr, TAG: tl.constexpr):
    tl.store(x_ptr, 1.0)
