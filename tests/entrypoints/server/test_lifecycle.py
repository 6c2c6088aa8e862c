"""The life of a server process: signals, faults, clients that leave. Every request ends, and so does every process."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from http_server import as_http
from ports import reserved_port
from processes import worker_pids_of
from server_process import ServerProcess, server_process
from waiting import LIMIT_S, wait_until

from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.server import lifecycle
from nanovllm.entrypoints.server.gate import API_KEY_VARIABLE, load_keys
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.errors import EngineError

SHORT = {"prompt": "The passkey is", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
SECRET = "a private sentence"
ENDLESS = SHORT | {"max_tokens": 10**5}


@contextmanager
def clients(num: int = 8) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(num) as pool:
        yield pool


def complete(server: ServerProcess, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)


def get(server: ServerProcess, path: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=LIMIT_S)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, which must be whole, and end with [DONE]."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def last_reason(response: httpx.Response) -> str | None:
    body = events(response)[-1] if response.headers["content-type"].startswith("text/event-stream") else response.json()
    reason: str | None = body["choices"][0]["finish_reason"]
    return reason


def start_load(server: ServerProcess, pool: ThreadPoolExecutor, **body: Any) -> list[Future[httpx.Response]]:
    """Two streams and two whole answers, all of them running."""
    started = [pool.submit(partial(complete, server, stream=i % 2 == 0, **body)) for i in range(4)]
    server.wait_for_metric("num_requests_running", 4)
    return started


def connect(server: ServerProcess, data: bytes = b"") -> socket.socket:
    url = httpx.URL(server.url)
    client = socket.create_connection((url.host, url.port), timeout=LIMIT_S)
    client.sendall(data)
    return client


def wait_until_healthy(server: ServerProcess) -> None:
    """Until a connection is not refused. The first one must be answered with status 200."""

    def is_accepted() -> bool:
        is_alive = server.process.exitcode is None
        try:
            assert get(server, "/health").status_code == 200
            return True
        except httpx.ConnectError:
            assert is_alive
            return False

    wait_until(is_accepted)


def before_each_launch(engine: Any, act: Callable[[], None]) -> None:
    """Call `act` before each step is launched, in the engine's thread."""
    executor = engine.llm.engine.executor
    launch = executor.launch

    def act_and_launch(plan: Any) -> Any:
        act()
        return launch(plan)

    executor.launch = act_and_launch


# -- the port ----------------------------------------------------------------------------------------------------------


def test_port_in_use_is_one_line_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--model", "./no/such/model", "--port", port]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"--port={port}" in lines[0] and "already in use" in lines[0]


def test_host_unknown_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "./no/such/model", "--host", "256.0.0.1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_network_without_a_key_is_warned_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert not load_keys(ServerOptions(host=host))
    assert not caplog.messages
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        load_keys(ServerOptions(host=host))
        assert f"host={host} lets everyone" in caplog.messages[-1] and API_KEY_VARIABLE in caplog.messages[-1]
    monkeypatch.setenv(API_KEY_VARIABLE, "s3cret")
    assert load_keys(ServerOptions(host="0.0.0.0")) and len(caplog.messages) == 4


def test_extra_missing_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", "--model", "demo"]) == 2
    assert "needs uvicorn; run: pip install --constraint constraints.txt '.[server]'" in capsys.readouterr().err


def hold_the_warm_up(held: Path, engine: Any) -> None:
    """Make the file `held` before the first step, and wait until it is gone."""
    held_before: list[Path] = []

    def hold() -> None:
        if not held_before:
            held_before.append(held)
            held.touch()
            wait_until(lambda: not held.exists())

    before_each_launch(engine, hold)


@pytest.mark.slow
def test_server_has_a_note_while_it_serves(
    long_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_process(long_model, tmp_path / "log") as server:
        assert cli.main(["ps"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if server.url in line]
        assert line.split()[0] == str(server.process.pid) and line.endswith("ready")
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    assert cli.main(["ps"]) == 0 and server.url not in capsys.readouterr().out


@pytest.mark.slow
def test_killed_server_starts_again_on_its_port_and_is_ready_only_when_warm(long_model: Path, tmp_path: Path) -> None:
    with server_process(long_model, tmp_path / "first") as server, clients() as pool:
        port = httpx.URL(server.url).port
        started = start_load(server, pool, **ENDLESS)
        assert f"tiny is served at {server.url}/v1, and a page to try it at {server.url}/\n" in server.log.read_text()
        server.send(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        for each in started:
            with pytest.raises(httpx.TransportError):
                each.result()
    held = tmp_path / "held"
    change, options = partial(hold_the_warm_up, held), {"port": port}
    with server_process(long_model, tmp_path / "second", options=options, change=change, waits=False) as server:
        server.url = f"http://127.0.0.1:{port}"
        wait_until(held.exists)
        for _ in range(3):
            with pytest.raises(httpx.ConnectError):
                get(server, "/health")
        held.unlink()
        wait_until_healthy(server)
        assert complete(server, **SHORT).status_code == 200
        assert server.metric("engine_steps_total") > SHORT["max_tokens"] + 1  # the warm-up's are among them
        server.send(signal.SIGINT)
        assert server.wait() == 0


def listen_on(port: int, engine: Any) -> None:
    engine.rival = socket.create_server(("127.0.0.1", port))


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.mark.slow
def test_port_that_a_rival_takes_during_the_load_is_named(long_model: Path, tmp_path: Path, port: int) -> None:
    """Two sockets may be bound to a port as long as neither listens."""
    change, options = partial(listen_on, port), {"port": port}
    with server_process(long_model, tmp_path / "log", change=change, options=options, waits=False) as server:
        assert server.wait() == 1
        assert f"ConfigError: port={port} of host=127.0.0.1 cannot be used" in server.log.read_text()


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_under_load_finishes_what_is_open(long_model: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    change = partial(slow_down, slow)
    started_server = server_process(long_model, tmp_path / "log", change=change)
    with started_server as server, clients() as pool, httpx.Client(timeout=LIMIT_S) as idle:
        idle.get(f"{server.url}/health")  # stays connected
        body = SHORT | {"max_tokens": 600}
        started = start_load(server, pool, **body)
        server.send(signal.SIGTERM)
        server.wait_for_log("stopping")
        slow.unlink()
        with pytest.raises(httpx.TransportError):
            while True:  # until the connection is closed
                idle.get(f"{server.url}/health")
        assert [last_reason(each.result()) for each in started] == ["length"] * 4
        assert started[1].result().json()["usage"]["completion_tokens"] == 600
        assert server.wait() == 0


def wait_for_last_events(seen: Path, engine: Any) -> None:
    """Cut no connection before the file `seen` exists, however late clients read their last events."""
    wait = asyncio.wait

    async def wait_until_seen(tasks: Any, *, timeout: float | None = None, **options: Any) -> Any:
        while timeout == lifecycle.LAST_EVENTS_S and not seen.exists():
            await asyncio.sleep(0.01)
        return await wait(tasks, timeout=0 if timeout == lifecycle.LAST_EVENTS_S else timeout, **options)

    asyncio.wait = wait_until_seen  # type: ignore[assignment]


@pytest.mark.slow
def test_sigterm_beyond_the_limit_aborts_with_a_last_event(long_model: Path, tmp_path: Path) -> None:
    """A client that does not read, and one that never sends its whole body, do not hold up the end."""
    seen, options = tmp_path / "seen", {"drain_s": 0.3}
    change = partial(wait_for_last_events, seen)
    with server_process(long_model, tmp_path / "log", change=change, options=options) as server, clients() as pool:
        slow = connect(server, as_http(ENDLESS | {"stream": True, "logprobs": 5}))
        half = connect(server, as_http(ENDLESS)[:-10])
        server.wait_for_metric("num_requests_running", 1)
        started = [pool.submit(partial(complete, server, stream=i % 2 == 0, **ENDLESS)) for i in range(4)]
        server.wait_for_metric("num_requests_running", 5)
        server.wait_for_steps(3)  # so that each has a token
        server.send(signal.SIGTERM)
        responses = [each.result() for each in started]
        seen.touch()
        assert [last_reason(each) for each in responses] == ["abort"] * 4
        assert all(choice["text"] for each in responses[1::2] for choice in each.json()["choices"])
        assert server.wait() == 0
        slow.close()
        half.close()


@pytest.mark.slow
def test_second_signal_ends_at_once(long_model: Path, tmp_path: Path) -> None:
    with server_process(long_model, tmp_path / "log") as server, clients() as pool:
        started = start_load(server, pool, **ENDLESS)
        server.send(signal.SIGTERM)
        server.wait_for_log("stopping")
        assert server.process.exitcode is None
        server.send(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT  # and not 0, as after draining
        for each in started:
            with pytest.raises(httpx.TransportError):
                each.result()


class EndlessAnswers:
    """An application that gets SIGTERM with its first request, which it answers when it is told to abort."""

    num_open = 1

    def __init__(self) -> None:
        self.gate = SimpleNamespace(outermost=self, is_draining=False)

    async def warm_up(self) -> None:
        self.aborted = asyncio.Event()

    async def wait_for_failure(self) -> EngineError:
        return await asyncio.Future()

    async def abort(self) -> None:
        self.aborted.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(self.aborted.wait(), LIMIT_S)
        await send({"type": "http.response.body", "body": b"the last event"})


def test_answers_that_are_open_at_the_limit_get_a_last_event() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound, clients() as pool:
        answer = pool.submit(httpx.get, f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=LIMIT_S)
        options = ServerOptions(drain_s=0.05)
        assert lifecycle.serve_until_stopped(EndlessAnswers(), options, bound, 1000) == 0  # type: ignore[arg-type]
        assert answer.result().text == "the last event"


def load_forever(engine: Any) -> None:
    time.sleep(LIMIT_S)


def test_sigterm_while_loading_ends_with_143(long_model: Path, tmp_path: Path) -> None:
    with server_process(long_model, tmp_path / "log", change=load_forever, waits=False) as server:
        server.wait_for_log("loading")
        server.send(signal.SIGTERM)
        server.process.join(10)
        if server.process.exitcode is None:  # Python drops an exception that a signal raises inside a destructor
            server.send(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM


# -- faults ------------------------------------------------------------------------------------------------------------


def fail_in_a_step(when: Path, seen: Path, engine: Any) -> None:
    """In the first step after the file `when` exists. `seen`: see `linger_until`."""

    def fail() -> None:
        if when.exists():
            raise RuntimeError("a simulated fault of the GPU")

    before_each_launch(engine, fail)
    linger_until(seen)


def linger_until(seen: Path) -> None:
    """Let a failed server go on until the file `seen` exists, however late a client looks at it."""
    sleep = asyncio.sleep

    async def wait(delay_s: float, *args: Any) -> None:
        if delay_s != lifecycle.LINGER_S:
            return await sleep(delay_s, *args)
        while not seen.exists():
            await sleep(0.01)

    asyncio.sleep = wait  # type: ignore[assignment]


def slow_down(slow: Path, engine: Any) -> None:
    """Each step takes 0.2 s longer while the file `slow` exists."""
    before_each_launch(engine, lambda: time.sleep(0.2 if slow.exists() else 0))


def errors_of_all(server: ServerProcess, started: list[Future[httpx.Response]]) -> list[Any]:
    """The errors that end the answers of `start_load`. The server must be unhealthy then."""
    responses = [each.result() for each in started]
    assert [each.status_code for each in responses] == [200, 503] * 2
    assert get(server, "/health").status_code == 503
    return [(events(each)[-1] if i % 2 == 0 else each.json())["error"] for i, each in enumerate(responses)]


def test_step_that_raises_answers_everyone_and_ends_with_status_1(long_model: Path, tmp_path: Path) -> None:
    when, seen = tmp_path / "fail", tmp_path / "seen"
    change = partial(fail_in_a_step, when, seen)
    with server_process(long_model, tmp_path / "log", change=change) as server, clients() as pool:
        started = start_load(server, pool, **ENDLESS)
        server.wait_for_steps(2)  # so that each has a token
        when.touch()
        for error in errors_of_all(server, started):
            assert "a simulated fault of the GPU" in error["message"]
        assert complete(server, **SHORT).status_code == 503
        assert server.metric("engine_is_running") == 0
        seen.touch()
        assert server.wait() == 1
        assert "the engine has failed" in server.log.read_text()


def test_step_that_raises_during_the_warm_up_ends_with_status_1(long_model: Path, tmp_path: Path) -> None:
    change = partial(fail_in_a_step, tmp_path, tmp_path)  # which exists
    with server_process(long_model, tmp_path / "log", change=change, waits=False) as server:
        assert server.wait() == 1
        assert "is served at" not in server.log.read_text()


def fail_in_the_tokenizer(engine: Any) -> None:
    tokenizer = engine.llm.tokenizer
    encode = tokenizer.encode

    def encode_or_fail(text: str, **options: Any) -> Any:
        if text == SECRET:
            raise RuntimeError(f"a simulated fault of the tokenizer for {text}")
        return encode(text, **options)

    tokenizer.encode = encode_or_fail


def test_faulty_tokenizer_and_vanished_clients_harm_nobody_else(long_model: Path, tmp_path: Path) -> None:
    """Clients vanish after connecting, in the head, in the body, before the first token, and in the middle."""
    with server_process(long_model, tmp_path / "log", change=fail_in_the_tokenizer) as server:
        before, failed = complete(server, **SHORT), complete(server, prompt=SECRET)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
        server.wait_for_log("RuntimeError")
        assert SECRET not in server.log.read_text() + failed.text
        for is_streamed in (False, True):
            request = as_http(ENDLESS | {"stream": is_streamed})
            for num_bytes in (0, 20, len(request) - 5, len(request)):
                connect(server, request[:num_bytes]).close()
            running = connect(server, request)
            server.wait_for_metric("num_requests_running", 1)
            if is_streamed:
                assert b"200 OK" in running.recv(100)
            running.close()
            server.wait_for_metric("num_requests_running", 0)
        assert server.metric("num_answers_in_queue") == 0
        assert complete(server, **SHORT).json()["choices"] == before.json()["choices"]
        server.send(signal.SIGTERM)
        assert server.wait() == 0


def fill_the_disk(engine: Any) -> None:
    """From now on, nothing can be written to the log."""
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(full, descriptor)
    fail_in_the_tokenizer(engine)


def test_full_disk_of_the_log_harms_nobody(long_model: Path, tmp_path: Path, port: int) -> None:
    options = {"port": port}
    started = server_process(long_model, tmp_path / "log", change=fill_the_disk, options=options, waits=False)
    with started as server:
        server.url = f"http://127.0.0.1:{port}"
        wait_until_healthy(server)
        assert complete(server, prompt=SECRET).status_code == 500  # which is logged
        assert complete(server, **SHORT).status_code == 200
        server.send(signal.SIGTERM)
        assert server.wait() == 0


def change_ranks(slow: Path, seen: Path, engine: Any) -> None:
    print(f"rank 1 is {worker_pids_of(engine.llm.engine.executor)[0]}", flush=True)
    slow_down(slow, engine)
    linger_until(seen)


@contextmanager
def server_of_two_ranks(model: Path, tmp_path: Path, **options: Any) -> Iterator[tuple[ServerProcess, int]]:
    """The server, and the process id of rank 1. Its steps are slow while the file tmp_path/slow exists. If it fails, it
    goes on until tmp_path/seen exists.
    """
    engine = {"device": "cpu", "num_kvcache_blocks": 600, "tensor_parallel_size": 2}
    change = partial(change_ranks, tmp_path / "slow", tmp_path / "seen")
    started = server_process(model, tmp_path / "log", change=change, engine=engine, options=options)
    with started as server:
        yield server, int(server.log.read_text().partition("rank 1 is ")[2].split()[0])


@pytest.mark.slow
def test_dead_rank_ends_an_idle_server_with_status_1(long_model: Path, tmp_path: Path) -> None:
    """Nobody asks anything, so no step notices."""
    with server_of_two_ranks(long_model, tmp_path) as (server, pid):
        (tmp_path / "seen").touch()
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == 1
        assert "rank 1 died" in server.log.read_text()


@pytest.mark.slow
def test_dead_rank_answers_everyone_and_ends_with_status_1(long_model: Path, tmp_path: Path) -> None:
    with server_of_two_ranks(long_model, tmp_path) as (server, pid), clients() as pool:
        started = start_load(server, pool, **ENDLESS)
        server.wait_for_steps(2)  # so that each has a token
        os.kill(pid, signal.SIGKILL)
        for error in errors_of_all(server, started):
            assert error["code"] == "engine_unavailable"
        (tmp_path / "seen").touch()
        assert server.wait() == 1


@pytest.mark.slow
@pytest.mark.parametrize("signums", [(signal.SIGKILL,), (signal.SIGTERM, signal.SIGTERM)])
def test_killed_server_leaves_no_rank(long_model: Path, tmp_path: Path, signums: tuple[signal.Signals, ...]) -> None:
    """Rank 1 notices that rank 0 has gone. `wait` asserts that no process is left."""
    with server_of_two_ranks(long_model, tmp_path) as (server, _), clients() as pool:
        started = start_load(server, pool, **ENDLESS)
        for i, signum in enumerate(signums):
            if i:
                server.wait_for_log("stopping")
            server.send(signum)
        assert server.wait() in (-signal.SIGKILL, 128 + signal.SIGTERM)
        for each in started:
            with pytest.raises(httpx.TransportError):
                each.result()


@pytest.mark.slow
def test_sigterm_of_two_ranks_finishes_what_is_open(long_model: Path, tmp_path: Path) -> None:
    with server_of_two_ranks(long_model, tmp_path) as (server, _), clients() as pool:
        slow = tmp_path / "slow"
        slow.touch()
        started = start_load(server, pool, **SHORT | {"max_tokens": 400})
        server.send(signal.SIGTERM)
        server.wait_for_log("stopping")
        slow.unlink()
        assert [last_reason(each.result()) for each in started] == ["length"] * 4
        assert server.wait() == 0
