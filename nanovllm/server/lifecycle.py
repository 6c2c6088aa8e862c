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
from typing import Any, NoReturn

import uvicorn

from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.api_keys import ApiKeys, read_api_keys
from nanovllm.server.connections import Connection, ConnectionLimits, raise_file_limit
from nanovllm.server.options import ServerOptions
from nanovllm.server.port import port_error, url_of
from nanovllm.server.private_log import keep_messages_out
from nanovllm.server.site import Site, build_site

FAILED = 1  # exit status after the engine has failed; a supervisor should start the server again
LINGER_S = 1.0  # after a failure: time for load balancers to see it, and for clients to read why
LAST_EVENTS_S = 2.0  # for clients to take the last events
SWITCH_INTERVAL_S = 0.001  # the engine's thread and the event loop wait for each other; Python's default is 5 ms
KEEP_ALIVE_S = 60  # longer than clients keep idle connections, so that they do not meet one that is just closing
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


def run_server(load: Callable[[], AsyncLLM], options: ServerOptions, bound: socket.socket, model_name: str) -> int:
    """Serve until a signal arrives or the engine fails, and return the exit status. Call it in the main thread.

    load: makes the engine, which is closed in the end. bound: a socket that owns the port. Raises ConfigError for a
    port or a key file that cannot be used, and what `load` raises.
    """
    keep_messages_out()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    num_files = raise_file_limit()
    keys = ApiKeys(read_api_keys(options.api_key_file, os.environ))
    with _ended_by_sigterm():
        engine = load()
        try:
            site = build_site(engine, options, keys, model_name)
            limits = ConnectionLimits(options.max_receive_s, options.max_unread_s, num_files)
            return asyncio.run(_Server(engine, site, options, bound, limits).run())
        finally:
            engine.close()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
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

    def __init__(
        self, engine: AsyncLLM, site: Site, options: ServerOptions, bound: socket.socket, limits: ConnectionLimits
    ) -> None:
        self._engine, self._site, self._options, self._socket = engine, site, options, bound
        config = uvicorn.Config(
            site.app,
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
            await self._warm_up()
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

    async def _warm_up(self) -> None:
        """Run one short request, so that the first client does not wait for what is made on first use."""
        num_tokens = min(2, max(1, self._engine.llm.max_request_tokens - 1))  # two: a prefill and a decode
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async for _ in self._engine.generate([[0]], params):
            pass

    async def _serve(self) -> int:
        served = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        failed = asyncio.ensure_future(self._engine.wait_for_failure())
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
        logger.info("nanovllm: %s is served at %s/v1", self._site.model_name, url_of(self._socket))

    async def _drain(self, served: "asyncio.Future[None]", failed: "asyncio.Future[EngineError]") -> None:
        """Let the open requests finish. Returns when they have, at the limit, or when the engine fails."""
        num_open = self._site.queue.num_open
        self._site.gate.is_draining = True
        logger.info("nanovllm: stopping; open answers: %d, which get %g s", num_open, self._options.drain_s)
        self._uvicorn.should_exit = True  # closes the port and waits for the connections
        await asyncio.wait((served, failed), timeout=self._options.drain_s, return_when=asyncio.FIRST_COMPLETED)

    async def _end(self, served: "asyncio.Future[None]") -> None:
        """End what is still open. Each answer gets a last event, with what was generated so far."""
        if self._site.queue.num_open:
            logger.warning("nanovllm: aborting what is left; open answers: %d", self._site.queue.num_open)
        self._uvicorn.should_exit = True
        await self._engine.aclose()
        await asyncio.wait((served,), timeout=LAST_EVENTS_S)
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()  # a client that does not read, or never sent its whole request
        await served

    def _report_failure(self, error: EngineError) -> None:
        logger.error("nanovllm: the engine has failed: %s", error)
