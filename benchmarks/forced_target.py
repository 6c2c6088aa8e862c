"""Runs the kernels for one GPU on another, such as those for an RTX 40 on an H200, to test and time them."""

import triton

from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KNOWN_TARGETS, KernelTarget


def force_target(name: str) -> KernelTarget:
    """Choose kernels for compute capability `name`, and generate code for it, in the rest of this process.

    Triton then emits the instructions of that GPU (such as mma, where Hopper would run wgmma), and the assembler
    translates them for the GPU of this machine. Call this before the first kernel is compiled. Other processes, such as
    the workers of tensor parallelism, are not affected.
    """
    target = KNOWN_TARGETS[name]
    kernel_target.target_of = lambda device: target if device.type == "cuda" else kernel_target.INTERPRETER
    major, minor = target.capability
    triton.knobs.runtime.override_arch = f"sm{major}{minor}"
    return target
