"""Gate: the ASGI application around the server's own. It refuses what must not cost any work.

In this order: requests after the server has begun to stop (503), without a valid API key (401), and with a body that is
too large (413), arrives too slowly (408), or for which no memory is left (503). It reads a body whole, as the
application would, and passes everything else on as it is, so that streamed answers are not slowed down.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from nanovllm.server.api_keys import ApiKeys
from nanovllm.server.errors import ClientDisconnectedError
from nanovllm.server.refusals import Refusal

Scope: TypeAlias = MutableMapping[str, Any]
ASGIMessage: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[ASGIMessage]]
Send: TypeAlias = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/health", "/version")  # need no key
MAX_HELD_BODIES = 64  # the bodies of all open requests together are at most as large as so many of the largest
CACHE_SALT = "cache_salt"  # the entry of the request's state that holds the salt of its key, with cache_salt_per_key


@dataclass
class _Held:
    """What one request has in memory of its body."""

    num_bytes: int = 0


class Gate:
    """`is_draining` is set when the server stops. `on_refusal` is told each reason, for the metrics."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        max_body_bytes: int,
        max_receive_s: float,
        cache_salt_per_key: bool,
        on_refusal: Callable[[str], None],
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        self._app, self._keys, self._max_body_bytes = app, keys, max_body_bytes
        self._max_receive_s = max_receive_s
        self._cache_salt_per_key = cache_salt_per_key
        self._on_refusal = on_refusal
        self._open_paths = frozenset(open_paths)
        self._num_held_bytes = 0  # in the bodies of all requests that are open
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = _Held()
        try:
            if scope["type"] == "http":
                try:
                    self._check_access(scope)
                    receive = await self._read_body(scope, receive, held)
                except Refusal as refusal:
                    self._on_refusal(refusal.reason)
                    return await refusal.response()(scope, receive, send)
                except ClientDisconnectedError:
                    return None
            await self._app(scope, receive, send)
        finally:  # the application keeps the body until it has answered
            self._num_held_bytes -= held.num_bytes

    def _check_access(self, scope: Scope) -> None:
        """Raise Refusal while the server stops, or for a request without a valid key. Note the key's salt."""
        if self.is_draining:
            raise Refusal(503, "draining", "the server is stopping; ask again later", retry_after_s=1)
        if not self._keys or scope["path"] in self._open_paths:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not self._keys.accept(given[0]):
            problem = "the API key is wrong" if given else "the API key is missing"
            raise Refusal(401, "api_key", f"{problem}; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
        if self._cache_salt_per_key:
            scope.setdefault("state", {})[CACHE_SALT] = self._keys.cache_salt(given[0])

    async def _read_body(self, scope: Scope, receive: Receive, held: "_Held") -> Receive:
        """Read the whole body, and return a `receive` that repeats it. Raises Refusal if it is too large or slow."""
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()]
        self._check_size(max(lengths, default=0))  # what is announced need not be true
        try:
            whole = await asyncio.wait_for(self._whole_body(receive, held), self._max_receive_s)
        except asyncio.TimeoutError as error:
            message = f"the body has not arrived within max_receive_s={self._max_receive_s:g} seconds; send it faster"
            raise Refusal(408, "slow_body", message, code="request_timeout") from error
        body: list[ASGIMessage] = [{"type": "http.request", "body": whole, "more_body": False}]

        async def receive_again() -> ASGIMessage:
            return body.pop() if body else await receive()

        return receive_again

    async def _whole_body(self, receive: Receive, held: "_Held") -> bytes:
        body = bytearray()  # and not a list of chunks, which can be a byte each
        is_complete = False
        while not is_complete:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnectedError
            body += message.get("body", b"")
            self._check_size(len(body))
            self._num_held_bytes += len(body) - held.num_bytes
            held.num_bytes = len(body)
            if self._num_held_bytes > MAX_HELD_BODIES * self._max_body_bytes:
                raise Refusal(
                    503, "bodies", "the server has no memory left for bodies; ask again later", retry_after_s=1
                )
            is_complete = not message.get("more_body", False)
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            limit = f"max_body_mb={self._max_body_bytes / 2**20:g}"
            message = f"the body is larger than {limit} MiB; send less, or raise the server's limit"
            raise Refusal(413, "body_size", message, code="request_too_large")
