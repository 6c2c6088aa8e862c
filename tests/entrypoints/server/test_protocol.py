"""Bodies to SamplingParams: every field arrives, and defaults come from the right place."""

from dataclasses import fields
from typing import Any

import pytest

from nanovllm.entrypoints.server.call_formats import HERMES, LLAMA
from nanovllm.entrypoints.server.protocol import (
    LENIENT,
    ChatRequest,
    CompletionRequest,
    call_constraint,
    chat_params,
    completion_params,
)
from nanovllm.errors import RequestError
from nanovllm.sampling_params import ModelLimit, SamplingParams, StructuredOutputs

FIELDS: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 3,
    "stop": ("x",),
    "stop_token_ids": (4,),
    "ignore_eos": True,
    "min_tokens": 2,
    "bad_words": ("bad",),
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "prompt_logprobs": 3,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "max_tokens": 9,
}
AS_JSON = {name: list(value) if isinstance(value, tuple) else value for name, value in FIELDS.items()}


def completion(**given: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x"} | given)


def chat(**given: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | given)


def test_every_field_arrives() -> None:
    """If this fails for a new sampling parameter: give it a field of the same name in SamplingFields."""
    others = {"logprobs", "logit_bias", "structured_outputs", "detokenize", "reasoning_tags", "output_kind"}
    assert FIELDS.keys() | others == {each.name for each in fields(SamplingParams)}
    expected = SamplingParams(**FIELDS, logprobs=4, logit_bias={5: 1.5})
    body = completion(**AS_JSON, logprobs=4, logit_bias={"5": 1.5})
    assert completion_params(body, {}) == expected
    body_of_chat = chat(**AS_JSON, logprobs=True, top_logprobs=4, logit_bias={"5": 1.5})
    assert chat_params(body_of_chat, {}) == expected


def test_null_fields_are_defaults() -> None:
    nulls = dict.fromkeys(FIELDS)
    assert completion_params(completion(**nulls), {}) == SamplingParams(max_tokens=16)
    assert chat_params(chat(**nulls), {}) == SamplingParams(max_tokens=None)


def test_defaults_of_the_model_yield_to_the_body() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 64}
    assert completion_params(completion(top_k=3), defaults) == SamplingParams(temperature=0.6, top_k=3, max_tokens=16)
    assert chat_params(chat(temperature=0), defaults) == SamplingParams(temperature=0, top_k=20, max_tokens=64)


def test_chat_default_of_the_model_stays_one_that_the_context_limits() -> None:
    defaults = {"max_tokens": ModelLimit(64)}
    assert chat_params(chat(), defaults).within(10).max_tokens == 10
    assert chat_params(chat(max_completion_tokens=80), defaults).within(10).max_tokens == 80


def test_structured_outputs_come_from_any_of_their_fields() -> None:
    cases: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            StructuredOutputs(json={"type": "object"}),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"json": {}}}, StructuredOutputs(json={})),
        ({"guided_json": {"type": "object"}}, StructuredOutputs(json={"type": "object"})),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutputs(choice=("a",))),
    ]
    for given, expected in cases:
        assert chat_params(chat(**given), {}).structured_outputs == expected
        assert completion_params(completion(**given), {}).structured_outputs == expected


def test_echo_with_logprobs_asks_for_the_prompts() -> None:
    assert completion_params(completion(echo=True, logprobs=2), {}).prompt_logprobs == 2
    assert completion_params(completion(echo=True, logprobs=2, prompt_logprobs=5), {}).prompt_logprobs == 5
    assert completion_params(completion(echo=True, logprobs=2, max_tokens=0), {}).max_tokens == 1


def test_logit_bias_bad_key_is_refused() -> None:
    for key in ("x", "-1", "1.5", "", "²", "9" * 5000):
        with pytest.raises(RequestError, match="logit_bias"):
            completion_params(completion(logit_bias={key: 1}), {})


def test_calls_are_constrained_if_the_answer_must_be_one_or_a_tool_is_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    anything = {"type": "object"}

    def tools(**options: bool) -> list[dict[str, Any]]:
        functions = [{"name": "f", "parameters": schema, **options}, {"name": "g"}]
        return [{"type": "function", "function": function} for function in functions]

    named = {"type": "function", "function": {"name": "f"}}
    for given, expected in (
        ({}, None),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, None),
        ({"tool_choice": "none", "parallel_tool_calls": False, "tools": tools(strict=True)}, None),
        ({"tools": tools(strict=True)}, ([schema, anything], False, False)),
        ({"parallel_tool_calls": False}, ([anything, anything], False, True)),
        ({"tool_choice": "required"}, ([schema | LENIENT, anything | LENIENT], True, False)),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            ([schema | LENIENT, anything | LENIENT], True, True),
        ),
        ({"tool_choice": "required", "tools": tools(strict=True)}, ([schema, anything | LENIENT], True, False)),
        ({"tool_choice": named}, ([schema | LENIENT], True, True)),
        ({"response_format": {"type": "json_object"}}, ([anything, anything], False, False)),
        ({"response_format": {"type": "text"}}, None),
    ):
        constraint = call_constraint(chat(**{"tools": tools()} | given), HERMES)
        if constraint is None:
            assert expected is None, given
            continue
        found = [tag[1] for tag in constraint.tags], constraint.is_required, constraint.is_single
        assert found == expected, given
    for parameters in ({"properties": {}}, {"type": ["object", "null"], "properties": {}}):
        untyped = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
        ((_, found_schema, _),) = call_constraint(chat(tools=untyped), HERMES).tags  # type: ignore[union-attr]
        assert found_schema == {"type": "object", "properties": {}}
    body = chat(tools=tools(), tool_choice=named)
    ((begin, _, end),) = call_constraint(body, HERMES).tags  # type: ignore[union-attr]
    assert (begin, end) == ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>")
    bare = call_constraint(body, LLAMA)
    assert bare is not None and not bare.trigger and bare.separator == "; "
    assert bare.tags[0][0::2] == ('{"name": "f", "parameters": ', "}")


def test_answer_with_a_form_and_tools_is_calls_or_of_that_form() -> None:
    """Regression: the form made calls impossible, or the request was refused if a tool was strict."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given, form in (
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"guided_regex": "a", "tool_choice": "required"}, {}),
        ({"guided_regex": "a", "tool_choice": {"type": "function", "function": {"name": "f"}}}, {}),
    ):
        body = chat(tools=tools, **given)
        calls = call_constraint(body, HERMES)
        assert chat_params(body, {}, calls).structured_outputs == StructuredOutputs(tagged_json=calls, **form)
    body = chat(tools=tools, guided_regex="a", tool_choice="none")
    assert call_constraint(body, HERMES) is None
    assert chat_params(body, {}).structured_outputs == StructuredOutputs(regex="a")
