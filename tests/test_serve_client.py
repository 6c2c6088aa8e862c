"""The client of bench_serve.py against a fake server: what it reads of an answer, and the errors."""

import pytest
from fake_openai import FAULTS, FakeServer
from serve_answers import TIMEOUT_S, run, stream

from benchmarks.serve_client import CHAT, COMPLETIONS, Answer, Request, ask
from benchmarks.serve_http import Address, HttpClient
from benchmarks.serve_process import free_port
from benchmarks.serve_wire import ConnectionLost, ProtocolError, Response, SseParser

# -- what arrives ----------------------------------------------------------------------------------------------------

EVENTS = (
    b'data: {"a": 1}\n\n: a comment\n\ndata: two\ndata:lines\r\n\r\nevent: x\r\ndata: \xc3\xa9\r\n\r\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_sse_events_are_the_same_whatever_the_pieces(size: int) -> None:
    parser = SseParser()
    pieces = [EVENTS[start : start + size] for start in range(0, len(EVENTS), size)]
    events = [event for piece in pieces for event in parser.feed(piece)]
    assert events == [b'{"a": 1}', b"two\nlines", "é".encode(), b"[DONE]"]


def read_response(data: bytes, size: int) -> tuple[Response, bytes]:
    body: list[bytes] = []
    response = Response(lambda piece, _: body.append(piece))
    for start in range(0, len(data), size):
        response.feed(data[start : start + size], 0.0)
    return response, b"".join(body)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 11", b"hello world"),
        (b"Transfer-Encoding: chunked", b"5;name=value\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"),
    ],
)
def test_response_body_is_the_same_whatever_the_pieces(size: int, framing: bytes, body: bytes) -> None:
    response, content = read_response(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + body, size)
    assert (response.status, content) == (200, b"hello world")
    assert response.is_complete and response.keeps_connection


def test_response_without_a_body_or_a_length() -> None:
    response, _ = read_response(b"HTTP/1.1 204 Gone\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", 1000)
    assert response.is_complete and not response.keeps_connection
    response, content = read_response(b"HTTP/1.1 200 OK\r\n\r\nall of it", 4)
    assert not response.is_complete
    response.feed_end()
    assert response.is_complete and content == b"all of it" and not response.keeps_connection


def test_response_that_is_cut_off_or_not_http_is_refused() -> None:
    for cut in (b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"):
        response, _ = read_response(cut, 1000)
        with pytest.raises(ConnectionLost):
            response.feed_end()
    with pytest.raises(ProtocolError, match="status line"):
        read_response(b"220 mail ESMTP\r\n\r\n", 1000)
    with pytest.raises(ProtocolError, match="size of a chunk"):
        read_response(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 1000)


def test_address_of_a_url() -> None:
    assert Address.from_url("http://h:1/proxy/") == Address("h", 1, False, "/proxy")
    assert Address.from_url("https://h") == Address("h", 443, True, "")
    with pytest.raises(ValueError, match="--base-url 'h:80'"):
        Address.from_url("h:80")


# -- one answer ------------------------------------------------------------------------------------------------------


async def answers_of(server: FakeServer, *requests: Request, timeout_s: float = TIMEOUT_S) -> list[Answer]:
    """The answers to requests that are sent one after the other by one client."""
    async with server:
        client = HttpClient(server.url)
        answers = [await ask(client, request, timeout_s) for request in requests]
        await client.close()
    return answers


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("piece_bytes", [None, 1, 50])
def test_answer_has_every_token_and_the_servers_counts(path: str, piece_bytes: int | None) -> None:
    server = FakeServer(piece_bytes=piece_bytes)
    answers = run(answers_of(server, *[stream(5, path)] * 3))
    for answer in answers:
        assert (answer.error, answer.num_output_tokens, answer.num_prompt_tokens) == (None, 5, 2)
        assert answer.event_tokens == [1.0] * 5
        assert answer.sent_s < answer.event_s[0] <= answer.event_s[-1] <= answer.end_s and answer.ttft_s > 0
    assert server.max_connections == 1  # it is used again


def test_answer_times_are_those_of_the_clock() -> None:
    """The clock counts the times when it was asked: when the request is sent, at each piece, and at the end."""
    ticks = iter(range(1000))

    async def measure() -> Answer:
        async with FakeServer(token_s=0.01) as server:
            client = HttpClient(server.url, clock=lambda: float(next(ticks)))
            answer = await ask(client, stream(3), TIMEOUT_S)
            await client.close()
        return answer

    answer = run(measure())
    assert answer.sent_s == 0.0 and answer.event_s == sorted(answer.event_s)
    assert answer.end_s == next(ticks) - 1 and answer.ttft_s == answer.event_s[0]
    assert [tokens for _, _, tokens in answer.gaps()] == [1.0, 1.0]


@pytest.mark.parametrize(("with_totals", "expected"), [(True, [3, 3, 1]), (False, [7 / 3] * 3)])
def test_answer_tokens_of_an_event_are_counted_or_shared(with_totals: bool, expected: list[float]) -> None:
    (answer,) = run(answers_of(FakeServer(tokens_per_event=3, with_totals=with_totals), stream(7)))
    assert answer.event_tokens == pytest.approx(expected) and answer.num_output_tokens == 7


def test_answer_that_is_not_streamed_has_no_events() -> None:
    (answer,) = run(answers_of(FakeServer(), stream(5).with_body({"stream": None})))
    assert (answer.error, answer.num_output_tokens, answer.event_s) == (None, 5, [])


KINDS = {
    "429": "http_429",
    "500": "http_500",
    "close": "disconnected",
    "close_in_stream": "disconnected",
    "error_event": "stream_error",
    "bad_event": "malformed",
    "no_done": "no_done",
    "abort": "finish_abort",
    "hang": "timeout",
    "not_http": "malformed",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_answer_that_fails_says_how_and_the_next_one_succeeds(fault: str) -> None:
    timeout_s = 1.0 if fault == "hang" else TIMEOUT_S
    failed, good = run(answers_of(FakeServer(faults=[fault]), stream(), stream(), timeout_s=timeout_s))
    assert (failed.error, good.error) == (KINDS[fault], None)
    assert failed.end_s >= failed.sent_s
    assert {"429": "not now", "error_event": "broken"}.get(fault, "") in failed.detail


def test_answer_without_a_server_says_so() -> None:
    async def measure() -> Answer:
        return await ask(HttpClient(f"http://127.0.0.1:{free_port()}"), stream(), TIMEOUT_S)

    assert run(measure()).error == "no_connection"


def test_request_on_a_connection_that_the_server_closed_is_sent_again() -> None:
    """A server may close a connection that is idle; that is not an error of the next request."""

    async def measure() -> list[str | None]:
        async with FakeServer() as server:
            client = HttpClient(server.url)
            first = await ask(client, stream(), TIMEOUT_S)
            server.faults = ["close"]  # at the next request, without an answer
            second = await ask(client, stream(), TIMEOUT_S)
            await client.close()
            assert len(server.bodies) == 3
            return [first.error, second.error]

    assert run(measure()) == [None, None]


def test_request_fields_are_replaced_and_removed() -> None:
    assert stream(5, seed=1).with_body({"seed": None, "top_k": 3}).body == stream(5, top_k=3).body
