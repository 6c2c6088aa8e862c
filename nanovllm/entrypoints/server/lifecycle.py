"""Life of a server process, from the bound port to the exit status.

    bind the port           a port in use is known before the model is loaded
    load, warm up           connections are refused until then
    serve                   until SIGTERM or SIGINT, or until the engine fails
    drain                   no new requests; the open ones get `drain_s` to finish
    abort                   unfinished answers get their last event; connections that still do not end are cut

A second signal ends the process at once. A step on the GPU cannot be interrupted, but the kernel frees everything.

This module also limits the number of open connections and their time. Uvicorn closes connections only between requests.
Here a connection also ends if the head of a request does not arrive in time, or if the client stops reading an answer
whose data waits. Each of these limits has a separate timer per connection, so thousands of idle connections cost
nothing. The Gate limits the time of a body. Connections beyond the limit on open files get status 503 and are closed,
so that files and the ranks' sockets can still be opened.
"""

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.async_llm import AsyncLLM
from nanovllm.entrypoints.server.app import Site
from nanovllm.entrypoints.server.errors import ApiError, keep_messages_out
from nanovllm.entrypoints.server.gate import Gate, load_keys
from nanovllm.entrypoints.server.notes import noted
from nanovllm.entrypoints.server.options import ServerOptions, port_error, url_of
from nanovllm.errors import EngineError
from nanovllm.utils.interrupt import ended_by_sigterm

FAILED = 1  # exit status after the engine has failed; a supervisor should start the server again
LINGER_S = 1.0  # time after a failure in which load balancers can notice the failure and clients can read the error
LAST_EVENTS_S = 2.0  # time for clients to receive the last events
SWITCH_INTERVAL_S = 1e-4  # the engine's thread and the event loop wait for each other; Python's default is 5 ms
KEEP_ALIVE_S = 60  # longer than clients keep idle connections, so no client sends a request while the server closes
MAX_FILES = 1 << 20  # the limit if the system sets none
SPARE_FILES = 64  # files other than connections that the server may open after its start
REPORT_INTERVAL_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


class Served(Protocol):
    """The application of a server process: the Site of one engine, or the ServiceSite of several (see cluster)."""

    @property
    def gate(self) -> Gate: ...

    @property
    def num_open(self) -> int:
        """The number of unfinished answers."""

    async def warm_up(self) -> None:
        """Prepare for the first request. Raises EngineError if no request can be answered."""

    async def wait_for_failure(self) -> EngineError:
        """Wait until no request can be answered any more, and return why."""

    async def abort(self) -> None:
        """Give every open answer its last event. No request may follow."""


def run_server(load: Callable[[], AsyncLLM], options: ServerOptions, bound: socket.socket) -> int:
    """Serve until a signal arrives or the engine fails, and return the exit status. Call it in the main thread.

    load: makes the engine, which this function closes at the end. bound: a socket that owns the port. Raises
    ConfigError for a port or a key file that cannot be used, and what `load` raises.
    """
    keep_messages_out()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    num_files = raise_file_limit()
    keys = load_keys(options)
    with ended_by_sigterm():
        engine = load()
        try:
            return serve_until_stopped(Site(engine, options, keys), options, bound, num_files)
        finally:
            engine.close()


def serve_until_stopped(served: Served, options: ServerOptions, bound: socket.socket, num_files: int) -> int:
    """Serve until a signal arrives or `served` fails, and return the exit status. Call it in the main thread.

    num_files: the number of files that the process may open.
    """
    return asyncio.run(_Server(served, options, bound, num_files).run())


class _Listener(uvicorn.Server):
    """Uvicorn without its own signal handlers, which would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One run of the application on an event loop, with an orderly end."""

    def __init__(self, served: Served, options: ServerOptions, bound: socket.socket, num_files: int) -> None:
        self._served, self._options, self._socket = served, options, bound
        limits = ConnectionLimits(options.max_receive_s, options.max_unread_s, num_files)
        config = uvicorn.Config(
            served.gate.outermost,
            http=partial(Connection, limits=limits),  # type: ignore[arg-type]  # any callable that makes protocols works
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._uvicorn = _Listener(config)
        self._stop_asked = asyncio.Event()
        self._num_signals = 0

    async def run(self) -> int:
        """Run the server to its end, and return the exit status."""
        loop = asyncio.get_running_loop()
        for signum in _SIGNALS:
            loop.add_signal_handler(signum, partial(self._on_signal, signum))
        try:
            await self._served.warm_up()
            with noted(url_of(self._socket), self._options.served_model_name):
                return await self._serve()
        except EngineError as error:  # during the warm-up
            logger.error("nanovllm: the engine has failed: %s", error)
            return FAILED
        finally:
            for signum in _SIGNALS:
                loop.remove_signal_handler(signum)

    def _on_signal(self, signum: int) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            logger.warning("nanovllm: a second signal, ending at once")
            os._exit(128 + signum)
        self._stop_asked.set()

    async def _serve(self) -> int:
        served = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        failed = asyncio.ensure_future(self._served.wait_for_failure())
        stopped = asyncio.ensure_future(self._stop_asked.wait())
        announced = asyncio.ensure_future(self._announce())
        try:
            await asyncio.wait((served, failed, stopped), return_when=asyncio.FIRST_COMPLETED)
            if served.done():
                try:
                    served.result()
                except OSError as error:  # another process has bound the port as well, and listened first
                    raise port_error(self._options.host, self._options.port, error) from error
            elif not failed.done():
                await self._drain(served, failed)
            if failed.done():
                logger.error("nanovllm: the engine has failed: %s", failed.result())
                await asyncio.sleep(LINGER_S)
            await self._end(served)
            return FAILED if failed.done() else 0
        finally:
            for task in (failed, stopped, announced):
                task.cancel()

    async def _announce(self) -> None:
        """Log that the server is ready, once the server listens."""
        while not self._uvicorn.started:
            await asyncio.sleep(0.01)
        name, url = self._options.served_model_name[0], url_of(self._socket)
        logger.info("nanovllm: %s is served at %s/v1, and a page to try it at %s/", name, url, url)

    async def _drain(self, served: "asyncio.Future[None]", failed: "asyncio.Future[EngineError]") -> None:
        """Let the open requests finish. Return when all have finished, after `drain_s`, or when the engine fails."""
        num_open = self._served.num_open
        self._served.gate.is_draining = True
        logger.info("nanovllm: stopping; open answers: %d, which get %g s", num_open, self._options.drain_s)
        self._uvicorn.should_exit = True  # closes the port and waits for the connections
        await asyncio.wait((served, failed), timeout=self._options.drain_s, return_when=asyncio.FIRST_COMPLETED)

    async def _end(self, served: "asyncio.Future[None]") -> None:
        """End the open answers, each with a last event that has the tokens so far, and then the connections."""
        if self._served.num_open:
            logger.warning("nanovllm: aborting what is left; open answers: %d", self._served.num_open)
        self._uvicorn.should_exit = True
        await self._served.abort()
        await asyncio.wait((served,), timeout=LAST_EVENTS_S)
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()  # the client does not read, or never sent its whole request
        await served


# -- connections -------------------------------------------------------------------------------------------------------


def raise_file_limit() -> int:
    """Raise the limit on open files to the system's hard limit, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the kernel may refuse an unlimited hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


class ConnectionLimits:
    """Limits on connections.

    receive_s: seconds for the head of a request to arrive. unread_s: seconds for a client to read some data.
    """

    def __init__(self, receive_s: float, unread_s: float, num_files: int) -> None:
        self.receive_s, self.unread_s = receive_s, unread_s
        num_open = len(os.listdir("/proc/self/fd"))
        self.max_connections = max(1, num_files - num_open - SPARE_FILES)
        self._reported_s = float("-inf")

    def admits(self, num_connections: int) -> bool:
        """Return True if this many connections may be open. Otherwise log a warning."""
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


class Connection(H11Protocol):
    """Uvicorn's protocol on h11, with ConnectionLimits.

    Uvicorn's protocol on httptools, which uvicorn prefers if httptools is installed, is not used, because it sends
    chunked answers to clients that speak HTTP/1.0.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._timers: dict[str, asyncio.TimerHandle] = {}  # "head": awaits a request. "unread": awaits the client
        self._num_unread_bytes = 0  # when the timer "unread" was started

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._limits.admits(len(self.connections)):
            self._start("head", self._limits.receive_s, transport.close)
        else:
            transport.write(_too_many_connections())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("head")
        self._stop("unread")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.transport.is_closing():
            self._stop("head")
        elif "head" not in self._timers:
            self._start("head", self._limits.receive_s, self.transport.close)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop("unread")
        super().resume_writing()

    def _watch_reader(self) -> None:
        """Cut the connection if the client has stopped reading the data that waits."""
        self._stop("unread")
        self._num_unread_bytes = self.transport.get_write_buffer_size()
        if self._num_unread_bytes:
            self._start("unread", self._limits.unread_s, self._check_reader)

    def _check_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unread_bytes:
            self._watch_reader()
        else:
            self.transport.abort()

    def _start(self, timer: str, delay_s: float, call: Callable[[], None]) -> None:
        self._timers[timer] = self.loop.call_later(delay_s, call)

    def _stop(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()


def _too_many_connections() -> bytes:
    error = ApiError("too many connections are open; ask again later", status=503, code="service_unavailable")
    body = json.dumps(error.body())
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
