"""TPGroup: the ranks of one tensor-parallel engine and their collectives. It is always passed and never global.

Each engine has its own process group, made without torch's default group, so several engines can live in one process.
Its ranks connect through a TCPStore that rank 0 opens on a free loopback port. GPUs that reach each other's memory
also have inboxes, through which a kernel sums a few rows in less than half of nccl's time (kernels/peer_sum.py).
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from nanovllm.device.cuda import HANDLE_BYTES, SharedMemory, UnsupportedDriverError, pinned_view

logger = logging.getLogger("nanovllm")

HOST = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(seconds=60)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may compile kernels first; other checks detect a dead rank

INBOX_BYTES = 2**21  # messages of 8 bytes for two sums, which hold 2**17 words each, divided among the ranks

_Options = TypeVar("_Options")


class Inboxes:
    """Memory on each rank's GPU to which the other ranks write their parts of a sum.

    An inbox is int64 [2, ranks, max_words]: messages of 32 bits, each with the number of its sum in the upper 32 bits.
    Sums use the two halves of the inbox in turn. A rank sends its message for a sum only after it has received all
    messages of the previous sum, so no rank overwrites a message that another rank has yet to read.
    """

    def __init__(self, memories: Sequence[SharedMemory], device: torch.device) -> None:
        """`memories`: INBOX_BYTES of each rank, in the order of the ranks."""
        self.max_words = INBOX_BYTES // (2 * 8 * len(memories))
        self.addresses = torch.tensor([each.address for each in memories], dtype=torch.int64, device=device)
        # Sums so far, for each program of the kernel
        self.num_sums = torch.zeros(self.max_words, dtype=torch.int32, device=device)
        # Kernels stop waiting for messages when this is not 0. The host writes it directly: a stream might share a
        # hardware queue with the kernel that waits, and the driver refuses all calls once the GPU has failed.
        self._pinned = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.gave_up = pinned_view(self._pinned, device)
        self._memories = memories

    def give_up(self) -> None:
        """Make kernels that wait for another rank end, now and later. Their sums are wrong."""
        self._pinned.fill_(1)


@dataclass(frozen=True)
class TPGroup:
    """Rank `rank` of `size`. With size 1 every collective is the identity.

    Collectives take contiguous tensors. On a GPU they are enqueued on the current stream and can be captured in a CUDA
    graph. On the CPU they return when they are done.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None  # a c10d backend, used directly; torch's stubs leave out its collectives
    device: torch.device | None = None  # this rank's device, or None for a single rank, which uses its engine's device
    inboxes: Inboxes | None = None  # None if nccl computes all sums
    on_close: list[Callable[[], None]] = field(default_factory=list, compare=False)  # destroy graphs with collectives

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place. Hot: twice per layer."""
        if self.process_group is not None:
            _wait(self.process_group.allreduce([x], _ALL_REDUCE))
        return x

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenate every rank's `x` along its last dimension, in rank order.

        With several ranks the result is written to `out`, if given.
        """
        if self.process_group is None:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        _wait(self.process_group.allgather([parts], [x.contiguous()], _ALL_GATHER))
        return torch.cat(parts, dim=-1, out=out)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's `x` to every rank, in place."""
        if self.process_group is not None:
            _wait(self.process_group.broadcast([x], _BROADCAST))
        return x

    def close(self) -> None:
        """Leave the group. On GPUs this also ends kernels that still wait for another rank, so that nothing hangs.

        nccl's abort returns only once no CUDA graph contains its collectives. However, a graph that waits for a dead
        rank ends only once the abort has begun, so the abort runs in a thread while the graphs are destroyed.
        """
        if self.process_group is None or isinstance(self.process_group, dist.ProcessGroupGloo):
            return
        if self.inboxes is not None:
            self.inboxes.give_up()
        abort = threading.Thread(target=self.process_group.abort)
        abort.start()
        while self.on_close:
            self.on_close.pop()()
        abort.join()


def _wait(work: dist.Work | None) -> None:
    """Wait until the work is done; on a GPU, only the current stream waits and not the host."""
    if work is not None:  # None if the work is on the current stream already
        work.wait()


def _on_current_stream(options: _Options) -> _Options:
    """Let nccl run on the current stream, because a separate stream would cost two events per collective."""
    if hasattr(options, "asyncOp"):  # older versions of torch do not have the option
        options.asyncOp = False
    return options


_ALL_REDUCE = _on_current_stream(AllreduceOptions())
_ALL_GATHER = _on_current_stream(AllgatherOptions())
_BROADCAST = _on_current_stream(BroadcastOptions())


def open_store() -> dist.TCPStore:
    """Open rank 0's end of the store, on a loopback port that the system chooses (`store.port`)."""
    listener = socket.create_server((HOST, 0))
    port, fd = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(  # without libuv, which accepts an open socket only from torch 2.8 on
        HOST, port, None, True, CONNECT_TIMEOUT, wait_for_workers=False, master_listen_fd=fd, use_libuv=False
    )


def join_store(port: int) -> dist.TCPStore:
    """Open another rank's end of the store."""
    return dist.TCPStore(HOST, port, None, False, CONNECT_TIMEOUT, wait_for_workers=False)


def connect(store: dist.Store, rank: int, size: int, device: torch.device) -> TPGroup:
    """Connect to the other ranks, with nccl if `device`, this rank's device, is a GPU, and with gloo on the CPU.

    Returns when every rank is connected. Raises RuntimeError if a rank does not connect within CONNECT_TIMEOUT.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            group = TPGroup(rank, size, _nccl(store, rank, size), device)
            # nccl connects in its first call, which must not happen during a graph capture.
            group.all_reduce(torch.zeros(1, device=device))
            return replace(group, inboxes=_open_inboxes(group, device))
    return TPGroup(rank, size, _gloo(store, rank, size), device)


def _open_inboxes(group: TPGroup, device: torch.device) -> Inboxes | None:
    """Open the inboxes, in a collective call. Returns None if a rank cannot open another rank's memory, because the
    GPUs do not reach each other, or if NCCL_P2P_DISABLE is set: on some machines memory can be opened but writes are
    lost.
    """
    error: Exception | None = None
    own, handle = None, bytes(HANDLE_BYTES)
    try:
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
            raise UnsupportedDriverError("NCCL_P2P_DISABLE is set")
        own = SharedMemory.allocate(INBOX_BYTES)
        handle = own.handle()
    except UnsupportedDriverError as its_error:
        error = its_error
    handles = group.all_gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(device))
    memories: list[SharedMemory] = []
    try:
        for rank, each in enumerate(handles.view(group.size, HANDLE_BYTES).tolist()):
            memories.append(own if own and rank == group.rank else SharedMemory.open(bytes(each)))
    except UnsupportedDriverError as its_error:
        error = error or its_error
    if group.all_reduce(torch.tensor(float(error is not None), device=device)).item():
        logger.info(
            "nccl sums over ranks even for few rows, which takes longer: %s",
            error or "another rank cannot share memory",
        )
        return None
    return Inboxes(memories, device)


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _gloo(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = COLLECTIVE_TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)
