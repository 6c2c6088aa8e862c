"""The device that an engine runs on: choose it, make it current, measure its memory, and clean up after
a failed start.
"""

import ctypes
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from nanovllm.config import GPU_RESERVE_BYTES, Config
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import format_bytes


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments, unless the user has configured the allocator.

    By default segments have fixed sizes. Steps have many different sizes, and gaps that no step could use took 0.2 GiB
    more than the largest step needs.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def resolve_device(config: Config) -> torch.device:
    """Return the device of rank 0. Raises ConfigError if the machine lacks the GPUs that the config asks for.

    With several ranks only the type of device counts, because each rank is given a different device.
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
            f"device={name!r} with tensor_parallel_size={size}: each rank needs a separate GPU; give device='cuda'"
        )
    if max(size, device.index + 1) > num_gpus:
        raise ConfigError(
            f"device={name!r} with tensor_parallel_size={size} needs more GPUs than the {num_gpus} that this "
            "process sees; lower tensor_parallel_size or choose another device"
        )
    return device


def num_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count()


def installed_gpu(config: Config) -> Any | None:
    """Return torch's properties of the GPU that `config.device` names, or None if this machine does not have it."""
    index = int(config.device.split(":")[1]) if ":" in config.device else 0
    return torch.cuda.get_device_properties(index) if index < torch.cuda.device_count() else None


_CONTEXT_BYTES = 524 * 2**20  # of CUDA in a process, on an H200


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_v2_t of NVIDIA's management library."""

    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in "total reserved free used".split()),
    ]


def memory_in_use(gpu: Any) -> int:
    """Return the bytes of a GPU's memory that are in use now, without this process's CUDA context, or 0 if NVIDIA's
    management library does not tell.

    gpu: torch's properties. Unlike torch.cuda.mem_get_info, this creates no context, which would take memory itself.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle, info = ctypes.c_void_p(), _MemoryInfo(version=ctypes.sizeof(_MemoryInfo) | 2 << 24)
        found = nvml.nvmlInit_v2() == 0
        found = found and nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}".encode(), ctypes.byref(handle)) == 0
        found = found and nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(info)) == 0
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return 0
    own = _CONTEXT_BYTES if torch.cuda.is_initialized() else 0
    return max(0, int(info.used) - own) if found else 0


def memory_node(device: torch.device) -> int | None:
    """Return the NUMA node that a GPU is attached to, or None if there is only one or the machine does not tell."""
    if device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs do not declare the PCI addresses
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


def release_failed_start(error: BaseException, device: torch.device) -> None:
    """Free the GPU memory of a failed start, even though the caller keeps the exception.

    The frames of the traceback refer to tensors such as the half-built model or the activations of the largest step.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    if device.type == "cuda":
        torch.cuda.empty_cache()


class HasDevice(Protocol):
    device: torch.device


P = ParamSpec("P")
R = TypeVar("R")
Owner = TypeVar("Owner", bound=HasDevice)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make `device` and its default stream the current ones. Does nothing for the CPU.

    Device and stream are per-thread settings that kernels, events and allocations use. Steps from different threads
    could otherwise run on different GPUs, or on streams that do not wait for each other.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.default_stream(device)):
        yield


def on_own_device(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Decorate a method to run with its object's device as the current device."""

    @wraps(method)
    def wrapper(self: Owner, *args: P.args, **kwargs: P.kwargs) -> R:
        with current_device(self.device):
            return method(self, *args, **kwargs)

    return wrapper


GRAPH_LAYER_BYTES = 64 * 1024  # per decoder layer of an instantiated graph; 43 KiB measured with Qwen3-0.6B


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Bytes on one GPU.

    `used_bytes` counts everything on it except the KV cache: weights, staging buffers, CUDA's context and libraries,
    and other programs.
    """

    total_bytes: int
    utilization: float
    used_bytes: int
    step_bytes: int  # additional memory in the largest step
    graph_bytes: int  # CUDA graphs and their static inputs

    @property
    def limit_bytes(self) -> int:
        return int(self.total_bytes * self.utilization)

    @property
    def free_bytes(self) -> int:
        """Memory left for the KV cache."""
        return self.limit_bytes - self.used_bytes - self.step_bytes - self.graph_bytes - GPU_RESERVE_BYTES

    def __str__(self) -> str:
        return (
            f"{format_bytes(max(0, self.free_bytes))} of the {format_bytes(self.limit_bytes)} that "
            f"gpu_memory_utilization={self.utilization} allows is left after {format_bytes(self.used_bytes)} in use "
            f"(weights, CUDA, other programs), {format_bytes(self.step_bytes)} for the largest step and "
            f"{format_bytes(self.graph_bytes + GPU_RESERVE_BYTES)} for CUDA graphs and a reserve"
        )


def reserved_by(work: Callable[[], object]) -> int:
    """Measure by how many bytes torch's allocator on the current device grows while `work` runs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def used_bytes() -> int:
    """Return the bytes in use on the current device by all processes, after torch has released its unused memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def memory_remedy(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error during start-up into a ConfigError that names the options to change."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        reason = str(error).split(" GPU ")[0].split("\n")[0].rstrip(". ")
        raise ConfigError(
            f"the GPU ran out of memory while {doing} ({reason}); lower max_num_batched_tokens, max_num_seqs, "
            "num_gpu_blocks or num_kvcache_blocks, use a smaller model or more ranks, or free memory that other "
            "programs hold on the GPU"
        ) from error
