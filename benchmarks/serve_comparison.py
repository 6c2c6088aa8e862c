"""Compares a server with the engine alone: the rate of LLM.generate, and the time that HTTP adds to a request.

The engine runs in a process of its own (serve_in_process.py) with the engine options of the server's command.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.reporting import Samples
from benchmarks.serve_client import Request
from benchmarks.serve_prompts import PromptError
from benchmarks.serve_workloads import Bench, WorkloadError

Json = dict[str, Any]

ROOT = Path(__file__).parent.parent
OVERHEAD_PROMPT_TOKENS, OVERHEAD_ANSWER_TOKENS = 100, 8
OVERHEAD_WARM_UPS = 10  # requests of each kind, before the first run
NOT_STREAMED = {"stream": False, "stream_options": None}


class EngineProcess:
    """An engine without a server. `mode` is "together" or "one-by-one": see serve_in_process.py."""

    def __init__(self, mode: str, command: Sequence[str]) -> None:
        words = [sys.executable, "-m", "benchmarks.serve_in_process", mode, *command]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # which ends it
        self._process.wait()
        self._process.stdout.close()

    def run(self, requests: Sequence[Request]) -> list[float]:
        """The seconds of the run, or those of each request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and so has its stdout
            print(json.dumps([_as_json(request) for request in requests]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise WorkloadError(f"the engine's process ended with status {self._process.wait()}")
        return [float(seconds) for seconds in json.loads(line)]


def _as_json(request: Request) -> Json:
    if request.token_ids is None:
        raise PromptError("the token ids of a prompt are not known")
    sampling = {name: request.body[name] for name in ("max_tokens", "temperature")}
    return {"token_ids": request.token_ids} | sampling


def compare_rate(
    result: Json,
    command: Sequence[str],
    runs: Sequence[Sequence[Request]],
    make_engine: Callable[..., EngineProcess] = EngineProcess,
) -> Json:
    """Add the rate of LLM.generate for the same requests with token ids, which is the bound of the server's rate.

    The first run warms up. The server has been stopped, because both may not fit on one GPU.
    """
    rates = []
    with make_engine("together", command) as engine:
        for requests in runs:
            (seconds,) = engine.run(requests)
            rates.append(sum(request.body["max_tokens"] for request in requests) / seconds)
    samples = Samples(tuple(rates[1:]))
    share = result["output_tok_per_s"] / samples.median
    print(f"LLM.generate: {samples} output tok/s; through HTTP {share:.3f} of that")
    return result | samples.as_json("generate_output_tok_per_s") | {"share_of_generate": share}


def limit_threads() -> None:
    """Let torch compute with one thread in the processes that are started from here, unless OMP_NUM_THREADS is set.

    The server and the engine run in turns. Idle threads of one keep spinning for a while, and a small model is slower
    with a thread for each core anyway.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")


async def measure_overhead(bench: Bench, make_engine: Callable[..., EngineProcess] = EngineProcess) -> Json:
    """What HTTP adds to the median latency of small requests, which are sent one after the other.

    The server answers one at once, then it streams one, then the engine alone runs one, and so on. So other work of the
    machine disturbs all three equally. All prompts are new. A few requests warm up.
    """
    args = bench.args
    figures: dict[str, list[float]] = {"http": [], "http_stream": [], "engine": []}
    with make_engine("one-by-one", bench.command) as engine:
        await _latencies_in_turn(bench, engine, min(OVERHEAD_WARM_UPS, args.num_requests), args.seed)
        for run in range(1, args.runs + 1):
            start_s = time.perf_counter()
            latencies = await _latencies_in_turn(bench, engine, args.num_requests, args.seed + run)
            medians = {name: statistics.median(values) for name, values in latencies.items()}
            for name, median in medians.items():
                figures[name].append(median)
            told = ", ".join(f"{name} {median * 1e3:.1f} ms" for name, median in medians.items())
            print(f"run {run} of {args.runs}, {time.perf_counter() - start_s:.0f} s: {told}", flush=True)
    return overhead_figures(figures)


async def _latencies_in_turn(bench: Bench, engine: EngineProcess, num_each: int, seed: int) -> dict[str, list[float]]:
    """Seconds of `num_each` requests of each kind."""
    made = await bench.maker.chats(3 * num_each, OVERHEAD_PROMPT_TOKENS, OVERHEAD_PROMPT_TOKENS, seed)
    requests = [request.with_body({"max_tokens": OVERHEAD_ANSWER_TOKENS}) for request in made]
    latencies: dict[str, list[float]] = {"http": [], "http_stream": [], "engine": []}
    for whole, streamed, alone in zip(requests[::3], requests[1::3], requests[2::3], strict=True):
        latencies["http"].append((await bench.ask(whole.with_body(NOT_STREAMED))).latency_s)
        latencies["http_stream"].append((await bench.ask(streamed)).latency_s)
        latencies["engine"] += await asyncio.to_thread(engine.run, [alone])
    return latencies


def overhead_figures(latencies_s: dict[str, list[float]]) -> Json:
    """The latencies, and what HTTP adds to the engine's in each run."""
    result: Json = {}
    for name, values in latencies_s.items():
        result |= Samples(tuple(values)).as_json(f"{name}_latency_s")
    for prefix, name in (("", "http"), ("stream_", "http_stream")):
        pairs = zip(latencies_s[name], latencies_s["engine"], strict=True)
        added = Samples(tuple((http - engine) * 1e3 for http, engine in pairs))
        result |= added.as_json(f"{prefix}overhead_ms")
        print(f"HTTP adds {added} ms to a request{' that is streamed' if prefix else ''}")
    print(f"  which takes the engine {result['engine_latency_s'] * 1e3:.2f} ms")
    return result
