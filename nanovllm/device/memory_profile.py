"""The GPU memory that an engine needs in addition to its KV cache, as start-up measures it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import format_bytes

# Left free in addition to what was measured, for cuBLAS workspaces of more threads and gaps in the allocator's segments
MARGIN_BYTES = 128 * 2**20
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
        return self.limit_bytes - self.used_bytes - self.step_bytes - self.graph_bytes - MARGIN_BYTES

    def __str__(self) -> str:
        return (
            f"{format_bytes(max(0, self.free_bytes))} of the {format_bytes(self.limit_bytes)} that "
            f"gpu_memory_utilization={self.utilization} allows is left after {format_bytes(self.used_bytes)} in use "
            f"(weights, CUDA, other programs), {format_bytes(self.step_bytes)} for the largest step and "
            f"{format_bytes(self.graph_bytes + MARGIN_BYTES)} for CUDA graphs and a reserve"
        )


def reserved_by(work: Callable[[], object]) -> int:
    """How many bytes torch's allocator on the current device grows by while `work` runs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def used_bytes() -> int:
    """Bytes in use on the current device by all processes, after torch has returned the memory that it can."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def memory_remedy(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error during start-up into a ConfigError that says which options to change."""
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
