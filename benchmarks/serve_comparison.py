"""Compares a server with the engine alone: the rate of LLM.generate, and the time that HTTP adds to a request.

The engine runs in a fresh process (serve_in_process.py) after the server has been stopped, with the same options.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting import Samples
from benchmarks.serve_client import Answer, Request
from benchmarks.serve_prompts import PromptError
from benchmarks.serve_workloads import Bench, WorkloadError

Json = dict[str, Any]

OVERHEAD_PROMPT_TOKENS, OVERHEAD_ANSWER_TOKENS = 100, 8


# -- the server's side -------------------------------------------------------------------------------------------


async def measure_overhead(bench: Bench) -> Json:
    """Latencies of small requests, one after the other: answered at once, and streamed. `compare_overhead` follows."""
    result: Json = {}
    args = bench.args
    whole: list[float] = []
    streamed: list[float] = []
    sizes = OVERHEAD_PROMPT_TOKENS, OVERHEAD_PROMPT_TOKENS
    for run in range(args.runs + 1):  # the first warms up, here and in the other process
        made = await bench.maker.chats(args.num_requests, *sizes, args.seed + run)
        requests = tuple(request.with_body({"max_tokens": OVERHEAD_ANSWER_TOKENS}) for request in made)
        bench.sent.append(requests)
        for latencies, start, changes in ((whole, 0, {"stream": False, "stream_options": None}), (streamed, 1, {})):
            # each prompt is new, so that no KV is found
            answers = [await bench.ask(request.with_body(changes)) for request in requests[start::2]]
            latencies.append(median_latency(answers))
    result |= Samples(tuple(whole[1:])).as_json("http_latency_s")
    return result | Samples(tuple(streamed[1:])).as_json("http_stream_latency_s")


def median_latency(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.end_s - answer.sent_s for answer in answers)


# -- the engine's side -------------------------------------------------------------------------------------------


def compare_overhead(result: Json, command: list[str], runs: Sequence[tuple[Request, ...]]) -> Json:
    """Add the latencies of the same requests in process, and what HTTP adds to them."""
    latencies = run_in_process(command, runs, one_by_one=True)["latency_s"]
    samples = Samples(tuple(statistics.median(run) for run in latencies))
    result = result | samples.as_json("engine_latency_s")
    for kind in ("", "stream_"):
        result[f"{kind}overhead_ms"] = (result[f"http_{kind}latency_s"] - samples.median) * 1e3
    print(
        f"a request of {OVERHEAD_PROMPT_TOKENS} tokens in and {OVERHEAD_ANSWER_TOKENS} out: engine "
        f"{samples.median * 1e3:.2f} ms, HTTP adds {result['overhead_ms']:.2f} ms, "
        f"{result['stream_overhead_ms']:.2f} ms if streamed"
    )
    return result


def compare_rate(result: Json, command: list[str], runs: Sequence[tuple[Request, ...]]) -> Json:
    """Add the rate of LLM.generate for the same requests with token ids, which is the bound of the server's rate."""
    rates = Samples(tuple(run_in_process(command, runs, one_by_one=False)["output_tok_per_s"]))
    share = result["output_tok_per_s"] / rates.median
    print(f"LLM.generate: {rates} output tok/s; through HTTP {share:.3f} of that")
    return result | rates.as_json("generate_output_tok_per_s") | {"share_of_generate": share}


def run_in_process(command: list[str], runs: Sequence[tuple[Request, ...]], one_by_one: bool) -> Json:
    """Run the requests in a fresh process with the engine options of a server's command."""
    work = {"command": command, "one_by_one": one_by_one, "runs": [[_as_json(each) for each in run] for run in runs]}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "work.json"
        path.write_text(json.dumps(work))
        words = [sys.executable, "-m", "benchmarks.serve_in_process", str(path)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parent.parent)
    if done.returncode:
        raise WorkloadError(f"the engine's process ended with status {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _as_json(request: Request) -> Json:
    if request.token_ids is None:
        raise PromptError("the token ids of a prompt are not known")
    sampling = {name: request.body[name] for name in ("max_tokens", "temperature")}
    return {"token_ids": request.token_ids} | sampling
