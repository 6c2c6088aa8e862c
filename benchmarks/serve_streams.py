"""Streams that run all the time, and how a long prompt or many idle connections affect them.

Rates and times per token of the streams in one time window are compared with another window.
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
    show,
)

STREAM_PROMPT_TOKENS = 100
SHORT_PROMPT_TOKENS, SHORT_ANSWER_TOKENS = 200, 16
LONG_ANSWER_TOKENS = 4
SETTLE_S = 0.5  # between the first tokens of all streams and the first window
POLL_S = 0.005


class Window(NamedTuple):
    """A time window in which the streams are measured."""

    start_s: float
    end_s: float

    def holds(self, time_s: float) -> bool:
        return self.start_s < time_s <= self.end_s


async def _cancel(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RunningStreams:
    """Streams that run until they are cancelled. A stream whose answer ends begins another answer.

    Steps take longer as contexts grow. So each stream begins at another point of an answer, with the missing part in
    its prompt: contexts are evenly distributed from the first token on, and their mean stays the same.

    async with RunningStreams(bench, seed=0) as streams: ...
    """

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench, self._seed = bench, seed
        self.answers: list[list[Answer]] = [[] for _ in range(bench.args.streams)]  # a list for each stream
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
        for (first, later), answers in zip(bodies, self.answers, strict=True):
            self._tasks.append(asyncio.create_task(self._run(first, later, answers)))
        try:
            while not all(answers and answers[0].has_token() for answers in self.answers):
                self.check()
                await asyncio.sleep(POLL_S)
        except BaseException:
            await _cancel(self._tasks)
            raise
        await asyncio.sleep(SETTLE_S)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await _cancel(self._tasks)
        for answer in (answer for answers in self.answers for answer in answers):
            answer.read()
        if failed := next((answer for answers in self.answers for answer in answers[:-1] if answer.error), None):
            raise WorkloadError(f"a running stream failed: {failed.error} {failed.detail}")

    async def _run(self, body: Json, later: Json, answers: list[Answer]) -> None:
        while True:
            answers.append(Answer())
            answer = await self._bench.client.ask(COMPLETIONS, body, answers[-1])
            has_end = b"[DONE]" in b"".join(piece for _, piece in answer.pieces[-2:])
            if answer.status != 200 or not has_end:  # `read` would delay the other streams, so it is called at the end
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

    # the other figures only after the streams have ended, because answers are read at the end

    def tok_per_s(self, window: Window) -> float:
        """The rate of all streams in the window."""
        return sum(self._tokens_in(window)) / (window.end_s - window.start_s)

    def num_steps(self, window: Window) -> int:
        """The most tokens that a stream got in the window: without draft tokens, the number of the engine's steps."""
        return round(max(self._tokens_in(window)))

    def gaps(self, window: Window) -> list[Weighted]:
        """(seconds per token, tokens) of all events whose gap to the previous event overlaps the window.

        The time between two answers of a stream does not count.
        """
        gaps = [gap for answers in self.answers for answer in answers for gap in answer.gaps()]
        return [
            (seconds, tokens)
            for time_s, seconds, tokens in gaps
            if time_s > window.start_s and time_s - seconds * tokens < window.end_s
        ]

    def _tokens_in(self, window: Window) -> list[float]:
        """Tokens of each stream that arrived in the window."""
        timed = [
            [pair for a in answers for pair in zip(a.event_s, a.event_tokens, strict=True)] for answers in self.answers
        ]
        return [sum(tokens for time_s, tokens in pairs if window.holds(time_s)) for pairs in timed]


async def measure_interference(bench: Bench) -> Json:
    """Measure running streams while a long prompt is read and short requests arrive one after the other."""
    args = bench.args
    result = over_runs(
        [await interfere(bench, args.seed + run) for run in range(args.runs + args.warm_up)][args.warm_up :]
    )
    keys = [f"{when}_time_per_token_{label}_ms" for when in ("quiet", "prefill") for label in ("p50", "p99")]
    keys += ["prefill_p99_over_quiet_p50", "short_ttft_s", "short_ttft_latest_s", "long_ttft_s"]
    show(f"{args.streams} streams, then {args.document_tokens} tokens:", result, *keys)
    return result


async def interfere(bench: Bench, seed: int) -> Json:
    """One run: figures of the quiet streams, of the streams while a long prompt is read, and of the short requests.

    The quiet figures are of windows before and after the prompt. The p50 of each says whether the pace stayed the same.
    """
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
    # Also chats that had to wait for the end of the prefill
    shorts = [short for short in shorts if prefill.holds(short.sent_s)]
    if not shorts:
        raise WorkloadError(f"the long prompt took only {long.ttft_s:.2f} s; make it longer, or lower --short-after-s")
    gaps_before, gaps_after = streams.gaps(before), streams.gaps(after)
    result = percentiles_ms("quiet_time_per_token", gaps_before + gaps_after)
    result |= percentiles_ms("prefill_time_per_token", streams.gaps(prefill))
    return result | {
        "quiet_before_time_per_token_p50_ms": percentile(gaps_before, 0.5) * 1e3,
        "quiet_after_time_per_token_p50_ms": percentile(gaps_after, 0.5) * 1e3,
        "prefill_p99_over_quiet_p50": result["prefill_time_per_token_p99_ms"] / result["quiet_time_per_token_p50_ms"],
        "quiet_tok_per_s": (streams.tok_per_s(before) + streams.tok_per_s(after)) / 2,
        "prefill_tok_per_s": streams.tok_per_s(prefill),
        "streams_ended": sum(len(answers) - 1 for answers in streams.answers),
        "short_ttft_s": percentile([(short.ttft_s, 1) for short in shorts], 0.5),
        "short_ttft_latest_s": max(short.ttft_s for short in shorts),
        "short_ttft_steps": max(streams.num_steps(Window(short.sent_s, short.event_s[0])) for short in shorts),
        "num_short_requests": len(shorts),
        "long_ttft_s": long.ttft_s,
    }


# -- idle and slow connections -----------------------------------------------------------------------------------

NUM_OPENING = 50  # connections at a time
BYTES_PER_WINDOW = 3  # bytes that a slow connection reads while the streams are measured
SPARE_FILES = 200
PAUSE_S = 0.5  # after opening the connections, and after closing them


class IdleConnections:
    """Connections that stay open. A third sends nothing, a third a slow head, a third a slow body.

    Each slow connection sends a byte every `byte_interval_s`; the connections take turns within this time.
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
            if failed := next((task for task in self._tasks if task.done()), None):
                failed.result()
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await _cancel(self._tasks)

    async def _keep_open(self, index: int) -> None:
        """Open a connection, and open it again whenever the server has closed it."""
        is_secure = self._address.scheme == "https"
        address = self._address.hostname, self._address.port or (443 if is_secure else 80)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {address[0]}\r\nContent-Length: 10000\r\n".encode()
        sent, slow = ((b"", b""), (head, b"a"), (head + b"\r\n", b" "))[index % 3]
        interval_s = self._byte_interval_s if slow else None
        while True:
            async with self._opening:
                reader, writer = await asyncio.open_connection(*address, ssl=is_secure or None)
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
    """Raise this process's limit of open files, which servers that it starts inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(num_files, hard)), hard))


async def measure_idle_connections(bench: Bench) -> Json:
    """The rate of running streams with the connections open, relative to the same streams without them.

    Each run measures both, in two passes that differ in nothing else. Which comes first changes from run to run.
    """
    args, runs = bench.args, []
    for run in range(args.runs + args.warm_up):
        figures: Json = {}
        for num_connections in (args.idle_connections, 0) if run % 2 else (0, args.idle_connections):
            async with IdleConnections(
                bench.client.base_url, num_connections, args.window_s / BYTES_PER_WINDOW
            ) as idle:
                await asyncio.sleep(PAUSE_S)
                async with RunningStreams(bench, args.seed + run) as streams:
                    window = await streams.watch(args.window_s)
                figures["with_tok_per_s" if num_connections else "without_tok_per_s"] = streams.tok_per_s(window)
            if num_connections:
                figures |= {"open_connections": num_connections, "closed_by_server": idle.num_closed_by_server}
            await asyncio.sleep(PAUSE_S)
        runs.append(figures | {"with_over_without": figures["with_tok_per_s"] / figures["without_tok_per_s"]})
    result = over_runs(runs[args.warm_up :])
    show(f"{args.streams} streams with {args.idle_connections} connections, and without:", result, *runs[0])
    return result
