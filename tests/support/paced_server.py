"""A server in virtual time whose steps take longer as contexts grow, for tests of what bench_serve.py makes of that.

    with VirtualTimeLoop() as loop: loop.run(measure(...))

No step computes anything, and nobody waits: where the loop would sleep, its clock is put forward. So times are exact,
and minutes of streams take a second.
"""

import argparse
import asyncio
import json
import selectors
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import bench_serve
from benchmarks import serve_options
from benchmarks.serve_http import HttpClient
from benchmarks.serve_load import Server
from benchmarks.serve_prompts import RequestMaker
from benchmarks.serve_wire import OnBody, Response
from benchmarks.serve_workloads import Bench

T = TypeVar("T")

REAL_TIMEOUT_S = 60.0
BASE_STEP_S, STEP_S_PER_CONTEXT_TOKEN = 0.002, 4e-6
PREFILL_TOKEN_S = 1e-5
LONG_PROMPT_TOKENS = 10_000  # from this many on, a prompt slows the streams while it is read


class _SkippingSelector(selectors.DefaultSelector):
    """Puts the clock forward instead of waiting, unless something has arrived."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout is not None else REAL_TIMEOUT_S)
        if not found and timeout is not None:
            self.now_s += max(timeout, 0.0)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of its timers."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s

    def __enter__(self) -> "VirtualTimeLoop":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` for at most a minute of real time."""
        end_s = time.monotonic() + REAL_TIMEOUT_S

        async def watched() -> T:
            task = asyncio.ensure_future(work)
            while not task.done():
                assert time.monotonic() < end_s, "too slow"
                await asyncio.wait([task], timeout=1.0)
            return task.result()

        return self.run_until_complete(watched())


@dataclass(eq=False)
class _Running:
    """A request that gets a token in each step."""

    num_context: int
    num_left: int
    on_body: OnBody
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    num_done: int = 0


class PacedClient(HttpClient):
    """A client and its server in one. Enter it for the address that other connections are opened to.

    factor: by what the time of each step is multiplied at this moment; gets this object.
    """

    def __init__(self, clock: Callable[[], float], factor: Callable[["PacedClient"], float]) -> None:
        super().__init__("http://127.0.0.1:1", clock=clock)
        self._factor = factor
        self._running: list[_Running] = []
        self._stepping: asyncio.Task[None] | None = None
        self.num_reading_long = 0
        self.num_connections = 0
        self.bytes_s: dict[int, list[float]] = {}  # when each connection sent something, by its number

    async def __aenter__(self) -> "PacedClient":
        self._server = await asyncio.start_server(self._listen, "127.0.0.1", 0, backlog=1000)
        self.address = self.address._replace(port=self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times_s = self.bytes_s.setdefault(len(self.bytes_s), [])
        self.num_connections += 1
        try:
            while await reader.read(100_000):
                times_s.append(self.clock())
        except ConnectionError:
            pass
        finally:
            self.num_connections -= 1
            writer.close()

    async def send(self, method: str, path: str, body: bytes, on_body: OnBody) -> Response:
        request = json.loads(body)
        num_prompt_tokens = len(request["prompt"])
        is_long = num_prompt_tokens >= LONG_PROMPT_TOKENS
        self.num_reading_long += is_long
        try:
            await asyncio.sleep(PREFILL_TOKEN_S * num_prompt_tokens)
        finally:
            self.num_reading_long -= is_long
        running = _Running(num_prompt_tokens, request["max_tokens"], on_body)
        self._running.append(running)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_on())
        try:
            await running.ended.wait()
        finally:
            self._running.remove(running)
        response = Response(on_body)
        response.status = 200
        return response

    async def _step_on(self) -> None:
        """Steps, until nobody waits for one."""
        while self._running:
            num_tokens = sum(each.num_context for each in self._running)
            step_s = BASE_STEP_S + STEP_S_PER_CONTEXT_TOKEN * num_tokens / len(self._running)
            await asyncio.sleep(step_s * self._factor(self))
            for each in self._running:
                if each.num_left:
                    self._emit(each)

    def _emit(self, running: _Running) -> None:
        running.num_context += 1
        running.num_left -= 1
        running.num_done += 1
        choice = {"text": " word", "finish_reason": None if running.num_left else "length"}
        event = {"choices": [choice], "usage": {"completion_tokens": running.num_done}}
        running.on_body(b"data: " + json.dumps(event).encode() + b"\n\n", self.clock())
        if not running.num_left:
            running.on_body(b"data: [DONE]\n\n", self.clock())
            running.ended.set()


def paced_bench(client: PacedClient, workload: str, *argv: str) -> Bench:
    """A Bench of this workload with the default options, apart from those in `argv`."""
    words = ("--base-url", "http://127.0.0.1:1", "--no-warm-up", "--workload", workload, *argv)
    args: argparse.Namespace = serve_options.parse("about", tuple(bench_serve.MEASURES), words)
    return Bench(args, Server("http://127.0.0.1:1"), client, RequestMaker(client, "fake", vocab_size=1000))
