"""Running streams of bench_serve.py, whose pace depends on their contexts: what is compared with what."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from paced_server import BASE_STEP_S, STEP_S_PER_CONTEXT_TOKEN, PacedClient, VirtualTimeLoop, paced_bench
from serve_answers import made_answer

from benchmarks.serve_idle import BYTES_PER_WINDOW, IdleConnections, measure_idle_connections
from benchmarks.serve_streams import STREAM_PROMPT_TOKENS, RunningStreams, Window, interfere
from benchmarks.serve_workloads import Bench

Factor = Callable[[PacedClient], float]

STREAMS = ("--streams", "8")
STEP_MS = 1e3 * (BASE_STEP_S + STEP_S_PER_CONTEXT_TOKEN * (STREAM_PROMPT_TOKENS + 1024 / 2))  # at the mean context


def with_bench(measure: Callable[[Bench, PacedClient], Any], factor: Factor, workload: str, *argv: str) -> Any:
    """What `measure` returns, in virtual time. factor: of the time of each step."""

    async def work(loop: VirtualTimeLoop) -> Any:
        async with PacedClient(loop.time, factor) as client:
            return await measure(paced_bench(client, workload, *STREAMS, *argv), client)

    with VirtualTimeLoop() as loop:
        return loop.run(work(loop))


def idle_result(factor: Factor, *argv: str) -> dict[str, Any]:
    return with_bench(
        lambda bench, _: measure_idle_connections(bench), factor, "idle-connections", "--idle-connections", "20", *argv
    )


# -- idle connections ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream_tokens", ["1024", "8192"])
def test_idle_connections_that_cost_nothing_have_a_ratio_of_one(stream_tokens: str) -> None:
    """Regression: the rate was compared with the mean of those before and after. It falls along a convex curve as the
    contexts grow, so the mean was too high.
    """
    result = idle_result(lambda client: 1.0, "--runs", "2", "--stream-tokens", stream_tokens)
    assert result["with_over_without_min"] == pytest.approx(1.0, abs=0.003)
    assert result["with_over_without_max"] == pytest.approx(1.0, abs=0.003)
    assert result["open_connections"] == 20 and result["closed_by_server"] == 0


def test_idle_connections_that_slow_each_step_show_in_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    result = idle_result(lambda client: 1.25 if client.num_connections else 1.0, "--runs", "2")
    assert result["with_over_without"] == pytest.approx(0.8, abs=0.004)
    assert [run["with_over_without"] for run in result["each_run"]] == pytest.approx([0.8, 0.8], abs=0.004)
    assert result["streams_ended"] > 8  # of both passes
    first, second, _ = capsys.readouterr().out.splitlines()
    assert "without first" in first and "with first" in second


def test_idle_connections_are_not_blamed_for_a_server_that_slows_down() -> None:
    """The passes change places from run to run, so that what comes second is not always the same."""
    result = idle_result(lambda client: 1.0 + client.clock() / 1000, "--runs", "4")
    assert result["with_over_without_min"] < 0.997 and result["with_over_without_max"] > 1.003
    assert result["with_over_without"] == pytest.approx(1.0, abs=0.001)


def test_slow_connections_send_bytes_while_the_streams_are_watched_and_not_all_at_once() -> None:
    """Regression: a slow connection sent a byte every 5 s, and the streams were watched for 3 s."""

    async def measure(bench: Bench, client: PacedClient) -> tuple[list[list[float]], Window]:
        idle = IdleConnections(client, 30, bench.args.window_s / BYTES_PER_WINDOW)
        async with idle, RunningStreams(bench, 2, seed=0) as streams:
            window = await streams.watch(bench.args.window_s)
        return list(client.bytes_s.values()), window

    sent, window = with_bench(measure, lambda client: 1.0, "idle-connections")
    inside = [[time_s for time_s in times_s if window.holds(time_s)] for times_s in sent]
    num_bytes = sorted(map(len, inside))
    assert num_bytes[:10] == [0] * 10 and set(num_bytes[10:]) <= {2, 3, 4}
    window_s = window.end_s - window.start_s
    tenths = Counter(int((time_s - window.start_s) / window_s * 10) for times_s in inside for time_s in times_s)
    assert max(tenths.values()) <= 2 * BYTES_PER_WINDOW * 20 / 10


# -- a long prompt ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_s", ["1", "3"])
def test_quiet_pace_is_the_same_before_and_after_a_long_prompt(window_s: str) -> None:
    """Regression: streams of 8192 tokens began at the same time, and became slower while they were watched."""
    result = with_bench(
        lambda bench, _: interfere(bench, seed=0),
        lambda client: 2.0 if client.num_reading_long else 1.0,
        *("interference", "--window-s", window_s, "--document-tokens", "500000"),
    )
    for when in ("quiet", "quiet_before", "quiet_after"):
        assert result[f"{when}_time_per_token_p50_ms"] == pytest.approx(STEP_MS, rel=0.02)
    assert result["prefill_time_per_token_p50_ms"] == pytest.approx(2 * STEP_MS, rel=0.05)
    assert result["prefill_p99_over_quiet_p50"] == pytest.approx(2.0, rel=0.1)
    assert result["streams_ended"] > 0


# -- streams that end and begin again --------------------------------------------------------------------------------


def test_streams_begin_at_different_points_of_an_answer() -> None:
    async def measure(bench: Bench, client: PacedClient) -> RunningStreams:
        async with RunningStreams(bench, 8, seed=0) as streams:
            await streams.watch(bench.args.window_s)
        return streams

    streams = with_bench(measure, lambda client: 1.0, "interference", "--stream-tokens", "240")
    firsts = [answers[0].num_output_tokens for answers in streams.answers]
    assert firsts == [30, 60, 90, 120, 150, 180, 210, 240]
    assert {answers[1].num_output_tokens for answers in streams.answers} == {240}
    assert streams.num_ended == sum(len(answers) for answers in streams.answers) - 8
    ends_s = sorted(answers[0].end_s for answers in streams.answers)
    step_s = BASE_STEP_S + STEP_S_PER_CONTEXT_TOKEN * (STREAM_PROMPT_TOKENS + 240 / 2)
    steps_between = [(later - sooner) / step_s for sooner, later in pairwise(ends_s)]
    assert min(steps_between) > 25 and max(steps_between) < 40


def test_fewer_tokens_than_streams_leave_each_at_least_one() -> None:
    async def measure(bench: Bench, client: PacedClient) -> list[float]:
        async with RunningStreams(bench, 8, seed=0) as streams:
            pass
        return [answers[0].num_output_tokens for answers in streams.answers]

    assert with_bench(measure, lambda client: 1.0, "interference", "--stream-tokens", "3") == [1, 1, 2, 2, 2, 3, 3, 3]


def streams_of(*answers: list[Any]) -> RunningStreams:
    """Streams that have ended, with these answers."""
    streams = object.__new__(RunningStreams)
    streams.answers = list(answers)
    return streams


def test_window_counts_gaps_that_reach_into_it_and_tokens_that_arrive_in_it() -> None:
    streams = streams_of([made_answer(0.0, 1.0, 3.0, 5.0, 9.0)])  # two tokens each
    assert streams.gaps(Window(3.5, 6.0)) == [(1.0, 2.0), (2.0, 2.0)]
    assert streams.tok_per_s(Window(3.0, 7.0)) == 2 / 4 and streams.num_steps(Window(2.0, 5.0)) == 4


def test_window_across_two_answers_has_no_gap_between_them_and_counts_the_tokens_of_both() -> None:
    streams = streams_of([made_answer(0.0, 1.0, 2.0), made_answer(2.0, 8.0, 9.0)], [made_answer(0.0, 1.0, 8.0)])
    assert streams.gaps(Window(1.5, 8.5)) == [(0.5, 2.0), (0.5, 2.0), (3.5, 2.0)]
    assert streams.tok_per_s(Window(1.5, 9.5)) == 8 / 8 and streams.num_steps(Window(1.5, 9.5)) == 6
    assert streams.num_ended == 1
