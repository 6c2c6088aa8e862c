"""The GPU tests, then every benchmark, each in a process of its own with a time limit. `make bench-gpu` runs it.

Each benchmark's last line goes to benchmarks/results/NAME.json; the table printed last holds what was reached beside
the targets. Exit status 0 only if all ran, whatever they reached.

    python benchmarks/run_all.py                     # all
    python benchmarks/run_all.py --only offload      # those with "offload" in their names
    python benchmarks/run_all.py --list
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Json = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A quantity of a result, and what the project promises of it."""

    what: str
    value: Callable[[Json], float]
    bound: float  # at least so much
    unit: str = ""
    at_most: bool = False  # or at most so much

    def is_reached(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


def of(key: str) -> Callable[[Json], float]:
    return lambda result: float(result[key])


def share(key: str, bound_key: str) -> Callable[[Json], float]:
    return lambda result: float(result[key]) / float(result[bound_key])


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]  # after the interpreter
    timeout_s: int = 300
    targets: tuple[Target, ...] = ()
    has_json: bool = True


def bench(name: str, *args: str, targets: tuple[Target, ...] = (), timeout_s: int = 300) -> Job:
    return Job(name, args, timeout_s, targets)


TESTS = [
    Job("tests-gpu", ("-m", "pytest", "-q", "-m", "gpu and not slow", "tests"), 1200, has_json=False),
    Job("tests-gpu-slow", ("-m", "pytest", "-q", "-m", "gpu and slow", "tests"), 1200, has_json=False),
    Job("tests-multi-gpu", ("-m", "pytest", "-q", "-m", "multi_gpu", "tests"), 600, has_json=False),
]

REQUESTS = Target("256 requests", of("output_tok_per_s"), 28_000, "tok/s")
START = Target("start to first token", of("start_to_first_token_s"), 15, "s", at_most=True)
LONG = (
    Target("prefill 40,959 tokens", of("prefill_tok_per_s"), 105_000, "tok/s"),
    Target("decode at 40K", of("decode_tok_per_s"), 470, "tok/s"),
)
BATCH = Target("decode, batch 256, of its bound", share("batch_decode_tok_per_s", "batch_decode_bound_tok_per_s"), 0.8)


def of_link(at_least: float) -> Target:
    return Target("decode, of the link's bound", of("link_share"), at_least)


def of_gpu(kind: str, at_least: float) -> Target:
    return Target(f"{kind} / all-GPU {kind}", of(f"{kind}_ratio_to_gpu"), at_least)


OFFLOAD = "bench_offload.py"
BENCHMARKS = [
    *(
        bench(f"requests-{b}", "bench.py", "--backend", b, targets=(REQUESTS, START) if b == "auto" else ())
        for b in ("auto", "triton", "flash")
    ),
    *(
        bench(f"long-{b}", "bench.py", "--long", "--backend", b, targets=LONG if b == "auto" else ())
        for b in ("auto", "triton", "flash")
    ),
    *(
        bench(f"batch256-{b}", "bench.py", "--batch", "256", "--backend", b, targets=(BATCH,) if b == "auto" else ())
        for b in ("auto", "triton", "flash")
    ),
    bench(
        "offload-8slots",
        OFFLOAD,
        timeout_s=600,
        targets=(of_gpu("prefill", 0.95), Target("decode at 40K", of("offload_decode_tok_per_s"), 45, "tok/s")),
    ),
    bench("offload-4slots", OFFLOAD, "--num-gpu-blocks", "4", "--compare", "", targets=(of_link(0.9),)),
    bench("offload-fits", OFFLOAD, "--num-gpu-blocks", "12", "--compare", "gpu", targets=(of_gpu("decode", 0.95),)),
    bench(
        "offload-fits-batch8",
        *(OFFLOAD, "--num-gpu-blocks", "80", "--batch", "8", "--compare", "gpu"),
        timeout_s=600,
        targets=(of_gpu("decode", 0.95),),
    ),
    bench(
        "offload-131k",
        *(OFFLOAD, "--max-model-len", "131072", "--compare", "gpu", "--runs", "5"),
        timeout_s=600,
        targets=(of_gpu("prefill", 0.95), of_link(0.93)),
    ),
    bench(
        "offload-4x32k",
        *(OFFLOAD, "--max-model-len", "32768", "--num-gpu-blocks", "12", "--batch", "4", "--compare", ""),
        targets=(of_link(0.9),),
    ),
    bench("attention", "benchmarks/bench_attention.py", timeout_s=600),
]


def run(job: Job) -> tuple[str, Json | None]:
    """How it ended ("ok", or what was wrong), and its last line."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    print(f"\n== {job.name}: {' '.join(job.command)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, *job.command], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=job.timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        print(output, flush=True)
        return f"no end after {job.timeout_s} s", None
    lines = output.strip().splitlines()
    has_result = job.has_json and process.returncode == 0
    print("\n".join(lines[:-1] if has_result else lines), flush=True)
    if process.returncode:
        no_tests = job.name == "tests-multi-gpu" and process.returncode == 5  # none was selected
        return ("ok" if no_tests else f"exit status {process.returncode}"), None
    if not has_result:
        return "ok", None
    try:
        result = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return "its last line is no JSON", None
    (RESULTS / f"{job.name}.json").write_text(lines[-1] + "\n")
    return "ok", result


def table(job: Job, status: str, result: Json | None, seconds: float) -> list[str]:
    """One line per target of the job, or one that says how it ended."""
    head = f"{job.name:22}"
    if result is None or not job.targets:
        return [f"{head} {status:46} {seconds:6.0f} s"]
    lines = []
    for target in job.targets:
        try:
            value = target.value(result)
        except KeyError as error:
            lines.append(f"{head} {target.what:32} no {error} in the result")
            continue
        verdict = "reached" if target.is_reached(value) else "MISSED"
        lines.append(f"{head} {target.what:32} {value:12,.2f} {target.bound:12,.2f} {target.unit:6} {verdict}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only jobs whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    args = parser.parse_args()
    jobs = [job for job in TESTS + BENCHMARKS if args.only in job.name]
    if args.list:
        for job in jobs:
            print(f"{job.name:22} {job.timeout_s:5} s  {' '.join(job.command)}")
        return 0
    RESULTS.mkdir(exist_ok=True)
    lines, all_ran = [], True
    for job in jobs:
        start_s = time.perf_counter()
        status, result = run(job)
        all_ran &= status == "ok"
        lines += table(job, status, result, time.perf_counter() - start_s)
    print(f"\n{'':22} {'':32} {'reached':>12} {'target':>12}")
    print("\n".join(lines))
    return 0 if all_ran else 1


if __name__ == "__main__":
    sys.exit(main())
