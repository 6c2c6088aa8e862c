"""Load on an OpenAI-compatible server: rates, times to the first token and per token, errors.

    python bench_serve.py --base-url http://127.0.0.1:8000 --rate 1 2 4 8 --json rates.json --plot rates.png
    python bench_serve.py --start "nanovllm serve --model demo --port {port}" --concurrency 8 --num-requests 32

Workloads: `chats`, short ones, in closed loops (--concurrency) or at Poisson arrivals (--rate); `document`, one long
text with many questions; `mixed`, both at once; `interference`, a long prompt that arrives beside running streams;
`idle-connections`, idle or slow connections beside running streams; `overhead`, what HTTP adds to a small request.

Prompts are texts with exact numbers of tokens, which the server's /tokenize counts, or with --token-ids random token
ids. Times are those that a client sees. Every rate stands beside its bound: the offered rate, or with
--against-generate the rate of LLM.generate for the same requests.
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.reporting import report, run_options, versions
from benchmarks.serve_client import CHAT, COMPLETIONS
from benchmarks.serve_comparison import compare_rate, limit_threads, measure_overhead
from benchmarks.serve_idle import allow_files, measure_idle_connections
from benchmarks.serve_load import Server
from benchmarks.serve_options import parse
from benchmarks.serve_plot import plot_if_possible
from benchmarks.serve_process import ServerError, ServerProcess, free_port, served_model, server_url, server_version
from benchmarks.serve_prompts import PromptError, RequestMaker
from benchmarks.serve_streams import measure_interference
from benchmarks.serve_workloads import Bench, WorkloadError, measure_chats, measure_document, measure_mixed

Json = dict[str, Any]
T = TypeVar("T")

MEASURES: dict[str, Callable[[Bench], Awaitable[Json]]] = {
    "chats": measure_chats,
    "document": measure_document,
    "mixed": measure_mixed,
    "interference": measure_interference,
    "idle-connections": measure_idle_connections,
    "overhead": measure_overhead,
}


def gpu_name() -> str | None:
    """The name of this machine's first GPU; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0] if lines else None


def run_until_sigterm(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, which SIGTERM ends with SystemExit. `work` is cancelled first, so that it closes its connections; an
    exit out of a signal handler can leave the loop with its tasks pending.
    """

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(*_: object) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGTERM, cancel)
        try:
            return await work
        finally:
            if signal.getsignal(signal.SIGTERM) is cancel:
                signal.signal(signal.SIGTERM, before)

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


def end(*_: object) -> None:
    """End the program on SIGTERM, and with it the server. A second one must not disturb that; timeout(1) sends two."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


async def measure(args: argparse.Namespace, server: Server, command: tuple[str, ...]) -> tuple[Json, Bench]:
    """Run the workload against a server that is ready. `command` has started it, unless it is empty."""
    client = server.client()
    path = CHAT if args.endpoint == "chat" else COMPLETIONS
    maker = RequestMaker(client, args.model, path, args.token_ids, args.extra_body)
    bench = Bench(args, server, client, maker, command)
    try:
        return await MEASURES[args.workload](bench), bench
    finally:
        await client.close()


def run(args: argparse.Namespace, stack: ExitStack) -> Json:
    """Start a server if asked to, measure, stop it, and compare with the engine if asked to."""
    if args.workload == "idle-connections":
        allow_files(2 * args.idle_connections)  # the server inherits it
    elif args.workload == "overhead":
        limit_threads()
    process = None
    result: Json = {}
    if args.start:
        port = free_port()
        args.base_url = f"http://127.0.0.1:{port}"
        process = stack.enter_context(ServerProcess(args.start, args.base_url, port))
        result["start_to_ready_s"] = process.wait_until_ready()
        result["gpu"] = gpu_name()
    args.base_url = server_url(args.base_url)
    args.model = args.model or served_model(args.base_url, args.api_key)
    result |= {"server_version": server_version(args.base_url, args.api_key)}
    command = tuple(process.words) if process is not None else ()
    server = Server(args.base_url, args.api_key, args.timeout_s)
    figures, bench = run_until_sigterm(measure(args, server, command))
    if process is not None:
        result["server_exit_status"] = process.stop()
        if args.against_generate:
            figures = compare_rate(figures, command, bench.sent)
    return result | figures


def main() -> int:
    args = parse(__doc__, tuple(MEASURES))
    signal.signal(signal.SIGTERM, end)
    args.api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    with ExitStack() as stack:
        if args.preset:
            from benchmarks.serve_model import write_model

            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{args.preset}-"))
            write_model(args.preset, Path(directory))
            args.start = args.start.replace("{model}", directory)
        header = run_options(args) | versions()
        try:
            result = header | run(args, stack) | {"model": args.preset or args.model}
        except (ServerError, WorkloadError, PromptError) as error:
            print(f"bench_serve.py: {error}", file=sys.stderr)
            return 1
    if args.plot:
        plot_if_possible(result, args.plot, args.json)
    report(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
