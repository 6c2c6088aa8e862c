"""The choice of the kernel that attends on the CPU."""

import logging
from collections.abc import Sequence

import torch

from nanovllm.cpu_attention import instruction_sets
from nanovllm.cpu_attention.base import CpuKernel, CpuServer
from nanovllm.cpu_attention.compiled import CompiledKernel, NotBuiltError, UnusableLibraryError, why_unfit
from nanovllm.cpu_attention.torch_kernel import TorchKernel
from nanovllm.errors import ConfigError

__all__ = ["KERNEL_NAMES", "CpuKernel", "CpuServer", "choose_kernel"]

KERNEL_NAMES = (*(variant.name for variant in instruction_sets.INSTRUCTION_SETS), TorchKernel.name)  # best first

logger = logging.getLogger("nanovllm")


def choose_kernel(
    cpus: Sequence[int],
    name: str | None = None,
    *,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    is_pinned: bool = True,
    stays_awake: bool = True,
) -> CpuKernel:
    """The kernel of this name, or else the best one that can run here, with one thread for each of `cpus`.

    `is_pinned`: each thread stays on its cpu. Otherwise the threads run on any cpu that the process may use.
    `stays_awake`: the threads spin for a while after each piece of work, since the next layer follows soon. Not where
    others need the CPUs between two layers.

    Raises ConfigError if the kernel of this name cannot run here. `head_dim` and `dtype` are those of the KV cache.
    Logs a warning if the choice would be better with another build.
    """
    reasons = []
    not_built = []
    for kernel_name in KERNEL_NAMES:
        if name in (None, kernel_name):
            try:
                kernel = _open(kernel_name, cpus, head_dim, dtype, is_pinned, stays_awake)
            except UnusableLibraryError as error:
                reasons.append(str(error))
                if isinstance(error, NotBuiltError):
                    not_built.append(error.problem)
                continue
            if not_built:
                logger.warning(
                    "attention on the CPU uses the %s kernel, although this processor can run a better one: %s; "
                    "run %s, which needs a C++ compiler",
                    *(kernel.name, ", ".join(not_built), instruction_sets.BUILD_COMMAND),
                )
            return kernel
    if not reasons:
        raise ConfigError(f"there is no CPU attention kernel {name!r}; choose one of {', '.join(KERNEL_NAMES)}")
    raise ConfigError(f"the CPU attention kernel {name} cannot run here: {reasons[0]}; choose another one or none")


def _open(
    name: str, cpus: Sequence[int], head_dim: int, dtype: torch.dtype, is_pinned: bool, stays_awake: bool
) -> CpuKernel:
    if name == TorchKernel.name:
        return TorchKernel(cpus, is_pinned)
    variant = next(variant for variant in instruction_sets.INSTRUCTION_SETS if variant.name == name)
    reason = instruction_sets.why_not_runnable(variant, instruction_sets.cpu_flags())
    if reason := reason or why_unfit(head_dim, dtype):
        raise UnusableLibraryError(reason)
    return CompiledKernel(variant, cpus, is_pinned, stays_awake)
