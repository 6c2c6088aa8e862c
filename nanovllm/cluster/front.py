"""Front: the ASGI application that has replicas answer, with one process' HTTP server around it.

A request whose replica is lost is sent to another one, as long as nothing of its answer has reached the client. It is
sent again only once, because it may be the request that ended the replica. Otherwise it ends with an error.
"""

import json
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.responses import Response

from nanovllm.cluster.app_call import WholeRequest
from nanovllm.cluster.metrics_text import join_metrics
from nanovllm.server.answers import DONE, while_connected
from nanovllm.server.errors import ApiError, ClientDisconnectedError, Refusal, json_response
from nanovllm.server.gate import ASGIMessage, Receive, Scope, Send
from nanovllm.server.metrics import CONTENT_TYPE, PREFIX

MAX_SENDS = 2
RETRY_AFTER_S = 5.0  # about the time in which a small model is loaded


class ReplicaLostError(Exception):
    """A replica ended, or its engine failed, while it answered. `replica`: its name, None if it is not known."""

    def __init__(self, replica: str | None) -> None:
        super().__init__("the replica that answered has failed")
        self.replica = replica


class Replicas(Protocol):
    @property
    def num_ready(self) -> int: ...

    def answer(self, request: WholeRequest, without: Collection[str]) -> AsyncGenerator[list[ASGIMessage], None]:
        """The messages of the answer, by a replica that is not among `without`.

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
        for attempt in range(MAX_SENDS):
            if attempt:
                self._resent.inc()
            reply = _Reply(send)
            try:
                async with aclosing(self._replicas.answer(request, lost)) as parts:
                    async for part in parts:
                        for message in part:
                            await reply.pass_on(message)
                return
            except ReplicaLostError as error:
                if reply.has_begun:
                    self._cut.inc()
                    return await reply.end_with_error()
                if error.replica is not None:
                    lost.add(error.replica)
            except Refusal as refusal:
                self.refused(refusal.reason)
                return await refusal.response()(scope, receive, send)
        self._cut.inc()
        await _lost_error().response({"Retry-After": "1"})(scope, receive, send)

    def _health(self) -> Response:
        if self._replicas.num_ready:
            return json_response({"status": "ready"})
        return no_replica().response()

    async def _metrics(self) -> str:
        return join_metrics([generate_latest(self._registry).decode(), *await self._replicas.metrics()])


class _Reply:
    """Passes an answer on. It keeps the head until the first part of the body follows."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: ASGIMessage | None = None
        self._is_event_stream = False
        self.has_begun = False

    async def pass_on(self, message: ASGIMessage) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            self._is_event_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
            return
        if self._head is not None:
            head, self._head = self._head, None
            self.has_begun = True
            await self._send(head)
        await self._send(message)

    async def end_with_error(self) -> None:
        """End a stream with an event. Any other answer stays incomplete, and the server closes its connection."""
        if self._is_event_stream:
            event = f"data: {json.dumps(_lost_error().body())}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event + DONE, "more_body": False})


def no_replica() -> Refusal:
    return Refusal(503, "no_replica", "no replica is ready; ask again later", retry_after_s=RETRY_AFTER_S)


def _lost_error() -> ApiError:
    return ApiError("the replica that answered has failed; ask again", status=503, code="engine_unavailable")
