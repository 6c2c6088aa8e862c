"""Handover: gives a process that rank 0 did not spawn what a spawned one inherits, over a Unix socket.

That is the shared memory for calls and the worker's ends of the two pipes. They are handed over as file descriptors.
Neither the socket nor the memory has a name in a file system, so nothing is left behind, however the processes end.
Only processes of the same user are served, because what comes through the pipes is unpickled.
"""

import mmap
import multiprocessing
import os
import secrets
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the process at the other end
_ANSWER_TIMEOUT_S = 10.0  # for a process that has connected to say its rank


class Connected(NamedTuple):
    """A worker that has been served, as rank 0 sees it."""

    rank: int
    pid: int
    pidfd: int  # to be closed by whoever takes it
    control: Connection
    reports: Connection


@dataclass(frozen=True)
class WorkerEnds:
    segment: mmap.mmap
    control: Connection
    reports: Connection


class Handover:
    """Rank 0's side."""

    def __init__(self, segment_bytes: int) -> None:
        self.address = f"\0nanovllm-{secrets.token_hex(16)}"  # the NUL makes it an abstract name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address)
        self._socket.listen()
        self._memory_fd = os.memfd_create("nanovllm-calls")
        os.ftruncate(self._memory_fd, segment_bytes)
        self.segment = mmap.mmap(self._memory_fd, segment_bytes)

    def serve_one(self, timeout_s: float) -> Connected | None:
        """Serve the next worker that connects; None if there is none within the timeout, or it has died meanwhile."""
        self._socket.settimeout(timeout_s)
        try:
            peer = self._socket.accept()[0]
        except TimeoutError:
            return None
        with peer, suppress(ConnectionError, ProcessLookupError):
            return self._serve(peer)
        return None

    def _serve(self, peer: socket.socket) -> Connected:
        pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():
            raise ConnectionRefusedError(f"a process of user {uid} has connected")
        peer.settimeout(_ANSWER_TIMEOUT_S)
        rank = peer.recv(1)
        if not rank:
            raise ConnectionResetError("the worker has died")
        control, worker_control = multiprocessing.Pipe()
        reports, worker_reports = multiprocessing.Pipe()  # two-way, so that the worker sees this end close
        with worker_control, worker_reports:
            socket.send_fds(peer, [b"."], [self._memory_fd, worker_control.fileno(), worker_reports.fileno()])
        return Connected(rank[0], pid, os.pidfd_open(pid), control, reports)

    def close(self) -> None:
        """Serve no more workers. What has been handed over stays usable."""
        self._socket.close()
        os.close(self._memory_fd)


def take_over(address: str, rank: int) -> WorkerEnds:
    """The worker's side. Raises OSError if rank 0 no longer listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank_0:
        rank_0.connect(address)
        rank_0.sendall(bytes([rank]))
        data, fds, _, _ = socket.recv_fds(rank_0, 1, 3)
    if not data:
        raise ConnectionError("rank 0 ended before this rank was connected to it")
    memory_fd, control_fd, reports_fd = fds
    segment = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
    os.close(memory_fd)
    return WorkerEnds(segment, Connection(control_fd), Connection(reports_fd))
