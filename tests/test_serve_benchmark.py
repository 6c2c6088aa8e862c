"""bench_serve.py against a fake server: what its client reads, its workloads, and the figures that the targets read."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FAULTS, FakeServer, ServerThread

import bench_serve
from benchmarks import serve_streams
from benchmarks.serve_client import (
    COMPLETIONS,
    Answer,
    Client,
    load_figures,
    over_runs,
    percentile,
)
from benchmarks.serve_streams import RunningStreams, Window
from benchmarks.server_process import EngineProcess, ServerError, ServerProcess
from benchmarks.targets import JOBS, TARGETS

ROOT = Path(__file__).parent.parent
FAKE = Path(__file__).parent / "support" / "fake_openai.py"
STREAM = {"prompt": "a b", "max_tokens": 5, "stream": True}

# -- answers ---------------------------------------------------------------------------------------------------------


def ask(server: FakeServer, *bodies: dict[str, Any], timeout_s: float = 60.0) -> list[Answer]:
    """The answers to requests that are sent one after the other by one client."""

    async def work() -> list[Answer]:
        async with server, Client(server.url, timeout_s=timeout_s) as client:
            return [await client.ask(COMPLETIONS, body) for body in bodies]

    answers = asyncio.run(asyncio.wait_for(work(), 60))
    for answer, body in zip(answers, bodies, strict=True):
        answer.read("stream" in body)
    return answers


def test_answer_has_every_token_and_the_servers_counts() -> None:
    server = FakeServer(token_s=0.001)
    for answer in ask(server, STREAM, STREAM):
        assert (answer.error, answer.num_output_tokens, answer.num_prompt_tokens) == (None, 5, 2)
        assert answer.event_tokens == [1.0] * 5 and len(answer.gaps()) == 4
        assert answer.sent_s < answer.event_s[0] < answer.event_s[-1] <= answer.end_s and answer.ttft_s > 0
    assert server.max_connections == 1  # it is used again
    (whole,) = ask(FakeServer(), {"prompt": "a b", "max_tokens": 5})
    assert (whole.error, whole.num_output_tokens) == (None, 5)
    for with_totals, expected in ((True, [3, 3, 1]), (False, [7 / 3] * 3)):
        (answer,) = ask(FakeServer(tokens_per_event=3, with_totals=with_totals), STREAM | {"max_tokens": 7})
        assert answer.event_tokens == pytest.approx(expected) and answer.num_output_tokens == 7


def test_events_are_the_same_whatever_the_pieces() -> None:
    choice = {"text": "é", "finish_reason": None}
    lines = [f"data: {json.dumps({'choices': [choice]})}\r\n\r\n: a comment\n\n"] * 3
    lines.append(f"data:{json.dumps({'choices': [choice | {'finish_reason': 'stop'}]})}\n\ndata: [DONE]\n\n")
    stream = "".join(lines).encode()
    for size in (1, 2, 7, 1000):
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        answer = Answer(status=200, pieces=list(enumerate(pieces)))
        assert answer.has_token() and not Answer(status=200, pieces=[(0.0, stream[:20])]).has_token()
        answer.read()
        ends = [match.end() - 1 for match in re.finditer(rb"data: ?\{.*\n", stream)]
        assert answer.event_s == [end // size for end in ends]  # the pieces that complete their lines
        assert answer.error is None and answer.num_output_tokens == 4


KINDS = {
    "429": "http_429",
    "500": "http_500",
    "close": "disconnected",
    "close_in_stream": "disconnected",
    "error_event": "stream_error",
    "bad_event": "malformed",
    "no_done": "no_done",
    "abort": "finish_abort",
    "hang": "timeout",
    "not_http": "malformed",
}


def test_answer_that_fails_says_how_and_the_next_one_succeeds() -> None:
    assert KINDS.keys() == set(FAULTS)
    for fault, kind in KINDS.items():
        failed, good = ask(FakeServer(faults=[fault]), STREAM, STREAM, timeout_s=0.3 if fault == "hang" else 60)
        assert (failed.error, good.error) == (kind, None)
        assert {"429": "not now", "error_event": "broken"}.get(fault, "") in failed.detail

    async def without_server() -> Answer:
        async with Client("http://127.0.0.1:1") as client:
            return await client.ask(COMPLETIONS, STREAM)

    assert asyncio.run(without_server()).error == "no_connection"


# -- figures ---------------------------------------------------------------------------------------------------------


def made_answer(sent_s: float, *event_s: float, error: str | None = None) -> Answer:
    """An answer with two tokens in each event."""
    answer = Answer(sent_s, event_s[-1] if event_s else sent_s, 200, error=error)
    answer.event_s, answer.event_tokens, answer.num_output_tokens = (
        list(event_s),
        [2.0] * len(event_s),
        2 * len(event_s),
    )
    return answer


def test_percentile_counts_weights() -> None:
    values = [(float(n), 1.0) for n in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([(1.0, 1.0), (2.0, 98.0), (9.0, 1.0)], 0.5) == 2.0
    assert percentile([(1.0, 0.1)] * 10, 1.0) == 1.0  # though ten times 0.1 is not 1


def test_load_figures_are_those_of_the_good_answers() -> None:
    figures = load_figures([made_answer(0, 1, 1.5, 2.5), made_answer(1, 3, 5), made_answer(0, 9, error="http_429")])
    assert (figures["num_requests"], figures["num_errors"], figures["errors"]) == (3, 1, {"http_429": 1})
    assert figures["wall_s"] == 5 and figures["output_tok_per_s"] == 10 / 5 and figures["request_per_s"] == 2 / 5
    assert figures["ttft_p50_ms"] == 1000 and figures["ttft_p99_ms"] == 2000
    assert figures["time_per_token_p50_ms"] == 500 and figures["time_per_token_p90_ms"] == 1000
    failed = load_figures([made_answer(0, error="timeout")])
    both = over_runs([failed, load_figures([made_answer(0, 1, 2)]), load_figures([made_answer(0, 3, 4)])])
    assert both["num_requests"] == 3 and both["errors"] == {"timeout": 1}
    assert (both["ttft_p50_ms"], both["ttft_p50_ms_min"], both["ttft_p50_ms_max"]) == (2000, 1000, 3000)


def test_window_counts_gaps_that_reach_into_it_and_tokens_that_arrive_in_it() -> None:
    """The time between two answers of a stream is not a gap."""
    streams = object.__new__(RunningStreams)
    streams.answers = [[made_answer(0.0, 1.0, 2.0), made_answer(2.0, 8.0, 9.0)], [made_answer(0.0, 1.0, 8.0)]]
    assert streams.gaps(Window(1.5, 8.5)) == [(0.5, 2.0), (0.5, 2.0), (3.5, 2.0)]
    assert streams.tok_per_s(Window(1.5, 9.5)) == 8 / 8 and streams.num_steps(Window(1.5, 9.5)) == 6


# -- workloads -------------------------------------------------------------------------------------------------------


class FakeEngine:
    """Takes 1 ms for each request."""

    def __init__(self, command: Sequence[str]) -> None:
        assert command[-2:] == ["--token-s", "0.001"]

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def run(self, requests: Sequence[dict[str, Any]]) -> float:
        assert all(request.keys() == {"prompt_token_ids", "max_tokens", "temperature"} for request in requests)
        return 0.001 * len(requests)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs bench_serve.py with these arguments, and returns its status and its result or its output."""
    monkeypatch.setattr(serve_streams, "SETTLE_S", 0.05)
    monkeypatch.setattr(bench_serve, "EngineProcess", FakeEngine)

    def run(*argv: str, warm_up: bool = False) -> tuple[int, Any]:
        monkeypatch.setattr(sys, "argv", ["bench_serve.py", *argv, *(() if warm_up else ("--no-warm-up",))])
        status = bench_serve.main()
        captured = capsys.readouterr()
        return status, captured.err if status else json.loads(captured.out.splitlines()[-1])

    return run


def check_targets(job: str, result: dict[str, Any]) -> None:
    """Every figure that a target reads is in the result of its workload."""
    for target in [target for target in TARGETS if target.jobs == [job]]:
        assert target.value(result) >= 0


SMALL = ("--runs", "2", "--num-requests", "6", "--min-tokens", "3", "--max-tokens", "8", "--concurrency", "2")
STREAMS = ("--streams", "3", "--stream-tokens", "20", "--window-s", "0.2", "--runs", "1")


def test_chats_in_loops_and_at_a_rate_count_errors_by_kind(bench: Any, tmp_path: Path) -> None:
    server = FakeServer(api_key="secret", faults=["429", "500", "429"])
    path = tmp_path / "result.json"
    with ServerThread(server):
        status, result = bench("--base-url", f"{server.url}/v1", *SMALL, "--api-key", "secret", "--json", str(path))
        assert status == 0 and json.loads(path.read_text()) == result and "secret" not in path.read_text()
        assert result["model"] == "fake" and result["server_version"] == "1" and len(server.bodies) == 2 * 6
        assert result["num_requests"] == 12 and result["errors"] == {"http_429": 2, "http_500": 1}
        for key in ("output_tok_per_s", "request_per_s", "ttft_p50_ms", "time_per_token_p99_ms", "latency_p90_ms"):
            assert result[f"{key}_min"] <= result[key] <= result[f"{key}_max"]
        status, result = bench("--base-url", server.url, *SMALL, "--rate", "200", "--api-key", "secret")
        assert status == 0 and (result["offered_request_per_s"], result["num_errors"]) == (200, 0)


def test_started_server_is_stopped_and_compared_with_its_engine(bench: Any) -> None:
    start = ("--start", f"{sys.executable} {FAKE} --port {{port}} --token-s 0.001")
    status, result = bench(*start, *SMALL, "--against-generate", warm_up=True)
    assert (status, result["server_exit_status"]) == (0, 0) and result["start_to_ready_s"] > 0
    assert result["generate_output_tok_per_s"] == pytest.approx(5500, rel=0.3)  # 3 to 8 tokens of a request, in 1 ms
    assert result["share_of_generate"] == result["output_tok_per_s"] / result["generate_output_tok_per_s"]
    check_targets("serve-chats", result)
    status, result = bench(*start, "--workload", "overhead", "--num-requests", "3", "--runs", "2")
    assert status == 0 and result["engine_latency_s"] == 0.001
    assert result["overhead_ms_min"] <= result["overhead_ms"] <= result["overhead_ms_max"]
    check_targets("serve-overhead", result)


def test_document_is_read_once_and_later_questions_start_sooner(bench: Any) -> None:
    server = FakeServer(prompt_token_s=0.0005)
    argv = ("--workload", "document", "--document-tokens", "600", "--questions", "3", "--runs", "2")
    with ServerThread(server):
        _, result = bench("--base-url", server.url, *argv)
    assert result["second_question_ttft_ratio"] < 0.8 and result["first_ttft_s"] > result["later_ttft_s"]
    assert result["cached_tokens"] >= 550 and len(server.bodies) == 6
    assert result["prompt_tokens"] == pytest.approx(632, rel=0.1)
    check_targets("serve-document", result)


@pytest.mark.slow
def test_interference_watches_streams_before_and_during_a_long_prompt(bench: Any) -> None:
    server = FakeServer(token_s=0.01, prompt_token_s=0.0004)
    argv = ("--document-tokens", "2000", "--short-after-s", "0.05", "--short-requests", "3")
    with ServerThread(server):
        _, result = bench("--base-url", server.url, "--workload", "interference", *STREAMS, *argv)
    assert 1 <= result["num_short_requests"] <= 3 and result["streams_ended"] > 0
    assert 0 < result["short_ttft_s"] <= result["short_ttft_latest_s"] < result["long_ttft_s"]
    assert result["short_ttft_steps"] >= 1 and result["prefill_p99_over_quiet_p50"] > 0
    assert server.bodies[0]["max_tokens"] < server.bodies[2]["max_tokens"] == 20  # they begin at different points
    check_targets("serve-interference", result)


@pytest.mark.slow
def test_idle_connections_are_open_beside_the_streams(bench: Any) -> None:
    server = FakeServer(token_s=0.01)
    with ServerThread(server):
        argv = ("--workload", "idle-connections", "--idle-connections", "30")
        _, result = bench("--base-url", server.url, *argv, *STREAMS)
    assert server.max_connections >= 33 and result["closed_by_server"] == 0
    check_targets("serve-idle", result)


def test_running_streams_that_fail_are_not_measured(bench: Any) -> None:
    server = FakeServer(faults=["500"])
    with ServerThread(server):
        status, printed = bench("--base-url", server.url, "--workload", "interference", *STREAMS)
    assert status == 1 and "a running stream failed: http_500" in printed and "not now" in printed


# -- processes -------------------------------------------------------------------------------------------------------


def test_server_that_fails_or_ignores_sigterm(bench: Any) -> None:
    """Regression: a benchmark past its time was killed, and its server ran on beside the next one."""
    with pytest.raises(ServerError, match="no program 'no-such-server'"):
        ServerProcess("no-such-server {port}")
    status, printed = bench("--start", f"{sys.executable} -c raise(SystemExit(3)) {{port}}")
    assert status == 1 and "ended with status 3 before it was ready" in printed
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    server = ServerProcess(f'{sys.executable} -c "{code}"')
    with pytest.raises(SystemExit), server:
        raise SystemExit(143)
    assert server.stop() in (-signal.SIGKILL, -signal.SIGTERM)  # the latter if it had not come to ignoring it


def test_sigterm_ends_a_running_load_quietly() -> None:
    """Regression: timeout(1) sends SIGTERM twice. The second sys.exit in the signal's handler left the event loop with
    its tasks pending, which Python reported with tracebacks.
    """
    server = FakeServer(token_s=10)
    with ServerThread(server):
        words = [sys.executable, "bench_serve.py", "--base-url", server.url, *SMALL]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        benchmark = subprocess.Popen(words, cwd=ROOT, env=env, text=True, **pipe)
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


@pytest.mark.slow
def test_engine_alone_answers_with_the_options_of_the_servers_command() -> None:
    command = "nanovllm serve --port 8000 --model demo --max-queue 5 --max-num-seqs 3 --device cpu".split()
    request = {"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "temperature": 0.6}
    with EngineProcess([*command, "--max-model-len", "256"]) as engine:
        assert engine.run([request] * 3) > 0 and engine.run([request]) > 0
    with EngineProcess([*command, "--max-model-len", "0"]) as engine, pytest.raises(ServerError, match="with status 1"):
        engine.run([request])


def test_options_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, complaint in (
        ("", "either --base-url or --start"),
        ("--start server", "needs {port}"),
        ("--base-url u --preset qwen3-0.6b", "--preset needs --start"),
        ("--base-url u --against-generate", "needs --start"),
        ("--base-url u --workload overhead", "needs --start"),
        ("--base-url u --workload document --questions 1", "2 or more"),
        ("--base-url u --min-tokens 9 --max-tokens 8", "--min-tokens 9 is above"),
        ("--base-url u --rate 0", "--rate 0.0 must be above 0"),
        ("--base-url u --runs 0", "0 must be 1 or more"),
    ):
        with pytest.raises(SystemExit):
            bench_serve.parse(argv.split())
        assert complaint in capsys.readouterr().err
    for job in JOBS:
        if "bench_serve.py" in job.command:
            bench_serve.parse(job.command[2:])
