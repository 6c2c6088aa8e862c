from collections.abc import Callable, Iterator

import pytest
from emulated_amx import EMULATED_AMX, open_kernel_named

from nanovllm.capabilities.cpu_attention.job import CpuKernel
from nanovllm.capabilities.cpu_attention.kernels import KERNEL_NAMES
from nanovllm.errors import ConfigError

OpenKernel = Callable[..., CpuKernel]


@pytest.fixture(params=[*KERNEL_NAMES, pytest.param(EMULATED_AMX.name, marks=pytest.mark.slow)])
def kernel_name(request: pytest.FixtureRequest) -> str:
    """Each kernel that can run on this machine."""
    try:
        open_kernel_named(request.param, [0]).close()
    except ConfigError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def open_kernel(kernel_name: str) -> Iterator[OpenKernel]:
    """Opens kernels of this name that are closed after the test."""
    kernels: list[CpuKernel] = []

    def open_one(num_threads: int = 2) -> CpuKernel:
        cpus = [cpu % 2 for cpu in range(num_threads)]  # threads may share a cpu, which the machine may lack
        kernels.append(open_kernel_named(kernel_name, cpus))
        return kernels[-1]

    yield open_one
    for kernel in kernels:
        kernel.close()
