"""A small HTTP/1.1 client for a load generator: bytes are parsed as they arrive, without a task in between.

With httpx every piece of a stream passes through several coroutines: 28 us of CPU for an event, here 10 to 13
(docs/log.md). Connections carry one request at a time.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks.serve_wire import ConnectionLost, OnBody, Response

Clock = Callable[[], float]


class Address(NamedTuple):
    """Where a server is, taken from its base URL."""

    host: str
    port: int
    is_secure: bool
    path: str  # what precedes the path of every request; mostly empty

    @classmethod
    def from_url(cls, url: str) -> "Address":
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url {url!r} is not the address of a server; write it as http://host:port")
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/")
        return cls(parts.hostname, parts.port or (443 if is_secure else 80), is_secure, path)


class _Connection(asyncio.Protocol):
    """A connection to the server, which carries one response at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._done: asyncio.Future[None] | None = None
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def exchange(self, request: bytes, response: Response) -> None:
        """Send a request and wait until its response is complete."""
        assert self._transport is not None
        self._response = response
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._response = None
            if not response.keeps_connection:
                self.close()

    def data_received(self, data: bytes) -> None:
        if self._response is None:  # bytes after the end of a response
            self.close()
            return
        try:
            self._response.feed(data, self._clock())
        except Exception as error:  # also from `on_body`; the waiting request gets it
            self._finish(error)
            return
        if self._response.is_complete:
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._response is None:
            return
        try:
            self._response.feed_end()
        except ConnectionLost as lost:
            self._finish(lost)
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Sends requests to one server. Connections that are free are used again."""

    def __init__(self, base_url: str, api_key: str | None = None, clock: Clock = time.perf_counter) -> None:
        self.address = Address.from_url(base_url)
        self.clock = clock
        self.ssl = ssl.create_default_context() if self.address.is_secure else None
        self._api_key = api_key
        self._free: list[_Connection] = []

    async def send(self, method: str, path: str, body: bytes, on_body: OnBody) -> Response:
        """Send a request and wait for the end of its response, whose body goes to `on_body` as it arrives.

        Raises OSError if there is no connection, ConnectionLost if it ends early, and ProtocolError. Cancelling closes
        the connection.
        """
        request = self.head(method, path, len(body)) + body
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                response = Response(on_body)
                try:
                    return await self._exchange(connection, request, response)
                except ConnectionLost:
                    if response.status:
                        raise  # else the server had closed the connection, which had been idle
        return await self._exchange(await self._connect(), request, Response(on_body))

    def head(self, method: str, path: str, num_body_bytes: int) -> bytes:
        """The request line and the headers."""
        lines = [
            f"{method} {self.address.path}{path} HTTP/1.1",
            f"Host: {self.address.host}:{self.address.port}",
            "Content-Type: application/json",
            f"Content-Length: {num_body_bytes}",
        ]
        if self._api_key:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()
        await asyncio.sleep(0)  # the transports end in the next turn of the loop

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        host, port = self.address.host, self.address.port
        _, connection = await loop.create_connection(lambda: _Connection(self.clock), host, port, ssl=self.ssl)
        return connection

    async def _exchange(self, connection: _Connection, request: bytes, response: Response) -> Response:
        await connection.exchange(request, response)
        if response.keeps_connection:
            self._free.append(connection)
        return response
