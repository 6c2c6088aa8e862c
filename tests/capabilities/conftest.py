from collections.abc import Callable, Iterator

import pytest
from emulated_amx import EMULATED_AMX

from nanovllm.capabilities.cpu_attention import build
from nanovllm.capabilities.cpu_attention.job import CpuKernel
from nanovllm.capabilities.cpu_attention.kernels import KERNEL_NAMES, CompiledKernel, choose_kernel
from nanovllm.errors import ConfigError

OpenKernel = Callable[..., CpuKernel]
# Emulating takes long, and the real unit is better.
_EMULATES_AMX = not {"amx_bf16"} & build.cpu_flags() and not build.missing_flags(EMULATED_AMX, build.cpu_flags())


def _open(cpus: list[int], name: str) -> CpuKernel:
    if name != EMULATED_AMX.name:
        return choose_kernel(cpus, name)
    if not _EMULATES_AMX:
        raise ConfigError("this processor has AMX, or lacks AVX-512 with bf16")
    return CompiledKernel(EMULATED_AMX, cpus)


@pytest.fixture(params=[*KERNEL_NAMES, pytest.param(EMULATED_AMX.name, marks=pytest.mark.slow)])
def kernel_name(request: pytest.FixtureRequest) -> str:
    """Each kernel that can run on this machine."""
    try:
        _open([0], request.param).close()
    except ConfigError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def open_kernel(kernel_name: str) -> Iterator[OpenKernel]:
    """Opens kernels of this name that are closed after the test."""
    kernels: list[CpuKernel] = []

    def open_one(num_threads: int = 2) -> CpuKernel:
        cpus = [cpu % 2 for cpu in range(num_threads)]  # threads may share a cpu, which the machine may lack
        kernels.append(_open(cpus, kernel_name))
        return kernels[-1]

    yield open_one
    for kernel in kernels:
        kernel.close()
