"""The options of bench_serve.py."""

import argparse
import json
from collections.abc import Sequence
from typing import Any


def parse(about: str | None, workloads: Sequence[str], argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options in `argv`, or of the command line. Options that do not fit together are refused."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_server_options(parser)
    _add_workload_options(parser, workloads)
    parser.add_argument("--runs", type=_positive, default=5, help="number of runs")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="leave out the run that warms up")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the percentiles of chats over their loads; needs matplotlib"
    )
    args = parser.parse_args(argv)
    if complaint := _complaint(args):
        parser.error(complaint)
    return args


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    group.add_argument("--base-url", metavar="URL", help="of a running server, such as http://127.0.0.1:8000")
    group.add_argument(
        "--start",
        metavar="COMMAND",
        help="start this server instead, on {port}, and stop it with SIGTERM; nanovllm is that of this checkout",
    )
    group.add_argument(
        "--preset",
        metavar="NAME",
        help="write a model with this preset's shapes and a tokenizer as large, which is {model} in --start; it has no "
        "weights, so add --load-format dummy",
    )
    group.add_argument("--model", help="name in the requests; default: the first that the server offers")
    group.add_argument("--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY")
    group.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="seconds of one request")
    group.add_argument("--endpoint", default="completions", choices=("completions", "chat"))
    group.add_argument(
        "--token-ids", type=_positive, metavar="VOCAB_SIZE", help="prompts are random token ids below this, not texts"
    )
    group.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="fields of every request; null removes one, such as '{\"ignore_eos\": null}' for servers without it",
    )
    group.add_argument("--processes", type=_positive, default=1, metavar="N", help="client processes for chats")


def _add_workload_options(parser: argparse.ArgumentParser, workloads: Sequence[str]) -> None:
    group = parser.add_argument_group("the workload")
    group.add_argument("--workload", default=workloads[0], choices=workloads)
    group.add_argument(
        "--concurrency", type=_positive, default=[256], nargs="+", metavar="N", help="requests at a time"
    )
    group.add_argument(
        "--rate", type=float, nargs="+", metavar="N", help="requests per second of Poisson arrivals, instead"
    )
    group.add_argument("--num-requests", type=_positive, default=256, metavar="N", help="chats in a run")
    group.add_argument("--min-tokens", type=_positive, default=100, metavar="N", help="of a chat, in and out")
    group.add_argument("--max-tokens", type=_positive, default=1024, metavar="N", help="of a chat, in and out")
    group.add_argument(
        "--against-generate",
        action="store_true",
        help="chats: then run the same requests in LLM.generate, with token ids and the options in --start",
    )
    group.add_argument("--document-tokens", type=_positive, default=100_000, metavar="N", help="of the long prompt")
    group.add_argument("--questions", type=_positive, default=8, metavar="N", help="about a document, in turn")
    group.add_argument("--streams", type=_positive, default=32, metavar="N", help="that run beside something else")
    group.add_argument(
        "--stream-tokens",
        type=_positive,
        default=1024,
        metavar="N",
        help="of one answer of a stream, which then begins another; each stream begins at another point of an answer, "
        "so that the mean context stays the same",
    )
    group.add_argument("--window-s", type=float, default=3.0, metavar="S", help="time in which streams are watched")
    group.add_argument(
        "--short-after-s", type=float, default=0.25, metavar="S", help="from the long prompt to a short one"
    )
    group.add_argument(
        "--short-requests", type=_positive, default=16, metavar="N", help="at most, beside a long prompt"
    )
    group.add_argument("--idle-connections", type=_positive, default=1000, metavar="N")


def _complaint(args: argparse.Namespace) -> str | None:
    """What does not fit together."""
    if (args.base_url is None) == (args.start is None):
        return "give either --base-url or --start"
    if args.preset and (args.start is None or "{model}" not in args.start):
        return "--preset needs --start with {model} in its command"
    if args.start and "{port}" not in args.start:
        return "--start needs {port} in its command"
    if args.min_tokens > args.max_tokens:
        return f"--min-tokens {args.min_tokens} is above --max-tokens {args.max_tokens}"
    if args.rate and min(args.rate) <= 0:
        return f"--rate {min(args.rate):g} must be above 0"
    if args.workload == "document" and args.questions < 2:
        return "--questions must be 2 or more: the later ones are compared with the first"
    if args.workload == "overhead" and args.start is None:
        return "--workload overhead needs --start: the same engine runs without a server afterwards"
    if args.against_generate and (args.workload != "chats" or args.start is None):
        return "--against-generate needs --workload chats and --start"
    if args.against_generate and not args.warm_up:
        return "--against-generate needs a run that warms up; leave out --no-warm-up"
    if args.against_generate and len(args.rate or args.concurrency) > 1:
        return "--against-generate compares one load; give one --concurrency"
    if args.plot and args.workload != "chats":
        return "--plot draws the chats; leave it out with other workloads"
    return None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
