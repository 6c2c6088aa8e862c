"""bench_serve.py against a fake server: its workloads, its options, and the figures that the targets read."""

import argparse
import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer, ServerThread
from serve_answers import made_answer, run, stream
from tiny_models import write_tiny_model

import bench_serve
from benchmarks import serve_comparison, serve_in_process, serve_options, serve_plot, serve_streams
from benchmarks.serve_client import Request
from benchmarks.serve_figures import load_figures, over_runs
from benchmarks.serve_http import HttpClient
from benchmarks.serve_idle import IdleConnections
from benchmarks.serve_load import Server
from benchmarks.serve_process import ServerError, ServerProcess
from benchmarks.serve_prompts import RequestMaker
from benchmarks.serve_streams import RunningStreams, Window
from benchmarks.serve_workloads import Bench, WorkloadError
from benchmarks.targets import JOBS, TARGETS

ROOT = Path(__file__).parent.parent
FAKE = Path(__file__).parent / "support" / "fake_openai.py"

# -- workloads -------------------------------------------------------------------------------------------------------


def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Run bench_serve.py with these arguments. Returns its status and what it printed."""
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *argv])
    status = bench_serve.main()
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.fixture
def result_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a workload against a server and returns its result."""

    def measure(server: FakeServer, *argv: str) -> dict[str, Any]:
        with ServerThread(server):
            status, printed = bench(monkeypatch, capsys, "--base-url", f"{server.url}/v1", *argv)
        assert status == 0, printed
        result: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return result

    return measure


SMALL = ("--runs", "2", "--num-requests", "6", "--min-tokens", "3", "--max-tokens", "8")


def test_chats_report_every_figure_of_each_load(result_of: Any, tmp_path: Path) -> None:
    server = FakeServer(api_key="secret")
    path = tmp_path / "result.json"
    argv = ("--api-key", "secret", "--json", str(path), "--plot", str(tmp_path / "plot.png"))
    result = result_of(server, *SMALL, *argv, "--concurrency", "2", "3")
    assert json.loads(path.read_text()) == result and "secret" not in path.read_text()
    assert result["model"] == "fake" and result["server_version"] == "1" and len(server.bodies) == 5 * 6
    assert [point["concurrency"] for point in result["points"]] == [2, 3]
    for point in result["points"]:
        assert (point["num_requests"], point["num_errors"], point["num_runs"]) == (12, 0, 2)
        for key in ("output_tok_per_s", "request_per_s", "ttft_p50_ms", "time_per_token_p99_ms", "latency_p90_ms"):
            assert point[f"{key}_min"] <= point[key] <= point[f"{key}_max"]


def test_chats_at_a_rate_count_errors_by_kind(result_of: Any) -> None:
    result = result_of(FakeServer(faults=["429", "500", "429"]), *SMALL, "--no-warm-up", "--rate", "200")
    assert result["errors"] == {"http_429": 2, "http_500": 1} and result["num_errors"] == 3
    assert result["offered_request_per_s"] == 200 and result["num_requests"] == 12 and "points" not in result


def test_document_is_read_once_and_later_questions_start_sooner(result_of: Any) -> None:
    server = FakeServer(prompt_token_s=0.0005)
    argv = ("--workload", "document", "--document-tokens", "600", "--questions", "3", "--runs", "2", "--no-warm-up")
    result = result_of(server, *argv)
    assert result["second_question_ttft_ratio"] < 0.8
    assert result["first_ttft_s"] > result["later_ttft_s"] and result["prefill_tok_per_s"] > 0
    assert result["num_cached_tokens"] >= 600 and len(server.bodies) == 6


def test_mixed_reports_chats_and_documents(result_of: Any) -> None:
    argv = ("--workload", "mixed", "--document-tokens", "50", "--questions", "2", "--concurrency", "2", *SMALL)
    result = result_of(FakeServer(), *argv)
    assert result["num_requests"] == 12 and result["document_second_question_ttft_ratio"] > 0


def streams_argv(workload: str, *more: str) -> tuple[str, ...]:
    return ("--workload", workload, "--streams", "3", "--window-s", "0.2", "--runs", "1", "--no-warm-up", *more)


def test_interference_watches_streams_before_and_during_a_long_prompt(
    result_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_streams, "SETTLE_S", 0.05)
    server = FakeServer(token_s=0.01, prompt_token_s=0.0004)
    argv = streams_argv("interference", "--document-tokens", "2000", "--stream-tokens", "40", "--short-after-s", "0.05")
    result = result_of(server, *argv, "--short-requests", "3")
    assert 1 <= result["num_short_requests"] <= 3
    assert 0 < result["short_ttft_s"] <= result["short_ttft_latest_s"] < result["long_ttft_s"]
    assert result["short_ttft_steps"] >= 1 and result["prefill_p99_over_quiet_p50"] > 0


def test_idle_connections_are_open_beside_the_streams(result_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_streams, "SETTLE_S", 0.05)
    server = FakeServer(token_s=0.01)
    result = result_of(server, *streams_argv("idle-connections", "--idle-connections", "30", "--stream-tokens", "20"))
    assert server.max_connections >= 33
    assert result["open_connections"] == 30 and result["closed_by_server"] == 0 and result["with_over_without"] > 0
    assert result["streams_ended"] > 0  # an answer has only 20 tokens


def test_idle_connections_that_the_server_closes_are_opened_again() -> None:
    async def measure() -> tuple[int, int]:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.02)
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with IdleConnections(client, 6, byte_interval_s=0.01) as idle:
            while idle.num_closed_by_server < 12:
                await asyncio.sleep(0.01)
        server.close()
        return idle.num_open, idle.num_closed_by_server

    num_open, num_closed = run(measure())
    assert num_open == 0 and num_closed >= 12


def test_running_streams_that_fail_are_not_measured(result_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"a running stream failed: http_500 .*not now"):
        result_of(FakeServer(faults=["500"]), *streams_argv("interference"))


def test_server_is_killed_if_the_benchmark_ends_early() -> None:
    """Regression: a benchmark past its time was killed, and its server ran on beside the next one."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    server = ServerProcess(f'{sys.executable} -c "{code}"', "http://127.0.0.1:1", 1)
    with pytest.raises(SystemExit), server:
        raise SystemExit(143)
    assert server.stop() == -signal.SIGKILL or server.stop() == -signal.SIGTERM  # if it had not come to ignoring it


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_sigterm_ends_a_running_load_quietly(num_processes: str) -> None:
    """Regression: timeout(1) sends SIGTERM twice. The second sys.exit in the signal's handler left the event loop with
    its tasks pending, which Python reported with tracebacks. With several client processes, the benchmark first waited
    for the whole load.
    """
    server = FakeServer(token_s=10)
    with ServerThread(server):
        words = [sys.executable, "bench_serve.py", "--base-url", server.url, *SMALL, "--processes", num_processes]
        benchmark = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            while not server.bodies and benchmark.poll() is None:
                time.sleep(0.05)
            for _ in range(5):
                benchmark.terminate()
                time.sleep(0.005)
            printed, _ = benchmark.communicate(timeout=30)
        finally:
            benchmark.kill()
    assert (benchmark.returncode, printed) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("axis", ["offered_request_per_s", "concurrency"])
def test_plot_draws_points_even_if_one_has_only_errors(axis: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    good = over_runs([load_figures([made_answer(0, 1, 2), made_answer(1, 3, 5)])])
    bad = over_runs([load_figures([made_answer(0, error="http_429")])])
    points = [{axis: 2} | good, {axis: 1} | good, {axis: 4} | bad]
    path = serve_plot.plot({"model": "m", "gpu": None, "points": points}, tmp_path / "plot.png")
    assert path.stat().st_size > 1000


# -- a server of its own ---------------------------------------------------------------------------------------------


def start_command(*more: str) -> str:
    return " ".join((sys.executable, str(FAKE), "--port", "{port}", *more))


def test_start_stops_the_server_with_sigterm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = bench(monkeypatch, capsys, "--start", start_command(), *SMALL, "--concurrency", "2")
    result = json.loads(printed.splitlines()[-1])
    assert status == 0 and result["server_exit_status"] == 0 and result["start_to_ready_s"] > 0
    assert result["num_prompt_tokens"] == result["num_prompt_tokens_made"] > 0


def test_start_of_a_server_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ServerError, match="no program 'no-such-server'"):
        ServerProcess("no-such-server {port}", "http://127.0.0.1:1", 1)
    status, printed = bench(monkeypatch, capsys, "--start", f"{sys.executable} -c raise(SystemExit(3)) {{port}}")
    assert status == 1 and "ended with status 3 before it was ready" in printed


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "either --base-url or --start"),
        (("--start", "server"), "needs {port}"),
        (("--base-url", "u", "--preset", "qwen3-0.6b"), "--preset needs --start"),
        (("--base-url", "u", "--against-generate"), "needs --workload chats and --start"),
        (("--base-url", "u", "--workload", "overhead"), "needs --start"),
        (("--base-url", "u", "--workload", "document", "--questions", "1"), "2 or more"),
        (("--base-url", "u", "--workload", "mixed", "--plot", "p"), "--plot draws the chats"),
        (("--base-url", "u", "--min-tokens", "9", "--max-tokens", "8"), "--min-tokens 9 is above"),
        (("--base-url", "u", "--rate", "0"), "--rate 0 must be above 0"),
        (("--base-url", "u", "--runs", "0"), "0 must be 1 or more"),
        (("--base-url", "u", "--extra-body", "[1]"), "must be a JSON object"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    argv: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve_options.parse("about", tuple(bench_serve.MEASURES), argv)
    assert complaint in capsys.readouterr().err


# -- the engine alone ------------------------------------------------------------------------------------------------


class FakeEngine:
    """Takes 1 ms for each request."""

    def __init__(self, mode: str, command: Sequence[str]) -> None:
        self._mode = mode
        assert tuple(command) == ("server", "--flag")

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def run(self, requests: Sequence[Request]) -> list[float]:
        return [0.001] * len(requests) if self._mode == "one-by-one" else [0.001 * len(requests)]


def test_rate_is_compared_with_that_of_the_same_requests() -> None:
    runs = [(stream(5),) * 4, (stream(10),) * 4]
    result = serve_comparison.compare_rate({"output_tok_per_s": 5000.0}, ("server", "--flag"), runs, FakeEngine)
    assert result["generate_output_tok_per_s"] == pytest.approx(10_000)  # the first run warms up
    assert result["share_of_generate"] == pytest.approx(0.5)


def test_overhead_is_what_http_adds_to_the_engine() -> None:
    async def measure() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with FakeServer(token_s=0.002) as server:
            client = HttpClient(server.url)
            args = argparse.Namespace(runs=2, num_requests=3, seed=0)
            bench = Bench(args, Server(server.url), client, RequestMaker(client, "fake"), ("server", "--flag"))
            result = await serve_comparison.measure_overhead(bench, FakeEngine)
            await client.close()
        return result, server.bodies

    result, bodies = run(measure())
    num_tokens = serve_comparison.OVERHEAD_ANSWER_TOKENS
    for prefix in ("", "stream_"):
        added_ms = result[f"http_{prefix}latency_s"] * 1e3 - 1
        assert result[f"{prefix}overhead_ms"] == pytest.approx(added_ms) and added_ms > 2 * num_tokens - 1
    assert result["engine_latency_s"] == 0.001
    assert [bool(body["stream"]) for body in bodies] == [False, True] * 3 * 3
    assert len({body["prompt"] for body in bodies}) == len(bodies) and bodies[0]["max_tokens"] == num_tokens


RUNS = [[{"token_ids": [1, 2, 3], "max_tokens": 4, "temperature": 0.6}] * 3] * 2


def test_engine_alone_answers_each_run(tmp_path: Path) -> None:
    pytest.importorskip("nanovllm.async_llm")
    model, options = str(write_tiny_model(tmp_path)), {"device": "cpu", "max_model_len": 128, "num_kvcache_blocks": 8}
    answers = io.StringIO()
    serve_in_process.run_together(model, options, RUNS, answers)
    run(serve_in_process.run_one_by_one(model, options, RUNS, answers))
    seconds = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [len(each) for each in seconds] == [1, 1, 3, 3] and all(time_s > 0 for each in seconds for time_s in each)


def test_engine_options_are_those_of_the_servers_command() -> None:
    pytest.importorskip("nanovllm.cli.flags")
    command = "python -m nanovllm serve --port 8000 --model demo --max-queue 5 --max-num-seqs 3 --device cpu".split()
    model, options = serve_in_process.engine_of(command)
    assert Path(model).is_dir() and options["max_num_seqs"] == 3 and options["device"] == "cpu"
    assert not {"port", "max_queue"} & options.keys()


def test_engine_process_that_fails_says_so() -> None:
    with (
        pytest.raises(WorkloadError, match="the engine's process ended with status "),
        serve_comparison.EngineProcess("together", ()) as engine,
    ):
        engine.run([replace(stream(temperature=0.6), token_ids=(1, 2))])


# -- targets ---------------------------------------------------------------------------------------------------------


def test_jobs_have_options_that_fit() -> None:
    jobs = [job for job in JOBS if job.name.startswith("serve-")]
    assert len(jobs) >= 5
    for job in jobs:
        assert job.command[1] == "bench_serve.py"
        serve_options.parse("about", tuple(bench_serve.MEASURES), job.command[2:])


def test_targets_read_figures_that_the_workloads_report() -> None:
    streams = object.__new__(RunningStreams)
    streams.answers = [[made_answer(0.0, 1.0, 3.0, 5.0, 9.0)]]
    windows = (Window(0.0, 4.0), Window(4.0, 6.0), Window(6.0, 9.0))
    interference = serve_streams.interference_figures(streams, *windows)
    interference |= {"short_ttft_latest_s": 1.0, "short_ttft_steps": 2}
    reported = {
        "serve-chats": {"share_of_generate": 1.0},
        "serve-document": {"second_question_ttft_ratio": 0.05},
        "serve-interference": interference,
        "serve-interference-offload": interference,
        "serve-idle": {"with_over_without": 1.0},
        "serve-overhead": {"overhead_ms": 1.0, "stream_overhead_ms": 1.0},
    }
    targets = [target for target in TARGETS if any(name.startswith("serve-") for name in target.jobs)]
    assert {name for target in targets for name in target.jobs} == set(reported)
    for target in targets:
        target.value(*(reported[name] for name in target.jobs))
