"""Connections: what a client can hold open, and for how long.

Uvicorn closes connections only between requests. Here a connection also ends if the head of a request does not arrive
in time, or if the client takes nothing of an answer that waits for it. Each of these has a timer of its own, so that
thousands of idle connections cost nothing. The Gate limits the time of a body.

Connections beyond the limit on open files are answered with status 503 and closed, so that files and the ranks' sockets
can still be opened.
"""

import asyncio
import json
import logging
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.server.errors import ApiError

MAX_FILES = 1 << 20  # where the system sets no limit
SPARE_FILES = 64  # for everything but connections, beyond those that are open when the server starts
REPORT_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it to, and return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # an unlimited hard limit can be more than the kernel takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


class ConnectionLimits:
    """receive_s: for the head of a request. unread_s: for a client to take some of what waits for it."""

    def __init__(self, receive_s: float, unread_s: float, num_files: int) -> None:
        self.receive_s, self.unread_s = receive_s, unread_s
        num_open = len(os.listdir("/proc/self/fd"))
        self.max_connections = max(1, num_files - num_open - SPARE_FILES)
        self._reported_s = float("-inf")

    def admits(self, num_connections: int) -> bool:
        """Whether so many connections may be open. Says so in the log if they may not."""
        if num_connections <= self.max_connections:
            return True
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_INTERVAL_S:
            self._reported_s = now_s
            logger.warning(
                "nanovllm: %d connections are open, more would exceed the limit on open files; new ones get status "
                "503; raise the hard limit (ulimit -Hn)",
                self.max_connections,
            )
        return False


class _Timer:
    """Calls something once, unless it is cancelled before. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, delay_s: float, call: Callable[[], None]) -> None:
        def ring() -> None:
            self._handle = None
            call()

        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(delay_s, ring)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """Uvicorn's protocol with these limits.

    Always the one on h11: the one on httptools, which uvicorn prefers where it is installed, sends answers in chunks to
    clients that speak HTTP/1.0.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._head_timer = _Timer()  # runs while the head of a request is awaited
        self._unread_timer = _Timer()  # runs while the client leaves something unread
        self._num_unread_bytes = 0  # when the timer was started

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._limits.admits(len(self.connections)):
            self._head_timer.start(self._limits.receive_s, self._end)
        else:
            transport.write(_too_many_connections())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self._unread_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.transport.is_closing():
            self._head_timer.cancel()
        elif not self._head_timer.is_running:
            self._head_timer.start(self._limits.receive_s, self._end)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._unread_timer.cancel()
        super().resume_writing()

    def _watch_reader(self) -> None:
        """Cut the connection if the client takes nothing of what waits for it."""
        self._unread_timer.cancel()
        self._num_unread_bytes = self.transport.get_write_buffer_size()
        if self._num_unread_bytes:
            self._unread_timer.start(self._limits.unread_s, self._check_reader)

    def _check_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unread_bytes:
            self._watch_reader()
        else:
            self.transport.abort()

    def _end(self) -> None:
        self.transport.close()


def _too_many_connections() -> bytes:
    error = ApiError("too many connections are open; ask again later", status=503, code="service_unavailable")
    body = json.dumps(error.body())
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
