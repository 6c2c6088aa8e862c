"""TPGroup: the ranks of one tensor-parallel engine and their collectives. An object that is passed, never a global.

Each engine has a process group of its own, made without torch's default group, so several engines can live in one
process. Its ranks meet at a TCPStore that rank 0 opens on a free loopback port.
"""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

HOST = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(seconds=60)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may compile kernels first; a dead rank is noticed by other means

_Options = TypeVar("_Options")


@dataclass(frozen=True)
class TPGroup:
    """Rank `rank` of `size`. With size 1 every collective is the identity.

    Collectives take contiguous tensors. On a GPU they are enqueued in the order of the current stream and can be
    captured in a CUDA graph; on the CPU they return when they are done.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None  # a c10d backend, used directly; torch's stubs leave out its collectives
    on_close: list[Callable[[], None]] = field(default_factory=list, compare=False)  # destroy the graphs that captured

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place. Hot: twice per layer."""
        if self.process_group is not None:
            _wait(self.process_group.allreduce([x], _ALL_REDUCE))
        return x

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenate every rank's `x` along its last dimension, in rank order. With several ranks into `out`, if
        given.
        """
        if self.process_group is None:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        _wait(self.process_group.allgather([parts], [x.contiguous()], _ALL_GATHER))
        return torch.cat(parts, dim=-1, out=out)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x` on every rank, in place."""
        if self.process_group is not None:
            _wait(self.process_group.broadcast([x], _BROADCAST))
        return x

    def close(self) -> None:
        """Leave the group. With nccl, kernels that still wait for another rank end, so that nothing hangs on them.

        nccl lets go only when no CUDA graph has its collectives any more, and a graph that waits for a dead rank ends
        only when nccl has begun to let go: so both happen at once.
        """
        if self.process_group is None or isinstance(self.process_group, dist.ProcessGroupGloo):
            return
        abort = threading.Thread(target=self.process_group.abort)
        abort.start()
        while self.on_close:
            self.on_close.pop()()
        abort.join()


def _wait(work: dist.Work | None) -> None:
    """On the CPU, until done; on the GPU, the current stream waits and the host goes on."""
    if work is not None:  # None: nccl has enqueued it on the current stream, so there is nothing to wait for
        work.wait()


def _on_current_stream(options: _Options) -> _Options:
    """nccl then runs on the current stream instead of one of its own, which costs two events per collective."""
    if hasattr(options, "asyncOp"):  # older torch has only the other way
        options.asyncOp = False
    return options


_ALL_REDUCE = _on_current_stream(AllreduceOptions())
_ALL_GATHER = _on_current_stream(AllgatherOptions())
_BROADCAST = _on_current_stream(BroadcastOptions())


def open_store() -> dist.TCPStore:
    """Rank 0's end of the meeting point, at a loopback port that the system chose (`store.port`)."""
    listener = socket.create_server((HOST, 0))
    port, fd = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(  # without libuv, which takes no socket before torch 2.8
        HOST, port, None, True, CONNECT_TIMEOUT, wait_for_workers=False, master_listen_fd=fd, use_libuv=False
    )


def join_store(port: int) -> dist.TCPStore:
    """Another rank's end of it."""
    return dist.TCPStore(HOST, port, None, False, CONNECT_TIMEOUT, wait_for_workers=False)


def connect(store: dist.Store, rank: int, size: int, device_type: str) -> TPGroup:
    """Meet the other ranks: nccl on device `cuda:rank`, or gloo on the CPU.

    Returns when every rank is connected. Raises RuntimeError when one does not come within CONNECT_TIMEOUT.
    """
    if device_type == "cuda":
        with torch.cuda.device(rank):
            group = TPGroup(rank, size, _nccl(store, rank, size))
            group.all_reduce(torch.zeros(1, device="cuda"))  # nccl connects in the first call, too late in a capture
            torch.cuda.synchronize()
        return group
    return TPGroup(rank, size, _gloo(store, rank, size))


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _gloo(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = COLLECTIVE_TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)
