"""Sends many requests: in closed loops, or at Poisson arrivals that do not wait for answers; from several processes."""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from benchmarks.serve_client import Answer, Request, ask
from benchmarks.serve_http import HttpClient

START_DELAY_S = 0.1  # for all processes to hear of the start


@dataclass(frozen=True)
class Server:
    """The server under test, as a client process has to know it."""

    base_url: str
    api_key: str | None = None
    timeout_s: float = 600.0  # of one request

    def client(self) -> HttpClient:
        return HttpClient(self.base_url, self.api_key)


@dataclass(frozen=True)
class Load:
    """Requests, and when they are sent.

    concurrency: that many loops each wait for an answer before they send the next request. arrivals_s: instead, request
    i is sent so many seconds after the start.
    """

    requests: tuple[Request, ...]
    concurrency: int | None = None
    arrivals_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert (self.concurrency is None) == (len(self.arrivals_s) == len(self.requests) > 0), "either of the two"

    def share(self, index: int, num_shares: int) -> "Load":
        """The part of one of several processes, which get the requests in turn."""
        part = replace(self, requests=self.requests[index::num_shares], arrivals_s=self.arrivals_s[index::num_shares])
        if self.concurrency is None:
            return part
        return replace(part, concurrency=len(range(index, self.concurrency, num_shares)))


class LoadResult(NamedTuple):
    """The answers to a load, and the largest share of a core that a client process used for it."""

    answers: list[Answer]
    client_cpu_share: float


def poisson_arrivals(request_per_s: float, num_requests: int, seed: int) -> tuple[float, ...]:
    """Times of arrivals whose intervals are independent and exponentially distributed."""
    rng = random.Random(seed)
    now_s = 0.0
    arrivals = []
    for _ in range(num_requests):
        now_s += rng.expovariate(request_per_s)
        arrivals.append(now_s)
    return tuple(arrivals)


async def drive(client: HttpClient, load: Load, timeout_s: float) -> LoadResult:
    """Send the load from this process and wait for all answers."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    if load.concurrency is None:
        sent = (_ask_at(client, request, timeout_s, at_s) for request, at_s in _timed(load))
        answers = list(await asyncio.gather(*sent))
    else:
        waiting = iter(load.requests)
        loops = (_ask_in_turn(client, waiting, timeout_s) for _ in range(load.concurrency))
        answers = [answer for part in await asyncio.gather(*loops) for answer in part]
    return LoadResult(answers, (time.process_time() - cpu_s) / (time.perf_counter() - start_s))


def _timed(load: Load) -> Iterator[tuple[Request, float]]:
    return zip(load.requests, load.arrivals_s, strict=True)


async def _ask_at(client: HttpClient, request: Request, timeout_s: float, at_s: float) -> Answer:
    await asyncio.sleep(at_s)
    return await ask(client, request, timeout_s)


async def _ask_in_turn(client: HttpClient, waiting: Iterator[Request], timeout_s: float) -> list[Answer]:
    """Take the next of the waiting requests, which the loops share, after each answer."""
    return [await ask(client, request, timeout_s) for request in waiting]


# -- several processes -------------------------------------------------------------------------------------------


async def run_load(server: Server, load: Load, num_processes: int = 1) -> LoadResult:
    """Send the load from this process, or from several others, and wait for all answers."""
    num_processes = min(num_processes, len(load.requests), load.concurrency or len(load.requests))
    if num_processes == 1:
        return await _drive_with_client(server, load)
    processes: list[SpawnProcess] = []
    try:
        return await asyncio.to_thread(_run_in_processes, server, load, num_processes, processes)
    except asyncio.CancelledError:
        for process in processes:
            if process.pid is not None:
                process.kill()  # which ends the thread, for which the event loop waits
        raise


async def _drive_with_client(server: Server, load: Load) -> LoadResult:
    client = server.client()
    try:
        return await drive(client, load, server.timeout_s)
    finally:
        await client.close()


def _run_in_processes(server: Server, load: Load, num_processes: int, processes: list[SpawnProcess]) -> LoadResult:
    """All processes start together; they are added to `processes`. Their clocks are the same, because time.perf_counter
    counts from boot on Linux.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_processes)]
    shares = [load.share(index, num_processes) for index in range(num_processes)]
    processes += (
        context.Process(target=_client_process, args=(theirs, server, share), daemon=True)
        for (_, theirs), share in zip(pipes, shares, strict=True)
    )
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that `recv` notices if the process ends
        for ours, _ in pipes:
            ours.recv()  # it is ready
        start_s = time.perf_counter() + START_DELAY_S
        for ours, _ in pipes:
            ours.send(start_s)
        results = [ours.recv() for ours, _ in pipes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.join(timeout=10)
                process.kill()
    answers = [answer for result in results for answer in result.answers]
    return LoadResult(answers, max(result.client_cpu_share for result in results))


def _client_process(pipe: Connection, server: Server, load: Load) -> None:
    pipe.send("ready")
    start_s = pipe.recv()
    time.sleep(max(0.0, start_s - time.perf_counter()))
    pipe.send(asyncio.run(_drive_with_client(server, load)))
    pipe.close()
