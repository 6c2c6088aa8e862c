"""Server-sent events of an answer that has nothing to say for a long time."""

import asyncio
import gc
from typing import Any

import pytest

from nanovllm.entrypoints.server.answers import COMMENT, DONE, EventStream, is_sign_of_life


class SlowStream:
    """Updates of which the first one comes after `num_signs` signs of life."""

    def __init__(self, num_updates: int, num_signs: int) -> None:
        self._num_updates, self._num_signs, self.num_seen_signs, self.is_closed = num_updates, num_signs, 0, False

    async def __aiter__(self) -> Any:
        while self.num_seen_signs < self._num_signs:
            await asyncio.sleep(0.001)
        for i in range(self._num_updates):
            yield Update(i)

    def close(self) -> None:
        self.is_closed = True


class Update:
    output = None

    def __init__(self, number: int) -> None:
        self.number = number


WAITING = f"{COMMENT}data: nothing\n\n".encode()


class PlainAnswer:
    end = DONE

    def __init__(self, first: str = "") -> None:
        self._first = first

    def first_events(self) -> str:
        return self._first

    def waiting_events(self) -> str:
        return "data: nothing\n\n"

    def progress_event(self, stream: SlowStream, elapsed_s: float) -> str:
        return ""

    def update_events(self, update: Update) -> str:
        return f"data: {update.number}\n\n"

    def last_events(self) -> str:
        return ""


def sent(
    num_updates: int, *, num_signs: int = 0, silence_s: float = 0.01, is_deaf: bool = False, first: str = ""
) -> list[bytes]:
    messages: list[dict[str, Any]] = []
    stream = SlowStream(num_updates, num_signs)

    async def send(message: dict[str, Any]) -> None:
        stream.num_seen_signs += message.get("body") == WAITING
        if is_deaf and message.get("body") == WAITING:
            raise OSError
        messages.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def run() -> None:
        await EventStream(stream, PlainAnswer(first), silence_s)({}, receive, send)  # type: ignore[arg-type]
        assert stream.is_closed
        assert len(asyncio.all_tasks()) == 1, "something still runs"

    asyncio.run(run())
    start, *bodies = messages
    assert start["type"] == "http.response.start" and [body["more_body"] for body in bodies].count(False) == 1
    return [body["body"] for body in bodies]


def test_silence_is_broken_by_events() -> None:
    """Regression: a prompt of 40,000 tokens took 31 s on a CPU without a byte, and proxies give up after 60.

    Regression: what was sent were comments, which Codex does not count, so it gave up during a long prompt.
    """
    bodies = sent(3, num_signs=3)
    assert bodies == [WAITING] * bodies.count(WAITING) + [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", DONE]
    assert bodies.count(WAITING) >= 3


def test_first_events_come_with_the_first_update() -> None:
    """Regression: they came at once, and after them the front could not send the request to another replica."""
    bodies = sent(1, num_signs=1, first="first")
    assert bodies[0] == WAITING and bodies[-3:] == [b"first", b"data: 0\n\n", DONE]


def test_comment_that_cannot_be_sent_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # of what earlier tests have left
    caplog.clear()
    assert sent(1, num_signs=1, is_deaf=True) == [b"data: 0\n\n", DONE]
    gc.collect()
    assert not caplog.records, "an error that nobody has asked for is logged when its task is collected"


def test_stream_that_speaks_has_no_comments() -> None:
    assert sent(20, silence_s=1e6) == [*(f"data: {i}\n\n".encode() for i in range(20)), DONE]


def test_event_without_text_begins_with_a_comment_that_tells_it_from_the_answer() -> None:
    """A replica that is lost before its first token can be replaced, as only such events were sent."""
    assert COMMENT.startswith(":") and COMMENT.count("\n") == 1
    assert is_sign_of_life(WAITING) and not is_sign_of_life(b"data: 0\n\n")
