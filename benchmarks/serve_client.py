"""One request to an OpenAI-compatible server, and what a client sees of its answer: when which tokens arrived."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.serve_http import HttpClient
from benchmarks.serve_wire import ConnectionLost, ProtocolError, SseParser

Json = dict[str, Any]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD_ENDS = ("stop", "length", "tool_calls")
NUM_DETAIL_BYTES = 300  # what is kept of a body that says what was wrong


@dataclass(frozen=True)
class Request:
    """What is sent. `token_ids` are those of the prompt as far as they are known; chat templates add to them."""

    path: str
    body: Json
    num_prompt_tokens: int
    token_ids: tuple[int, ...] | None = None

    def with_body(self, changes: Json) -> "Request":
        """The request with these fields of its body replaced. A value of None removes the field."""
        body = {name: value for name, value in (self.body | changes).items() if value is not None}
        return replace(self, body=body)


@dataclass
class Answer:
    """What a client saw of one answer. Times are those of the client's clock."""

    sent_s: float
    end_s: float = 0.0
    event_s: list[float] = field(default_factory=list)  # when each event with tokens arrived
    event_tokens: list[float] = field(default_factory=list)  # how many tokens it had; known at the end
    num_output_tokens: float = 0
    num_prompt_tokens: int | None = None  # by the server's count, like the next
    num_cached_tokens: int | None = None
    error: str | None = None  # the kind of error, such as "http_429", "disconnected" or "stream_error"
    detail: str = ""  # what the server said about it

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token. Only for answers that have one."""
        return self.event_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """Seconds of the whole request."""
        return self.end_s - self.sent_s

    def gaps(self) -> list[tuple[float, float, float]]:
        """For each event after the first: when it came, seconds per token since the one before, number of tokens."""
        triples = zip(self.event_s, self.event_s[1:], self.event_tokens[1:], strict=False)
        return [(now_s, (now_s - before_s) / tokens, tokens) for before_s, now_s, tokens in triples if tokens]


class AnswerReader:
    """Fills an Answer from the body of a response.

    The tokens of an event are those by which usage.completion_tokens has grown, if the server sends it with every
    event. Otherwise the total, which comes last, is divided equally among the events that have text.
    """

    def __init__(self, answer: Answer, is_stream: bool) -> None:
        self._answer = answer
        self._is_stream = is_stream
        self._sse = SseParser()
        self._body: list[bytes] = []  # all of it; only the start of a stream
        self._totals: list[int | None] = []  # completion_tokens after each event
        self._usage: Json = {}
        self._finish_reason: str | None = None
        self._is_done = False
        self._error: Json | None = None

    def read(self, data: bytes, now_s: float) -> None:
        """Read a part of the body. Hot: for everything that arrives."""
        if not self._is_stream:
            self._body.append(data)
            return
        if not self._body:
            self._body.append(data[:NUM_DETAIL_BYTES])
        for event in self._sse.feed(data):
            if event == b"[DONE]":
                self._is_done = True
                continue
            try:
                self._read_event(json.loads(event), now_s)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ProtocolError(f"an event that is not a chunk of a completion: {event[:80]!r}") from error

    def _read_event(self, event: Json, now_s: float) -> None:
        if "error" in event:
            self._error = event["error"]
            return
        usage = event.get("usage")
        if usage:
            self._usage = usage
        for choice in event["choices"]:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            # an answer can be without text, if its only token is a special one
            if _has_tokens(choice) or (choice.get("finish_reason") and not self._answer.event_s):
                self._answer.event_s.append(now_s)
                self._totals.append(usage["completion_tokens"] if usage else None)

    def finish(self, status: int) -> None:
        """Fill in what is known only at the end."""
        answer = self._answer
        if status == 200 and not self._is_stream:
            self._read_whole()
        answer.num_prompt_tokens = self._usage.get("prompt_tokens")
        answer.num_cached_tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        answer.error = self._error_kind(status)
        if answer.error is not None:
            self._keep_detail()

    def _read_whole(self) -> None:
        try:
            answer = json.loads(b"".join(self._body))
            self._usage = answer.get("usage") or {}
            self._finish_reason = answer["choices"][0]["finish_reason"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ProtocolError(f"not a completion: {self._body[:1]}") from error
        self._is_done = True

    def _error_kind(self, status: int) -> str | None:
        if status != 200:
            return f"http_{status}"
        if self._error is not None:
            return "stream_error"
        if not self._is_done:
            return "no_done"  # the body ended, but not with [DONE]
        if self._finish_reason not in GOOD_ENDS:
            return f"finish_{self._finish_reason}"
        return None

    def _keep_detail(self) -> None:
        said = json.dumps(self._error).encode() if self._error is not None else b"".join(self._body)
        self._answer.detail = said[:NUM_DETAIL_BYTES].decode(errors="replace")

    def count_tokens(self) -> None:
        """Say how many tokens each event had."""
        answer = self._answer
        num_events = len(answer.event_s)
        answer.num_output_tokens = self._usage.get("completion_tokens", num_events)
        totals = [total for total in self._totals if total is not None]
        if not num_events:
            answer.event_tokens = []
        elif len(totals) == num_events:
            answer.event_tokens = [now - before for before, now in zip([0, *totals], totals, strict=False)]
        else:
            answer.event_tokens = [answer.num_output_tokens / num_events] * num_events


def _has_tokens(choice: Json) -> bool:
    """Whether a choice of a chunk has text. Reasoning and tool calls count, too."""
    if "text" in choice:
        return bool(choice["text"])
    delta = choice["delta"]
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))


async def ask(client: HttpClient, request: Request, timeout_s: float, answer: Answer | None = None) -> Answer:
    """Send a request and wait for its end. What goes wrong is in the answer's `error`; nothing is raised.

    answer: is filled while the answer arrives, if the caller wants to watch it.
    """
    body = json.dumps(request.body, separators=(",", ":")).encode()
    answer = answer or Answer(0.0)
    reader = AnswerReader(answer, bool(request.body.get("stream")))
    answer.sent_s = client.clock()
    try:
        sending = client.send("POST", request.path, body, reader.read)
        reader.finish((await asyncio.wait_for(sending, timeout_s)).status)
    except asyncio.TimeoutError:
        answer.error = "timeout"
    except ConnectionLost:
        answer.error = "disconnected"
    except ProtocolError as error:
        answer.error, answer.detail = "malformed", str(error)
    except OSError as error:
        answer.error, answer.detail = "no_connection", str(error)
    finally:  # also if it is cancelled
        answer.end_s = client.clock()
        reader.count_tokens()
    return answer
