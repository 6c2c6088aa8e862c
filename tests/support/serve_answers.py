"""What the tests of the load generator share: a time limit, requests, and answers made by hand."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from benchmarks.serve_client import CHAT, COMPLETIONS, Answer, Request

T = TypeVar("T")

TIMEOUT_S = 60.0


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


def stream(max_tokens: int = 5, path: str = COMPLETIONS, **body: Any) -> Request:
    """A request for a stream. Its prompt has two tokens."""
    prompt = {"messages": [{"role": "user", "content": "a b"}]} if path == CHAT else {"prompt": "a b"}
    return Request(path, {"max_tokens": max_tokens, "stream": True} | prompt | body, 2)


def made_answer(sent_s: float, *event_s: float, error: str | None = None) -> Answer:
    """An answer with two tokens in each event."""
    tokens = [2.0] * len(event_s)
    end_s = event_s[-1] if event_s else sent_s
    return Answer(sent_s, end_s, list(event_s), tokens, sum(tokens), 10, 0, error)
