"""The device that rank 0 is planned for, on machines that are made up."""

import pytest
import torch

from nanovllm.config import Config
from nanovllm.device.devices import memory_in_use, resolve_device
from nanovllm.errors import ConfigError


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
def test_resolve_device_one_gpu_for_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="=2 needs more GPUs than the 1 that this process sees"):
        resolve_device(Config(model="m", tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"device='cuda:1' .*: each rank needs a separate GPU; give device="):
        resolve_device(Config(model="m", device="cuda:1", tensor_parallel_size=2))


@pytest.mark.gpu
def test_memory_in_use_is_what_cuda_counts() -> None:
    """Without the context of this process, which exists by now."""
    gpu = torch.cuda.get_device_properties(0)
    before = memory_in_use(gpu)
    block = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    assert 0.99 * block.nbytes < memory_in_use(gpu) - before < 1.01 * block.nbytes
    free, total = torch.cuda.mem_get_info(0)
    assert abs(memory_in_use(gpu) + 2**29 - (total - free)) < 2**28
