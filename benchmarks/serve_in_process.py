"""Runs requests in an engine of this process, without a server: python -m benchmarks.serve_in_process FILE

bench_serve.py writes FILE and starts this when it has stopped the server. FILE holds {"command", "runs", "one_by_one"}.
command: the words that started the server, whose engine options are used here. runs: for each run a list of
{"token_ids", "max_tokens", "temperature"}. The last line of stdout is JSON with the figures of every run but the first,
which warms up.

Together, the requests of a run go through LLM.generate. One by one, they go through AsyncLLM, as in a server.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.cli.flags import add_flags, given_fields
from nanovllm.cli.main import CPU_STEP_TOKENS, _model
from nanovllm.config import Config
from nanovllm.device.devices import resolve_device

Json = dict[str, Any]


def engine_options(command: list[str]) -> tuple[str, Json]:
    """The model and the engine's options in the words of a server's command. The server's own options are ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--model", required=True)
    add_flags(parser, Config, without=("model",))
    args, _ = parser.parse_known_args(command)
    options = given_fields(args, Config)
    if resolve_device(Config(model=args.model, **options)).type == "cpu":
        options = {"max_num_batched_tokens": CPU_STEP_TOKENS} | options  # as the command line does
    return _model(args.model), options


def sampling_params(request: Json) -> SamplingParams:
    return SamplingParams(temperature=request["temperature"], max_tokens=request["max_tokens"], ignore_eos=True)


def generate_rates(model: str, options: Json, runs: list[list[Json]]) -> Json:
    """Output tokens per second of LLM.generate, for each run."""
    rates = []
    with LLM(model, **options) as llm:
        for requests in runs:
            params = [sampling_params(request) for request in requests]
            start_s = time.perf_counter()
            outputs = llm.generate([request["token_ids"] for request in requests], params, use_tqdm=False)
            seconds = time.perf_counter() - start_s
            rates.append(sum(len(output["token_ids"]) for output in outputs) / seconds)
    return {"output_tok_per_s": rates[1:]}


def latencies(model: str, options: Json, runs: list[list[Json]]) -> Json:
    """Seconds of each request, one after the other, through AsyncLLM."""
    return asyncio.run(_latencies(model, options, runs))


async def _latencies(model: str, options: Json, runs: list[list[Json]]) -> Json:
    from nanovllm import AsyncLLM

    seconds: list[list[float]] = []
    async with AsyncLLM(model, **options) as engine:
        for requests in runs:
            seconds.append([])
            for request in requests:
                params = sampling_params(request)
                start_s = time.perf_counter()
                async for _ in engine.generate({"prompt_token_ids": request["token_ids"]}, params):
                    pass
                seconds[-1].append(time.perf_counter() - start_s)
    return {"latency_s": seconds[1:]}


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    model, options = engine_options(work["command"])
    measure = latencies if work["one_by_one"] else generate_rates
    print(json.dumps(measure(model, options, work["runs"])))


if __name__ == "__main__":
    main()
