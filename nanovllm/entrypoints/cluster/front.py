"""Front: the ASGI application that has replicas answer, with one process' HTTP server around it.

A request whose replica is lost is sent to another one if nothing of its answer has reached the client. What a stream
says while its prompt is computed does not count. The request is sent again only once, because it may be the one that
ended the replica. After that it ends with an error.

In the replica, an AppCall gives the request to the application. A part of an answer costs the front 0.4 ms, whatever
its length. So each call rests after a part, longer if more calls are open. The application waits meanwhile, and a
stream of events merges what was generated into fewer and longer chunks. The first part never waits.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from nanovllm.entrypoints.server.answers import DONE, is_sign_of_life, while_connected
from nanovllm.entrypoints.server.errors import ApiError, ClientDisconnectedError, Refusal, json_response, sse_error
from nanovllm.entrypoints.server.gate import CACHE_SALT
from nanovllm.entrypoints.server.metrics import CONTENT_TYPE, PREFIX

MAX_SENDS = 2
RETRY_AFTER_S = 5.0  # about the time in which a small model is loaded
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


class ReplicaLostError(Exception):
    """The replica that answered has ended, or its engine has failed. replica: its name, or None if it is not known."""

    def __init__(self, replica: str | None) -> None:
        super().__init__("the replica that answered has failed")
        self.replica = replica


class Replicas(Protocol):
    @property
    def num_ready(self) -> int: ...

    def answer(self, request: WholeRequest, without: Collection[str]) -> AsyncGenerator[list[ASGIMessage], None]:
        """Yield the messages of the answer, given by a replica that is not among `without`.

        Raises ReplicaLostError, and Refusal if no replica has taken the request in time.
        """

    async def metrics(self) -> list[str]:
        """The metrics of each replica that answers."""


class Front:
    """`num_open`: requests that have not been answered. `refused` counts what the gate refuses."""

    def __init__(self, replicas: Replicas, model_name: str) -> None:
        self.num_open = 0
        self._replicas = replicas
        self._registry = CollectorRegistry(auto_describe=False)
        label, self._model_name = ["model_name"], model_name
        self._refused = Counter(
            f"{PREFIX}front_requests_refused",
            "Requests that were refused before a replica was chosen",
            [*label, "reason"],
            registry=self._registry,
        )
        resent = Counter(f"{PREFIX}requests_resent", "Requests sent to another replica", label, registry=self._registry)
        self._resent = resent.labels(model_name)
        cut = Counter(f"{PREFIX}answers_cut", "Answers that ended with their replica", label, registry=self._registry)
        self._cut = cut.labels(model_name)
        ready = Gauge(f"{PREFIX}num_replicas_ready", "Replicas that take requests", label, registry=self._registry)
        ready.labels(model_name).set_function(lambda: replicas.num_ready)

    def refused(self, reason: str) -> None:
        self._refused.labels(self._model_name, reason).inc()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", f"{scope['type']} is switched off in uvicorn"
        if scope["method"] in ("GET", "HEAD") and scope["path"] == "/health":
            return await self._health()(scope, receive, send)
        if scope["method"] == "GET" and scope["path"] == "/metrics":
            return await Response(await self._metrics(), media_type=CONTENT_TYPE)(scope, receive, send)
        message = await receive()  # the gate has read the body
        request = WholeRequest.of(scope, message["body"])
        self.num_open += 1
        try:
            with suppress(ClientDisconnectedError):
                await while_connected(receive, self._answer(request, scope, receive, send))
        finally:
            self.num_open -= 1

    async def _answer(self, request: WholeRequest, scope: Scope, receive: Receive, send: Send) -> None:
        lost: set[str] = set()
        reply = _Reply(scope["path"], send)
        for attempt in range(MAX_SENDS):
            if attempt:
                self._resent.inc()
            try:
                async with aclosing(self._replicas.answer(request, lost)) as parts:
                    async for part in parts:
                        for message in part:
                            await reply.pass_on(message)
                return
            except ReplicaLostError as error:
                if reply.has_begun:
                    break
                if error.replica is not None:
                    lost.add(error.replica)
            except Refusal as refusal:
                self.refused(refusal.reason)
                return await reply.end_with_error(refusal, scope, receive)
        self._cut.inc()
        await reply.end_with_error(_lost_error(), scope, receive)

    def _health(self) -> Response:
        if self._replicas.num_ready:
            return json_response({"status": "ready"})
        return no_replica().response()

    async def _metrics(self) -> str:
        return join_metrics([generate_latest(self._registry).decode(), *await self._replicas.metrics()])


class _Reply:
    """Passes an answer on. It keeps the head until the first part of the body follows.

    has_begun: something of the answer itself was sent, so no other replica may answer any more.
    """

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self._head: ASGIMessage | None = None  # the answering replica's, if it has sent one
        self._is_head_sent = self._is_event_stream = False
        self.has_begun = False

    async def pass_on(self, message: ASGIMessage) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        assert self._head is not None, "the head of an answer comes first"
        body = message.get("body", b"")
        if not self._is_head_sent:
            self._is_head_sent, self._is_event_stream = True, _is_event_stream(self._head)
            await self._send(self._head)
        elif self._is_event_stream and not _is_event_stream(self._head):  # another replica has refused the request
            return await self._end_stream(sse_error(body.decode(), self._path))
        self.has_begun = self.has_begun or not (self._is_event_stream and is_sign_of_life(body))
        await self._send(message)

    async def end_with_error(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Answer with the error, or end a stream with an event. Any other answer that has begun stays incomplete, and
        the server closes its connection.
        """
        if not self._is_head_sent:
            await error.response(self._path)(scope, receive, self._send)
        elif self._is_event_stream:
            await self._end_stream(error.event(self._path))

    async def _end_stream(self, event: str) -> None:
        await self._send({"type": "http.response.body", "body": event.encode() + DONE, "more_body": False})


def _is_event_stream(head: ASGIMessage) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head["headers"])


def no_replica() -> Refusal:
    return Refusal(503, "no_replica", "no replica is ready; ask again later", retry_after_s=RETRY_AFTER_S)


def _lost_error() -> ApiError:
    message, headers = "the replica that answered has failed; ask again", {"Retry-After": "1"}
    return ApiError(message, status=503, code="engine_unavailable", headers=headers)


def join_metrics(texts: Iterable[str]) -> str:
    """Merge the samples into one text. The format wants all samples of a metric in one group, under a single head.

    The texts must differ in a label of each sample, such as `replica`.
    """
    heads: dict[str, list[str]] = {}  # by metric: its lines HELP and TYPE
    samples: dict[str, list[str]] = {}
    for text in texts:
        metric = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                metric = line.split(" ", 3)[2]
                samples.setdefault(metric, [])
                head = heads.setdefault(metric, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples[metric].append(line)
    lines = (line for metric in heads for line in (*heads[metric], *samples[metric]))
    return "".join(f"{line}\n" for line in lines)


# -- a call of the application, in the replica ---------------------------------------------------------------------


class Pace:
    """The rest of a call after each part. All calls of a replica share it."""

    def __init__(self) -> None:
        self.num_open = 0

    @property
    def rest_s(self) -> float:
        return min(MAX_REST_S, self.num_open * REST_PER_CALL_S)


class AppCall:
    """One request to an ASGI application, whose messages are a generator. Closing it cancels the application."""

    def __init__(self, app: ASGIApp, request: WholeRequest, pace: Pace) -> None:
        self._app, self._request, self._pace = app, request, pace
        self._sent: list[ASGIMessage] = []
        self._changed = asyncio.Event()  # part of a body was sent, or the application has ended
        self._taken = asyncio.Event()  # the last message has been taken
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
