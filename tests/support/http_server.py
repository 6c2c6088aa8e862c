"""A real uvicorn server in a thread, for tests of the HTTP API."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server import ServerOptions, make_app

OPTIONS = ServerOptions(served_model_name=("tiny", "alias/of tiny"))
START_LIMIT_S = LIMIT_S = 120  # they bound a hang


def http_server(
    engine: AsyncLLM, options: ServerOptions = OPTIONS, **uvicorn_options: Any
) -> AbstractContextManager[str]:
    """Serve the engine, and yield the server's URL. The engine stays open."""
    return app_server(make_app(engine, options), **uvicorn_options)


@contextmanager
def app_server(app: Any, **options: Any) -> Iterator[str]:
    """Serve an ASGI application, and yield the server's URL. `options` are uvicorn's."""
    options = {"http": H11Protocol} | options  # as Connection does, whatever else is installed
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + START_LIMIT_S
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline_s, "the server has not started"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def num_open(engine: AsyncLLM) -> int:
    """Requests in the engine that have not ended."""
    stats = engine.llm.stats()
    return int(stats["num_running"] + stats["num_waiting"])


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition has not become true"
        time.sleep(0.002)


def wait_until_idle(engine: AsyncLLM, limit_s: float = LIMIT_S) -> None:
    wait_until(lambda: not num_open(engine), limit_s)


def as_http(body: dict[str, Any]) -> bytes:
    """A request for a completion, as it is sent."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(content)}\r\n\r\n".encode() + content
