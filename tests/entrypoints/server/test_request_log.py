"""The log: how its lines look, and the line of each request."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from http_server import site_server, web_client
from waiting import wait_until

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server.log_lines import set_up_log

SECRET = "a private sentence"
LOGGER = "nanovllm.entrypoints.server.request_log"
CHAT = {"messages": [{"role": "user", "content": SECRET * 40}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def site_url(served: tuple[AsyncLLM, str]) -> Iterator[str]:
    with site_server(served[0], ["key"], max_queue=4) as url:
        yield url


@pytest.fixture
def site(site_url: str) -> Iterator[httpx.Client]:
    with web_client(site_url) as client:
        client.headers["authorization"] = "Bearer key"
        yield client


class Lines:
    """The lines of requests. A line is written after the response, so the test waits for it."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def of(self, response: httpx.Response) -> tuple[int, str, dict[str, Any]]:
        """The level, the text and the fields of a response's line."""
        request_id = response.headers["x-request-id"]

        def found() -> list[logging.LogRecord]:
            own = (record for record in self._caplog.records if record.name == LOGGER)
            return [record for record in own if request_id in record.getMessage()]

        wait_until(found, f"a line of {request_id}")
        (record,) = found()
        return record.levelno, record.getMessage(), record.fields  # type: ignore[attr-defined]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.DEBUG, LOGGER)
    return Lines(caplog)


def test_answer_has_a_line_with_id_tokens_and_times(site: httpx.Client, lines: Lines) -> None:
    first, again = (site.post("/v1/chat/completions", json=CHAT) for _ in range(2))
    for response, is_cached in ((first, False), (again, True)):
        body = response.json()
        level, text, fields = lines.of(response)
        usage = body["usage"]
        assert level == logging.INFO and body["id"] == f"chatcmpl-{fields['request_id']}"
        assert (fields["method"], fields["path"], fields["status"]) == ("POST", "/v1/chat/completions", 200)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == is_cached
        assert (fields["prompt_tokens"], fields["cached_tokens"]) == (usage["prompt_tokens"], cached)
        assert (fields["completion_tokens"], fields["finish_reasons"]) == (4, ["length"])
        assert 0 < fields["first_token_s"] <= fields["duration_s"]
        assert f"200 in {fields['duration_s']:.3f} s" in text
        assert f"prompt {usage['prompt_tokens']} tokens, {cached} cached; answer 4 tokens" in text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_stream_has_the_id_of_its_line(path: str, site: httpx.Client, lines: Lines) -> None:
    body: dict[str, Any] = {
        "/v1/completions": {"prompt": "Hello", "n": 2, "max_tokens": 3},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
    }[path]
    response = site.post(path, json=body | {"stream": True})
    _, _, fields = lines.of(response)
    assert response.status_code == 200 and fields["request_id"] in response.text
    assert fields["completion_tokens"] > 0 and fields["prompt_tokens"] > 0


def test_refused_requests_have_a_line_with_the_reason(site: httpx.Client, lines: Lines) -> None:
    cases: list[tuple[str, dict[str, Any], int, dict[str, str]]] = [
        ("/v1/completions", {"prompt": "x", "top_p": 5}, 400, {"param": "top_p"}),
        ("/v1/completions", {"prompt": "x", "temprature": 1}, 400, {"param": "temprature"}),
        ("/v1/completions", {"prompt": "x", "n": 5}, 400, {"reason": "queue", "param": "n"}),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, {"param": "tools[0].function"}),
        ("/v1/completions", {"prompt": "x", "model": "y"}, 404, {"code": "model_not_found", "param": "model"}),
        ("/v1/v1/completions", {"prompt": "x"}, 404, {}),
        (
            "/v1/completions",
            {"prompt": [1] * 2048},
            400,
            {"code": "context_length_exceeded", "param": "prompt"},
        ),
    ]
    for path, body, status, error in cases:
        level, text, fields = lines.of(site.post(path, json=body))
        assert (level, fields["path"], fields["status"]) == (logging.INFO, path, status), fields
        assert fields.get("error", {}) == error, fields
        assert all(f"{name} {cause}" in text for name, cause in error.items())
    response = site.post("/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer no"})
    assert lines.of(response)[2]["error"] == {"code": "invalid_api_key", "reason": "api_key"}


def test_stream_that_fails_has_a_line_with_the_reason(site: httpx.Client, lines: Lines) -> None:
    """The status of a stream is 200."""
    response = site.post("/v1/responses", json={"input": "x" * 3000, "stream": True})
    _, _, fields = lines.of(response)
    assert fields["status"] == 200 and fields["error"]["code"] == "context_length_exceeded"


def test_requests_that_read_are_logged_at_debug(site: httpx.Client, lines: Lines) -> None:
    assert lines.of(site.get("/health"))[0] == lines.of(site.get("/metrics"))[0] == logging.DEBUG
    assert lines.of(site.get("/nothing"))[0] == logging.INFO


def test_client_that_leaves_has_a_line(site: httpx.Client, lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with site.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_raw())
    assert lines.of(response)[2]["finish_reasons"] == ["abort"]


def test_lines_hold_nothing_that_users_wrote(
    site: httpx.Client, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """Except for paths and names of fields, in one line of printable characters."""
    caplog.set_level(logging.DEBUG)
    bodies: list[dict[str, Any]] = [
        *({"prompt": SECRET, **more} for more in ({}, {SECRET: 1}, {"stop": SECRET}, {"logit_bias": {SECRET: 1}})),
        *({"prompt": SECRET, **more} for more in ({"temperature": SECRET}, {"model": SECRET}, {"user": SECRET})),
    ]
    for body in bodies:
        lines.of(site.post("/v1/completions", json=body))
    answered = site.post("/v1/x%0Ay%1b[0m", json={}, headers={"x-request-id": SECRET})
    assert "POST /v1/x%0Ay%1b[0m 404" in lines.of(answered)[1]
    own = [record.getMessage() for record in caplog.records if record.name.startswith(("nanovllm", "uvicorn"))]
    assert len(own) > len(bodies) and not [line for line in own if SECRET in line or not line.isprintable()]


def test_openai_client_knows_the_request_id(site_url: str, lines: Lines) -> None:
    with openai.OpenAI(base_url=f"{site_url}/v1", api_key="key", max_retries=0) as client:
        done = client.completions.create(model="tiny", prompt="Hello", max_tokens=1)
        assert done._request_id is not None and done.id == f"cmpl-{done._request_id}"


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Returns what was logged to stderr. The root logger gets its handlers back."""
    root, own = logging.getLogger(), logging.getLogger("nanovllm")
    handlers, level = root.handlers[:], own.level
    root.handlers = []  # set_up_log would close pytest's
    yield lambda: capsys.readouterr().err
    root.handlers = handlers
    own.setLevel(level)


def test_lines_have_time_and_level(log: Callable[[], str]) -> None:
    set_up_log("warning", "text")
    logger = logging.getLogger("nanovllm.test")
    logger.info("too little")
    logger.warning("a %s", "warning")
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    assert re.fullmatch(rf"{time} WARNING a warning\n", log())


def test_lines_in_json_are_objects(log: Callable[[], str]) -> None:
    set_up_log("info", "json")
    logger = logging.getLogger("nanovllm.test")
    logger.info("two\nlines", extra={"fields": {"status": 200}})
    try:
        raise ValueError("cause")
    except ValueError:
        logger.exception("failed")
    logging.getLogger("other").info("not ours, and below a warning")
    first, second = map(json.loads, log().splitlines())
    assert (first["level"], first["message"], first["status"]) == ("info", "two\nlines", 200)
    assert second["level"] == "error" and "ValueError: cause" in second["exception"]
