"""What every CPU attention kernel offers.

A kernel owns threads. It attends to one job at a time, either at once (`attend`) or in a server, which waits for each
job's queries by itself. So the thread that launches the GPU's work never waits for the CPU's.
"""

from abc import ABC, abstractmethod

import torch

from nanovllm.cpu_attention.job import TILE_TOKENS, AttentionJob

MAX_QUEUED_JOBS = 2048  # CAPACITY in source/server.h
FAR_AHEAD = 2**30  # a closed server counts this many jobs beyond its newest one as done


class CpuServer(ABC):
    """Attends in the order of submission, to each job as soon as its queries have arrived.

    Numbers count up by one from 1 and wrap around in int32. A number is reached when the signed 32-bit difference of
    the flag and the number is not negative. flags[0] is the newest job whose queries have arrived, written by the GPU.
    flags[1] is the newest job whose output is complete, read by the GPU.
    """

    @abstractmethod
    def submit(self, job: AttentionJob, layer: int, number: int) -> None:
        """Attend in `layer` when flags[0] has reached `number`, then set flags[1] to it. Hot: once per layer.

        The caller keeps the job and its tensors alive until flags[1] has reached `number` or the server is closed.
        Raises RuntimeError if 2,048 jobs are waiting already.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish the job that has started, drop the others, and let go whoever waits: flags[1] moves far ahead."""


class CpuKernel(ABC):
    """Attention of a few query rows over keys that lie in CPU memory, on `num_threads` threads."""

    name: str
    num_threads: int
    unit_tokens: int = TILE_TOKENS  # the CPU's share of a block should be a multiple of this

    @classmethod
    @abstractmethod
    def why_unavailable(cls, head_dim: int, dtype: torch.dtype) -> str | None:
        """None if it can serve such a KV cache on this machine, otherwise the reason."""

    @abstractmethod
    def attend(self, job: AttentionJob, layer: int) -> None:
        """Write out_THD and lse_HT of the job. Returns when they are complete; other Python threads run meanwhile."""

    @abstractmethod
    def serve(self, flags: torch.Tensor) -> CpuServer:
        """A server that is driven by `flags`: int32 [2], in CPU memory, pinned if a GPU uses them. Sets both to 0."""

    @abstractmethod
    def close(self) -> None:
        """Close the servers and end the threads. Closing twice does nothing."""


def check_flags(flags: torch.Tensor) -> None:
    assert (
        flags.dtype == torch.int32 and flags.shape == (2,) and flags.device.type == "cpu" and flags.is_contiguous()
    ), "flags must be two contiguous int32 in CPU memory"
