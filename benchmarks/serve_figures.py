"""The figures of a load: rates, and percentiles of the times that clients waited."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.reporting import Samples
from benchmarks.serve_client import Answer

Json = dict[str, Any]

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentile(values: Iterable[tuple[float, float]], share: float) -> float:
    """The smallest value such that it and those below it have this share of the weight. `values`: (value, weight)."""
    ordered = sorted(values)
    assert ordered, "a percentile of nothing"
    limit = share * sum(weight for _, weight in ordered) * (1 - 1e-12)  # sums of weights are rounded
    weight_so_far = 0.0
    for value, weight in ordered:
        weight_so_far += weight
        if weight_so_far >= limit:
            return value
    return ordered[-1][0]


def percentiles_ms(name: str, values_s: Sequence[tuple[float, float]]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds; nothing if there are no values."""
    if not values_s:
        return {}
    return {f"{name}_{label}_ms": percentile(values_s, share) * 1e3 for label, share in SHARES.items()}


def load_figures(answers: Sequence[Answer]) -> Json:
    """The figures of one run. Rates and times are those of the answers without an error.

    ttft: from the request to the first token. time_per_token: from one event to the next, divided by the tokens of the
    event and weighted with them. latency: of the whole request.
    """
    good = [answer for answer in answers if answer.error is None]
    result: Json = {"num_requests": len(answers), "num_errors": len(answers) - len(good)}
    result["errors"] = dict(Counter(answer.error for answer in answers if answer.error is not None))
    if not good:
        return result
    wall_s = max(answer.end_s for answer in good) - min(answer.sent_s for answer in good)
    result["wall_s"] = wall_s
    result["request_per_s"] = len(good) / wall_s
    result["output_tok_per_s"] = sum(answer.num_output_tokens for answer in good) / wall_s
    result["num_prompt_tokens"] = sum(answer.num_prompt_tokens or 0 for answer in good)
    result["num_output_tokens"] = sum(answer.num_output_tokens for answer in good)
    result |= percentiles_ms("ttft", [(answer.ttft_s, 1) for answer in good if answer.event_s])
    gaps = [(seconds, tokens) for answer in good for _, seconds, tokens in answer.gaps()]
    result |= percentiles_ms("time_per_token", gaps)
    return result | percentiles_ms("latency", [(answer.latency_s, 1) for answer in good])


def over_runs(runs: Sequence[Json]) -> Json:
    """Median, minimum and maximum of each figure. Counts of requests and errors are added up.

    A figure that some run lacks, because all of its requests failed, is that of the other runs.
    """
    result: Json = {"num_runs": len(runs)}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if key in run]
        if key == "errors":
            total: Counter[str] = Counter()
            for value in values:
                total.update(value)
            result[key] = dict(total)
        elif key.startswith("num_"):
            result[key] = sum(values)
        else:
            result |= Samples(tuple(values)).as_json(key)
    return result


def print_load(name: str, result: Json) -> None:
    """Print the figures of a load, each with its range over the runs."""
    print(f"{name}: {result['num_requests']} requests in {result['num_runs']} runs", flush=True)
    for key, unit, bound in (
        ("output_tok_per_s", "output tok/s", "bound_output_tok_per_s"),
        ("request_per_s", "requests/s", "offered_request_per_s"),
    ):
        if key in result:
            share = f", offered {result[bound]:,.2f}" if bound in result else ""
            print(f"  {_with_range(result, key)} {unit}{share}")
    for key, what in (("ttft", "first token"), ("time_per_token", "each token"), ("latency", "whole request")):
        if f"{key}_p50_ms" in result:
            times = ", ".join(f"{label} {_with_range(result, f'{key}_{label}_ms')}" for label in SHARES)
            print(f"  {what:13} ms: {times}")
    if result["num_errors"]:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(result["errors"].items()))
        print(f"  {result['num_errors']} errors: {kinds}")


def _with_range(result: Json, key: str) -> str:
    return f"{result[key]:,.2f} ({result[f'{key}_min']:,.2f} to {result[f'{key}_max']:,.2f})"
