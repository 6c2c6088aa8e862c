"""/v1/messages and /v1/responses beyond what real clients test: errors, ends, replayed turns, the cost of blocks."""

import json
import warnings
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server.call_formats import HERMES, LLAMA, QWEN_TAGS, CallFormat
from nanovllm.entrypoints.server.chat_answers import AnswerBlock, BlockAnswer, ChatAnswer, ChatForm, ReasoningIds
from nanovllm.entrypoints.server.errors import ApiError, Refusal
from nanovllm.entrypoints.server.messages import MessagesAnswer, MessagesRequest, _content
from nanovllm.entrypoints.server.protocol import ChatRequest
from nanovllm.entrypoints.server.responses import ResponsesAnswer, ResponsesRequest
from nanovllm.request_stream import RequestUpdate
from nanovllm.sampling_params import ReasoningTags

NOTE = "The passkey is 4711, says the old captain."
QUESTION = f"{NOTE}\nThe passkey is"
REST = NOTE.removeprefix("The passkey is")
ASK: dict[str, Any] = {"max_tokens": 60, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}


def post(web: httpx.Client, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    response = web.post(path, json=body)
    return response.status_code, response.json()


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(event.split("data: ")[1]) for event in text.strip().split("\n\n") if "{" in event]


def make_answer(kind: type[BlockAnswer]) -> Any:
    service: Any = SimpleNamespace(model_names=["tiny"])
    if kind is MessagesAnswer:
        return MessagesAnswer(service, MessagesRequest.model_validate(ASK).as_chat(), ChatForm())
    asked = ResponsesRequest.model_validate({"input": "x"})
    return ResponsesAnswer(service, asked.as_chat(), ChatForm(), asked)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_messages_errors_have_anthropics_form_and_types(web: httpx.Client) -> None:
    """Regression: they had OpenAI's, so a client that looks at error.type saw a bad request where a model was missing.

    The gate and the front answer in this form, too, which their own tests check.
    """
    cases: tuple[tuple[dict[str, Any], int, str, str], ...] = (
        ({"model": "claude"}, 404, "not_found_error", "model"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0]"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"output_config": {"effort": "x"}}, 400, "invalid_request_error", "output_config.effort"),
    )
    for fields, status, kind, param in cases:
        code, body = post(web, "/v1/messages?beta=true", ASK | fields)
        assert (code, body["type"]) == (status, "error")
        assert (body["error"]["type"], body["error"]["param"]) == (kind, param)
    assert post(web, "/v1/messages/batches", {})[1]["error"]["type"] == "not_found_error"


def test_error_types_of_anthropic_follow_the_status() -> None:
    kinds = {
        status: ApiError("x", status=status).body("/v1/messages")["error"]["type"] for status in (408, 413, 429, 500)
    }
    assert kinds == {408: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"}


def test_stream_that_fails_ends_as_clients_expect() -> None:
    """Regression: Responses' had no response.failed, and clients that wait for a last response saw none."""
    error = Refusal(503, "wait", "no token")
    text = make_answer(MessagesAnswer).error_events(error)
    assert text.startswith("event: error\n") and events(text)[0]["error"]["type"] == "overloaded_error"
    for begun in (False, True):
        answer = make_answer(ResponsesAnswer)
        text = (answer.first_events() if begun else "") + answer.error_events(error)
        created, _, failed, last = events(text)
        assert (created["type"], failed["type"], last["type"]) == ("response.created", "error", "response.failed")
        assert (last["response"]["status"], last["response"]["error"]["message"]) == ("failed", "no token")
        assert [each["sequence_number"] for each in events(text)] == [0, 1, 2, 3]


def test_responses_errors_name_the_fields_of_the_body(web: httpx.Client) -> None:
    """Regression: they named those of the chat behind it, or "tool_choice.literal['none','auto','required']"."""
    tools = [{"type": "function", "name": "f"}]
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"tools": tools, "tool_choice": "any"}, "tool_choice"),
        ({"tools": tools, "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "x"}}, "reasoning.effort"),  # Regression: it was "reasoning_effort"
        ({"tools": [*tools, {"type": "custom"}]}, "tools[1].name"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        # Regression: 300,000 tools were made those of a chat first, which stopped the event loop for 20 s
        ({"tools": tools * 5000}, "tools"),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input"),
    )
    for fields, param in cases:
        status, body = post(web, "/v1/responses", {"input": "x"} | fields)
        assert (status, body["error"]["param"]) == (400, param)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_messages_say_what_ended_the_answer(web: httpx.Client) -> None:
    """Regression: a stop sequence was an "end_turn", and max_tokens of 32,000, as agents ask, needed such a context."""
    for fields, reason, sequence, text in (
        ({}, "end_turn", None, REST),
        ({"max_tokens": 3}, "max_tokens", None, REST[:3]),
        ({"stop_sequences": ["x", "old"]}, "stop_sequence", "old", REST.split("old")[0]),
        ({"max_tokens": 32_000}, "end_turn", None, REST),
    ):
        _, body = post(web, "/v1/messages", ASK | fields)
        assert (body["stop_reason"], body["stop_sequence"], body["content"][0]["text"]) == (reason, sequence, text)
        response = web.post("/v1/messages", json=ASK | fields | {"stream": True})
        assert events(response.text)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_answer_that_fills_the_context_says_so(served: tuple[AsyncLLM, str], web: httpx.Client) -> None:
    engine, _ = served
    num_tokens = engine.llm.max_request_tokens - 100
    long = [{"role": "user", "content": "a" * num_tokens}]
    counted = post(web, "/v1/messages/count_tokens", {"messages": long})[1]["input_tokens"]
    _, body = post(web, "/v1/messages", ASK | {"messages": long, "max_tokens": 32_000})
    assert "usage" in body, body
    assert body["usage"]["output_tokens"] == engine.llm.max_request_tokens - counted
    assert body["stop_reason"] == "model_context_window_exceeded"
    _, body = post(web, "/v1/responses", {"input": long, "max_output_tokens": 32_000, "temperature": 0})
    assert (body["status"], body["usage"]["input_tokens"]) == ("incomplete", counted), body
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


def test_empty_answer_can_be_sent_back(web: httpx.Client) -> None:
    """Regression: an answer without text was refused in the next turn, as "messages[1] has content=None"."""
    for content in ([], [{"type": "thinking", "thinking": "Hm.", "signature": ""}], [{"type": "redacted_thinking"}]):
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}, *ASK["messages"]]
        assert post(web, "/v1/messages", ASK | {"messages": turns})[0] == 200
    items = [{"type": "reasoning", "id": "rs", "summary": [], "content": None}, {"role": "user", "content": QUESTION}]
    assert post(web, "/v1/responses", {"input": items})[0] == 200


def test_messages_header_that_differs_in_each_request_is_no_part_of_the_prompt() -> None:
    """Regression: it begins the system prompt of Claude Code, so no request had anything in the prefix cache."""
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b;"}
    system = [header, {"type": "text", "text": "Be brief."}]
    first, *_ = MessagesRequest.model_validate(ASK | {"system": system}).as_chat().messages
    assert (first.role, first.content) == ("system", "Be brief.")


def test_response_repeats_what_was_asked_under_its_own_names(web: httpx.Client) -> None:
    """Regression: "schema" came back as "schema_"."""
    _, body = post(web, "/v1/responses", {"input": "x", "text": {"format": FORMAT}, "max_output_tokens": 5})
    assert body["text"]["format"] == FORMAT
    _, body = post(web, "/v1/responses", {"input": "x", "text": {"verbosity": "medium"}, "max_output_tokens": 5})
    assert body["text"] == {"format": {"type": "text"}}


def test_tool_choice_that_names_a_tool_is_repeated_without_a_warning() -> None:
    """Regression: pydantic wrote a warning to the server's log."""
    choice = {"type": "function", "name": "f"}
    body = {"input": "x", "tools": [{"type": "function", "name": "f"}], "tool_choice": choice}
    asked = ResponsesRequest.model_validate(body)
    service: Any = SimpleNamespace(model_names=["tiny"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, *_ = events(ResponsesAnswer(service, asked.as_chat(), ChatForm(), asked).first_events())
    assert first["response"]["tool_choice"] == choice


def test_reasoning_tokens_are_those_before_its_end() -> None:
    """Regression: reasoning that the model had begun and not ended counted none, and a tag in an answer some."""
    begin, end = 7, 8
    for token_ids, has_begun, expected in (
        ([begin, 1, end, 2], False, 3),
        ([begin, 1], False, 2),
        ([1, end, 2], True, 2),
        ([1, 2], True, 2),
        ([1, 2, 3, 4, 5, begin, end], False, 0),
        ([1, end, 2], False, 0),
    ):
        service: Any = SimpleNamespace(model_names=["tiny"])
        form = ChatForm(None, ReasoningTags("<think>", "</think>", has_begun), ReasoningIds((begin,), end))
        answer = ChatAnswer(service, ChatRequest.model_validate({"messages": ASK["messages"]}), form)
        output: Any = {"token_ids": token_ids, "num_cached_tokens": 0, "text": "", "finish_reason": "length"}
        usage = answer.whole([output])["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == expected, token_ids


def test_item_that_is_cut_off_is_incomplete_in_its_last_event(web: httpx.Client) -> None:
    """Regression: it was completed, and agents run a call as soon as that event says so."""
    body = {"input": QUESTION, "temperature": 0, "stream": True}
    for fields, status in (({}, "completed"), ({"max_output_tokens": 3}, "incomplete")):
        *_, done, last = events(web.post("/v1/responses", json=body | fields).text)
        assert (done["type"], last["type"]) == ("response.output_item.done", f"response.{status}")
        assert [done["item"]] == last["response"]["output"] and done["item"]["status"] == status


@pytest.mark.parametrize("call_format", [HERMES, LLAMA, QWEN_TAGS, None])
def test_answer_of_white_space_costs_the_same_for_each_token(call_format: CallFormat | None) -> None:
    """Regression: a model that loops on new lines had all of them searched again for each."""
    service: Any = SimpleNamespace(model_names=["tiny"])
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = ChatRequest.model_validate({"messages": ASK["messages"], "tools": tools, "stream": True})
    answer = ChatAnswer(service, body, ChatForm(call_format, ReasoningTags("<think>", "</think>")))
    for _ in range(1000):
        answer.update_events(RequestUpdate(0, text="\n"))
    assert not (answer._splitters or answer._parsers)  # nothing is searched until a text follows
    assert "\\n\\nDone." in answer.update_events(RequestUpdate(0, text="Done."))


@pytest.mark.parametrize("kind", [MessagesAnswer, ResponsesAnswer])
def test_events_of_a_long_answer_cost_no_more_than_those_of_a_short_one(kind: type[BlockAnswer]) -> None:
    """Regression: each piece copied all of the answer so far."""
    answer = make_answer(kind)
    num_chars = [len(answer.update_events(RequestUpdate(0, text="word "))) for _ in range(1000)]
    assert max(num_chars[1:]) <= num_chars[1] + 10  # a number in the event may grow
    (block,) = answer._blocks
    assert len(block.pieces) == 1000  # each piece is kept, and none is copied


def test_messages_arguments_that_nest_too_deeply_are_no_bug() -> None:
    """Regression: the last event of such a stream was an internal error."""
    block = AnswerBlock("call", 0, "b", "call_1", "f", ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"])
    assert _content(block)["input"] == {}


def test_messages_form_of_the_answer_has_two_places() -> None:
    """Regression: `output_format`, as in Anthropic's beta, was ignored, so the answer had any form."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    message = {"role": "user", "content": "x"}
    chats = [
        MessagesRequest.model_validate({"messages": [message], "max_tokens": 5, **fields}).as_chat()
        for fields in ({"output_format": form}, {"output_config": {"format": form}})
    ]
    assert chats[0] == chats[1] and chats[0].response_format is not None
