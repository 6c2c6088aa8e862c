"""Workloads that are loads: short chats, a long document with many questions, and both at once."""

import argparse
import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from benchmarks.reporting import Samples
from benchmarks.serve_client import Answer, Request, ask
from benchmarks.serve_figures import load_figures, over_runs, print_load
from benchmarks.serve_http import HttpClient
from benchmarks.serve_load import Load, LoadResult, Server, poisson_arrivals, run_load
from benchmarks.serve_prompts import RequestMaker

Json = dict[str, Any]

DOCUMENT_ANSWER_TOKENS = 32
QUESTION_TOKENS = 32
BUSY_CLIENT = 0.8  # share of a core above which the client may be what is measured


class WorkloadError(Exception):
    """A workload could not be measured."""


@dataclass
class Bench:
    """What the workloads share.

    command: the words that started the server; empty if it was running already. sent: the requests of each run, for a
    comparison with the engine.
    """

    args: argparse.Namespace
    server: Server
    client: HttpClient
    maker: RequestMaker
    command: tuple[str, ...] = ()
    sent: list[tuple[Request, ...]] = field(default_factory=list)

    async def ask(self, request: Request) -> Answer:
        """The answer to one request that has to succeed."""
        answer = await ask(self.client, request, self.server.timeout_s)
        if answer.error is not None:
            raise WorkloadError(f"a request failed: {answer.error} {answer.detail}")
        return answer


# -- short chats -------------------------------------------------------------------------------------------------


def levels(args: argparse.Namespace) -> list[Json]:
    """The loads to measure: one for each rate, or one for each concurrency."""
    if args.rate:
        return [{"offered_request_per_s": rate} for rate in args.rate]
    return [{"concurrency": concurrency} for concurrency in args.concurrency]


async def make_load(bench: Bench, level: Json, seed: int) -> Load:
    args = bench.args
    requests = await bench.maker.chats(args.num_requests, args.min_tokens, args.max_tokens, seed)
    if "concurrency" in level:
        return Load(requests, level["concurrency"])
    return Load(requests, arrivals_s=poisson_arrivals(level["offered_request_per_s"], len(requests), seed))


async def measure_chats(bench: Bench) -> Json:
    """Every level, `runs` times each, after one run that warms up. One level's figures are at the top of the result."""
    points = []
    args = bench.args
    if args.warm_up:
        load = await make_load(bench, levels(args)[-1], args.seed)
        await run_load(bench.server, load, args.processes)
        bench.sent.append(load.requests)
    for index, level in enumerate(levels(args)):
        runs = []
        for run in range(args.runs):
            load = await make_load(bench, level, seed=args.seed + 1 + index * args.runs + run)
            bench.sent.append(load.requests)
            result = await run_load(bench.server, load, args.processes)
            runs.append(figures_of(result))
            runs[-1]["num_prompt_tokens_made"] = sum(request.num_prompt_tokens for request in load.requests)
        points.append(level | over_runs(runs))
        print_load(", ".join(f"{name} {value:g}" for name, value in level.items()), points[-1])
    return points[0] if len(points) == 1 else {"points": points}


def figures_of(result: LoadResult) -> Json:
    """The figures of one run. Says so if the client rather than the server may have set them."""
    if result.client_cpu_share > BUSY_CLIENT:
        print(f"  the client took {result.client_cpu_share:.0%} of a core; raise --processes", flush=True)
    if failed := next((answer for answer in result.answers if answer.error), None):
        print(f"  an error: {failed.error} {failed.detail}", flush=True)
    return load_figures(result.answers) | {"client_cpu_share": result.client_cpu_share}


# -- a document --------------------------------------------------------------------------------------------------


async def ask_document(bench: Bench, seed: int, num_tokens: int) -> list[Answer]:
    """Ask about a new document, one question after the other. Only the first answer has to read it."""
    rng = random.Random(seed)
    document = await bench.maker.prompt(rng, num_tokens)
    answers = []
    for _ in range(bench.args.questions):
        question = bench.maker.question(rng, document, QUESTION_TOKENS)
        answers.append(await bench.ask(bench.maker.request(question, DOCUMENT_ANSWER_TOKENS)))
    return answers


def document_figures(runs: list[list[Answer]]) -> Json:
    """The time to the first token of the first question, and the median of the later ones, which is also a ratio."""
    later = [Samples(tuple(answer.ttft_s for answer in answers[1:])).median for answers in runs]
    first = [answers[0].ttft_s for answers in runs]
    result: Json = Samples(tuple(first)).as_json("first_ttft_s") | Samples(tuple(later)).as_json("later_ttft_s")
    ratios = tuple(after / before for after, before in zip(later, first, strict=True))
    result |= Samples(ratios).as_json("second_question_ttft_ratio")
    rates = tuple((answers[0].num_prompt_tokens or 0) / answers[0].ttft_s for answers in runs)
    result |= Samples(rates).as_json("prefill_tok_per_s")
    result["num_document_prompt_tokens"] = runs[0][0].num_prompt_tokens
    result["num_cached_tokens"] = runs[0][-1].num_cached_tokens
    print(
        f"document of {result['num_document_prompt_tokens']} tokens: first token {result['first_ttft_s']:.3f} s "
        f"({result['prefill_tok_per_s']:,.0f} tok/s), of later questions {result['later_ttft_s']:.3f} s, "
        f"ratio {result['second_question_ttft_ratio']:.3f}; {result['num_cached_tokens']} tokens cached"
    )
    return result


async def measure_document(bench: Bench) -> Json:
    args = bench.args
    if args.warm_up:
        await ask_document(bench, args.seed, args.document_tokens)
    runs = [await ask_document(bench, args.seed + 1 + run, args.document_tokens) for run in range(args.runs)]
    return document_figures(runs)


# -- both --------------------------------------------------------------------------------------------------------


async def measure_mixed(bench: Bench) -> Json:
    """Short chats, and at the same time a document with questions. The keys of the document begin with document_."""
    args = bench.args
    level = levels(args)[0]
    chats, documents = [], []
    for run in range(args.runs + args.warm_up):
        load = await make_load(bench, level, args.seed + run)
        result, answers = await asyncio.gather(
            run_load(bench.server, load, args.processes), ask_document(bench, args.seed + run, args.document_tokens)
        )
        if run >= args.warm_up:
            chats.append(figures_of(result))
            documents.append(answers)
    figures = level | over_runs(chats)
    print_load("short chats beside the document", figures)
    return figures | {f"document_{key}": value for key, value in document_figures(documents).items()}
