"""A small OpenAI-compatible server without a model, for tests of the load generator.

It answers with the word "word" as often as a request allows, sleeps where a model would compute, and misbehaves where a
test asks it to. A token is up to four letters with the space before them, or one other character.

    python tests/support/fake_openai.py --port 8000     # until SIGTERM
"""

import argparse
import asyncio
import json
import re
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

TOKEN = re.compile(r" ?[a-zA-Z]{1,4}|.", re.DOTALL)
FAULTS = ("429", "500", "close", "close_in_stream", "error_event", "bad_event", "no_done", "abort", "hang", "not_http")


def encode(text: str) -> list[int]:
    return [hash(token) % 1000 for token in TOKEN.findall(text)]


@dataclass
class FakeServer:
    """Runs on the loop that enters it. `faults`: what goes wrong with the next requests, None for nothing."""

    token_s: float = 0.0  # between tokens
    prompt_token_s: float = 0.0  # prefill, for tokens that no earlier prompt began with
    tokens_per_event: int = 1
    with_totals: bool = False  # usage with every event
    faults: list[str | None] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)  # one for each completion that was asked for
    num_connections: int = 0
    max_connections: int = 0  # at a time
    api_key: str | None = None
    _prompts: list[Any] = field(default_factory=list)

    async def __aenter__(self) -> "FakeServer":
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=2**24, backlog=1000)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.max_connections = max(self.max_connections, self.num_connections)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head.lower())
                body = await reader.readexactly(int(length[1]) if length else 0)
                path = head.split()[1].decode()
                await self._answer(path, json.loads(body) if body else {}, head.decode(), writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.num_connections -= 1
            writer.close()

    async def _answer(self, path: str, body: Json, head: str, writer: asyncio.StreamWriter) -> None:
        if self.api_key and f"Bearer {self.api_key}" not in head:
            return await self._write(writer, 401, {"error": {"message": "which key?"}})
        if path == "/tokenize":
            return await self._write(writer, 200, {"tokens": encode(body["prompt"])})
        if path == "/v1/models":
            return await self._write(writer, 200, {"data": [{"id": "fake"}]})
        if path in ("/health", "/version"):
            return await self._write(writer, 200, {"version": "1"})
        assert path == "/v1/completions", path
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if fault in ("429", "500"):
            return await self._write(writer, int(fault), {"error": {"message": "not now"}})
        if fault == "close":
            return writer.transport.abort()
        if fault == "not_http":
            return writer.write(b"220 mail.example.org ESMTP\r\n\r\n")
        if fault == "hang":
            await asyncio.sleep(3600)
        await self._complete(body, fault, writer)

    async def _complete(self, body: Json, fault: str | None, writer: asyncio.StreamWriter) -> None:
        prompt_ids = encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        num_cached = max((len(_common(prompt_ids, other)) for other in self._prompts), default=0)
        if self.prompt_token_s:
            self._prompts.append(prompt_ids)
            await asyncio.sleep(self.prompt_token_s * (len(prompt_ids) - num_cached))
        usage: Json = {"prompt_tokens": len(prompt_ids), "prompt_tokens_details": {"cached_tokens": num_cached}}
        reason = "abort" if fault == "abort" else "length"
        if not body.get("stream"):
            await asyncio.sleep(self.token_s * body["max_tokens"])
            choice = {"text": " word" * body["max_tokens"], "finish_reason": reason}
            usage["completion_tokens"] = body["max_tokens"]
            return await self._write(writer, 200, {"choices": [choice], "usage": usage})
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
        for num_before in range(0, body["max_tokens"], self.tokens_per_event):
            if num_before and fault in ("close_in_stream", "error_event", "bad_event"):
                if fault == "close_in_stream":
                    return writer.transport.abort()
                await self._event(writer, {"error": {"message": "broken"}} if fault == "error_event" else [])
                break
            num_tokens = min(self.tokens_per_event, body["max_tokens"] - num_before)
            choice = {"text": " word" * num_tokens, "finish_reason": None}
            total = {"usage": usage | {"completion_tokens": num_before + num_tokens}} if self.with_totals else {}
            await self._event(writer, {"choices": [choice]} | total)
            await asyncio.sleep(self.token_s * num_tokens)
        else:
            await self._event(writer, {"choices": [{"text": "", "finish_reason": reason}]})
            await self._event(writer, {"choices": [], "usage": usage | {"completion_tokens": body["max_tokens"]}})
        if fault != "no_done":
            await self._chunk(writer, b"data: [DONE]\n\n")
        await self._chunk(writer, b"")

    async def _event(self, writer: asyncio.StreamWriter, event: object) -> None:
        await self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    async def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()

    async def _write(self, writer: asyncio.StreamWriter, status: int, body: Json) -> None:
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)


def _common(first: list[int], second: list[int]) -> list[int]:
    """Return the beginning that both share."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return first[:index]
    return first[: len(second)]


class ServerThread:
    """A FakeServer in a thread, for tests of code that has an event loop of its own."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        async with self._server:
            self._is_ready.set()
            await self._ended.wait()

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._is_ready.wait(60), "the fake server did not start"
        return self._server

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-s", type=float, default=0.0)
    args = parser.parse_args()
    await FakeServer(token_s=args.token_s).start(args.port)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with suppress(asyncio.CancelledError):
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(main())
