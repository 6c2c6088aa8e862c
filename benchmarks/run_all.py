"""Runs every benchmark and then the GPU tests, each in its own process with a time limit. `make bench-gpu` runs it.

Each benchmark's last line is written to benchmarks/results/NAME.json. The table printed last compares the results with
the targets. A job that needs something that this machine lacks is listed as skipped, with the reason. The exit status
is 0 only if all other jobs ran successfully, whether or not they reached their targets.

    python -m benchmarks.run_all                            # all
    python -m benchmarks.run_all --only offload,start       # those with "offload" or "start" in their names
    python -m benchmarks.run_all --list
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.targets import JOBS, TARGETS, Job, Json, Target

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
END_TIMEOUT_S = 15.0


def count_gpus() -> int:
    """Count GPUs in another process, because a process that has used CUDA would hold memory on every GPU."""
    count = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True).stdout)


def why_skipped(job: Job, num_gpus: int) -> str | None:
    if job.num_gpus > num_gpus:
        return f"needs {job.num_gpus} GPU{'s' * (job.num_gpus > 1)}"
    for name in job.needs:
        if shutil.which(name) is None and importlib.util.find_spec(name) is None:
            return f"needs {name}"
    return None


def run(job: Job) -> tuple[str, Json | None]:
    """Run a job and print its output. Returns its status, which is "ok" or an error, and its result."""
    with tempfile.TemporaryDirectory() as scratch:
        env = os.environ | {name: value.format(scratch=scratch) for name, value in job.env}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
        pipe: Json = {"stdout": subprocess.PIPE, "text": True, "errors": "replace"}
        # in a separate session, so that processes that the job starts can be killed with it
        process = subprocess.Popen(job.command, cwd=ROOT, env=env, start_new_session=True, **pipe)
        try:
            output, _ = process.communicate(timeout=job.timeout_s)
        except subprocess.TimeoutExpired:
            print(end(process), flush=True)
            return f"did not end within {job.timeout_s} s", None
        except BaseException:  # Ctrl-C, SIGTERM
            end(process)
            raise
    print(output, flush=True)
    status = f"exit status {process.returncode}" if process.returncode else "ok"
    if job.is_check or process.returncode:
        return status, {"passed": not process.returncode} if job.is_check else None
    try:
        result = json.loads(output.splitlines()[-1])
    except (json.JSONDecodeError, IndexError):
        return "its last line is not JSON", None
    (RESULTS / f"{job.name}.json").write_text(json.dumps(result) + "\n")
    return status, result


def end(process: subprocess.Popen[str]) -> str:
    """End a job and all its processes, and return its output. A job that started a server gets time to
    end the server.
    """
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=END_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def row(target: Target, results: dict[str, Json], statuses: dict[str, str]) -> str:
    """A line of the table: the value and the target, or why there is nothing to compare."""
    head = f"{target.what:52}"
    if missing := [f"{name} {statuses.get(name, 'did not run')}" for name in target.jobs if name not in results]:
        return f"{head} not measured: {', '.join(missing)}"
    try:
        value = target.value(*(results[name] for name in target.jobs))
    except KeyError as error:
        return f"{head} not measured: no {error} in the result"
    verdict = "reached" if target.is_reached(value) else "MISSED"
    return f"{head} {value:12,.3f} {target.bound:12,.3f} {target.unit:6} {verdict}"


def choose(only: str) -> list[Job]:
    parts = [part for part in only.split(",") if part]
    for part in parts:
        if not any(part in job.name for job in JOBS):
            raise ValueError(f"--only {part}: no job has this in its name; --list shows all jobs")
    return [job for job in JOBS if not parts or any(part in job.name for part in parts)]


def run_jobs(jobs: list[Job], num_gpus: int) -> tuple[dict[str, Json], dict[str, str]]:
    """Run the jobs and print results as they arrive. Returns results and statuses by name. Ctrl-C skips the rest."""
    results: dict[str, Json] = {}
    statuses: dict[str, str] = {}
    try:
        for job in jobs:
            print(f"\n== {job.name}: {job}", flush=True)
            start_s = time.perf_counter()
            reason = why_skipped(job, num_gpus)
            status, result = (f"skipped: {reason}", None) if reason else run(job)
            statuses[job.name] = status
            if result is not None:
                results[job.name] = result
            print(f"-- {job.name}: {status}, {time.perf_counter() - start_s:.0f} s")
            for target in TARGETS:
                if job.name in target.jobs and results.keys() >= set(target.jobs):
                    print(f"   {row(target, results, statuses)}", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted")
    return results, statuses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="A,B", help="only jobs whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the commands and exit")
    args = parser.parse_args()
    try:
        jobs = choose(args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for job in jobs:
            print(f"{job.name:22} {job.num_gpus} GPU {job.timeout_s:5} s  {job}")
        return 0
    RESULTS.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the job in progress also ends
    results, statuses = run_jobs(jobs, count_gpus())
    print()
    for job in jobs:
        print(f"{job.name:22} {statuses.get(job.name, 'did not run')}")
    print(f"\n{'':52} {'reached':>12} {'target':>12}")
    for target in TARGETS:
        if any(job.name in target.jobs for job in jobs):
            print(row(target, results, statuses))
    ran = [status for status in statuses.values() if not status.startswith("skipped")]
    return 0 if ran and len(statuses) == len(jobs) and set(ran) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
