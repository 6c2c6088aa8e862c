"""Clients that go away or read slowly, and an engine that fails: no request is left behind, none goes unanswered."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_server import http_server, num_open, wait_until_idle
from tiny_models import write_tiny_model, write_tiny_tokenizer

from nanovllm import AsyncLLM

ENDLESS: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
SHORT: dict[str, Any] = ENDLESS | {"max_tokens": 8}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    return write_tiny_tokenizer(write_tiny_model(directory, max_position_embeddings=2048))


def make_engine(model: Path) -> AsyncLLM:
    return AsyncLLM(
        model, device="cpu", dtype="float32", num_kvcache_blocks=40, max_num_batched_tokens=300, enforce_eager=True
    )


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[tuple[AsyncLLM, str]]:
    engine = make_engine(tiny_model)
    with http_server(engine) as url:
        yield engine, url
    assert not engine.is_failed
    engine.close()


def send_request(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request over a plain socket with a small receive buffer."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


# -- disconnects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_client_that_disconnects_ends_its_request_within_a_step(
    tiny: tuple[AsyncLLM, str], streams: bool, n: int
) -> None:
    engine, url = tiny
    connection = send_request(url, ENDLESS | {"stream": streams, "n": n})
    wait_until(lambda: num_open(engine) == n)
    if streams:
        assert connection.recv(100)
    num_steps = engine.llm.stats()["num_steps"]
    connection.close()
    wait_until_idle(engine)
    assert engine.llm.stats()["num_steps"] < num_steps + 200  # of 1500; the loop needs a moment to notice


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.003, 0.01, 0.03])
@pytest.mark.parametrize("streams", [False, True])
def test_client_that_disconnects_at_any_stage_leaves_nothing(
    tiny: tuple[AsyncLLM, str], streams: bool, delay_s: float
) -> None:
    engine, url = tiny
    for connection in [send_request(url, ENDLESS | {"stream": streams}) for _ in range(4)]:
        time.sleep(delay_s)
        connection.close()
    answered = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=20)
    assert answered.status_code == 200
    wait_until_idle(engine)
    wait_until(lambda: not engine._dispatcher._streams)


def test_client_that_leaves_after_the_last_token_leaves_nothing(tiny: tuple[AsyncLLM, str]) -> None:
    """It goes when the reason of the end has arrived, and [DONE] has not been read; or with a whole answer unread."""
    engine, url = tiny
    for i in range(20):
        connection = send_request(url, SHORT | {"stream": i % 2 == 0})
        if i % 2 == 0:
            received = b""
            while b'"finish_reason": "length"' not in received:
                received += connection.recv(100)
        else:
            wait_until(lambda: num_open(engine) == 0)
        connection.close()
    wait_until(lambda: not engine._dispatcher._streams)
    assert httpx.post(f"{url}/v1/completions", json=SHORT, timeout=20).status_code == 200


def test_client_that_leaves_during_its_prefill_ends_its_request(tiny: tuple[AsyncLLM, str]) -> None:
    """The prompts are longer than a step; those behind the first ones leave while they wait."""
    engine, url = tiny
    body = ENDLESS | {"prompt": [5] * 1500, "max_tokens": 500}
    for connection in [send_request(url, body | {"stream": i % 2 == 0}) for i in range(6)]:
        wait_until(lambda: num_open(engine) > 0)
        connection.close()
    wait_until_idle(engine)
    wait_until(lambda: not engine._dispatcher._streams)


def test_openai_stream_closed_early_ends_its_request(tiny: tuple[AsyncLLM, str]) -> None:
    engine, url = tiny
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        fields = dict(ENDLESS)
        extra = {"ignore_eos": fields.pop("ignore_eos")}
        stream = client.completions.create(model="tiny", stream=True, extra_body=extra, **fields)
        next(iter(stream))
        stream.close()
        wait_until_idle(engine)


# -- slow clients ----------------------------------------------------------------------------------------------------


def test_client_that_does_not_read_holds_up_nobody(tiny: tuple[AsyncLLM, str]) -> None:
    engine, url = tiny
    slow = [send_request(url, ENDLESS | {"stream": True, "n": 4}) for _ in range(3)]
    assert httpx.post(f"{url}/v1/completions", json=SHORT, timeout=20).status_code == 200
    for connection in slow:
        connection.close()
    wait_until_idle(engine)


def test_client_that_reads_late_gets_the_whole_answer(tiny: tuple[AsyncLLM, str]) -> None:
    engine, url = tiny
    body = ENDLESS | {"stream": True, "n": 4, "max_tokens": 400}
    expected = httpx.post(f"{url}/v1/completions", json=body | {"stream": False}, timeout=60).json()
    connection = send_request(url, body)
    wait_until(lambda: num_open(engine) == 4)
    wait_until_idle(engine, limit_s=30)
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(65536)
    connection.close()
    texts = ["", "", "", ""]
    for line in received.decode().splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in expected["choices"]]


# -- an engine that fails or ends ------------------------------------------------------------------------------------


def test_step_that_raises_is_an_error_for_all_and_turns_health(tiny_model: Path) -> None:
    def fall(*args: Any) -> None:
        raise OSError("the GPU fell off")

    async def ask(url: str, engine: AsyncLLM) -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(timeout=20) as client:
            whole = asyncio.create_task(client.post(f"{url}/v1/completions", json=ENDLESS))
            streamed = asyncio.create_task(client.post(f"{url}/v1/completions", json=ENDLESS | {"stream": True}))
            while num_open(engine) < 2:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            engine.llm.engine.executor.launch = fall  # type: ignore[method-assign, assignment]
            return await whole, await streamed

    engine = make_engine(tiny_model)
    with http_server(engine) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        whole, streamed = asyncio.run(ask(url, engine))
        assert whole.status_code == 503
        assert "the GPU fell off" in whole.json()["error"]["message"]
        *_, last, done, _ = streamed.text.split("\n\n")
        assert done == "data: [DONE]"
        assert "the GPU fell off" in json.loads(last.removeprefix("data: "))["error"]["message"]
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert "the GPU fell off" in health.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 503
    engine.close()


def test_engine_that_is_closed_gives_open_requests_their_last_event(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with http_server(engine) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            engine.close()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
        assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 503
