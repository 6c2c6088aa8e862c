"""The loads of bench_serve.py: arrivals, loops and processes, the figures of a load, and prompts of exact lengths."""

import random
import statistics
import time

import pytest
from fake_openai import FakeServer, ServerThread, encode
from serve_answers import TIMEOUT_S, made_answer, run, stream

from benchmarks import serve_model
from benchmarks.serve_client import CHAT, COMPLETIONS, Answer, Request
from benchmarks.serve_figures import load_figures, over_runs, percentile
from benchmarks.serve_http import HttpClient
from benchmarks.serve_load import Load, Server, drive, poisson_arrivals, run_load
from benchmarks.serve_prompts import PromptError, RequestMaker, Tokenizer

# -- figures ---------------------------------------------------------------------------------------------------------


def test_percentile_counts_weights() -> None:
    values = [(float(n), 1.0) for n in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([(1.0, 1.0), (2.0, 98.0), (9.0, 1.0)], 0.5) == 2.0
    assert percentile([(7.0, 0.1)], 0.99) == 7.0
    assert percentile([(1.0, 0.1)] * 10, 1.0) == 1.0  # though ten times 0.1 is not 1


def test_load_figures_are_those_of_the_good_answers() -> None:
    figures = load_figures([made_answer(0, 1, 1.5, 2.5), made_answer(1, 3, 5), made_answer(0, 9, error="http_429")])
    assert (figures["num_requests"], figures["num_errors"], figures["errors"]) == (3, 1, {"http_429": 1})
    assert figures["wall_s"] == 5 and figures["output_tok_per_s"] == 10 / 5 and figures["request_per_s"] == 2 / 5
    assert figures["ttft_p50_ms"] == 1000 and figures["ttft_p99_ms"] == 2000
    assert figures["time_per_token_p50_ms"] == 500 and figures["time_per_token_p90_ms"] == 1000
    assert figures["latency_p99_ms"] == 4000


def test_load_figures_where_all_failed_have_no_rates() -> None:
    figures = load_figures([made_answer(0, error="timeout")])
    assert figures == {"num_requests": 1, "num_errors": 1, "errors": {"timeout": 1}}
    both = over_runs([figures, load_figures([made_answer(0, 1, 2)])])
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
    start_s = time.perf_counter()
    answers = run(answers_to_load(server, Load((stream(5),) * 8, arrivals_s=arrivals)))
    assert server.max_connections == 8
    for each, at_s in zip(answers, arrivals, strict=True):
        assert each.sent_s - start_s >= at_s


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
