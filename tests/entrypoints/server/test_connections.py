"""Connections that are idle, slow, too many or given up: they harm nobody, and hold nothing for ever."""

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from http_server import OPTIONS, app_server, as_http, http_server, make_site, num_open, wait_until_idle, web_client
from waiting import LIMIT_S, wait_until

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server import make_app
from nanovllm.entrypoints.server.lifecycle import SPARE_FILES, Connection, ConnectionLimits, raise_file_limit

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
ENDLESS = BODY | {"max_tokens": 10**5}
SHORT = BODY | {"max_tokens": 8}
PIECES, PIECE = 64, bytes(1 << 18)  # more than the kernel buffers
ENOUGH_FILES = 100_000
NEVER_S = 10.0**6


def make_engine(model: Path) -> AsyncLLM:
    return AsyncLLM(
        model, device="cpu", dtype="float32", num_kvcache_blocks=600, max_num_batched_tokens=300, enforce_eager=True
    )


@pytest.fixture(scope="module")
def tiny(long_model: Path) -> Iterator[tuple[AsyncLLM, str]]:
    """The engine, and the address of a server without limits."""
    engine = make_engine(long_model)
    with http_server(engine) as url:
        yield engine, url
    assert engine.failure is None
    engine.close()


@pytest.fixture
def engine(tiny: tuple[AsyncLLM, str]) -> AsyncLLM:
    return tiny[0]


async def send_much(scope: Any, receive: Any, send: Any) -> None:
    """An application with a large answer: in pieces, or at /whole at once."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/whole":
        await send({"type": "http.response.body", "body": PIECE * PIECES})
        return
    for _ in range(PIECES):
        await send({"type": "http.response.body", "body": PIECE, "more_body": True})
    await send({"type": "http.response.body"})


class SmallBuffers(Connection):
    """Lets the kernel buffer little, so that the server soon sees what a client has read."""

    made: ClassVar[list[Connection]] = []

    def connection_made(self, transport: Any) -> None:
        self.made.append(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        super().connection_made(transport)


@contextmanager
def limited_server(app: Any, limits: ConnectionLimits) -> Iterator[tuple[str, int]]:
    with app_server(app, http=partial(SmallBuffers, limits=limits)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def connect(address: tuple[str, int], data: bytes = b"") -> socket.socket:
    """A connection with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(LIMIT_S)
    connection.connect(address)
    connection.sendall(data)
    return connection


def send_request(url: str, body: dict[str, Any]) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return connect((host, int(port)), as_http(body))


def is_answering(url: str) -> bool:
    return web_client().post(f"{url}/v1/completions", json=SHORT).status_code == 200


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes the connection."""
    received = b""
    while data := connection.recv(1 << 20):
        received += data
    return received


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        data = connection.recv(1 << 20)
        assert data, f"the server has closed the connection after {received!r}"
        received += data
    return received


def is_answered(address: tuple[str, int]) -> bool:
    try:
        return b"200 OK" in read_all(connect(address, b"GET /health HTTP/1.0\r\n\r\n"))
    except ConnectionError:  # it was refused before it was read
        return False


@contextmanager
def no_step_ahead_of_the_loop(engine: AsyncLLM) -> Iterator[None]:
    """Let each step wait for one round of the event loop, whichever of the two threads is slow."""
    executor = engine.llm.engine.executor
    launch, loop = executor.launch, engine._dispatcher._loop
    assert loop is not None

    def wait_and_launch(plan: Any) -> Any:
        has_passed = threading.Event()
        loop.call_soon_threadsafe(has_passed.set)
        assert has_passed.wait(LIMIT_S)
        return launch(plan)

    executor.launch = wait_and_launch  # type: ignore[method-assign]
    yield
    executor.launch = launch  # type: ignore[method-assign]


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_hundreds_of_idle_and_slow_connections_harm_no_stream(engine: AsyncLLM) -> None:
    app = make_app(engine, OPTIONS)
    with limited_server(app, ConnectionLimits(NEVER_S, NEVER_S, ENOUGH_FILES)) as address, ExitStack() as connections:
        url = f"http://{address[0]}:{address[1]}/v1/completions"
        expected = web_client().post(url, json=BODY).json()["choices"][0]["text"]
        num_files_before = num_files()
        whole = as_http(BODY)
        for i in range(300):
            connections.enter_context(connect(address, whole[: (0, 40, len(whole) - 3)[i % 3]]))
        with web_client().stream("POST", url, json=BODY | {"stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected
        assert num_files() >= 2 * 300  # both ends of all connections
        connections.close()
        wait_until(lambda: num_files() <= num_files_before)


def test_two_lengths_of_a_body_are_refused_and_the_connection_closed(engine: AsyncLLM) -> None:
    """Regression: it was answered by one of them, and went on, as RFC 9112, 6.1 forbids."""
    site = make_site(engine)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with limited_server(site.gate.outermost, ConnectionLimits(NEVER_S, NEVER_S, ENOUGH_FILES)) as address:
        connection = connect(address, head + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = read_all(connection).decode()  # as the server closes it
    assert answer.startswith("HTTP/1.1 400 ") and "Transfer-Encoding" in answer and answer.count("HTTP/1.1") == 1


def test_head_that_does_not_arrive_in_time_is_cut_off(engine: AsyncLLM) -> None:
    """Regression: a connection that had sent no request, or the first byte of a second one, stayed open for ever."""
    limits = ConnectionLimits(NEVER_S, NEVER_S, ENOUGH_FILES)
    SmallBuffers.made.clear()
    with limited_server(make_app(engine, OPTIONS), limits) as address:
        running = connect(address, as_http(BODY | {"stream": True}))
        read_until(running, b"data: ")
        assert "head" not in SmallBuffers.made[0]._timers  # an answer may take longer
        second = connect(address, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_until(second, b'"ready"}').startswith(b"HTTP/1.1 200")
        limits.receive_s = 0.1
        second.sendall(b"G")
        for slow in (connect(address), connect(address, b"GET /health HTTP/1.1\r\nHost"), second):
            assert read_all(slow) == b""
        read_until(running, b"data: [DONE]")
        running.close()


@pytest.mark.parametrize("path", ["pieces", "whole"])
def test_client_that_takes_nothing_is_cut_off(path: str) -> None:
    """Regression: whoever does not read kept a connection, and an answer of any size, for as long as it wished."""
    num_begun = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_begun
        num_begun += scope["type"] == "http"
        await send_much(scope, receive, send)

    with limited_server(app, ConnectionLimits(NEVER_S, 0.1, ENOUGH_FILES)) as address:
        num_files_before = num_files()
        head = f"GET /{path} HTTP/1.1\r\nHost: x\r\nConnection: "
        unread = [connect(address, f"{head}{then}\r\n\r\n".encode()) for then in ("keep-alive", "close")]
        wait_until(lambda: num_begun == 2)
        wait_until(lambda: num_files() <= num_files_before + 2)  # the server's ends
        for each in unread:
            each.close()


def test_client_that_reads_slowly_is_not_cut_off() -> None:
    """The time begins anew whenever the client has taken something. The timers are simulated."""
    num_unread, due, aborts = [0], list[Any](), list[str]()
    connection = Connection.__new__(Connection)
    connection._limits, connection._timers = ConnectionLimits(NEVER_S, 1.5, ENOUGH_FILES), {}
    connection.transport = SimpleNamespace(  # type: ignore[assignment]
        get_write_buffer_size=lambda: num_unread[0], abort=lambda: aborts.append("aborted")
    )

    def call_later(delay_s: float, call: Any) -> Any:
        assert delay_s == 1.5
        due.append(call)
        return SimpleNamespace(cancel=lambda: None)

    connection.loop = SimpleNamespace(call_later=call_later)  # type: ignore[assignment]
    num_unread[0] = 1000
    connection._watch_reader()
    for _ in range(8):
        num_unread[0] -= 1
        due.pop()()
        assert not aborts and len(due) == 1
    due.pop()()  # it has taken nothing since
    assert aborts == ["aborted"] and not due


def test_connections_beyond_the_limit_on_files_are_refused_and_reported(
    engine: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ConnectionLimits(NEVER_S, NEVER_S, num_files() + SPARE_FILES + 20)
    assert limits.max_connections == 20
    with limited_server(make_app(engine, OPTIONS), limits) as address:
        idle = [connect(address) for _ in range(20)]
        for _ in range(3):
            head, _, body = read_all(connect(address)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503") and b"Retry-After" in head
            assert json.loads(body)["error"]["code"] == "service_unavailable"
        assert [record.message for record in caplog.records if "limit on open files" in record.message] == [
            "nanovllm: 20 connections are open, more would exceed the limit on open files; new ones get status 503; "
            "raise the hard limit (ulimit -Hn)"
        ]
        for each in idle:
            each.close()
        wait_until(lambda: is_answered(address))


def test_raise_file_limit_takes_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- clients that leave, or read late ----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_client_that_disconnects_ends_its_request_within_a_step(tiny: tuple[AsyncLLM, str], streams: bool) -> None:
    engine, url = tiny
    for n in (1, 3):
        connection = send_request(url, ENDLESS | {"stream": streams, "n": n})
        wait_until(lambda n=n: num_open(engine) == n)  # type: ignore[misc]
        if streams:
            assert connection.recv(100)
        with no_step_ahead_of_the_loop(engine):
            connection.close()
            num_steps = engine.llm.stats()["num_steps"]
            wait_until_idle(engine)
        assert engine.llm.stats()["num_steps"] < num_steps + 50  # the loop takes some rounds until it has noticed


def test_client_that_disconnects_at_any_stage_leaves_nothing(tiny: tuple[AsyncLLM, str]) -> None:
    engine, url = tiny
    for delay_s in (0, 0.001, 0.003, 0.01, 0.03):
        for connection in [send_request(url, ENDLESS | {"stream": i % 2 == 0}) for i in range(8)]:
            time.sleep(delay_s)
            connection.close()
        assert is_answering(url)
        wait_until_idle(engine)
        wait_until(lambda: not engine._dispatcher._streams)


def test_client_that_leaves_after_the_last_token_leaves_nothing(tiny: tuple[AsyncLLM, str]) -> None:
    """It goes when the reason of the end has arrived, and [DONE] has not been read; or with a whole answer unread."""
    engine, url = tiny
    for i in range(20):
        connection = send_request(url, SHORT | {"stream": i % 2 == 0})
        if i % 2 == 0:
            read_until(connection, b'"finish_reason": "length"')
        else:
            wait_until(lambda: num_open(engine) == 0)
        connection.close()
    wait_until(lambda: not engine._dispatcher._streams)
    assert is_answering(url)


def test_client_that_leaves_during_its_prefill_ends_its_request(tiny: tuple[AsyncLLM, str]) -> None:
    """The prompts are longer than a step; those behind the first ones leave while they wait."""
    engine, url = tiny
    body = ENDLESS | {"prompt": [5] * 1500}
    for connection in [send_request(url, body | {"stream": i % 2 == 0}) for i in range(6)]:
        wait_until(lambda: num_open(engine) > 0)
        connection.close()
    wait_until_idle(engine)
    wait_until(lambda: not engine._dispatcher._streams)


def test_client_that_does_not_read_holds_up_nobody(tiny: tuple[AsyncLLM, str]) -> None:
    engine, url = tiny
    slow = [send_request(url, ENDLESS | {"stream": True, "n": 4}) for _ in range(3)]
    assert is_answering(url)
    for connection in slow:
        connection.close()
    wait_until_idle(engine)


@pytest.mark.slow
def test_client_that_reads_late_gets_the_whole_answer(tiny: tuple[AsyncLLM, str]) -> None:
    engine, url = tiny
    body = ENDLESS | {"stream": True, "n": 4, "max_tokens": 400}
    expected = web_client(url).post("/v1/completions", json=body | {"stream": False}).json()
    num_tokens = engine.llm.stats()["num_decode_tokens"] + 4 * 399
    connection = send_request(url, body)
    wait_until(lambda: engine.llm.stats()["num_decode_tokens"] == num_tokens)
    received = read_until(connection, b"[DONE]")
    connection.close()
    texts = ["", "", "", ""]
    for line in received.decode().splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in expected["choices"]]


def test_engine_that_is_closed_gives_open_requests_their_last_event(long_model: Path) -> None:
    engine = make_engine(long_model)
    with http_server(engine) as url:
        web = web_client(url)
        with web.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            engine.close()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
        assert web.post("/v1/completions", json=SHORT).status_code == 503
