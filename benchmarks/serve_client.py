"""The client of `bench_serve.py`: requests to an OpenAI-compatible server, and the figures of its answers.

While a load runs, the client only notes when which bytes arrive. The client parses the bytes afterwards, so that
parsing long answers delays no other stream. aiohttp takes 14 to 19 us of CPU for an event, httpx 41 to 44
(docs/log/2026-11-23.md).
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.reporting import Samples

Json = dict[str, Any]
Weighted = tuple[float, float]  # a value and its weight

COMPLETIONS = "/v1/completions"
NUM_DETAIL_CHARACTERS = 300  # limit of the server's error message
KEEP_ALIVE_S = 2.0  # shorter than any server's, so that no request meets a connection that is being closed

clock = time.perf_counter


# -- answers -----------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """One answer as its client saw it, with times by `clock`. `read` fills the fields after `error`."""

    sent_s: float = 0.0
    end_s: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # parts of the body, and when they arrived
    error: str | None = None  # the kind of error, such as "http_429", "disconnected" or "stream_error"
    detail: str = ""  # the server's error message
    event_s: list[float] = field(default_factory=list)  # when each event with tokens arrived
    event_tokens: list[float] = field(default_factory=list)  # the event's number of tokens
    num_output_tokens: float = 0
    num_prompt_tokens: int = 0  # prompt tokens, by the server's count
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token. Only for answers with a token."""
        return self.event_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        return self.end_s - self.sent_s

    def gaps(self) -> list[tuple[float, float, float]]:
        """List, for each event after the first, its time, the seconds per token since the last, and its tokens."""
        triples = zip(self.event_s, self.event_s[1:], self.event_tokens[1:], strict=False)
        return [(now_s, (now_s - before_s) / tokens, tokens) for before_s, now_s, tokens in triples if tokens]

    def has_token(self) -> bool:
        """Return True once the first token has arrived. May be called while the answer arrives."""
        if self.status != 200:
            return False
        return any(choice["text"] for _, event in self._events() for choice in event.get("choices", ()))

    def _events(self) -> Iterator[tuple[float, Json]]:
        """List the events that have arrived, each with the time of the piece that completed its line."""
        rest = b""
        for time_s, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):  # other lines are comments, or separate events
                    data = line[5:].strip()
                    yield time_s, ({"done": True} if data == b"[DONE]" else json.loads(data))

    def read(self, is_stream: bool = True) -> None:
        """Read the pieces.

        The tokens of an event are those by which usage.completion_tokens has grown, if the server sends it with every
        event. Otherwise the total, which comes last, is divided equally among the events that have tokens.
        """
        try:
            error = self._read(is_stream)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as found:
            error = "malformed"
            self.detail = repr(found)
        self.error = self.error or error
        if self.error and not self.detail:
            body = b"".join(piece for _, piece in self.pieces[-2:])
            self.detail = body.decode(errors="replace")[-NUM_DETAIL_CHARACTERS:]
        self.pieces = []

    def _read(self, is_stream: bool) -> str | None:
        """Return what was wrong with the answer."""
        if self.status != 200:
            return f"http_{self.status}"
        events = self._events()
        if not is_stream:
            events = iter([(self.end_s, json.loads(b"".join(piece for _, piece in self.pieces)) | {"done": True})])
        usage: Json = {}
        totals: list[int | None] = []
        is_done, has_error, reason = False, False, None
        for time_s, event in events:
            is_done |= "done" in event
            has_error |= "error" in event
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                reason = choice.get("finish_reason") or reason
                # an answer can have no text, if its only token is a special token
                if choice["text"] or (choice.get("finish_reason") and not self.event_s):
                    self.event_s.append(time_s)
                    totals.append((event.get("usage") or {}).get("completion_tokens"))
        self.num_output_tokens = usage.get("completion_tokens", len(totals))
        self.num_prompt_tokens = usage.get("prompt_tokens") or 0
        self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        known = [total for total in totals if total is not None]
        if known and len(known) == len(totals):
            self.event_tokens = [now - before for before, now in zip([0, *known], known, strict=False)]
        else:
            self.event_tokens = [self.num_output_tokens / len(totals)] * len(totals) if totals else []
        if has_error:
            return "stream_error"
        if not is_done:
            return "no_done"  # the body ended, but not with [DONE]
        return None if reason in ("stop", "length") else f"finish_{reason}"


# -- requests ----------------------------------------------------------------------------------------------------


class Client:
    """Sends requests to one server. Enter it in the event loop that uses it."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """timeout_s: limit of one request, from its start to the end of its answer."""
        self.base_url, self._timeout_s = base_url, timeout_s
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    async def __aenter__(self) -> "Client":
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def ask(self, path: str, body: Json, answer: Answer | None = None) -> Answer:
        """Send a request and wait for its end. What goes wrong is in the answer's `error`; nothing is raised.

        answer: is filled while the answer arrives, if the caller wants to watch it. The caller calls its `read`.
        """
        answer = answer or Answer()
        answer.sent_s = clock()
        try:
            async with self._session.post(self.base_url + path, json=body) as response:
                answer.status = response.status
                async for piece in response.content.iter_any():  # Hot: for every event of every stream
                    answer.pieces.append((clock(), piece))
        except asyncio.TimeoutError:
            answer.error = "timeout"
        except aiohttp.ClientConnectorError as error:
            answer.error, answer.detail = "no_connection", str(error)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            answer.error, answer.detail = "disconnected", str(error)
        except aiohttp.ClientError as error:
            answer.error, answer.detail = "malformed", str(error)
        finally:  # also if the request is cancelled
            answer.end_s = clock()
        return answer


# Short common words, so that nearly all of them are one token of a large vocabulary
WORDS = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an had they you were
their one all we can her has there been if more when will would who so no out up into do any your what them time could
than other then its people only two first over new some like may well after made even most work way also many must
before back through years where much still should long see little world house water place right find still light paper
""".split()
NUM_COUNTED_WORDS = 2000


class WorkloadError(Exception):
    """A workload could not be measured with this server."""


class Prompts:
    """Makes random words with about the wanted number of tokens by the server's tokenizer (/tokenize, as in vLLM)."""

    def __init__(self, client: Client, model: str) -> None:
        self._client, self._model = client, model
        self._word_tokens = 0.0  # tokens of a word, on average

    async def prompt(self, rng: random.Random, num_tokens: int) -> str:
        if not self._word_tokens:
            text = " ".join(random.Random(0).choices(WORDS, k=NUM_COUNTED_WORDS))
            self._word_tokens = len(await self.token_ids(text)) / NUM_COUNTED_WORDS
        return " ".join(rng.choices(WORDS, k=max(1, round(num_tokens / self._word_tokens))))

    async def token_ids(self, prompt: str) -> list[int]:
        answer = await self._client.ask("/tokenize", {"model": self._model, "prompt": prompt})
        content = b"".join(piece for _, piece in answer.pieces)
        if answer.error is not None or answer.status != 200:
            said = answer.error or f"{answer.status} {content[:NUM_DETAIL_CHARACTERS].decode(errors='replace')}"
            raise WorkloadError(f"/tokenize, which says how long prompts are, answered {said}")
        return list(json.loads(content)["tokens"])


@dataclass
class Bench:
    """State that the workloads share.

    command: the words that started the server; empty if it was running already. sent: the requests of each run, for a
    comparison with the engine.
    """

    args: argparse.Namespace
    client: Client
    prompts: Prompts
    command: Sequence[str] = ()
    sent: list[list[Json]] = field(default_factory=list)

    async def request(self, rng: random.Random, num_prompt_tokens: int, max_tokens: int, **more: Any) -> Json:
        """The body of a request with a new prompt."""
        return self.body(await self.prompts.prompt(rng, num_prompt_tokens), max_tokens, **more)

    def body(self, prompt: str, max_tokens: int, **more: Any) -> Json:
        body = {"model": self.args.model, "prompt": prompt, "temperature": 0.6, "max_tokens": max_tokens}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body |= more | self.args.extra_body
        return {name: value for name, value in body.items() if value is not None}

    async def ask(self, body: Json) -> Answer:
        """The answer to one request that has to succeed."""
        answer = await self.client.ask(COMPLETIONS, body)
        answer.read("stream" in body)
        if answer.error is not None:
            raise WorkloadError(f"a request failed: {answer.error} {answer.detail}")
        return answer

    async def engine_requests(self, bodies: Sequence[Json]) -> list[Json]:
        """The same requests for an engine without a server, with token ids instead of text."""
        return [
            {
                "prompt_token_ids": await self.prompts.token_ids(body["prompt"]),
                "max_tokens": body["max_tokens"],
                "temperature": body["temperature"],
            }
            for body in bodies
        ]


# -- figures -----------------------------------------------------------------------------------------------------

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentile(values: Iterable[Weighted], share: float) -> float:
    """The smallest value such that all values up to it have this share of the weight."""
    ordered = sorted(values)
    assert ordered, "a percentile of nothing"
    limit = share * sum(weight for _, weight in ordered) * (1 - 1e-12)  # sums of weights are rounded
    weight_so_far = 0.0
    for value, weight in ordered:
        weight_so_far += weight
        if weight_so_far >= limit:
            return value
    return ordered[-1][0]


def percentiles_ms(name: str, values_s: Sequence[Weighted]) -> Json:
    """p50, p90 and p99 in milliseconds; nothing if there are no values."""
    if not values_s:
        return {}
    return {f"{name}_{label}_ms": percentile(values_s, share) * 1e3 for label, share in SHARES.items()}


def load_figures(answers: Sequence[Answer]) -> Json:
    """The figures of one run. Answers with an error do not count for rates and times.

    ttft: from the request to the first token. time_per_token: from one event to the next, divided by the tokens of the
    event and weighted with them. latency: of the whole request.
    """
    good = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    result: Json = {"num_requests": len(answers), "num_errors": len(answers) - len(good), "errors": dict(errors)}
    if not good:
        return result
    wall_s = max(answer.end_s for answer in good) - min(answer.sent_s for answer in good)
    num_output_tokens = sum(answer.num_output_tokens for answer in good)
    result |= {"wall_s": wall_s, "request_per_s": len(good) / wall_s, "output_tok_per_s": num_output_tokens / wall_s}
    result |= {"num_prompt_tokens": sum(answer.num_prompt_tokens for answer in good)}
    result |= {"num_output_tokens": num_output_tokens}
    result |= percentiles_ms("ttft", [(answer.ttft_s, 1) for answer in good if answer.event_s])
    gaps = [(seconds, tokens) for answer in good for _, seconds, tokens in answer.gaps()]
    result |= percentiles_ms("time_per_token", gaps)
    return result | percentiles_ms("latency", [(answer.latency_s, 1) for answer in good])


def over_runs(runs: Sequence[Json]) -> Json:
    """Median, minimum and maximum of each figure. Counts of requests and errors are added up.

    A run whose requests all failed lacks some figures; these come from the other runs.
    """
    result: Json = {"num_runs": len(runs)}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if key in run]
        if key == "errors":
            result[key] = dict(sum(map(Counter, values), Counter()))
        elif key.startswith("num_"):
            result[key] = sum(values)
        else:
            result |= Samples(tuple(values)).as_json(key)
    return result


def show(title: str, result: Json, *keys: str) -> None:
    """Print the figures that exist, with their ranges over the runs."""
    print(title)
    for key in keys:
        if key in result:
            print(f"  {key:34} {result[key]:10,.3f} ({result[f'{key}_min']:,.3f} to {result[f'{key}_max']:,.3f})")
