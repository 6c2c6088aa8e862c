"""Gate: the ASGI application around the server's own. It refuses what must not cost any work.

In this order: requests after the server has begun to stop (503), whose length is ambiguous (400), for a host that is
not ours (403), without a valid API key (401), and with a body that is too large (413), arrives too slowly (408), or for
which no memory is left (503). It reads a body whole, as the
application would, and passes everything else on as it is, so that streamed answers are not slowed down.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from nanovllm.server.api_keys import ApiKeys
from nanovllm.server.errors import ClientDisconnectedError
from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import Refusal

Scope: TypeAlias = MutableMapping[str, Any]
ASGIMessage: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[ASGIMessage]]
Send: TypeAlias = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/health", "/version")  # need no key
MAX_HELD_BODIES = 64  # the bodies of all open requests together are at most as large as so many of the largest
CACHE_SALT = "cache_salt"  # the entry of the request's state that holds the salt of its key, with cache_salt_per_key
HOST_REFUSED = (
    "a server without API keys that listens on this machine only answers only requests for this machine; ask for "
    "localhost, set an API key, or name the origin in allowed_origins"
)


@dataclass
class _Held:
    """What one request has in memory of its body."""

    num_bytes: int = 0


class Gate:
    """`is_draining` is set when the server stops. `on_refusal` is told each reason, for the metrics."""

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        keys: ApiKeys,
        on_refusal: Callable[[str], None],
        open_paths: Collection[str] = (),
    ) -> None:
        self._app, self._options, self._keys, self._on_refusal = app, options, keys, on_refusal
        self._open_paths = frozenset((*OPEN_PATHS, *open_paths))
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
        """Raise Refusal for requests that are refused whatever their body is. Note the salt of the key."""
        if self.is_draining:
            raise Refusal(503, "draining", "the server is stopping; ask again later", retry_after_s=1)
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:  # RFC 9112, 6.1: two servers may read it as two requests
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            raise Refusal(400, "framing", message, closes=True)
        for name, value in scope["headers"]:
            if name == b"host" and not self._keys and not self._options.is_known_host(value.decode("latin-1")):
                raise Refusal(403, "host", HOST_REFUSED)
        if not self._keys or scope["path"] in self._open_paths:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not self._keys.accept(given[0]):
            problem = "the API key is wrong" if given else "the API key is missing"
            raise Refusal(401, "api_key", f"{problem}; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
        if self._options.cache_salt_per_key:
            scope.setdefault("state", {})[CACHE_SALT] = self._keys.cache_salt(given[0])

    async def _read_body(self, scope: Scope, receive: Receive, held: "_Held") -> Receive:
        """Read the whole body, and return a `receive` that repeats it. Raises Refusal if it is too large or slow."""
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()]
        self._check_size(max(lengths, default=0))  # what is announced need not be true
        try:
            whole = await asyncio.wait_for(self._whole_body(receive, held), self._options.max_receive_s)
        except asyncio.TimeoutError as error:
            message = (
                f"the body has not arrived within max_receive_s={self._options.max_receive_s:g} seconds; send it faster"
            )
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
            if self._num_held_bytes > MAX_HELD_BODIES * self._options.max_body_bytes:
                raise Refusal(
                    503, "bodies", "the server has no memory left for bodies; ask again later", retry_after_s=1
                )
            is_complete = not message.get("more_body", False)
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._options.max_body_bytes:
            limit = f"max_body_mb={self._options.max_body_mb:g}"
            message = f"the body is larger than {limit} MiB; send less, or raise the server's limit"
            raise Refusal(413, "body_size", message, code="request_too_large")
