"""Runs requests in an engine of this process, without a server. serve_comparison.py starts it.

    python -m benchmarks.serve_in_process {together,one-by-one} COMMAND...

COMMAND is what starts the server; its engine options are used here. Every line of stdin is one run, a JSON list of
{"token_ids", "max_tokens", "temperature"}. Every line of stdout is the answer to a run, a JSON list of seconds.

together: the requests go through LLM.generate, and the list has the seconds of the whole run. one-by-one: they go
through AsyncLLM, as in a server, and the list has the seconds of each request.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from nanovllm.sampling_params import SamplingParams

Json = dict[str, Any]


def engine_of(command: list[str]) -> tuple[str, Mapping[str, Any]]:
    """The model and the engine's options in the words of a server's command. The server's own options are ignored."""
    from nanovllm.cli.flags import add_engine_flags, add_model_flag, engine_options
    from nanovllm.demo import model_path

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_model_flag(parser)
    add_engine_flags(parser)
    args, _ = parser.parse_known_args(command)
    return model_path(args.model), engine_options(args)


def sampling_params(request: Json) -> SamplingParams:
    return SamplingParams(temperature=request["temperature"], max_tokens=request["max_tokens"], ignore_eos=True)


def run_together(model: str, options: Mapping[str, Any], runs: Iterable[list[Json]], answers: TextIO) -> None:
    from nanovllm.llm import LLM

    with LLM(model, **options) as llm:
        for requests in runs:
            params = [sampling_params(request) for request in requests]
            prompts = [request["token_ids"] for request in requests]
            start_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            print(json.dumps([time.perf_counter() - start_s]), file=answers, flush=True)


async def run_one_by_one(model: str, options: Mapping[str, Any], runs: Iterable[list[Json]], answers: TextIO) -> None:
    from nanovllm.async_llm import AsyncLLM

    async with AsyncLLM(model, **options) as engine:
        for requests in runs:
            seconds = []
            for request in requests:
                params = sampling_params(request)
                start_s = time.perf_counter()
                async for _ in engine.generate({"prompt_token_ids": request["token_ids"]}, params):
                    pass
                seconds.append(time.perf_counter() - start_s)
            print(json.dumps(seconds), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what else is printed must not come between the answers
    _, mode, *command = sys.argv
    model, options = engine_of(command)
    runs = (json.loads(line) for line in sys.stdin)
    if mode == "together":
        run_together(model, options, runs, answers)
    else:
        asyncio.run(run_one_by_one(model, options, runs, answers))


if __name__ == "__main__":
    main()
