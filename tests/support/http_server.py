"""A real uvicorn server in a thread, for tests of the HTTP API."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from waiting import LIMIT_S, wait_until

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server import ServerOptions, make_app
from nanovllm.entrypoints.server.app import Site
from nanovllm.entrypoints.server.gate import ApiKeys

PATIENT: dict[str, Any] = {"max_wait_s": 3600, "max_receive_s": 3600, "max_unread_s": 3600}
OPTIONS = ServerOptions(served_model_name=("tiny", "alias/of tiny"), **PATIENT)


def http_server(
    engine: AsyncLLM, options: ServerOptions = OPTIONS, **uvicorn_options: Any
) -> AbstractContextManager[str]:
    """Serve the engine, and yield the server's URL. The engine stays open."""
    return app_server(make_app(engine, options), **uvicorn_options)


@contextmanager
def app_server(app: Any, **options: Any) -> Iterator[str]:
    """Serve an ASGI application, and yield the server's URL. `options` are uvicorn's."""
    # H11Protocol as Connection does. A client that reuses a connection must not meet the server closing it
    options = {"http": H11Protocol, "timeout_keep_alive": 3600} | options
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started, "the server has not started"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def make_site(engine: AsyncLLM, keys: Sequence[str] = (), **options: Any) -> Site:
    """The whole application, of which the gate is part."""
    return Site(engine, ServerOptions(**(PATIENT | {"served_model_name": ("tiny",)} | options)), ApiKeys(list(keys)))


def site_server(engine: AsyncLLM, keys: Sequence[str] = (), **options: Any) -> AbstractContextManager[str]:
    """Serve the whole application, and yield the server's URL."""
    return app_server(make_site(engine, keys, **options).gate.outermost)


def asgi_client(app: Any) -> httpx.AsyncClient:
    """A client that calls an application in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def web_client(url: str = "") -> httpx.Client:
    """A client with a new connection for each request: a server may close one after an error at any later moment."""
    return httpx.Client(base_url=url, timeout=LIMIT_S, limits=httpx.Limits(max_keepalive_connections=0))


def num_open(engine: AsyncLLM) -> int:
    """Requests in the engine that have not ended."""
    stats = engine.llm.stats()
    return int(stats["num_running"] + stats["num_waiting"])


def wait_until_idle(engine: AsyncLLM) -> None:
    wait_until(lambda: not num_open(engine))


def as_http(body: dict[str, Any]) -> bytes:
    """A request for a completion, as it is sent."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(content)}\r\n\r\n".encode() + content
