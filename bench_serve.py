"""Load on an OpenAI-compatible server: rates, times to the first token and per token, errors.

    python bench_serve.py --base-url http://127.0.0.1:8000 --rate 4 --json rate4.json
    python bench_serve.py --start "nanovllm serve --model demo --port {port}" --concurrency 8 --num-requests 32

Workloads: `chats`, short chats, in closed loops (--concurrency) or at Poisson arrivals (--rate); `document`, one long
text with many questions; `interference`, a long prompt that arrives while streams are running; `idle-connections`, idle
or slow connections concurrent with running streams; `overhead`, what HTTP adds to a small request.

Prompts are random words, counted in tokens by the server's /tokenize. Times are measured at the client. Every rate is
printed with its bound: the offered rate, or with --against-generate the rate of LLM.generate for the same requests.
Needs aiohttp (the extra `bench`).
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.reporting import Samples, report, run_options, versions
from benchmarks.serve_client import (
    COMPLETIONS,
    SHARES,
    Answer,
    Bench,
    Client,
    Json,
    Prompts,
    WorkloadError,
    clock,
    load_figures,
    over_runs,
    show,
)
from benchmarks.serve_streams import allow_files, measure_idle_connections, measure_interference
from benchmarks.server_process import EngineProcess, ServerError, ServerProcess, get, write_model

BUSY_CLIENT = 0.8  # share of a core above which the client may be the bottleneck
DOCUMENT_ANSWER_TOKENS, QUESTION_TOKENS = 32, 32
OVERHEAD_PROMPT_TOKENS, OVERHEAD_ANSWER_TOKENS = 100, 8
OVERHEAD_WARM_UPS = 10  # requests of each kind, before the first run


# -- short chats -------------------------------------------------------------------------------------------------


async def measure_chats(bench: Bench) -> Json:
    """`runs` runs, after one that warms up."""
    args = bench.args
    runs = [await run_load(bench, args.seed + run) for run in range(args.runs + args.warm_up)]
    load = {"offered_request_per_s": args.rate} if args.rate else {"concurrency": args.concurrency}
    result = load | over_runs(runs[args.warm_up :])
    keys = [f"{name}_{label}_ms" for name in ("ttft", "time_per_token", "latency") for label in SHARES]
    show(f"chats, {load}, errors {result['errors']}:", result, "output_tok_per_s", "request_per_s", *keys)
    if args.against_generate:
        bench.sent = [await bench.engine_requests(bodies) for bodies in bench.sent]
    return result


async def run_load(bench: Bench, seed: int) -> Json:
    """One run: requests in closed loops, or at Poisson arrivals that do not wait for answers."""
    args, rng = bench.args, random.Random(seed)
    least, most = args.min_tokens, args.max_tokens
    drawn = [(rng.randint(least, most), rng.randint(least, most), rng.random()) for _ in range(args.num_requests)]
    bodies = [await bench.request(random.Random(own_seed), *sizes) for *sizes, own_seed in drawn]
    bench.sent.append(bodies)
    waiting = iter(bodies)

    async def loop() -> list[Answer]:
        return [await bench.client.ask(COMPLETIONS, body) for body in waiting]

    async def ask_at(body: Json, at_s: float) -> list[Answer]:
        await asyncio.sleep(at_s)
        return [await bench.client.ask(COMPLETIONS, body)]

    cpu_s, start_s, arrival_s = time.process_time(), clock(), 0.0
    if args.rate:
        tasks = [ask_at(body, arrival_s := arrival_s + rng.expovariate(args.rate)) for body in bodies]
    else:
        tasks = [loop() for _ in range(args.concurrency)]
    answers = [answer for some in await asyncio.gather(*tasks) for answer in some]
    cpu_share = (time.process_time() - cpu_s) / (clock() - start_s)
    if cpu_share > BUSY_CLIENT:
        print(f"  the client took {cpu_share:.0%} of a core, so these may be figures of the client", flush=True)
    for answer in answers:
        answer.read()
    if failed := next((answer for answer in answers if answer.error), None):
        print(f"  an error: {failed.error} {failed.detail}", flush=True)
    return load_figures(answers) | {"client_cpu_share": cpu_share}


def compare_rate(result: Json, command: Sequence[str], runs: Sequence[Sequence[Json]]) -> Json:
    """Add the rate of LLM.generate for the same requests with token ids, which is the bound of the server's rate.

    The first run warms up. The server has been stopped, because both may not fit on one GPU.
    """
    with EngineProcess(command) as engine:
        rates = [sum(request["max_tokens"] for request in requests) / engine.run(requests) for requests in runs]
    samples = Samples(tuple(rates[1:]))
    share = result["output_tok_per_s"] / samples.median
    print(f"LLM.generate: {samples} output tok/s; through HTTP {share:.3f} of that")
    return result | samples.as_json("generate_output_tok_per_s") | {"share_of_generate": share}


# -- a document --------------------------------------------------------------------------------------------------


async def measure_document(bench: Bench) -> Json:
    """The time to the first token of the first question about a new document, and the median of the later ones."""
    args = bench.args
    runs = []
    for run in range(args.runs + args.warm_up):
        rng = random.Random(args.seed + run)
        document = await bench.prompts.prompt(rng, args.document_tokens)
        answers = []
        for _ in range(args.questions):
            question = await bench.prompts.prompt(rng, QUESTION_TOKENS)
            answers.append(await bench.ask(bench.body(f"{document}\n\n{question}?", DOCUMENT_ANSWER_TOKENS)))
        first, later = answers[0], [answer.ttft_s for answer in answers[1:]]
        figures: Json = {"first_ttft_s": first.ttft_s, "later_ttft_s": statistics.median(later)}
        figures |= {"second_question_ttft_ratio": figures["later_ttft_s"] / first.ttft_s}
        figures |= {"prefill_tok_per_s": first.num_prompt_tokens / first.ttft_s}
        figures |= {"prompt_tokens": first.num_prompt_tokens, "cached_tokens": answers[-1].num_cached_tokens}
        runs.append(figures)
    result = over_runs(runs[args.warm_up :])
    show("document:", result, *figures)
    return result


# -- what HTTP adds ----------------------------------------------------------------------------------------------


async def measure_overhead(bench: Bench) -> Json:
    """Measure what HTTP adds to the median latency of small requests, sent one after the other.

    The server answers one at once, then it streams one, then the engine alone runs one, and so on. So other work of the
    machine disturbs all three equally. All prompts are new. A few requests warm up.
    """
    args = bench.args
    runs = []
    with EngineProcess(bench.command) as engine:
        await latencies_in_turn(bench, engine, min(OVERHEAD_WARM_UPS, args.num_requests), args.seed)
        for run in range(1, args.runs + 1):
            latencies = await latencies_in_turn(bench, engine, args.num_requests, args.seed + run)
            medians = {name: statistics.median(values) for name, values in latencies.items()}
            runs.append(
                {f"{name}_latency_s": median for name, median in medians.items()}
                | {"overhead_ms": (medians["http"] - medians["engine"]) * 1e3}
                | {"stream_overhead_ms": (medians["http_stream"] - medians["engine"]) * 1e3}
            )
    result = over_runs(runs)
    show("HTTP adds to a small request:", result, *runs[0])
    return result


async def latencies_in_turn(bench: Bench, engine: EngineProcess, num_each: int, seed: int) -> dict[str, list[float]]:
    """Seconds of `num_each` requests of each kind."""
    rng = random.Random(seed)
    latencies: dict[str, list[float]] = {"http": [], "http_stream": [], "engine": []}
    sizes = OVERHEAD_PROMPT_TOKENS, OVERHEAD_ANSWER_TOKENS
    for _ in range(num_each):
        whole = await bench.request(rng, *sizes, stream=None, stream_options=None)
        streamed, alone = [await bench.request(rng, *sizes) for _ in range(2)]
        ids = await bench.engine_requests([alone])
        latencies["http"].append((await bench.ask(whole)).latency_s)
        latencies["http_stream"].append((await bench.ask(streamed)).latency_s)
        latencies["engine"].append(await asyncio.to_thread(engine.run, ids))
    return latencies


# -- the command -------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Bench], Awaitable[Json]]] = {
    "chats": measure_chats,
    "document": measure_document,
    "interference": measure_interference,
    "idle-connections": measure_idle_connections,
    "overhead": measure_overhead,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options in `argv`, or of the command line. Options that contradict each other are refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    number: Json = {"type": _positive, "metavar": "N"}
    add("--base-url", metavar="URL", help="address of a running server, such as http://127.0.0.1:8000")
    add("--start", metavar="COMMAND", help="start this server instead, on {port}; nanovllm means this checkout")
    add("--preset", metavar="NAME", help="{model} in --start has this preset's shapes; add --load-format dummy")
    add("--model", help="name in the requests; default: the first that the server offers")
    add("--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY")
    add("--timeout-s", type=float, default=600.0, metavar="S", help="seconds of one request")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="fields of each request; null removes one")
    add("--workload", default="chats", choices=MEASURES)
    add("--concurrency", default=256, **number, help="chats at a time")
    add("--rate", type=float, metavar="N", help="chats per second of Poisson arrivals, instead")
    add("--num-requests", default=256, **number, help="requests in a run")
    add("--min-tokens", default=100, **number, help="minimum length of a chat's prompt and answer")
    add("--max-tokens", default=1024, **number, help="maximum length of a chat's prompt and answer")
    add("--against-generate", action="store_true", help="chats: then run the same requests in LLM.generate")
    add("--document-tokens", default=100_000, **number, help="length of the long prompt")
    add("--questions", default=8, **number, help="questions about a document, in turn")
    add("--streams", default=32, **number, help="streams that run concurrently with the measured load")
    add("--stream-tokens", default=1024, **number, help="length of one answer of a stream, which then begins another")
    add("--window-s", type=float, default=3.0, metavar="S", help="time in which streams are watched")
    add("--short-after-s", type=float, default=0.25, metavar="S", help="seconds from the long prompt to a short one")
    add("--short-requests", default=16, **number, help="maximum of short requests during a long prompt")
    add("--idle-connections", default=1000, **number)
    add("--runs", default=5, **number)
    add("--no-warm-up", dest="warm_up", action="store_false", help="leave out the run that warms up")
    add("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals")
    add("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args(argv)
    needs_engine = args.against_generate or args.workload == "overhead"
    for is_wrong, complaint in (
        ((args.base_url is None) == (args.start is None), "give either --base-url or --start"),
        ("{port}" not in (args.start or "{port}"), "--start needs {port} in its command"),
        (args.preset and "{model}" not in (args.start or ""), "--preset needs --start with {model} in its command"),
        (needs_engine and args.start is None, "a comparison with the engine needs --start, for its options"),
        (args.against_generate and args.workload != "chats", "--against-generate needs --workload chats"),
        (args.against_generate and not args.warm_up, "--against-generate needs a run that warms up"),
        (args.min_tokens > args.max_tokens, f"--min-tokens {args.min_tokens} is above --max-tokens {args.max_tokens}"),
        (args.rate is not None and args.rate <= 0, f"--rate {args.rate} must be above 0"),
        (args.questions < 2, "--questions must be 2 or more: the later ones are compared with the first"),
    ):
        if is_wrong:
            parser.error(complaint)
    return args


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def gpu_name() -> str | None:
    """The name of this machine's first GPU, or None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0] if lines else None


def end(*_: object) -> None:
    """End the program and the server on SIGTERM. A second SIGTERM must not disturb the end; timeout(1) sends two."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


async def measure(args: argparse.Namespace, command: Sequence[str]) -> tuple[Json, Bench]:
    """Run the workload against a server that is ready. SIGTERM cancels it, so that it closes its connections."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, cancel)
    async with Client(args.base_url, args.api_key, args.timeout_s) as client:
        bench = Bench(args, client, Prompts(client, args.model), command)
        return await MEASURES[args.workload](bench), bench


def run(args: argparse.Namespace, stack: ExitStack) -> Json:
    """Start a server if asked to, measure, stop it, and compare with the engine if asked to."""
    if args.workload == "idle-connections":
        allow_files(2 * args.idle_connections)  # the server inherits the limit
    elif args.workload == "overhead":
        # The server and the engine run in turns, and idle threads of each spin for a while
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    process = None
    result: Json = {}
    if args.start:
        process = stack.enter_context(ServerProcess(args.start))
        args.base_url = process.url
        result = {"start_to_ready_s": process.wait_until_ready(), "gpu": gpu_name()}
    args.base_url = args.base_url.rstrip("/").removesuffix("/v1")
    models = get(args.base_url + "/v1/models", args.api_key)
    if not models:
        raise ServerError(f"{args.base_url}/v1/models did not answer; is the server running, and the API key right?")
    args.model = args.model or str(models["data"][0]["id"])
    result["server_version"] = (get(args.base_url + "/version", args.api_key) or {}).get("version")
    command = process.words if process is not None else ()
    try:
        figures, bench = asyncio.run(measure(args, command))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, end)
    if process is not None:
        result["server_exit_status"] = process.stop()
    if args.against_generate:
        figures = compare_rate(figures, command, bench.sent)
    return result | figures


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, end)
    args.api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    with ExitStack() as stack:
        if args.preset:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{args.preset}-"))
            write_model(args.preset, Path(directory))
            args.start = args.start.replace("{model}", directory)
        header = run_options(args) | versions()
        try:
            result = header | run(args, stack) | {"model": args.preset or args.model}
        except (ServerError, WorkloadError) as error:
            print(f"bench_serve.py: {error}", file=sys.stderr)
            return 1
    report(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
