"""Front: the ASGI application in the process of the HTTP server, which passes each request to one of several replicas.

PrefixRouting chooses the replica. If the replica is lost before any text of its answer has reached the client, the
request is sent to another replica. Comments and progress events of a stream are not text. A request is sent again only
once, because it may have ended the replica itself; after the second loss it ends with an error.

In the replica, an AppCall passes the request to the application. Each part of an answer costs the front 0.4 ms, for any
length of the part. So each call pauses after a part, for longer if more calls are open. During the pause the
application waits, and a stream of events merges new tokens into fewer and longer chunks. The first part never waits.
"""

import asyncio
import json
import logging
import re
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from nanovllm.entrypoints.cluster.resources import MAX_QUEUE_GAP
from nanovllm.entrypoints.server.answers import DONE, is_sign_of_life, while_connected
from nanovllm.entrypoints.server.errors import ApiError, ClientDisconnectedError, Refusal, json_response, sse_error
from nanovllm.entrypoints.server.gate import CACHE_SALT
from nanovllm.entrypoints.server.messages import BILLING_HEADER
from nanovllm.entrypoints.server.metrics import CONTENT_TYPE, PREFIX

MAX_SENDS = 2
RETRY_AFTER_S = 5.0  # about the time in which a small model is loaded
REST_PER_CALL_S = 0.002  # at most 500 parts a second...
MAX_REST_S = 0.25  # ...unless a part would wait longer than this
MIN_BEGINNING_BYTES = 256  # the prefill of a shorter beginning takes too little time to matter
NUM_LOOKED_UP = 2
MAX_BEGINNINGS = 1 << 16  # remembered at most: about 15 MB, and 5,000 prompts of 4 MB
PASSED_ON = ("method", "path", "raw_path", "query_string", "root_path", "scheme", "http_version", "headers")
_BILLING_HEADER = re.compile(f'{BILLING_HEADER}[^"]*')  # not in the prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WholeRequest:
    """An HTTP request that has been read whole. It can be pickled, and sent again.

    cache_salt: the cache salt of the request's API key, or None.
    """

    scope: dict[str, Any]
    body: bytes
    cache_salt: str | None

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "WholeRequest":
        passed_on = {name: scope[name] for name in PASSED_ON if name in scope}
        return cls(passed_on, body, scope.get("state", {}).get(CACHE_SALT))


class ReplicaLostError(Exception):
    """The replica that answered has ended, or its engine has failed. replica: its name, or None if unknown."""

    def __init__(self, replica: str | None) -> None:
        super().__init__("the replica that answered has failed")
        self.replica = replica


class Replicas(Protocol):
    @property
    def num_ready(self) -> int: ...

    def answer(self, request: WholeRequest, without: Collection[str]) -> AsyncGenerator[list[ASGIMessage], None]:
        """Yield the messages of the answer of a replica that is not among `without`.

        Raises ReplicaLostError, and Refusal if no replica has taken the request in time.
        """

    async def metrics(self) -> list[str]:
        """Return the metrics of each replica that answers."""


class Front:
    """Passes requests to replicas. `num_open` counts unfinished requests, and `refused` the gate's refusals."""

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
                refusal.record(scope)
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
    """Sends an answer to the client. The head waits for the first part of the body.

    has_begun: a part of the answer's text was sent, so no other replica may answer.
    """

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self._head: ASGIMessage | None = None  # the head that the answering replica has sent
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
        """Send the error as the answer, or as the last event of a stream. Any other answer that has begun stays
        incomplete, and the server closes its connection.
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
    """Merge the samples into one text. The format puts all samples of a metric in one group, under a single head.

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


# -- the choice of a replica -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestKey:
    """Hashes of a prompt's beginnings of 256 bytes, 512 bytes, 1024 bytes and so on.

    Two requests about the same document have equal hashes of all beginnings up to at least half of the document. Every
    hash includes the cache salt, so requests that do not share KV have different hashes.

    beginnings: the hash of each beginning, shortest first. text_hash: the hash of the whole prompt, or of its longest
    beginning. is_sticky: one replica answers all requests with this key, for any length of the replica's queue.
    """

    beginnings: tuple[int, ...] = ()
    text_hash: int = 0
    is_sticky: bool = False


def request_key(method: str, path: str, body: bytes, key_salt: str | None) -> RequestKey:
    """Return the key of an HTTP request. A malformed body, which the replica will refuse, has no beginnings.

    key_salt: the cache salt of the request's API key, or None.
    """
    if method != "POST":
        return RequestKey(is_sticky=True)  # so that the page at / shows the cache of one replica
    try:
        fields = json.loads(body)
        prompt = _prompt_bytes(path, fields)
    except (ValueError, RecursionError, TypeError, OverflowError, AttributeError, KeyError, IndexError):
        return RequestKey()
    salt = f"{key_salt or ''} {fields.get('cache_salt') or ''}"
    return key_of(prompt, salt.encode(errors="surrogatepass"))


def key_of(prompt: bytes, salt: bytes = b"") -> RequestKey:
    """Return the key of a prompt, given as the bytes of its text or of its token ids."""
    digest = xxhash.xxh3_64(salt + b"\0")
    beginnings, start, end = [], 0, MIN_BEGINNING_BYTES
    while end <= len(prompt):
        digest.update(memoryview(prompt)[start:end])
        beginnings.append(digest.intdigest())
        start, end = end, 2 * end
    if not beginnings:
        digest.update(prompt)
    return RequestKey(tuple(beginnings), digest.intdigest())


def _prompt_bytes(path: str, fields: dict[str, Any]) -> bytes:
    """Return the first prompt as bytes. Raises one of the errors that `request_key` catches."""
    if path == "/v1/completions":
        prompt = fields["prompt"]
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        return prompt.encode(errors="surrogatepass") if isinstance(prompt, str) else array("q", prompt).tobytes()
    if path == "/v1/chat/completions":
        text = "".join(_chat_parts(fields))
        return text.encode(errors="surrogatepass")
    if path in ("/v1/responses", "/v1/messages"):
        parts = [fields.get(name) for name in ("tools", "instructions", "system", "messages", "input")]
        return _BILLING_HEADER.sub("", json.dumps(parts), count=1).encode()
    raise KeyError(path)


def _chat_parts(fields: dict[str, Any]) -> Iterable[str]:
    """Yield the parts of the prompt in the usual order of chat templates, tools first."""
    if fields.get("tools"):
        yield json.dumps(fields["tools"])
    for message in fields["messages"]:
        yield f"\n{message['role']}\n"
        content = message.get("content") or ""
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content)


class PrefixRouting:
    """Chooses the replica for a request, and records which replicas have computed the beginnings of prompts.

    A request is sent to a replica that has computed the beginning of the prompt, because the replica's prefix cache has
    the KV of the beginning. If the replica's queue is too long, the request is sent to another replica, and then
    several replicas hold the beginning. Only the two longest beginnings of a prompt are looked up. The two longest
    beginnings cover at least a quarter of the prompt, so a common system prompt does not route all requests to one
    replica, unless the system prompt is most of each prompt.

    Used in one thread. Replicas are named by strings; `queues` has the number of open requests of each.
    """

    def __init__(self, max_queue_gap: int = MAX_QUEUE_GAP, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._max_queue_gap, self._max_beginnings = max_queue_gap, max_beginnings
        self._holders: OrderedDict[int, set[str]] = OrderedDict()  # by beginning, the least recently used first

    def choose(self, key: RequestKey, queues: Mapping[str, int]) -> str:
        """Return the replica for a request, and record that the replica computes the prompt. `queues` is not empty."""
        replica = self._choose(key, queues)
        self._remember(key.beginnings, replica)
        return replica

    def forget_all_but(self, replicas: Collection[str]) -> None:
        """Forget the caches of all other replicas."""
        for beginning, holders in list(self._holders.items()):
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[beginning]

    def _choose(self, key: RequestKey, queues: Mapping[str, int]) -> str:
        if key.is_sticky:
            return _preferred(queues, key.text_hash)
        longest_allowed = min(queues.values()) + self._max_queue_gap
        for beginning in key.beginnings[: -NUM_LOOKED_UP - 1 : -1]:
            holders = self._holders.get(beginning, set()) & queues.keys()
            if holders:
                replica = _shortest_queue({holder: queues[holder] for holder in holders}, key.text_hash)
                if queues[replica] <= longest_allowed:
                    return replica
        return _shortest_queue(queues, key.text_hash)

    def _remember(self, beginnings: tuple[int, ...], replica: str) -> None:
        for beginning in beginnings:
            self._holders.setdefault(beginning, set()).add(replica)
            self._holders.move_to_end(beginning)
        while len(self._holders) > self._max_beginnings:
            self._holders.popitem(last=False)


def _shortest_queue(queues: Mapping[str, int], text_hash: int) -> str:
    shortest = min(queues.values())
    return _preferred([replica for replica, queue in queues.items() if queue == shortest], text_hash)


def _preferred(replicas: Collection[str], text_hash: int) -> str:
    """Choose by rendezvous hashing: a text keeps its replica when other replicas start or end."""
    return max(replicas, key=lambda replica: (xxhash.xxh3_64_intdigest(f"{text_hash} {replica}".encode()), replica))


# -- a call of the application, in the replica ---------------------------------------------------------------------


class PartInterval:
    """The time for which a call pauses after each part of an answer. All calls of a replica share one PartInterval."""

    def __init__(self) -> None:
        self.num_open = 0

    @property
    def rest_s(self) -> float:
        return min(MAX_REST_S, self.num_open * REST_PER_CALL_S)


class AppCall:
    """One request to an ASGI application. Closing the generator of its messages cancels the application."""

    def __init__(self, app: ASGIApp, request: WholeRequest, interval: PartInterval) -> None:
        self._app, self._request, self._interval = app, request, interval
        self._sent: list[ASGIMessage] = []
        self._changed = asyncio.Event()  # part of a body was sent, or the application has ended
        self._taken = asyncio.Event()  # the last message has been taken
        self._is_body_read = False
        self._never = asyncio.Event()

    async def parts(self) -> AsyncGenerator[list[ASGIMessage], None]:
        task = asyncio.ensure_future(self._run())
        task.add_done_callback(lambda _: self._changed.set())
        self._interval.num_open += 1
        try:
            while not task.done() or self._sent:
                await self._changed.wait()
                self._changed.clear()
                part, self._sent = self._sent, []
                self._taken.set()
                if part:
                    yield part
                    await asyncio.wait((task,), timeout=self._interval.rest_s)
        finally:
            self._interval.num_open -= 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        state = {} if self._request.cache_salt is None else {CACHE_SALT: self._request.cache_salt}
        scope = {"type": "http", "asgi": {"version": "3.0"}, "state": state, **self._request.scope}
        try:
            await self._app(scope, self._receive, self._send)
        except Exception:  # a bug; the application has already sent an error, if it could
            logger.exception("nanovllm: the application raised an exception")

    async def _receive(self) -> ASGIMessage:
        if self._is_body_read:
            await self._never.wait()  # the front cancels the call if the client disconnects
        self._is_body_read = True
        return {"type": "http.request", "body": self._request.body, "more_body": False}

    async def _send(self, message: ASGIMessage) -> None:
        self._sent.append(message)
        if message["type"] != "http.response.start":  # the front holds the head until the first part of the body
            self._taken.clear()
            self._changed.set()
            await self._taken.wait()
