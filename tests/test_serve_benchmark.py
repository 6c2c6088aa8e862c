"""The load generator of bench_serve.py against a fake server: what it sends, what it reads, and what it reports."""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fake_openai import FAULTS, FakeServer, ServerThread, encode

import bench_serve
from benchmarks import serve_comparison, serve_model, serve_options, serve_streams
from benchmarks.serve_client import CHAT, COMPLETIONS, Answer, Request, ask
from benchmarks.serve_figures import load_figures, over_runs, percentile
from benchmarks.serve_http import Address, HttpClient
from benchmarks.serve_idle import IdleConnections
from benchmarks.serve_load import Load, Server, drive, poisson_arrivals, run_load
from benchmarks.serve_process import ServerError, ServerProcess, free_port
from benchmarks.serve_prompts import PromptError, RequestMaker, Tokenizer
from benchmarks.serve_streams import RunningStreams, Window
from benchmarks.serve_wire import ConnectionLost, ProtocolError, Response, SseParser
from benchmarks.serve_workloads import Bench, WorkloadError
from benchmarks.targets import JOBS, TARGETS

T = TypeVar("T")

TIMEOUT_S = 60.0
FAKE = Path(__file__).parent / "support" / "fake_openai.py"


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


def stream(max_tokens: int = 5, path: str = COMPLETIONS, **body: Any) -> Request:
    prompt = {"messages": [{"role": "user", "content": "a b"}]} if path == CHAT else {"prompt": "a b"}
    return Request(path, {"max_tokens": max_tokens, "stream": True} | prompt | body, 2)


# -- what arrives ----------------------------------------------------------------------------------------------------

EVENTS = (
    b'data: {"a": 1}\n\n: a comment\n\ndata: two\ndata:lines\r\n\r\nevent: x\r\ndata: \xc3\xa9\r\n\r\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_sse_events_are_the_same_whatever_the_pieces(size: int) -> None:
    parser = SseParser()
    pieces = [EVENTS[start : start + size] for start in range(0, len(EVENTS), size)]
    events = [event for piece in pieces for event in parser.feed(piece)]
    assert events == [b'{"a": 1}', b"two\nlines", "é".encode(), b"[DONE]"]


def read_response(data: bytes, size: int) -> tuple[Response, bytes]:
    body: list[bytes] = []
    response = Response(lambda piece, _: body.append(piece))
    for start in range(0, len(data), size):
        response.feed(data[start : start + size], 0.0)
    return response, b"".join(body)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 11", b"hello world"),
        (b"Transfer-Encoding: chunked", b"5;name=value\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"),
    ],
)
def test_response_body_is_the_same_whatever_the_pieces(size: int, framing: bytes, body: bytes) -> None:
    response, content = read_response(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + body, size)
    assert (response.status, content) == (200, b"hello world")
    assert response.is_complete and response.keeps_connection


def test_response_without_a_body_or_a_length() -> None:
    response, _ = read_response(b"HTTP/1.1 204 Gone\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", 1000)
    assert response.is_complete and not response.keeps_connection
    response, content = read_response(b"HTTP/1.1 200 OK\r\n\r\nall of it", 4)
    assert not response.is_complete
    response.feed_end()
    assert response.is_complete and content == b"all of it" and not response.keeps_connection


def test_response_that_is_cut_off_or_not_http_is_refused() -> None:
    for cut in (b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"):
        response, _ = read_response(cut, 1000)
        with pytest.raises(ConnectionLost):
            response.feed_end()
    with pytest.raises(ProtocolError, match="status line"):
        read_response(b"220 mail ESMTP\r\n\r\n", 1000)
    with pytest.raises(ProtocolError, match="size of a chunk"):
        read_response(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 1000)


def test_address_of_a_url() -> None:
    assert Address.from_url("http://h:1/proxy/") == Address("h", 1, False, "/proxy")
    assert Address.from_url("https://h") == Address("h", 443, True, "")
    with pytest.raises(ValueError, match="--base-url 'h:80'"):
        Address.from_url("h:80")


# -- one answer ------------------------------------------------------------------------------------------------------


async def answers_of(server: FakeServer, *requests: Request, timeout_s: float = TIMEOUT_S) -> list[Answer]:
    """The answers to requests that are sent one after the other by one client."""
    async with server:
        client = HttpClient(server.url)
        answers = [await ask(client, request, timeout_s) for request in requests]
        await client.close()
    return answers


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("piece_bytes", [None, 1, 50])
def test_answer_has_every_token_and_the_servers_counts(path: str, piece_bytes: int | None) -> None:
    server = FakeServer(piece_bytes=piece_bytes)
    answers = run(answers_of(server, *[stream(5, path)] * 3))
    for answer in answers:
        assert (answer.error, answer.num_output_tokens, answer.num_prompt_tokens) == (None, 5, 2)
        assert answer.event_tokens == [1.0] * 5
        assert answer.sent_s < answer.event_s[0] <= answer.event_s[-1] <= answer.end_s and answer.ttft_s > 0
    assert server.max_connections == 1  # it is used again


def test_answer_times_are_those_of_the_clock() -> None:
    """The clock counts the times when it was asked: when the request is sent, at each piece, and at the end."""
    ticks = iter(range(1000))

    async def measure() -> Answer:
        async with FakeServer(token_s=0.01) as server:
            client = HttpClient(server.url, clock=lambda: float(next(ticks)))
            answer = await ask(client, stream(3), TIMEOUT_S)
            await client.close()
        return answer

    answer = run(measure())
    assert answer.sent_s == 0.0 and answer.event_s == sorted(answer.event_s)
    assert answer.end_s == next(ticks) - 1 and answer.ttft_s == answer.event_s[0]
    assert [tokens for _, _, tokens in answer.gaps()] == [1.0, 1.0]


@pytest.mark.parametrize(("with_totals", "expected"), [(True, [3, 3, 1]), (False, [7 / 3] * 3)])
def test_answer_tokens_of_an_event_are_counted_or_shared(with_totals: bool, expected: list[float]) -> None:
    (answer,) = run(answers_of(FakeServer(tokens_per_event=3, with_totals=with_totals), stream(7)))
    assert answer.event_tokens == pytest.approx(expected) and answer.num_output_tokens == 7


def test_answer_that_is_not_streamed_has_no_events() -> None:
    (answer,) = run(answers_of(FakeServer(), stream(5).with_body({"stream": None})))
    assert (answer.error, answer.num_output_tokens, answer.event_s) == (None, 5, [])


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


@pytest.mark.parametrize("fault", FAULTS)
def test_answer_that_fails_says_how_and_the_next_one_succeeds(fault: str) -> None:
    timeout_s = 0.3 if fault == "hang" else TIMEOUT_S
    failed, good = run(answers_of(FakeServer(faults=[fault]), stream(), stream(), timeout_s=timeout_s))
    assert (failed.error, good.error) == (KINDS[fault], None)
    assert failed.end_s >= failed.sent_s
    assert {"429": "not now", "error_event": "broken"}.get(fault, "") in failed.detail


def test_answer_without_a_server_says_so() -> None:
    async def measure() -> Answer:
        return await ask(HttpClient(f"http://127.0.0.1:{free_port()}"), stream(), TIMEOUT_S)

    assert run(measure()).error == "no_connection"


def test_request_on_a_connection_that_the_server_closed_is_sent_again() -> None:
    """A server may close a connection that is idle; that is not an error of the next request."""

    async def measure() -> list[str | None]:
        async with FakeServer() as server:
            client = HttpClient(server.url)
            first = await ask(client, stream(), TIMEOUT_S)
            server.faults = ["close"]  # at the next request, without an answer
            second = await ask(client, stream(), TIMEOUT_S)
            await client.close()
            assert len(server.bodies) == 3
            return [first.error, second.error]

    assert run(measure()) == [None, None]


def test_request_fields_are_replaced_and_removed() -> None:
    assert stream(5, seed=1).with_body({"seed": None, "top_k": 3}).body == stream(5, top_k=3).body


# -- figures ---------------------------------------------------------------------------------------------------------


def test_percentile_counts_weights() -> None:
    values = [(float(n), 1.0) for n in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([(1.0, 1.0), (2.0, 98.0), (9.0, 1.0)], 0.5) == 2.0
    assert percentile([(7.0, 0.1)], 0.99) == 7.0
    assert percentile([(1.0, 0.1)] * 10, 1.0) == 1.0  # though ten times 0.1 is not 1


def answer(sent_s: float, *event_s: float, error: str | None = None) -> Answer:
    tokens = [2.0] * len(event_s)
    end_s = event_s[-1] if event_s else sent_s
    return Answer(sent_s, end_s, list(event_s), tokens, sum(tokens), 10, 0, error)


def test_load_figures_are_those_of_the_good_answers() -> None:
    figures = load_figures([answer(0, 1, 1.5, 2.5), answer(1, 3, 5), answer(0, 9, error="http_429")])
    assert (figures["num_requests"], figures["num_errors"], figures["errors"]) == (3, 1, {"http_429": 1})
    assert figures["wall_s"] == 5 and figures["output_tok_per_s"] == 10 / 5 and figures["request_per_s"] == 2 / 5
    assert figures["ttft_p50_ms"] == 1000 and figures["ttft_p99_ms"] == 2000
    assert figures["time_per_token_p50_ms"] == 500 and figures["time_per_token_p90_ms"] == 1000
    assert figures["latency_p99_ms"] == 4000


def test_load_figures_where_all_failed_have_no_rates() -> None:
    figures = load_figures([answer(0, error="timeout")])
    assert figures == {"num_requests": 1, "num_errors": 1, "errors": {"timeout": 1}}
    both = over_runs([figures, load_figures([answer(0, 1, 2)])])
    assert both["num_requests"] == 2 and both["errors"] == {"timeout": 1} and both["ttft_p50_ms"] == 1000


def test_over_runs_adds_counts_and_takes_medians() -> None:
    result = over_runs([{"num_errors": n, "errors": {"http_429": n}, "x_ms": float(n)} for n in (1, 2, 6)])
    assert result["num_errors"] == 9 and result["errors"] == {"http_429": 9} and result["num_runs"] == 3
    assert (result["x_ms"], result["x_ms_min"], result["x_ms_max"]) == (2.0, 1.0, 6.0)


# -- loads -----------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_depend_on_the_seed_alone() -> None:
    arrivals = poisson_arrivals(20.0, 5000, seed=1)
    intervals = [after - before for before, after in zip((0.0, *arrivals), arrivals, strict=False)]
    assert statistics.mean(intervals) == pytest.approx(0.05, rel=0.05)
    assert statistics.stdev(intervals) == pytest.approx(0.05, rel=0.05)  # as of an exponential distribution
    assert arrivals == poisson_arrivals(20.0, 5000, seed=1) != poisson_arrivals(20.0, 5000, seed=2)


def test_shares_of_a_load_are_all_of_it() -> None:
    requests = tuple(stream(n) for n in range(1, 12))
    shares = [Load(requests, 4).share(index, 3) for index in range(3)]
    assert [share.concurrency for share in shares] == [2, 1, 1]
    assert sorted(each.body["max_tokens"] for share in shares for each in share.requests) == list(range(1, 12))
    timed = Load(requests, arrivals_s=poisson_arrivals(1.0, 11, 0))
    shares = [timed.share(index, 3) for index in range(3)]
    assert sorted(at_s for share in shares for at_s in share.arrivals_s) == list(timed.arrivals_s)


async def answers_to_load(server: FakeServer, load: Load) -> list[Answer]:
    async with server:
        client = HttpClient(server.url)
        result = await drive(client, load, TIMEOUT_S)
        await client.close()
    return result.answers


def test_closed_loop_sends_so_many_at_a_time() -> None:
    server = FakeServer(token_s=0.005, faults=[None, "429", "close"])
    answers = run(answers_to_load(server, Load((stream(3),) * 12, concurrency=4)))
    assert len(answers) == 12 and server.max_connections == 4
    assert sorted(each.error or "" for each in answers) == [""] * 10 + ["disconnected", "http_429"]


def test_open_loop_does_not_wait_for_answers() -> None:
    """All arrive while the first is answered."""
    arrivals = tuple(0.01 * n for n in range(8))
    server = FakeServer(token_s=0.1)
    answers = run(answers_to_load(server, Load((stream(5),) * 8, arrivals_s=arrivals)))
    assert server.max_connections == 8
    for each, at_s in zip(answers, arrivals, strict=True):
        assert each.sent_s - answers[0].sent_s >= at_s - arrivals[0] - 0.01


def test_several_processes_send_the_whole_load() -> None:
    requests = tuple(stream(n) for n in range(1, 10))
    with ServerThread(FakeServer()) as server:
        result = run(run_load(Server(server.url), Load(requests, concurrency=4), num_processes=2))
        assert sorted(body["max_tokens"] for body in server.bodies) == list(range(1, 10))
    assert [each.error for each in result.answers] == [None] * 9
    assert sum(each.num_output_tokens for each in result.answers) == 45 and result.client_cpu_share > 0


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 99, 100, 3000])
def test_texts_have_exactly_so_many_tokens(num_tokens: int) -> None:
    async def make() -> list[tuple[str, list[int]]]:
        async with FakeServer() as server:
            tokenizer = Tokenizer(HttpClient(server.url), "fake")
            return [await tokenizer.text_of(random.Random(seed), num_tokens) for seed in (0, 1, 0)]

    first, second, again = run(make())
    assert len(encode(first[0])) == len(first[1]) == num_tokens
    assert first[0] == again[0] and (num_tokens < 50 or first[0][:40] != second[0][:40])


def test_chats_have_the_lengths_asked_for_and_depend_on_the_seed_alone() -> None:
    async def make(vocab_size: int | None, path: str = COMPLETIONS) -> list[tuple[Request, ...]]:
        async with FakeServer() as server:
            maker = RequestMaker(HttpClient(server.url), "fake", path, vocab_size, {"ignore_eos": None, "top_k": 5})
            return [await maker.chats(20, 10, 30, seed) for seed in (1, 1, 2)]

    for first, again, other in (run(make(None)), run(make(300))):
        assert first == again != other
        for request in first:
            assert 10 <= request.num_prompt_tokens <= 30 and 10 <= request.body["max_tokens"] <= 30
            assert request.token_ids is not None and len(request.token_ids) == request.num_prompt_tokens
            assert request.body["top_k"] == 5 and "ignore_eos" not in request.body
    assert run(make(None, CHAT))[0][0].body["messages"][0]["role"] == "user"
    with pytest.raises(PromptError, match="--endpoint completions"):
        run(make(300, CHAT))


def test_prompts_of_a_server_without_tokenize_are_refused_with_the_remedy() -> None:
    async def make() -> None:
        async with FakeServer(api_key="secret") as server:
            await RequestMaker(HttpClient(server.url), "fake").chats(1, 5, 5, 0)

    with pytest.raises(PromptError, match=r"/tokenize answered 401 .*--token-ids"):
        run(make())


def test_model_has_a_tokenizer_of_the_full_vocabulary() -> None:
    tokenizer = serve_model.make_tokenizer(vocab_size=3000, num_trained_tokens=400, sources=[__file__])
    assert tokenizer.get_vocab_size() == 3000 and tokenizer.token_to_id(serve_model.END_TOKEN) == 2999
    text = "def f(x):\n    return 'é'"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("assert await").ids) < len("assert await")
    assert all(tokenizer.decode([token_id]).isascii() for token_id in range(400, 2999))


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


def test_window_counts_gaps_that_reach_into_it_and_tokens_that_arrive_in_it() -> None:
    streams = object.__new__(RunningStreams)
    streams.answers = [answer(0.0, 1.0, 3.0, 5.0, 9.0)]  # two tokens each
    assert streams.gaps(Window(3.5, 6.0)) == [(1.0, 2.0), (2.0, 2.0)]
    assert streams.tok_per_s(Window(3.0, 7.0)) == 2 / 4 and streams.num_steps(Window(2.0, 5.0)) == 2


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
    assert [bool(body["stream"]) for body in bodies] == ([False] * 3 + [True] * 3) * 3
    assert len({body["prompt"] for body in bodies}) == len(bodies) and bodies[0]["max_tokens"] == num_tokens


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
    streams.answers = [answer(0.0, 1.0, 3.0, 5.0, 9.0)]
    interference = serve_streams.interference_figures(streams, Window(0.0, 4.0), Window(4.0, 9.0))
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
