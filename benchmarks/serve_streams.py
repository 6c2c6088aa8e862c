"""Streams that run all the time, and how they fare beside a long prompt or many idle connections.

Their rates and their times per token in one window of time are compared with those in another.
"""

import asyncio
import random
import resource
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks.serve_client import (
    COMPLETIONS,
    Answer,
    Bench,
    Json,
    Weighted,
    WorkloadError,
    clock,
    over_runs,
    percentile,
    percentiles_ms,
    with_range,
)

STREAM_PROMPT_TOKENS = 100
SHORT_PROMPT_TOKENS, SHORT_ANSWER_TOKENS = 200, 16
LONG_ANSWER_TOKENS = 4
SETTLE_S = 0.5  # between the first tokens of all streams and the first window
POLL_S = 0.005


class Window(NamedTuple):
    """A time during which the streams are watched."""

    start_s: float
    end_s: float

    def holds(self, time_s: float) -> bool:
        return self.start_s < time_s <= self.end_s


class RunningStreams:
    """Streams that run until they are cancelled. One whose answer ends begins another.

    Steps take longer as contexts grow. So each stream begins at another point of an answer, and what it lacks is in its
    prompt: the contexts are evenly distributed from the first token on, and their mean stays the same.

    async with RunningStreams(bench, seed=0) as streams: ...
    """

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench, self._seed = bench, seed
        self.answers: list[list[Answer]] = [[] for _ in range(bench.args.streams)]  # of each stream, in turn
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "RunningStreams":
        """Start the streams and wait until each has a token."""
        rng, max_tokens = random.Random(self._seed), self._bench.args.stream_tokens
        # the usage so far, which servers send as in vLLM, says how many tokens an event has
        more = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        bodies = []
        for stream_idx in range(len(self.answers)):
            num_begun = max_tokens * (len(self.answers) - 1 - stream_idx) // len(self.answers)
            sizes = (STREAM_PROMPT_TOKENS + num_begun, max_tokens - num_begun), (STREAM_PROMPT_TOKENS, max_tokens)
            bodies.append([await self._bench.request(rng, *size, **more) for size in sizes])
        try:
            for (first, later), answers in zip(bodies, self.answers, strict=True):
                self._tasks.append(asyncio.create_task(self._run(first, later, answers)))
            while not all(answers and answers[0].has_token() for answers in self.answers):
                self.check()
                await asyncio.sleep(POLL_S)
        except BaseException:
            await self._cancel()
            raise
        await asyncio.sleep(SETTLE_S)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._cancel()
        for answers in self.answers:
            for answer in answers:
                answer.read()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, body: Json, later: Json, answers: list[Answer]) -> None:
        while True:
            answers.append(Answer())
            answer = await self._bench.client.ask(COMPLETIONS, body, answers[-1])
            is_complete = b"[DONE]" in b"".join(piece for _, piece in answer.pieces[-2:])
            if answer.status != 200 or not is_complete:  # `read` would delay the other streams
                answer.read()
                raise WorkloadError(f"a running stream failed: {answer.error} {answer.detail}")
            body = later

    def check(self) -> None:
        """Raise the error of a stream that has failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def watch(self, seconds: float) -> Window:
        """Let them run. Returns the window."""
        start_s = clock()
        await asyncio.sleep(seconds)
        self.check()
        return Window(start_s, clock())

    # -- figures; only after the streams have ended, because until then their answers have not been read -------------

    @property
    def num_ended(self) -> int:
        """Answers that have ended, each of which made a stream begin another."""
        return sum(len(answers) - 1 for answers in self.answers)

    def tok_per_s(self, window: Window) -> float:
        """Rate of all streams in the window."""
        return sum(self._tokens_in(window)) / (window.end_s - window.start_s)

    def num_steps(self, window: Window) -> int:
        """The most tokens that any stream got in the window: without guesses, the engine's steps in it."""
        return round(max(self._tokens_in(window)))

    def gaps(self, window: Window) -> list[Weighted]:
        """(seconds per token, tokens) of all events whose gap to the one before is in the window, at least in part.

        The time between two answers of a stream does not count.
        """
        gaps = [gap for answers in self.answers for answer in answers for gap in answer.gaps()]
        return [
            (seconds, tokens)
            for time_s, seconds, tokens in gaps
            if time_s > window.start_s and time_s - seconds * tokens < window.end_s
        ]

    def _tokens_in(self, window: Window) -> list[float]:
        """Tokens of each stream that came in the window."""
        timed = [
            [pair for a in answers for pair in zip(a.event_s, a.event_tokens, strict=True)] for answers in self.answers
        ]
        return [sum(tokens for time_s, tokens in pairs if window.holds(time_s)) for pairs in timed]


async def measure_interference(bench: Bench) -> Json:
    """A long prompt arrives beside running streams, and short requests arrive one after the other while it is read."""
    args = bench.args
    runs = [await interfere(bench, args.seed + run) for run in range(args.runs + args.warm_up)]
    result = over_runs(runs[args.warm_up :])
    print(
        f"{args.streams} streams, then {args.document_tokens} tokens: time per token quiet p50 "
        f"{result['quiet_time_per_token_p50_ms']:.2f} ms (before {result['quiet_before_time_per_token_p50_ms']:.2f}, "
        f"after {result['quiet_after_time_per_token_p50_ms']:.2f}), p99 "
        f"{result['quiet_time_per_token_p99_ms']:.2f} ms; "
        f"meanwhile p50 {result['prefill_time_per_token_p50_ms']:.2f} ms, "
        f"p99 {result['prefill_time_per_token_p99_ms']:.2f} ms, {result['prefill_p99_over_quiet_p50']:.2f} of quiet p50"
    )
    print(
        f"{result['num_short_requests']} short requests meanwhile: first token {result['short_ttft_s']:.3f} s, latest "
        f"{result['short_ttft_latest_s']:.3f} s and {result['short_ttft_steps']:.0f} steps; "
        f"the long prompt {result['long_ttft_s']:.2f} s"
    )
    return result


async def interfere(bench: Bench, seed: int) -> Json:
    """One run: figures of the quiet streams, of the streams while a long prompt is read, and of the short requests."""
    args, rng = bench.args, random.Random(seed)
    long_body = await bench.request(rng, args.document_tokens, LONG_ANSWER_TOKENS)
    bodies = [await bench.request(rng, SHORT_PROMPT_TOKENS, SHORT_ANSWER_TOKENS) for _ in range(args.short_requests)]
    shorts: list[Answer] = []
    long = Answer()
    async with RunningStreams(bench, seed) as streams:
        before = await streams.watch(args.window_s)
        reading = asyncio.create_task(bench.client.ask(COMPLETIONS, long_body, long))
        await asyncio.sleep(args.short_after_s)
        for body in bodies:
            if long.has_token() or reading.done():
                break
            shorts.append(await bench.ask(body))
            await asyncio.sleep(rng.random() * args.short_after_s)
        await reading
        streams.check()
        after = await streams.watch(args.window_s)
    long.read()
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
    """The streams' times per token and their rates during the prefill, and before and after it.

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


# -- idle and slow connections -----------------------------------------------------------------------------------

NUM_OPENING = 50  # connections at a time
BYTES_PER_WINDOW = 3  # of each slow connection, while the streams are watched
SPARE_FILES = 200
PAUSE_S = 0.5  # after opening the connections, and after closing them


class IdleConnections:
    """Connections to the server that stay open. A third sends nothing, a third a slow head, a third a slow body.

    Each slow one sends a byte every `byte_interval_s`, and in this time they send one after the other.
    """

    def __init__(self, base_url: str, num_connections: int, byte_interval_s: float) -> None:
        self._address = urlsplit(base_url)
        self._num_connections, self._byte_interval_s = num_connections, byte_interval_s
        self._opening = asyncio.Semaphore(NUM_OPENING)
        self.num_opened = self.num_closed_by_server = 0

    async def __aenter__(self) -> "IdleConnections":
        allow_files(self._num_connections + SPARE_FILES)
        self._tasks = [asyncio.create_task(self._keep_open(index)) for index in range(self._num_connections)]
        while self.num_opened < self._num_connections:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_open(self, index: int) -> None:
        """Open a connection, and open it again whenever the server has closed it."""
        host, is_secure = self._address.hostname, self._address.scheme == "https"
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 10000\r\n".encode()
        sent, slow = ((b"", b""), (head, b"a"), (head + b"\r\n", b" "))[index % 3]
        interval_s = self._byte_interval_s if slow else None
        while True:
            async with self._opening:
                port = self._address.port or (443 if is_secure else 80)
                reader, writer = await asyncio.open_connection(host, port, ssl=is_secure or None)
            self.num_opened += 1
            ended = asyncio.ensure_future(reader.read())
            try:
                writer.write(sent)
                await asyncio.wait([ended], timeout=interval_s and interval_s * index / self._num_connections)
                while not ended.done():
                    writer.write(slow)
                    await asyncio.wait([ended], timeout=interval_s)
            finally:
                ended.cancel()
                writer.transport.abort()
            self.num_closed_by_server += 1


def allow_files(num_files: int) -> None:
    """Raise this process's limit of open files, which a server that it starts inherits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(num_files, hard)), hard))


async def measure_idle_connections(bench: Bench) -> Json:
    """The rate of running streams with the connections open, relative to that of the same streams without them.

    Each run measures both, in two passes that differ in nothing else. Which comes first changes from run to run.
    """
    args = bench.args
    runs = []
    for run in range(args.runs + args.warm_up):
        rates = {}
        for num_connections in (args.idle_connections, 0) if run % 2 else (0, args.idle_connections):
            interval_s = args.window_s / BYTES_PER_WINDOW
            async with IdleConnections(bench.client.base_url, num_connections, interval_s) as idle:
                await asyncio.sleep(PAUSE_S)
                async with RunningStreams(bench, args.seed + run) as streams:
                    window = await streams.watch(args.window_s)
                    if num_connections:
                        found = {"open_connections": num_connections, "closed_by_server": idle.num_closed_by_server}
            rates[num_connections] = streams.tok_per_s(window)
            await asyncio.sleep(PAUSE_S)
        beside, without = rates[args.idle_connections], rates[0]
        figures = {"without_tok_per_s": without, "with_tok_per_s": beside, "with_over_without": beside / without}
        runs.append(figures | found)
    result = over_runs(runs[args.warm_up :])
    print(
        f"{args.streams} streams: {result['without_tok_per_s']:,.1f} tok/s, beside {result['open_connections']:.0f} "
        f"idle or slow connections {result['with_tok_per_s']:,.1f}, ratio {with_range(result, 'with_over_without')}; "
        f"the server closed {result['closed_by_server']:.0f}"
    )
    return result
