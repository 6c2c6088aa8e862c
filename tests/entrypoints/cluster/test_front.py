"""The front of several replicas, with replicas made of plain generators: resends, errors, disconnects, metrics."""

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

import pytest
from event_loops import on_a_loop, run
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from nanovllm.entrypoints.cluster.front import (
    REST_PER_CALL_S,
    AppCall,
    Front,
    PartInterval,
    ReplicaLostError,
    WholeRequest,
    join_metrics,
    no_replica,
)
from nanovllm.entrypoints.server.answers import COMMENT, DONE, PROGRESS
from nanovllm.entrypoints.server.gate import CACHE_SALT

Parts = list[list[ASGIMessage] | Exception]


def head(content_type: bytes = b"application/json", status: int = 200) -> ASGIMessage:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]}


def body(content: bytes, more: bool = False) -> ASGIMessage:
    return {"type": "http.response.body", "body": content, "more_body": more}


STREAM = head(b"text/event-stream; charset=utf-8")


class FakeReplicas:
    """Answers each request with the next of `answers`: lists of parts, or of an exception that is raised."""

    def __init__(self, *answers: Parts, num_ready: int = 1) -> None:
        self.num_ready = num_ready
        self.without: list[set[str]] = []
        self.was_closed = False
        self._answers = list(answers)

    async def answer(self, request: WholeRequest, without: Collection[str]) -> AsyncGenerator[list[ASGIMessage], None]:
        self.without.append(set(without))
        try:
            for part in self._answers.pop(0):
                if isinstance(part, Exception):
                    raise part
                yield part
                await asyncio.sleep(0)
        finally:
            self.was_closed = True

    async def metrics(self) -> list[str]:
        return [f'# HELP m About\n# TYPE m gauge\nm{{replica="{name}"}} 1.0\n' for name in ("a", "b")]


def scope(method: str = "POST", path: str = "/v1/completions") -> Scope:
    return {"type": "http", "method": method, "path": path, "headers": [], "state": {}, "client": ("1.2.3.4", 5)}


def ask(app: ASGIApp, asked: Scope, *, leaves: Callable[[list[ASGIMessage]], bool] = lambda sent: False) -> list[Any]:
    """Return what the application sends. leaves: whether the client disconnects after what was sent."""
    sent: list[ASGIMessage] = []
    requests = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> ASGIMessage:
        if requests:
            return requests.pop()
        while not leaves(sent):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: ASGIMessage) -> None:
        sent.append(message)

    run(app(asked, receive, send))
    return sent


def counted(front: Front, name: str) -> float:
    value = front._registry.get_sample_value(f"nanovllm:{name}", {"model_name": "tiny"})
    assert value is not None
    return value


def test_answer_is_passed_on_as_it_is() -> None:
    parts: Parts = [[STREAM], [body(b"a", True), body(b"b", True)], [body(b"")]]
    front = Front(FakeReplicas(parts), "tiny")
    assert ask(front, scope()) == [STREAM, body(b"a", True), body(b"b", True), body(b"")]
    assert front.num_open == 0


def test_request_is_sent_again_to_another_replica_if_nothing_was_sent() -> None:
    """The head of a stream is sent with its first event, so it does not count."""
    for begun in ([], [[STREAM]]):
        replicas = FakeReplicas([*begun, ReplicaLostError("a")], [[head(), body(b"{}")]])
        front = Front(replicas, "tiny")
        assert ask(front, scope()) == [head(), body(b"{}")]
        assert replicas.without == [set(), {"a"}]
        assert counted(front, "requests_resent_total") == 1 and counted(front, "answers_cut_total") == 0


def test_signs_of_life_reach_the_client_and_do_not_count_as_an_answer() -> None:
    """Regression: comments were dropped, so a stream was silent while a replica computed its prompt, and a request
    that asked for progress was not sent again.
    """
    progress = body(f'data: {{"id": "1", "choices": [{PROGRESS}{{"total": 9}}}}\n\n'.encode(), True)
    text = body(json.dumps({"choices": [{"text": PROGRESS}]}).encode(), True)
    empty = body(COMMENT.encode() + b"\n", True)
    lost = [[STREAM], [empty], [progress], ReplicaLostError("a")]
    replicas = FakeReplicas(lost, [[STREAM, empty], [text, body(DONE)]])
    front = Front(replicas, "tiny")
    assert ask(front, scope()) == [STREAM, empty, progress, empty, text, body(DONE)]
    assert replicas.without == [set(), {"a"}] and counted(front, "requests_resent_total") == 1
    # A text that looks like progress is part of the answer
    cut = FakeReplicas([[STREAM, text], ReplicaLostError("a")])
    assert len(ask(Front(cut, "tiny"), scope())) == 3 and len(cut.without) == 1
    # The client waits for events, so what another replica refuses is an event
    refusal = [[head(status=429), body(b'{"error": {"code": "busy"}}')]]
    for second in (refusal, [no_replica()], [ReplicaLostError("b")]):
        *_, last = ask(Front(FakeReplicas(lost, second), "tiny"), scope())
        event, done = last["body"].decode().strip().split("\n\n")
        assert "code" in json.loads(event.removeprefix("data: "))["error"]
        assert done == "data: [DONE]" and not last["more_body"]


def test_request_is_sent_again_only_once() -> None:
    replicas = FakeReplicas([ReplicaLostError("a")], [ReplicaLostError(None)])
    front = Front(replicas, "tiny")
    start, content = ask(front, scope())
    assert start["status"] == 503
    assert json.loads(content["body"])["error"]["code"] == "engine_unavailable"
    assert counted(front, "requests_resent_total") == counted(front, "answers_cut_total") == 1


def test_answer_that_has_begun_ends_with_an_error_event_or_stays_incomplete() -> None:
    replicas = FakeReplicas([[STREAM, body(b"data: 1\n\n", True)], ReplicaLostError("a")])
    front = Front(replicas, "tiny")
    *_, last = ask(front, scope())
    event, done = last["body"].decode().strip().split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"
    assert done == "data: [DONE]" and not last["more_body"]
    assert len(replicas.without) == 1 and counted(front, "answers_cut_total") == 1
    # Regression: Anthropic's clients skip events without a name, so an answer that was cut looked whole
    replicas = FakeReplicas([[STREAM, body(b"event: message_start\ndata: 1\n\n", True)], ReplicaLostError("a")])
    *_, last = ask(Front(replicas, "tiny"), scope(path="/v1/messages"))
    assert last["body"].startswith(b'event: error\ndata: {"type": "error"')
    whole = FakeReplicas([[head(), body(b"{", True)], ReplicaLostError("a")])
    assert ask(Front(whole, "tiny"), scope()) == [head(), body(b"{", True)]


def test_client_that_leaves_closes_the_call() -> None:
    replicas = FakeReplicas([[STREAM, body(b"a", True)]] + [[body(b"b", True)]] * 100_000)  # type: ignore[list-item]
    front = Front(replicas, "tiny")
    assert len(ask(front, scope(), leaves=lambda sent: len(sent) > 5)) < 1000
    assert replicas.was_closed and front.num_open == 0


def test_without_a_replica_requests_and_health_get_503() -> None:
    front = Front(FakeReplicas([no_replica()], num_ready=0), "tiny")
    start, _ = ask(front, scope())
    assert start["status"] == 503 and (b"retry-after", b"5") in start["headers"]
    assert ask(front, scope("GET", "/health"))[0]["status"] == 503
    assert ask(Front(FakeReplicas(), "tiny"), scope("GET", "/health"))[0]["status"] == 200


def test_metrics_of_front_and_replicas_are_one_text() -> None:
    _, content = ask(Front(FakeReplicas(num_ready=2), "tiny"), scope("GET", "/metrics"))
    text = content["body"].decode()
    assert 'nanovllm:num_replicas_ready{model_name="tiny"} 2.0' in text
    assert text.endswith('# HELP m About\n# TYPE m gauge\nm{replica="a"} 1.0\nm{replica="b"} 1.0\n')
    first = '# HELP m M\n# TYPE m counter\nm{r="1"} 1\n# HELP n N\n# TYPE n counter\nn{r="1"} 1\n'
    second = '# HELP n N\n# TYPE n counter\nn{r="2"} 2\nn{r="2",x="y"} 3\n'  # only some replicas have m
    assert join_metrics([first, second, ""]) == first + 'n{r="2"} 2\nn{r="2",x="y"} 3\n'
    assert join_metrics([]) == ""


# -- a call of the application, in the replica -----------------------------------------------------------------------


def collect(app: ASGIApp, request: WholeRequest, limit: int = 10**9) -> list[list[ASGIMessage]]:
    async def parts_of_call() -> list[list[ASGIMessage]]:
        interval = PartInterval()
        parts, found = AppCall(app, request, interval).parts(), []
        async for part in parts:
            found.append(part)
            if len(found) == limit:
                break
        await parts.aclose()
        assert interval.num_open == 0
        return found

    return run(parts_of_call())


def test_call_repeats_the_request_and_merges_what_is_sent_together() -> None:
    async def app(asked: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        await send(head())
        await send(body(message["body"] + asked["path"].encode() + asked["state"][CACHE_SALT].encode(), True))
        await asyncio.sleep(0.01)
        await send(body(b""))

    asked = scope() | {"state": {CACHE_SALT: "salt"}, "extensions": {"unpicklable": lambda: None}}
    request = pickle.loads(pickle.dumps(WholeRequest.of(asked, b"body ")))
    assert collect(app, request) == [[head(), body(b"body /v1/completionssalt", True)], [body(b"")]]


@on_a_loop
async def test_application_waits_while_its_call_rests() -> None:
    """It could send 1,000 chunks at once; at each time, only one is on its way."""
    num_unsent = []

    async def app(asked: Scope, receive: Receive, send: Send) -> None:
        await send(head())
        for i in reversed(range(5)):
            num_unsent.append(i)
            await send(body(b"x", more=i > 0))

    interval = PartInterval()
    interval.num_open = 10
    parts = AppCall(app, WholeRequest.of(scope(), b""), interval).parts()
    assert interval.rest_s == 10 * REST_PER_CALL_S
    assert await anext(parts) == [head(), body(b"x", True)]
    assert num_unsent == [4]
    await asyncio.sleep(0)
    assert len([part async for part in parts]) == 4 and num_unsent == [4, 3, 2, 1, 0]


def test_closing_a_call_cancels_the_application() -> None:
    ended = []

    async def app(asked: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await send(head())
            await send(body(b"x", True))
            await receive()  # for a disconnect
        finally:
            ended.append(True)

    assert collect(app, WholeRequest.of(scope(), b""), limit=1) == [[head(), body(b"x", True)]]
    assert ended


def test_exception_of_the_application_is_logged_and_ends_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def app(asked: Scope, receive: Receive, send: Send) -> None:
        await send(head(status=500))
        await send(body(b""))
        raise RuntimeError("a bug")

    assert collect(app, WholeRequest.of(scope(), b"")) == [[head(status=500), body(b"")]]
    assert "the application raised an exception" in caplog.text
