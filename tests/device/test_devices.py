"""The device that rank 0 is planned for, on machines that are made up."""

import pytest
import torch

from nanovllm.config import Config
from nanovllm.device.devices import resolve_device
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
