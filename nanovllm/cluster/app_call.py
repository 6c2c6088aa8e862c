"""AppCall: one request to an ASGI application, with the messages of its answer as a generator.

Closing the generator cancels the application. A part costs the front 0.4 ms, however long it is. So each call rests
after a part, for longer the more calls are open, and the application waits meanwhile: a stream of events then merges
what was generated into fewer and longer chunks. The first part never waits.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from nanovllm.server.gate import CACHE_SALT, ASGIApp, ASGIMessage, Scope

REST_PER_CALL_S = 0.002  # at most 500 parts a second...
MAX_REST_S = 0.25  # ...unless they would wait longer than this
PASSED_ON = ("method", "path", "raw_path", "query_string", "root_path", "scheme", "http_version", "headers")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WholeRequest:
    """An HTTP request that has been read whole. It can be pickled, and sent again.

    cache_salt: of its API key, if there is one.
    """

    scope: dict[str, Any]
    body: bytes
    cache_salt: str | None

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "WholeRequest":
        passed_on = {name: scope[name] for name in PASSED_ON if name in scope}
        return cls(passed_on, body, scope.get("state", {}).get(CACHE_SALT))


class Pace:
    """Shared by all calls of a replica."""

    def __init__(self) -> None:
        self.num_open = 0

    @property
    def rest_s(self) -> float:
        return min(MAX_REST_S, self.num_open * REST_PER_CALL_S)


class AppCall:
    def __init__(self, app: ASGIApp, request: WholeRequest, pace: Pace) -> None:
        self._app, self._request, self._pace = app, request, pace
        self._sent: list[ASGIMessage] = []
        self._changed = asyncio.Event()  # part of a body was sent, or the application has ended
        self._taken = asyncio.Event()  # what was sent
        self._is_body_read = False
        self._never = asyncio.Event()

    async def parts(self) -> AsyncGenerator[list[ASGIMessage], None]:
        task = asyncio.ensure_future(self._run())
        task.add_done_callback(lambda _: self._changed.set())
        self._pace.num_open += 1
        try:
            while not task.done() or self._sent:
                await self._changed.wait()
                self._changed.clear()
                part, self._sent = self._sent, []
                self._taken.set()
                if part:
                    yield part
                    await asyncio.wait((task,), timeout=self._pace.rest_s)
        finally:
            self._pace.num_open -= 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        state = {} if self._request.cache_salt is None else {CACHE_SALT: self._request.cache_salt}
        scope = {"type": "http", "asgi": {"version": "3.0"}, "state": state, **self._request.scope}
        try:
            await self._app(scope, self._receive, self._send)
        except Exception:  # a bug, which the application has answered as well as it still could
            logger.exception("nanovllm: the application raised an exception")

    async def _receive(self) -> ASGIMessage:
        if self._is_body_read:
            await self._never.wait()  # a client that goes cancels the call
        self._is_body_read = True
        return {"type": "http.request", "body": self._request.body, "more_body": False}

    async def _send(self, message: ASGIMessage) -> None:
        self._sent.append(message)
        if message["type"] != "http.response.start":  # the front keeps the head until the body follows
            self._taken.clear()
            self._changed.set()
            await self._taken.wait()
