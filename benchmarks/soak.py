"""Soak: many clients of all kinds against `nanovllm serve`, for a long time, in a pool that is too small for them.

    python -m benchmarks.soak --requests 100000 --minutes 40 --json soak.json
    python -m benchmarks.soak --requests 500 -- --enable-cpu-offload --num-gpu-blocks 3 --num-cpu-blocks 40

What follows `--` are flags of the server. Every request must end in the one way that its client expects, and seeded
requests must get the answers of an idle engine. Memory, file descriptors and threads of the server must be the same in
the last tenth as in the second one. Exits with 1 if anything is not so.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak_cases import COMPLETIONS, Case, bad_request, make_cases, texts_of
from nanovllm.demo.retrieval_model import build_retrieval_model

HOST = "127.0.0.1"
SMALL_POOL = ("--num-kvcache-blocks", "12", "--max-num-seqs", "12", "--max-num-batched-tokens", "256")
WAYS = {
    "whole": 30,
    "stream": 30,
    "slow": 5,
    "bad": 15,
    "cut body": 3,
    "leave at once": 5,
    "leave early": 10,
    "look": 2,
}
NUM_SAMPLES = 100  # of the server's memory, spread over the run
MAX_RSS_GROWTH = 0.03  # from the second tenth to the last
WARM_AFTER = 1000  # requests; a run whose second tenth comes earlier says nothing about memory
TIMEOUT_S = 120.0


@dataclass
class Usage:
    """What the server's process holds."""

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
        """From the second tenth of the samples to the last one: of the RSS as a share, of the others as numbers."""
        tenth = max(1, len(self.usage) // 10)
        first, last = self.usage[tenth : 2 * tenth], self.usage[-tenth:]

        def medians(name: str) -> tuple[float, float]:
            early, late = (statistics.median(getattr(usage, name) for usage in part) for part in (first, last))
            return early, late

        early, late = medians("rss_bytes")
        numbers = {name: late - early for name in ("num_files", "num_threads") for early, late in (medians(name),)}
        return {"rss_share": late / early - 1, **numbers}


class Client:
    """Does one request after another, each in a random way, and notes how it ended."""

    def __init__(self, port: int, cases: Sequence[Case], report: Report, rng: random.Random) -> None:
        self._port, self._cases, self._report, self._rng = port, cases, report, rng

    async def request(self) -> None:
        way = self._rng.choices(list(WAYS), WAYS.values())[0]
        try:
            end = await asyncio.wait_for(getattr(self, "_" + way.replace(" ", "_"))(), TIMEOUT_S)
        except Exception as error:
            self._report.faults.append(f"{way}: {type(error).__name__}: {error}")
            end = "fault"
        self._report.ends[f"{way}: {end}"] += 1

    async def _whole(self) -> str:
        return await self._ask(self._rng.choice(self._cases), {})

    async def _stream(self) -> str:
        return await self._ask(self._rng.choice(self._cases), {"stream": True})

    async def _slow(self) -> str:
        return await self._ask(self._rng.choice(self._cases), {"stream": True}, pause_s=0.02)

    async def _ask(self, case: Case, more: dict[str, Any], pause_s: float = 0.0) -> str:
        status, payload = await self._send(case.path, json.dumps(case.body | more).encode(), pause_s)
        if status in (429, 503):  # the queue was full, which is an answer
            return f"refused with {status}"
        assert status == 200, f"status {status}: {payload[:200]!r}"
        texts = texts_of(case.path, payload, "stream" in more, case.body.get("n", 1))
        assert texts == case.texts, f"{case.body} {more} was answered {texts}, an idle engine says {case.texts}"
        return "right"

    async def _bad(self) -> str:
        path, body = bad_request(self._rng)
        status, payload = await self._send(path, body)
        assert 400 <= status < 500 and "error" in json.loads(payload), f"{body[:80]!r} got {status}: {payload[:200]!r}"
        return "refused"

    async def _cut_body(self) -> str:
        """Promise more than is sent."""
        _, writer = await asyncio.open_connection(HOST, self._port)
        writer.write(_head(COMPLETIONS, 1000) + b'{"prompt": "x')
        await _close(writer)
        return "left"

    async def _leave_at_once(self) -> str:
        _, writer = await self._begin(self._rng.choice(self._cases), {"stream": self._rng.random() < 0.5})
        await _close(writer)
        return "left"

    async def _leave_early(self) -> str:
        """After some of the answer has come."""
        reader, writer = await self._begin(self._rng.choice(self._cases), {"stream": True, "max_tokens": 200})
        await reader.read(self._rng.randrange(1, 2000))
        await _close(writer)
        return "left"

    async def _look(self) -> str:
        path = self._rng.choice(("/health", "/metrics", "/v1/models", "/version"))
        status, _ = await self._send(path, b"", method="GET")
        assert status == 200, f"{path}: {status}"
        return "seen"

    async def _begin(self, case: Case, more: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        body = json.dumps(case.body | more).encode()
        reader, writer = await asyncio.open_connection(HOST, self._port)
        writer.write(_head(case.path, len(body)) + body)
        await writer.drain()
        return reader, writer

    async def _send(self, path: str, body: bytes, pause_s: float = 0.0, method: str = "POST") -> tuple[int, bytes]:
        """Status and body of the response. `pause_s`: between reads of a few hundred bytes."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(_head(path, len(body), method) + body)
            parts = []
            while part := await reader.read(300 if pause_s else 1 << 16):
                parts.append(part)
                await asyncio.sleep(pause_s)
        finally:
            await _close(writer)
        head, _, payload = b"".join(parts).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            payload = _dechunked(payload)
        return int(head.split(b" ", 2)[1]), payload


def _head(path: str, num_bytes: int, method: str = "POST") -> bytes:
    fields = f"Host: {HOST}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}"
    return f"{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


def _dechunked(payload: bytes) -> bytes:
    parts = []
    while payload:
        size, _, payload = payload.partition(b"\r\n")
        length = int(size, 16)
        parts.append(payload[:length])
        payload = payload[length + 2 :]
    return b"".join(parts)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return  # the server was faster


async def run_clients(port: int, pid: int, cases: Sequence[Case], args: argparse.Namespace) -> Report:
    report = Report()
    start_s = time.monotonic()
    end_s = start_s + args.minutes * 60
    every = max(1, args.requests // NUM_SAMPLES)

    async def work(number: int) -> None:
        client = Client(port, cases, report, random.Random(args.seed + number))
        while report.num_requests < args.requests and time.monotonic() < end_s:
            report.num_requests += 1
            if report.num_requests % every == 0:
                report.usage.append(Usage.of(pid))
            await client.request()

    await asyncio.gather(*(work(number) for number in range(args.clients)))
    report.faults += await _what_is_left(port)
    report.seconds = time.monotonic() - start_s
    return report


async def _what_is_left(port: int) -> list[str]:
    """Requests that the server still counts after all clients have gone."""
    client = Client(port, (), Report(), random.Random(0))
    names = ("num_requests_running", "num_requests_waiting", "num_answers_in_queue")
    left: list[str] = []
    for _ in range(50):
        _, metrics = await client._send("/metrics", b"", method="GET")
        lines = [
            line for line in metrics.decode().splitlines() if line.startswith(tuple(f"nanovllm:{n}" for n in names))
        ]
        left = [f"at the end: {line}" for line in lines if float(line.split()[-1])]
        if not left:
            break
        await asyncio.sleep(0.1)
    return left


def start_server(model: str, flags: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The process and its port, once it answers."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm", "serve", "--model", model, "--host", HOST, "--port", str(port), *flags]
    process = subprocess.Popen(command)
    deadline_s = time.monotonic() + 120
    while True:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
            return process, port
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline_s, "the server has not started"
            time.sleep(0.1)


def faults_of(report: Report, status: int) -> list[str]:
    """Everything that is not as it should be."""
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
    parser.add_argument("server_flags", nargs="*", help="of nanovllm serve, after --")
    args = parser.parse_args(argv)

    model = str(build_retrieval_model())
    cases = make_cases(model, {"device": "cpu", "num_kvcache_blocks": 16}, args.cases, args.seed)
    process, port = start_server(model, ["--device", "cpu", *(args.server_flags or SMALL_POOL)])
    try:
        report = asyncio.run(run_clients(port, process.pid, cases, args))
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
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
