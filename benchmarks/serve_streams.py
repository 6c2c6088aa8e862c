"""Running streams, and how they fare while the server reads a long prompt (`--workload interference`).

The streams run all the time. Their rates and gaps in one window of time are compared with those in another.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serve_client import Answer, Request, ask
from benchmarks.serve_figures import over_runs, percentile, percentiles_ms
from benchmarks.serve_workloads import Bench, WorkloadError

Json = dict[str, Any]

STREAM_PROMPT_TOKENS = 100
SHORT_PROMPT_TOKENS, SHORT_ANSWER_TOKENS = 200, 16
LONG_ANSWER_TOKENS = 4
SETTLE_S = 0.5  # between the first tokens of all streams and the first window
POLL_S = 0.005
TOKENS_OF_EACH_EVENT: Json = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class Window:
    """A time during which the streams are watched."""

    start_s: float
    end_s: float

    def holds(self, time_s: float) -> bool:
        return self.start_s < time_s <= self.end_s


class RunningStreams:
    """Streams that run until they are cancelled. One whose answer ends begins another.

    Steps take longer as contexts grow. So each stream begins at another point of an answer: the contexts are evenly
    distributed from the first token on, and their mean stays the same. Nor do many answers end at once.

    async with RunningStreams(bench, 32, seed=0) as streams: ...
    """

    def __init__(self, bench: Bench, num_streams: int, seed: int) -> None:
        self._bench, self._num_streams, self._seed = bench, num_streams, seed
        self.answers: list[list[Answer]] = [[] for _ in range(num_streams)]  # of each stream, in turn
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "RunningStreams":
        """Start the streams and wait until each has a token."""
        rng = random.Random(self._seed)
        requests = [await self._requests(rng, stream_idx) for stream_idx in range(self._num_streams)]
        for (first, later), answers in zip(requests, self.answers, strict=True):
            self._tasks.append(asyncio.create_task(self._run(first, later, answers)))
        try:
            while not all(answers and answers[0].event_s for answers in self.answers):
                self.check()
                await asyncio.sleep(POLL_S)
        except BaseException:
            await self._cancel()
            raise
        await asyncio.sleep(SETTLE_S)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._cancel()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _requests(self, rng: random.Random, stream_idx: int) -> tuple[Request, Request]:
        """The first request of a stream, and the one that it sends whenever an answer has ended.

        What the first answer lacks is in its prompt, so that its context is that of a stream in mid-answer.
        """
        max_tokens = int(self._bench.args.stream_tokens)
        num_begun = max_tokens * (self._num_streams - 1 - stream_idx) // self._num_streams
        return (
            await self._request(rng, STREAM_PROMPT_TOKENS + num_begun, max_tokens - num_begun),
            await self._request(rng, STREAM_PROMPT_TOKENS, max_tokens),
        )

    async def _request(self, rng: random.Random, num_prompt_tokens: int, max_tokens: int) -> Request:
        prompt = await self._bench.maker.prompt(rng, num_prompt_tokens)
        return self._bench.maker.request(prompt, max_tokens).with_body(TOKENS_OF_EACH_EVENT)

    async def _run(self, first: Request, later: Request, answers: list[Answer]) -> None:
        request = first
        while True:
            answer = Answer(0.0)
            answers.append(answer)
            await ask(self._bench.client, request, self._bench.server.timeout_s, answer)
            if answer.error is not None:
                raise WorkloadError(f"a running stream failed: {answer.error} {answer.detail}")
            request = later

    def check(self) -> None:
        """Raise the error of a stream that has failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    @property
    def num_ended(self) -> int:
        """Answers that have ended, each of which made a stream begin another."""
        return sum(len(answers) - 1 for answers in self.answers)

    async def watch(self, seconds: float) -> Window:
        """Let them run. Returns the window."""
        start_s = self._bench.client.clock()
        await asyncio.sleep(seconds)
        self.check()
        return Window(start_s, self._bench.client.clock())

    # -- figures; only after the streams have ended, because until then the tokens of an event are not known ---------

    def tok_per_s(self, window: Window) -> float:
        """Rate of all streams in the window."""
        return sum(_tokens_in(window, answers) for answers in self.answers) / (window.end_s - window.start_s)

    def gaps(self, window: Window) -> list[tuple[float, float]]:
        """(seconds per token, tokens) of all events whose gap to the one before is in the window, at least in part.

        The time between two answers of a stream does not count.
        """
        gaps = [gap for answers in self.answers for answer in answers for gap in answer.gaps()]
        return [
            (seconds, tokens)
            for time_s, seconds, tokens in gaps
            if time_s > window.start_s and time_s - seconds * tokens < window.end_s
        ]

    def num_steps(self, window: Window) -> int:
        """The most tokens that any stream got in the window: without guesses, the engine's steps in it."""
        return round(max(_tokens_in(window, answers) for answers in self.answers))


def _tokens_in(window: Window, answers: Sequence[Answer]) -> float:
    """Tokens of one stream's answers that came in the window."""
    return sum(
        tokens
        for answer in answers
        for time_s, tokens in zip(answer.event_s, answer.event_tokens, strict=True)
        if window.holds(time_s)
    )


# -- a long prompt -----------------------------------------------------------------------------------------------


async def measure_interference(bench: Bench) -> Json:
    """A long prompt arrives beside running streams, and short requests arrive one after the other while it is read."""
    runs = []
    for run in range(bench.args.runs + bench.args.warm_up):
        figures = await interfere(bench, bench.args.seed + run)
        if run >= bench.args.warm_up:
            runs.append(figures)
    result = over_runs(runs)
    print(
        f"{bench.args.streams} streams, then {bench.args.document_tokens} tokens: time per token quiet p50 "
        f"{result['quiet_time_per_token_p50_ms']:.2f} ms (before {result['quiet_before_time_per_token_p50_ms']:.2f}, "
        f"after {result['quiet_after_time_per_token_p50_ms']:.2f}), p99 "
        f"{result['quiet_time_per_token_p99_ms']:.2f} ms; "
        f"meanwhile p50 {result['prefill_time_per_token_p50_ms']:.2f} ms, "
        f"p99 {result['prefill_time_per_token_p99_ms']:.2f} ms, {result['prefill_p99_over_quiet_p50']:.2f} of quiet p50"
    )
    print(
        f"  {result['num_short_requests']} short requests meanwhile: first token {result['short_ttft_s']:.3f} s, the "
        f"latest {result['short_ttft_latest_s']:.3f} s, {result['short_ttft_steps']:.0f} steps; long one: first token "
        f"{result['long_ttft_s']:.2f} s"
    )
    return result


async def interfere(bench: Bench, seed: int) -> Json:
    """One run: figures of the quiet streams, of the streams while a long prompt is read, and of the short requests."""
    rng = random.Random(seed)
    maker = bench.maker
    long_request = maker.request(await maker.prompt(rng, bench.args.document_tokens), LONG_ANSWER_TOKENS)
    prompts = [await maker.prompt(rng, SHORT_PROMPT_TOKENS) for _ in range(bench.args.short_requests)]
    shorts: list[Answer] = []
    long = Answer(0.0)
    async with RunningStreams(bench, bench.args.streams, seed) as streams:
        before = await streams.watch(bench.args.window_s)
        reading = asyncio.create_task(ask(bench.client, long_request, bench.server.timeout_s, long))
        await asyncio.sleep(bench.args.short_after_s)
        for prompt in prompts:
            if long.event_s or reading.done():
                break
            shorts.append(await bench.ask(maker.request(prompt, SHORT_ANSWER_TOKENS)))
            await asyncio.sleep(rng.random() * bench.args.short_after_s)
        await reading
        streams.check()
        after = await streams.watch(bench.args.window_s)
    if long.error is not None:
        raise WorkloadError(f"the long request failed: {long.error} {long.detail}")
    prefill = Window(long.sent_s, long.event_s[0])
    shorts = [short for short in shorts if prefill.holds(short.sent_s)]  # also those that had to wait for its end
    if not shorts:
        raise WorkloadError(f"the long prompt took only {long.ttft_s:.2f} s; make it longer, or lower --short-after-s")
    return interference_figures(streams, before, prefill, after) | {
        "streams_ended": streams.num_ended,
        "short_ttft_s": percentile([(short.ttft_s, 1) for short in shorts], 0.5),
        "short_ttft_latest_s": max(short.ttft_s for short in shorts),
        "short_ttft_steps": max(streams.num_steps(Window(short.sent_s, short.event_s[0])) for short in shorts),
        "num_short_requests": len(shorts),
        "long_ttft_s": long.ttft_s,
    }


def interference_figures(streams: RunningStreams, before: Window, prefill: Window, after: Window) -> Json:
    """What the streams felt: their times per token and their rates during the prefill, and before and after it.

    The quiet figures are of both windows. The p50 of each says whether the quiet pace has stayed the same.
    """
    gaps = {"before": streams.gaps(before), "after": streams.gaps(after)}
    result: Json = percentiles_ms("quiet_time_per_token", gaps["before"] + gaps["after"])
    for name, values in gaps.items():
        result[f"quiet_{name}_time_per_token_p50_ms"] = percentile(values, 0.5) * 1e3
    result |= percentiles_ms("prefill_time_per_token", streams.gaps(prefill))
    ratio = result["prefill_time_per_token_p99_ms"] / result["quiet_time_per_token_p50_ms"]
    result |= {"quiet_tok_per_s": (streams.tok_per_s(before) + streams.tok_per_s(after)) / 2}
    result |= {"prefill_tok_per_s": streams.tok_per_s(prefill)}
    return result | {"prefill_p99_over_quiet_p50": ratio}
