"""One rule for the fields of all APIs: what changes the answer is refused, near names are told, others are ignored."""

import logging
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from nanovllm.entrypoints.server import fields
from nanovllm.entrypoints.server.fields import INSTEAD, MAX_LOGGED_NAMES, UNSUPPORTED, Body, own_names
from nanovllm.entrypoints.server.messages import CountTokensRequest, MessagesRequest
from nanovllm.entrypoints.server.protocol import ChatRequest, CompletionRequest, Message, StructuredOutputsField
from nanovllm.entrypoints.server.responses import ResponsesRequest, TextOptions

USER = [{"role": "user", "content": "x"}]
WHOLE: dict[type[Body], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": USER},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"messages": USER, "max_tokens": 5},
    CountTokensRequest: {"messages": USER},
}
PATHS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
ALL_KINDS: list[tuple[type[Body], dict[str, Any]]] = [
    *WHOLE.items(),
    (Message, USER[0]),
    (StructuredOutputsField, {"regex": "x"}),
    (TextOptions, {}),
]


def error_of(kind: type[Body], body: dict[str, Any]) -> tuple[str, str]:
    """The field that is blamed, and the message."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    (error,) = caught.value.errors()
    return error["ctx"]["param"], error["msg"]


def test_values_that_change_nothing_are_accepted_and_others_are_refused() -> None:
    """Regression: verbosity="medium", suffix="", use_beam_search=false and others like them were 400."""
    for kind, body in ALL_KINDS:
        table = kind._unsupported()
        if kind in WHOLE:
            assert table.keys() - kind.NEUTRAL.keys() == UNSUPPORTED.keys() - own_names(kind)
        for name, neutral in table.items():
            for value in (None, *neutral, *(float(each) for each in neutral if type(each) is int)):
                assert kind.model_validate(body | {name: value}) == kind.model_validate(body), (kind, name, value)
            if name not in own_names(kind):
                param, message = error_of(kind, body | {name: {"other": 1}})
                assert param == name and f"the field {name!r} is not supported" in message


def test_fields_that_the_review_names_are_accepted_over_http(web: httpx.Client) -> None:
    same = {"use_beam_search": False, "priority": 0, "length_penalty": 1.0, "spaces_between_special_tokens": True}
    chat = {"verbosity": "medium", "top_logprobs": 0, "continue_final_message": False, "include_reasoning": True}
    same |= {"stream_options": {"include_usage": False}}
    completion = {"suffix": "", "echo": False, "logprobs": False, "best_of": 1}
    extras = {"cache_prompt": True, "typical_p": 1.0, "repeat_penalty": 1, "keep_alive": "5m", "options": {}}
    for path, body in (
        ("/v1/chat/completions", {"messages": USER} | chat),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1} | completion),
        ("/v1/responses", {"input": "x", "text": {"verbosity": "medium"}, "tool_choice": "auto"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "tool_choice": {"type": "auto"}}),
    ):
        answer = web.post(path, json=body | same | extras)
        assert answer.status_code == 200, answer.text


def test_refusal_names_the_field_that_the_api_has() -> None:
    for kind, name, ours in (
        (ChatRequest, "max_new_tokens", "max_tokens"),
        (ResponsesRequest, "max_tokens", "max_output_tokens"),
        (MessagesRequest, "stop", "stop_sequences"),
        (ChatRequest, "repeat_penalty", "repetition_penalty"),
        (ChatRequest, "format", "response_format"),
        (ResponsesRequest, "response_format", "text"),
        (ChatRequest, "think", "chat_template_kwargs"),
        (CompletionRequest, "messages", "prompt"),
        (ChatRequest, "system", "messages"),
        (ChatRequest, "text", "response_format"),
        (ChatRequest, "output_config", "response_format"),
        (ResponsesRequest, "output_config", "text"),
        (ChatRequest, "output_format", "response_format"),
    ):
        assert error_of(kind, WHOLE[kind] | {name: "x"})[1].endswith(f"; use {ours!r}")
    assert error_of(ChatRequest, {"messages": USER, "verbosity": "low"})[1] == (
        "the field 'verbosity' is not supported, except as 'medium'; leave it out"
    )
    assert INSTEAD.keys() <= UNSUPPORTED.keys() | {"schema", "parameters", "input_schema"}


def test_fields_of_one_api_are_not_ignored_in_another() -> None:
    """If this fails for a new field: add it to UNSUPPORTED, with the values that change nothing.

    Regression: the form of the answer in a field of another API, such as `text` or `output_config`, was ignored.
    """
    everywhere = {"model", "stream", "temperature", "top_p", "user", "cache_salt", "parallel_tool_calls"}
    changes_no_answer = {"stream_options", "return_progress", "include"}
    for kind in (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest):
        assert own_names(kind) - UNSUPPORTED.keys() == (everywhere | changes_no_answer) & own_names(kind)


def test_schema_in_the_place_of_another_api_is_refused() -> None:
    """Ignoring it would leave the answer without its form, or a tool without its parameters."""
    function = {"name": "f", "input_schema": {}}
    for kind, given, param, ours in (
        (ChatRequest, {"response_format": {"type": "json_object", "schema": {}}}, "schema", "json_schema"),
        (ResponsesRequest, {"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "json_schema", "schema"),
        (ChatRequest, {"tools": [{"type": "function", "function": function}]}, "input_schema", "parameters"),
        (ResponsesRequest, {"tools": [{"type": "function"} | function]}, "input_schema", "parameters"),
        (MessagesRequest, {"tools": [{"name": "f", "parameters": {}}]}, "parameters", "input_schema"),
    ):
        found, message = error_of(kind, WHOLE[kind] | given)
        assert found == param and message.endswith(f"use {ours!r}")
    for kind in (ResponsesRequest, MessagesRequest):
        with pytest.raises(ValidationError):
            kind.model_validate(WHOLE[kind] | {"tools": [{"type": "function", "function": {"name": "f"}}]})


def test_name_that_is_nearly_known_is_refused_with_the_known_one(web: httpx.Client) -> None:
    for kind, name, meant in (
        (ChatRequest, "temprature", "temperature"),
        (ChatRequest, "tempertaure", "temperature"),
        (ChatRequest, "maxTokens", "max_tokens"),
        (ChatRequest, "top-p", "top_p"),
        (ChatRequest, "tool_choise", "tool_choice"),
        (ChatRequest, "respone_format", "response_format"),
        (ChatRequest, "presense_penalty", "presence_penalty"),
        (ChatRequest, "mesages", "messages"),
        (CompletionRequest, "stops", "stop"),
        (ResponsesRequest, "instruction", "instructions"),
        (MessagesRequest, "stop_sequence", "stop_sequences"),
    ):
        param, message = error_of(kind, WHOLE[kind] | {name: 1})
        assert (param, message) == (name, f"the field {name!r} is unknown; {meant!r} may be meant")
    body = {"messages": [{"role": "user", "content": "x", "tool_cals": []}]}
    error = web.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "messages[0].tool_cals" and "'tool_calls' may be meant" in error["message"]


KNOWN_CLIENT_FIELDS: dict[type[Body], tuple[str, ...]] = {
    # What clients of OpenAI, Anthropic, LiteLLM, OpenRouter, llama.cpp and Ollama send, and what changes no answer here
    ChatRequest: (
        *("metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
        *("cache_prompt", "id_slot", "keep_alive", "timings_per_token", "provider", "transforms", "rid"),
        *("request_id", "guided_decoding_backend", "usage", "plugins", "extra_headers", "moderation"),
    ),
    ResponsesRequest: ("client_metadata", "context_management", "max_tool_calls", "service_tier", "store", "metadata"),
    MessagesRequest: ("betas", "metadata", "service_tier", "speed", "fallbacks", "inference_geo", "context_management"),
    Message: (
        *("provider_specific_fields", "annotations", "reasoning_details", "thinking_blocks", "id", "status", "index"),
        *("cache_control", "finish_reason", "reasoning_text", "timestamp", "created", "token_usage", "phase"),
    ),
}


def test_fields_that_change_no_answer_are_ignored() -> None:
    """Regression: LiteLLM's provider_specific_fields on messages were a 400, and so was what any new version added."""
    for kind, names in KNOWN_CLIENT_FIELDS.items():
        body = WHOLE.get(kind, USER[0])
        assert kind.model_validate(body | dict.fromkeys(names, 7)) == kind.model_validate(body)
    parts = [{"type": "text", "text": "x", "cache_control": {}, "mood": 1}]
    call = {"id": "a", "index": 0, "mood": 1, "function": {"name": "f", "arguments": "{}", "mood": 1}}
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    tools = [{"type": "function", "mood": 1, "function": {"name": "f", "defer_loading": True}}]
    ChatRequest.model_validate({"messages": messages, "tools": tools, "stream_options": None})
    items = [{"type": "reasoning", "id": "x", "status": None, "encrypted_content": "x", "summary": [], "mood": 1}]
    ResponsesRequest.model_validate({"input": items, "reasoning": {"effort": "low", "summary": "auto"}})


def test_ignored_fields_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose the names, so only possible names of an API are logged, and a limited number of them."""
    monkeypatch.setattr(fields, "_logged", set())
    caplog.set_level(logging.INFO, "nanovllm")
    for _ in range(2):
        ChatRequest.model_validate({"messages": USER, "metadata": {}, "my secret, not a name": 1, "\ud800": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "nanovllm: the field 'metadata' of requests is unknown and ignored"
    ]
    ChatRequest.model_validate({"messages": USER} | {f"field{i}": 1 for i in range(2 * MAX_LOGGED_NAMES)})
    assert len(caplog.records) == MAX_LOGGED_NAMES


def test_unknown_name_is_looked_up_once_for_each_of_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing each of 60,000 names of a body with all known names by difflib would take 20 s."""
    num_lookups = 0

    class Counted(dict[str, str]):
        def __contains__(self, name: object) -> bool:
            nonlocal num_lookups
            num_lookups += 1
            return super().__contains__(name)

    counted = Counted(fields._shortened_names(ChatRequest))
    monkeypatch.setattr(fields, "_shortened_names", lambda kind: counted)
    names = [f"{'max_completion_token'[: i % 20]}{i}x" for i in range(300)]
    ChatRequest.model_validate({"messages": USER} | dict.fromkeys([*names, "x" * 10_000], 1))
    assert len(names) <= num_lookups <= sum(1 + len(name) for name in names)
