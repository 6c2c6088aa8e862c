"""HTTP as clients, proxies and load balancers speak it: old versions, pipelines, bodies that come in any way."""

import gzip
import json
import socket
from collections.abc import Iterator

import pytest
import zstandard
from http_server import site_server
from waiting import LIMIT_S

from nanovllm import AsyncLLM

BODY = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
STREAMED = json.dumps({"prompt": "Hello", "max_tokens": 2, "stream": True}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module", params=[[], ["secret"]], ids=["open", "with keys"])
def address(request: pytest.FixtureRequest, served: tuple[AsyncLLM, str]) -> Iterator[tuple[str, int]]:
    """Address of a whole server: the gate is part of it."""
    with site_server(served[0], request.param) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def post(body: bytes, *headers: str, version: str = "1.1", key: str = "secret") -> bytes:
    length = [] if any("chunked" in header for header in headers) else [f"Content-Length: {len(body)}"]
    fixed = ["Host: localhost", "Content-Type: application/json", f"Authorization: Bearer {key}"]
    lines = [f"POST /v1/completions HTTP/{version}", *fixed, *length, *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def exchange(address: tuple[str, int], *parts: bytes, ends_with: bytes = b"") -> bytes:
    """Send the parts, each after the server has answered the one before, and read to the end."""
    with socket.create_connection(address, timeout=LIMIT_S) as connection:
        received = b""
        for part in parts:
            connection.sendall(part)
            if part is not parts[-1]:
                received += connection.recv(1 << 16)
        while not (ends_with and received.endswith(ends_with)) and (data := connection.recv(1 << 16)):
            received += data
    return received


def test_old_versions_get_a_whole_answer_and_the_end(address: tuple[str, int]) -> None:
    whole = exchange(address, post(BODY, version="1.0"))
    assert b" 200 OK" in whole and json.loads(whole.partition(b"\r\n\r\n")[2])["choices"]
    streamed = exchange(address, post(STREAMED, version="1.0"))
    assert b" 200 OK" in streamed and b"chunked" not in streamed and streamed.endswith(b"data: [DONE]\n\n")


def test_chunked_body_is_read(address: tuple[str, int]) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    answer = exchange(address, post(chunks, "Transfer-Encoding: chunked", "Connection: close"))
    assert b" 200 OK" in answer


def test_packed_body_is_answered_and_its_limit_counts_what_it_unpacks_to(address: tuple[str, int]) -> None:
    """Regression: a body in gzip, as several clients send a long one, was 400 "not valid JSON"."""
    for packed, *headers in (
        (gzip.compress(BODY), "Content-Encoding: gzip"),
        (zstandard.compress(BODY), "Content-Encoding: zstd"),
        (BODY.decode().encode("utf-16"), "X: y"),
    ):
        assert b" 200 OK" in exchange(address, post(packed, *headers, "Connection: close"))
    for bad, encoding, status in (
        (BODY, "gzip", b" 400 Bad"),
        (BODY, "br", b" 415 "),
        (gzip.compress(bytes(40 << 20)), "gzip", b" 413 "),
    ):
        assert status in exchange(address, post(bad, f"Content-Encoding: {encoding}", "Connection: close"))


def test_expected_100_is_sent_before_the_body(address: tuple[str, int]) -> None:
    head = post(BODY, "Expect: 100-continue", "Connection: close").removesuffix(BODY)
    answer = exchange(address, head, BODY)
    assert answer.startswith(b"HTTP/1.1 100 Continue") and b" 200 OK" in answer


def test_pipelined_requests_are_answered_in_order(address: tuple[str, int]) -> None:
    answer = exchange(address, post(BODY) + post(b"{") + post(STREAMED) + HEALTH, ends_with=b'"ready"}')
    places = [answer.find(mark) for mark in (b" 200 OK", b" 400 Bad", b"[DONE]", b'{"status"')]
    assert places == sorted(places) and places[0] > 0


def test_head_of_health_is_200_without_a_body(address: tuple[str, int]) -> None:
    """Regression: load balancers that ask with HEAD got 405."""
    answer = exchange(address, b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b" 200 OK" in answer and answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("address", [["secret"]], ids=["with keys"], indirect=True)
def test_refused_key_ends_the_connection(address: tuple[str, int]) -> None:
    """Regression: the body was not read, so a client that had waited for "100 Continue" and then went on with its next
    request never got an answer to it."""
    head = post(BODY, "Expect: 100-continue", key="wrong").removesuffix(BODY)
    answer = exchange(address, head)
    assert b" 401 Unauthorized" in answer and b"connection: close" in answer.lower()
