"""The life of a server process: from the bound port to the exit status.

    bind the port           a port in use is known before the model is loaded
    load, warm up           connections are refused until then
    serve                   until SIGTERM or SIGINT, or until the engine fails
    drain                   no new requests; the open ones get `drain_s` to finish
    abort                   what is left gets its last event; connections that still do not end are cut

A second signal ends the process at once. A step on the GPU cannot be interrupted, but the kernel frees everything.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

import uvicorn

from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import EngineError
from nanovllm.server.app import Site
from nanovllm.server.connections import Connection, ConnectionLimits, raise_file_limit
from nanovllm.server.errors import keep_messages_out
from nanovllm.server.gate import Gate, load_keys
from nanovllm.server.options import ServerOptions, port_error, url_of

FAILED = 1  # exit status after the engine has failed; a supervisor should start the server again
LINGER_S = 1.0  # after a failure: time for load balancers to see it, and for clients to read why
LAST_EVENTS_S = 2.0  # for clients to take the last events
SWITCH_INTERVAL_S = 1e-4  # the engine's thread and the event loop wait for each other; Python's default is 5 ms
KEEP_ALIVE_S = 60  # longer than clients keep idle connections, so that they do not meet one that is just closing
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


class Served(Protocol):
    """What a server process serves: the Site of one engine, or that of several (nanovllm/cluster)."""

    @property
    def gate(self) -> Gate: ...

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""

    async def warm_up(self) -> None:
        """Called before the first request. Raises EngineError if nothing can be answered."""

    async def wait_for_failure(self) -> EngineError:
        """Wait until no request can be answered any more, and return why."""

    async def abort(self) -> None:
        """Give every open answer its last event. There are no further requests."""


def run_server(load: Callable[[], AsyncLLM], options: ServerOptions, bound: socket.socket) -> int:
    """Serve until a signal arrives or the engine fails, and return the exit status. Call it in the main thread.

    load: makes the engine, which is closed in the end. bound: a socket that owns the port. Raises ConfigError for a
    port or a key file that cannot be used, and what `load` raises.
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

    num_files: that the process may open.
    """
    limits = ConnectionLimits(options.max_receive_s, options.max_unread_s, num_files)
    return asyncio.run(_Server(served, options, bound, limits).run())


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """While the model is loaded, SIGTERM cleans up like an error."""

    def end(signum: int, frame: Any) -> NoReturn:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Listener(uvicorn.Server):
    """Uvicorn without its own signal handlers, which would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """Runs the application on an event loop, and ends it in order."""

    def __init__(self, served: Served, options: ServerOptions, bound: socket.socket, limits: ConnectionLimits) -> None:
        self._served, self._options, self._socket = served, options, bound
        config = uvicorn.Config(
            served.gate.outermost,
            http=partial(Connection, limits=limits),  # type: ignore[arg-type]  # it only has to make protocols
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
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        for signum in _SIGNALS:
            loop.add_signal_handler(signum, partial(self._on_signal, signum))
        try:
            await self._served.warm_up()
            return await self._serve()
        except EngineError as error:  # during the warm-up
            self._report_failure(error)
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
                self._report_closed_port(served)
            elif not failed.done():
                await self._drain(served, failed)
            if failed.done():
                self._report_failure(failed.result())
                await asyncio.sleep(LINGER_S)
            await self._end(served)
            return FAILED if failed.done() else 0
        finally:
            for task in (failed, stopped, announced):
                task.cancel()

    def _report_closed_port(self, served: "asyncio.Future[None]") -> None:
        """Raise why the server does not listen: another process has bound the port as well, and listened first."""
        try:
            served.result()
        except OSError as error:
            raise port_error(self._options.host, self._options.port, error) from error

    async def _announce(self) -> None:
        """Say that the server is ready, once it listens."""
        while not self._uvicorn.started:
            await asyncio.sleep(0.01)
        name, url = self._options.served_model_name[0], url_of(self._socket)
        logger.info("nanovllm: %s is served at %s/v1, and a page to try it at %s/", name, url, url)

    async def _drain(self, served: "asyncio.Future[None]", failed: "asyncio.Future[EngineError]") -> None:
        """Let the open requests finish. Returns when they have, at the limit, or when the engine fails."""
        num_open = self._served.num_open
        self._served.gate.is_draining = True
        logger.info("nanovllm: stopping; open answers: %d, which get %g s", num_open, self._options.drain_s)
        self._uvicorn.should_exit = True  # closes the port and waits for the connections
        await asyncio.wait((served, failed), timeout=self._options.drain_s, return_when=asyncio.FIRST_COMPLETED)

    async def _end(self, served: "asyncio.Future[None]") -> None:
        """End what is still open. Each answer gets a last event, with what was generated so far."""
        if self._served.num_open:
            logger.warning("nanovllm: aborting what is left; open answers: %d", self._served.num_open)
        self._uvicorn.should_exit = True
        await self._served.abort()
        await asyncio.wait((served,), timeout=LAST_EVENTS_S)
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()  # a client that does not read, or never sent its whole request
        await served

    def _report_failure(self, error: EngineError) -> None:
        logger.error("nanovllm: the engine has failed: %s", error)
