"""The device that an engine runs on: choosing it, configuring its allocator, and cleaning up after a failed start."""

import os
import traceback
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.errors import ConfigError


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments, unless the user has configured the allocator.

    By default segments have fixed sizes. Steps have many different sizes, and the gaps that none of them could use took
    0.2 GiB more than the largest step needs.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def resolve_device(config: Config) -> torch.device:
    """The device of rank 0. Raises ConfigError if the machine lacks the GPUs that the config asks for.

    With several ranks only the kind of device counts, because each rank is given a device of its own.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={config.device!r}: this machine has no usable CUDA GPU; use device='cpu'")
    device = torch.device(name if ":" in name else "cuda:0")
    size, num_gpus = config.tensor_parallel_size, torch.cuda.device_count()
    if size > 1 and device.index:
        raise ConfigError(
            f"device={name!r} with tensor_parallel_size={size}: each rank has a GPU of its own; give device='cuda'"
        )
    if max(size, device.index + 1) > num_gpus:
        raise ConfigError(
            f"device={name!r} with tensor_parallel_size={size} needs more GPUs than the {num_gpus} that this "
            "process sees; lower tensor_parallel_size or choose another device"
        )
    return device


def installed_gpu(config: Config) -> Any | None:
    """torch's properties of the GPU that `config.device` names, or None if this machine does not have it."""
    index = int(config.device.split(":")[1]) if ":" in config.device else 0
    return torch.cuda.get_device_properties(index) if index < torch.cuda.device_count() else None


def memory_node(device: torch.device) -> int | None:
    """The memory node (NUMA) that a GPU is attached to; None if there is only one, or the machine does not say."""
    if device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(device)  # torch declares no addresses
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


def release_failed_start(error: BaseException, device: torch.device) -> None:
    """Free the GPU memory of a failed start, even though the caller keeps the exception.

    The frames of its traceback refer to tensors such as the half-built model or the activations of the largest step.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    if device.type == "cuda":
        torch.cuda.empty_cache()
