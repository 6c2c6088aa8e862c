"""Soak: many clients of all kinds against `nanovllm serve`, for a long time, in a pool that is too small for them.

    python -m benchmarks.soak --requests 100000 --minutes 40 --json soak.json
    python -m benchmarks.soak --requests 500 -- --enable-cpu-offload --num-gpu-blocks 3 --num-cpu-blocks 40

The flags after `--` go to the server. Every request must end in the one way that its client expects, and seeded
requests must get the answers of an idle engine. Memory, file descriptors and threads of the server must be the same in
the last tenth of the run as in the second tenth. Exits with 1 if one of these conditions fails.
"""

import argparse
import asyncio
import json
import random
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from benchmarks.server_process import ServerProcess
from nanovllm import LLM, SamplingParams
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.sampling_params import StructuredOutputs

Json = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB_SIZE = 256  # of the built-in model
FEATURES: tuple[Json, ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05},
    {"repetition_penalty": 1.2, "temperature": 0.7},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.9},
    {"logit_bias": {"10": -100, "32": 2.5}, "temperature": 0.6},
    {"min_tokens": 4, "stop": ["\n"]},
    {"n": 2, "temperature": 1.0},
    {"logprobs": 2},
    {"bad_words": ["the"], "temperature": 0.5},
    {"structured_outputs": {"choice": ["left", "right", "straight on"]}, "temperature": 1.0},
    {"structured_outputs": {"regex": "[a-f]{3,9}"}, "temperature": 1.0},
)
BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b'{"prompt": 1}',
    b'{"prompt": "x", "use_beam_search": true}',
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "temprature": 1}',
    b'{"prompt": "x", "logit_bias": {"999999": 1}}',
    b'{"prompt": "x", "model": "somebody else\'s"}',
    b'{"prompt": [1, 2, 1000000]}',
    b'{"prompt": "x", "structured_outputs": {"regex": "("}}',
    b'{"prompt": "' + b"x" * 100_000 + b'", "max_tokens": 1}',
)


JSON_HEADERS = {"Content-Type": "application/json"}
SMALL_POOL = ("--num-kvcache-blocks", "12", "--max-num-seqs", "12", "--max-num-batched-tokens", "256")
NUM_SAMPLES = 100  # measurements of the server's memory, spread over the run
MAX_RSS_GROWTH = 0.03  # from the second tenth of the run to the last
WARM_AFTER = 1000  # requests; a run whose second tenth ends earlier proves nothing about memory
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """A good request without `stream`, and the texts of its answers on an idle engine, one for each choice."""

    path: str
    body: Json
    texts: list[str] = field(default_factory=list)


def make_cases(model: str, options: Json, num_cases: int, seed: int) -> list[Case]:
    """Seeded requests of random lengths with all features, answered one by one by a separate engine."""
    rng = random.Random(seed)
    with LLM(model, **options) as llm:
        return [_answered(llm, *_request(rng, FEATURES[i % len(FEATURES)])) for i in range(num_cases)]


def _request(rng: random.Random, features: Json) -> tuple[str, Json]:
    """Half of the prompts begin with the same lines, so that they share blocks.

    No request is greedy: two continuations can be equally likely for the built-in model, and then rounding decides
    between them.
    """
    shared = "".join(f"line {i} of the text that many prompts share\n" for i in range(rng.choice((0, 0, 3, 20))))
    lines = (f"{rng.choice(('key', 'name', 'place'))} {rng.randrange(50)} is {rng.randrange(10**6)}" for _ in range(40))
    text = shared + "\n".join(list(lines)[: rng.randrange(1, 12)])
    body = {"max_tokens": rng.randrange(4, 24), "seed": rng.randrange(2**31), "temperature": 0.6} | features
    if rng.random() < 0.3 and "logprobs" not in features:
        return CHAT, body | {"messages": [{"role": "user", "content": text}]}
    return COMPLETIONS, body | {"prompt": text}


def _answered(llm: LLM, path: str, body: Json) -> Case:
    fields = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputs(**fields["structured_outputs"])
    params = SamplingParams(**fields)
    prompt = llm.chat_token_ids(body["messages"])[0] if path == CHAT else body["prompt"]
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    return Case(path, body, [each["text"] or "" for each in output.get("outputs", [output])])


def bad_request(rng: random.Random) -> tuple[str, bytes]:
    """Make a body that the server refuses, and its path."""
    if rng.random() < 0.3:  # noise in place of values
        keys = ("prompt", "messages", "max_tokens", "stop", "n", "stream", "response_format", "tools")
        noise = (None, -1, 1e99, "", [], {}, [None], {"type": "?"}, "\u0000", True)
        body = {key: rng.choice(noise) for key in rng.sample(keys, 4)} | {"use_beam_search": True}
        return rng.choice((COMPLETIONS, CHAT)), json.dumps(body).encode()
    return COMPLETIONS, rng.choice(BAD_BODIES)


def texts_of(path: str, payload: bytes, is_stream: bool, num_choices: int) -> list[str]:
    """Return the texts of an answer's choices. Raises ValueError for an answer with an unexpected end."""
    texts = [""] * num_choices
    reasons: list[str | None] = [None] * num_choices
    events = [json.loads(payload)] if not is_stream else _events(payload)
    for event in events:
        if "error" in event:
            raise ValueError(f"an error in the answer: {event['error']}")
        for choice in event["choices"]:
            part = choice.get("delta" if is_stream else "message") if path == CHAT else choice
            texts[choice["index"]] += (part.get("content") if path == CHAT else part["text"]) or ""
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    if not all(reason in ("stop", "length") for reason in reasons):
        raise ValueError(f"finish reasons {reasons}")
    return texts


def _events(payload: bytes) -> list[Json]:
    # Lines that begin with a colon are comments, which keep a slow stream alive
    *events, done = [line[6:] for line in payload.decode().splitlines() if line.startswith("data: ")] or [""]
    if done != "[DONE]":
        raise ValueError("the stream has no end")
    return [json.loads(event) for event in events]


# -- what the server holds ---------------------------------------------------------------------------------------


class Usage(NamedTuple):
    """Resources that the server's process holds."""

    rss_bytes: int
    num_files: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(int(status["VmRSS"].split()[0]) * 1024, num_files, int(status["Threads"]))


@dataclass
class Report:
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    num_requests: int = 0
    seconds: float = 0.0

    def growth(self) -> dict[str, float]:
        """Growth from the second tenth of the samples to the last tenth: of the RSS as a share, of
        others as numbers.
        """
        tenth = max(1, len(self.usage) // 10)
        early, late = (
            [statistics.median(values) for values in zip(*part, strict=True)]
            for part in (self.usage[tenth : 2 * tenth], self.usage[-tenth:])
        )
        return {"rss_share": late[0] / early[0] - 1, "num_files": late[1] - early[1], "num_threads": late[2] - early[2]}


class Client:
    """Makes one request after another, each in a random way, and records how it ended."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, cases: Sequence[Case], report: Report, rng: random.Random
    ) -> None:
        self._url, self._session = url, session
        self._cases, self._report, self._rng = cases, report, rng

    async def request(self) -> None:
        ways: dict[tuple[str, int], Callable[[], Awaitable[str]]] = {  # with their weights
            ("whole", 30): lambda: self._ask({}),
            ("stream", 30): lambda: self._ask({"stream": True}),
            ("slow", 5): lambda: self._ask({"stream": True}, pause_s=0.02),
            ("bad", 15): self._bad,
            ("cut body", 3): lambda: self._send_and_leave(COMPLETIONS, b'{"prompt": "x', num_bytes=1000),
            ("leave at once", 5): self._leave_at_once,
            ("leave early", 10): self._leave_early,
            ("look", 2): self._look,
        }
        (way, _), do = self._rng.choices(list(ways.items()), [weight for _, weight in ways])[0]
        try:
            end = await asyncio.wait_for(do(), TIMEOUT_S)
        except Exception as error:
            self._report.faults.append(f"{way}: {type(error).__name__}: {error}")
            end = "fault"
        self._report.ends[f"{way}: {end}"] += 1

    async def _ask(self, more: Json, pause_s: float = 0.0) -> str:
        """pause_s: between reads of a few hundred bytes."""
        case = self._rng.choice(self._cases)
        async with self._session.post(self._url + case.path, json=case.body | more) as response:
            parts = []
            while part := await response.content.read(300 if pause_s else 1 << 16):
                parts.append(part)
                await asyncio.sleep(pause_s)
        payload = b"".join(parts)
        if response.status in (429, 503):  # the queue was full, which is a valid answer
            return f"refused with {response.status}"
        assert response.status == 200, f"status {response.status}: {payload[:200]!r}"
        texts = texts_of(case.path, payload, "stream" in more, case.body.get("n", 1))
        assert texts == case.texts, f"{case.body} {more} was answered {texts}, an idle engine says {case.texts}"
        return "right"

    async def _bad(self) -> str:
        path, body = bad_request(self._rng)
        async with self._session.post(self._url + path, data=body, headers=JSON_HEADERS) as response:
            payload = await response.read()
        refused = 400 <= response.status < 500 and "error" in json.loads(payload)
        assert refused, f"{body[:80]!r} got {response.status}: {payload[:200]!r}"
        return "refused"

    async def _leave_at_once(self) -> str:
        case = self._rng.choice(self._cases)
        body = json.dumps(case.body | {"stream": self._rng.random() < 0.5}).encode()
        return await self._send_and_leave(case.path, body, len(body))

    async def _send_and_leave(self, path: str, body: bytes, num_bytes: int) -> str:
        """Announce a body of `num_bytes`, send `body`, and leave."""
        address = urlsplit(self._url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        writer.close()
        with suppress(OSError):  # the server has closed the connection first
            await writer.wait_closed()
        return "left"

    async def _leave_early(self) -> str:
        """After some of the answer has come."""
        case = self._rng.choice(self._cases)
        body = case.body | {"stream": True, "max_tokens": 200}
        async with self._session.post(self._url + case.path, json=body) as response:
            await response.content.read(self._rng.randrange(1, 2000))
            response.close()
        return "left"

    async def _look(self) -> str:
        path = self._rng.choice(("/health", "/metrics", "/v1/models", "/version"))
        async with self._session.get(self._url + path) as response:
            assert response.status == 200, f"{path}: {response.status}"
        return "seen"


async def run_clients(url: str, pid: int, cases: Sequence[Case], args: argparse.Namespace) -> Report:
    report = Report()
    start_s = time.monotonic()
    end_s = start_s + args.minutes * 60
    every = max(1, args.requests // NUM_SAMPLES)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # every request has a separate connection
    async with aiohttp.ClientSession(connector=connector) as session:

        async def work(number: int) -> None:
            client = Client(url, session, cases, report, random.Random(args.seed + number))
            while report.num_requests < args.requests and time.monotonic() < end_s:
                report.num_requests += 1
                if report.num_requests % every == 0:
                    report.usage.append(Usage.of(pid))
                await client.request()

        await asyncio.gather(*(work(number) for number in range(args.clients)))
        report.faults += await _what_is_left(url, session)
    report.seconds = time.monotonic() - start_s
    return report


async def _what_is_left(url: str, session: aiohttp.ClientSession) -> list[str]:
    """Requests that the server still counts after all clients have gone."""
    names = ("num_requests_running", "num_requests_waiting", "num_answers_in_queue")
    left: list[str] = []
    for _ in range(50):
        async with session.get(url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        counts = [line for line in lines if line.startswith(tuple(f"nanovllm:{name}" for name in names))]
        left = [f"at the end: {line}" for line in counts if float(line.split()[-1])]
        if not left:
            break
        await asyncio.sleep(0.1)
    return left


def faults_of(report: Report, status: int) -> list[str]:
    """List all violated conditions."""
    growth = report.growth()
    faults = report.faults.copy()
    if report.num_requests >= 10 * WARM_AFTER and growth["rss_share"] > MAX_RSS_GROWTH:
        faults.append(f"memory has grown by {growth['rss_share']:.1%}")
    faults += [f"{name} has grown by {growth[name]:g}" for name in ("num_files", "num_threads") if growth[name] > 2]
    if status != 0:
        faults.append(f"the server ended with status {status}")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=40, help="stop earlier, after this time")
    parser.add_argument("--clients", type=int, default=24, help="requests at once")
    parser.add_argument("--cases", type=int, default=120, help="different good requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("server_flags", nargs="*", help="flags of nanovllm serve, after --")
    args = parser.parse_args(argv)

    model = str(build_retrieval_model())
    cases = make_cases(model, {"device": "cpu", "num_kvcache_blocks": 16}, args.cases, args.seed)
    command = ["nanovllm", "serve", "--model", model, "--port", "{port}", "--device", "cpu"]
    with ServerProcess(shlex.join([*command, *(args.server_flags or SMALL_POOL)])) as server:
        server.wait_until_ready()
        report = asyncio.run(run_clients(server.url, server.pid, cases, args))
        status = server.stop()
    faults = faults_of(report, status)
    for end, count in sorted(report.ends.items()):
        print(f"{count:8,}  {end}")
    print(*faults[:20], sep="\n")
    result = {
        "num_requests": report.num_requests,
        "seconds": round(report.seconds, 1),
        "ends": dict(sorted(report.ends.items())),
        "num_faults": len(faults),
        "growth": report.growth(),
        "rss_bytes": report.usage[-1].rss_bytes,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
