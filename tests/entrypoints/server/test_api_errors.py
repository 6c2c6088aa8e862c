"""Bad requests are refused in OpenAI's form, by the name of the field, and never with status 422 or 500."""

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Hello"}


def post(web: httpx.Client, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request; {} without an error."""
    response = web.post(path, **options)
    error = response.json().get("error", {})
    assert not error or error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error


def test_error_is_raised_by_the_client_with_its_fields(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="Hello", temperature=-1)
    assert raised.value.param == "temperature"
    assert "temperature=-1.0 must be 0 (greedy)" in raised.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="Hello")
    assert missing.value.code == "model_not_found"


BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"n": 1.5}, "n"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stream_options": {"include_usages": True}, "stream": True}, "stream_options.include_usages"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 1, "echo": True, "stream": True}, "echo"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"7": 101}}, "logit_bias"),
    *(({"logit_bias": {"7": bias}}, "logit_bias") for bias in ("1", True, None, [1], float("nan"))),
    *(({"presence_penalty": value}, "presence_penalty") for value in (float("nan"), 10**400, "1", True)),
    *(({"seed": value}, "seed") for value in (10**4000, "1", True)),
    ({"bad_words": ["\ud800"]}, "bad_words"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {"prompt": "x"}}, "prompt"),
    ({"prompt": {"": None}}, "prompt"),
    ({"prompt": ["x", 3]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [9999]}, None),
    ({"prompt": ""}, None),
    ({"prompt": "\ud800"}, None),
    ({"prompt": "long " * 1000}, "prompt"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
]


def test_completion_bad_field_is_refused_by_name(web: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for fields, param in BAD_COMPLETIONS:
        status, error = post(web, "/v1/completions", content=json.dumps(COMPLETION | fields), headers=headers)
        assert (status, error["param"]) == (400, param), error
        assert error["type"] == "invalid_request_error"


TEXT_PART = {"type": "text", "text": "x"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:"}}


BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"reasoning_effort": "very high"}, "reasoning_effort"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, None),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "tool_cals": []}]}, "messages[0].tool_cals"),
    ({"messages": [{"role": "user", "content": [TEXT_PART, IMAGE_PART]}]}, "messages[0].content[1].type"),
    ({"messages": [{"role": "user", "content": [TEXT_PART | {"txt": 1}]}]}, "messages[0].content[0].txt"),
    ({"messages": [{"role": "user", "content": [TEXT_PART | {"text": 1}]}]}, "messages[0].content[0].text"),
]


def test_chat_bad_field_is_refused_by_name(web: httpx.Client) -> None:
    for fields, param in BAD_CHATS:
        status, error = post(web, "/v1/chat/completions", json=CHAT | fields)
        assert status == 400
        assert param is None or error["param"] == param
        # Regression: "messages[0].content=[...]: should be a valid string"
        assert "valid string" not in error["message"] or param in ("messages[0].content", "messages[0].content[0].text")
    _, error = post(web, "/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": [IMAGE_PART]}]})
    assert "'image_url' is not supported, as the model reads only text; leave it out" in error["message"]


MANY = 20_000


def test_body_with_many_errors_stops_at_the_first() -> None:
    """Regression: 200,000 errors blocked the event loop for 0.6 s, and a body of 32 MiB could hold 16 million."""
    cases: list[tuple[type[Body], dict[str, Any]]] = [
        *((CompletionRequest, {name: [1] * MANY}) for name in ("stop", "bad_words", "guided_choice")),
        (CompletionRequest, {"structured_outputs": {"choice": [1] * MANY}}),
        (CompletionRequest, {"stop_token_ids": ["x"] * MANY}),
        (CompletionRequest, {f"stopp{i % 10}": i for i in range(MANY)}),
        (DetokenizeRequest, {"tokens": ["x"] * MANY}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"messages": [{f"conten{i % 10}": i for i in range(MANY)}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": [1] * MANY}]}),
        (ChatRequest, {"tools": [1] * MANY}),
    ]
    for kind, fields in cases:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(fields)
        assert caught.value.error_count() < 10


def test_neutral_values_are_accepted(web: httpx.Client) -> None:
    chat = {"modalities": ["text"], "parallel_tool_calls": True, "functions": None, "no_such_field": None}
    chat |= {"store": True, "metadata": {"a": "b"}, "prompt_cache_key": "me", "service_tier": "flex"}
    same = {"user": "me", "n": None, "temperature": None, "stop": None, "logit_bias": {}, "stream_options": None}
    assert post(web, "/v1/chat/completions", json=CHAT | chat | same)[0] == 200
    assert post(web, "/v1/completions", json=COMPLETION | same | {"suffix": None, "best_of": 1})[0] == 200
    assert post(web, "/v1/chat/completions", json=CHAT | {"response_format": {"type": "text"}})[0] == 200


def test_malformed_body_is_refused(web: httpx.Client) -> None:
    bodies = (
        "",
        "{",
        "[]",
        "1",
        '"x"',
        "null",
        "\x00",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        "[" * 100_000,
        "{}",
        f'{{"prompt": {"9" * 5000}}}',
    )
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for body in bodies:
            status, error = post(web, path, content=body, headers={"content-type": "application/json"})
            assert status == 400 and "error parsing the body" not in error["message"]
            if body in (b'{"prompt": "\xff"}', "[" * 100_000, bodies[-1]):
                assert "not in UTF-8" in error["message"] and "nested too deeply" in error["message"]
    assert post(web, "/v1/completions", data={"prompt": "Hello"})[0] == 400


def test_prompt_that_is_refused_before_it_is_tokenized_has_the_same_message(web: httpx.Client) -> None:
    """Regression: agents did not find the words in the message about token ids and about characters."""
    question = [{"role": "user", "content": "x" * 300_000}]
    for path, body, length in (
        ("/v1/completions", {"prompt": [1] * 3000}, "3000 tokens > 2047 maximum"),
        ("/v1/completions", {"prompt": "x" * 300_000}, "300000 characters > "),
        ("/v1/chat/completions", {"messages": question}, "characters > "),
        ("/v1/responses", {"input": question}, "characters > "),
        ("/v1/messages", {"messages": question, "max_tokens": 1}, "characters > "),
    ):
        status, error = post(web, path, json=body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        message = error["message"]
        assert message.startswith("prompt is too long: ") and length in message
        assert "maximum context length is 2048 tokens" in message


def test_unknown_route_and_method_have_the_form_too(web: httpx.Client) -> None:
    assert post(web, "/v1/embeddings", json={})[0] == 404
    assert post(web, "/v1/models", json={})[0] == 405
    response = web.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"]


def test_bug_is_answered_with_500_in_the_form(served: tuple[AsyncLLM, str], web: httpx.Client) -> None:
    engine, _ = served

    def fall(*args: Any, **options: Any) -> None:
        raise KeyError("secret text")

    original = engine.llm.make_sequences
    engine.llm.make_sequences = fall  # type: ignore[method-assign, assignment]
    try:
        status, error = post(web, "/v1/completions", json=COMPLETION)
    finally:
        engine.llm.make_sequences = original  # type: ignore[method-assign]
    assert (status, error["code"]) == (500, "internal_error")
    assert "secret" not in error["message"]
    assert post(web, "/v1/completions", json=COMPLETION)[0] == 200


def test_body_of_tiny_parts_is_refused_before_they_are_checked(web: httpx.Client) -> None:
    """Regression: while hundreds of thousands of parts were checked, the server answered nobody for 3 to 5 s.

    In each body, the first part is wrong. An error about their number shows that this part has not been checked.
    """
    parts: list[Any] = [{"type": 5}, *[{"type": "text", "text": ""}] * 70_000]
    for path, name, value in (
        ("/v1/chat/completions", "messages", [{"role": "user", "content": parts}]),
        ("/v1/chat/completions", "tools", parts),
        ("/v1/messages", "messages", [{"role": "user", "content": parts}]),
        ("/v1/responses", "input", [{"role": "user", "content": parts}]),
        ("/v1/completions", "prompt", [5.5, *[""] * 150_000]),
        ("/tokenize", "messages", [{"role": 5}, *CHAT["messages"] * 70_000]),
    ):
        answer = web.post(path, json={"messages": CHAT["messages"], name: value, "max_tokens": 1})
        error = answer.json()["error"]
        assert answer.status_code == 400 and "more than 131072 values; send the text in fewer" in error["message"], path
        assert path == "/v1/messages" or error["param"] == name
