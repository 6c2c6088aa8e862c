"""POST /v1/chat/completions through the openai client: messages, tools, streams, and their end."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import site_server
from model_files import copy_with_template
from tiers import RUNS_ALL

from nanovllm import AsyncLLM

NOTE = "The passkey is 4711, says the old captain."
QUESTION = f"{NOTE}\nThe passkey is"
REST = NOTE.removeprefix("The passkey is")
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASK_FOR_CALL: list[Any] = [{"role": "user", "content": f"Go on, please: I will. {CALL}<|endoftext|>\nGo on, please:"}]
# What follows this in the prompt is ambiguous for the model, so the answer must end here
UP_TO_THE_CALL = {"temperature": 0, "stop": ["</tool_call>"], "include_stop_str_in_output": True}
LONG_ANSWER = {"temperature": 0, "max_tokens": 90, "ignore_eos": True}  # the call ends before it does
RESERVED = ("chat_template", "tokenize", "messages", "conversations")  # the tokenizer's arguments
TOOL_TEMPLATE = (
    "{%- if tools %}{{ tools | length }} tools\n{% endif -%}"
    "{%- for message in messages -%}{{ message.role }}: {{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor -%}"
    "{%- if not loop.last %}\n{% endif -%}{%- endfor -%}{{ suffix or '' }}"
)


@pytest.fixture(scope="module")
def tool_client(retrieval_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model whose template takes tools, and which copies tool calls from the prompt."""
    model = copy_with_template(retrieval_model, tmp_path_factory.mktemp("tools") / "model", TOOL_TEMPLATE)
    options: dict[str, Any] = {"max_model_len": 1024, "num_kvcache_blocks": 16, "max_num_batched_tokens": 512}
    engine = AsyncLLM(model, device="cpu", generation_config="none", **options)
    with site_server(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    engine.close()


# -- messages --------------------------------------------------------------------------------------------------------


def test_chat_message_is_answered_to_its_end(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="tiny", messages=MESSAGES)
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REST, "stop")
    assert (done.object, choice.logprobs, choice.message.tool_calls) == ("chat.completion", None, None)
    assert done.usage is not None
    assert done.usage.completion_tokens == len(REST) + 1  # the end token


def test_chat_text_parts_are_joined_by_lines(client: openai.OpenAI) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}  # regression: it was refused, as "should be a valid string"
    parts: list[Any] = [{"type": "text", "text": NOTE} | hint, {"type": "text", "text": "The passkey is"}]
    done = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    assert done.choices[0].message.content == REST


def test_chat_system_and_developer_are_the_same(client: openai.OpenAI) -> None:
    for role in ("system", "developer"):
        messages: list[Any] = [{"role": role, "content": NOTE}, {"role": "user", "content": "The passkey is"}]
        assert client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content == REST


def test_chat_max_tokens_limits_the_answer(client: openai.OpenAI) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        fields: dict[str, Any] = {field: 4}
        done = client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
        assert (done.choices[0].message.content, done.choices[0].finish_reason) == (REST[:4], "length")


def test_chat_earlier_answer_of_the_client_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message
    messages: list[Any] = [*MESSAGES, first.model_dump(), {"role": "user", "content": "says the old"}]
    assert client.chat.completions.create(model="tiny", messages=messages).choices[0].message.content == " captain."


def test_chat_streamed_is_the_same_in_pieces(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in choices) == REST
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert choices[-1].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None and last.usage.completion_tokens == 2 * (len(REST) + 1)


def test_chat_async_client_many_at_once(url: str) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def ask(i: int) -> str:
                messages: list[Any] = [{"role": "user", "content": f"It is {i:03}.\nIt is"}]
                if i % 2:
                    whole = await client.chat.completions.create(model="tiny", messages=messages)
                    return whole.choices[0].message.content or ""
                stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(i) for i in range(24)))

    assert asyncio.run(ask_all()) == [f" {i:03}." for i in range(24)]


# -- tools -----------------------------------------------------------------------------------------------------------


def test_chat_tool_call_is_parsed(tool_client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": ASK_FOR_CALL, "tools": TOOLS, "extra_body": UP_TO_THE_CALL}
    (choice,) = tool_client.chat.completions.create(**fields, tool_choice="auto").choices
    assert (choice.message.content, choice.finish_reason) == (" I will.", "tool_calls")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
    choices = [chunk.choices[0] for chunk in tool_client.chat.completions.create(**fields, stream=True)]
    assert "".join(choice.delta.content or "" for choice in choices) == " I will."
    (call,) = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert call.id and call.function and call.function.name == "weather"
    assert json.loads(call.function.arguments or "") == {"city": "Bern"}
    assert choices[-1].finish_reason == "tool_calls"
    (choice,) = tool_client.chat.completions.create(**fields, tool_choice="none").choices
    assert (choice.message.content, choice.finish_reason) == (f" I will. {CALL}", "stop")


def test_chat_call_that_is_followed_by_text_is_cut_off_as_length(tool_client: openai.OpenAI) -> None:
    """The reason is "tool_calls" only if the model has ended its answer itself."""
    fields: dict[str, Any] = {"model": "tiny", "messages": ASK_FOR_CALL, "tools": TOOLS, "extra_body": LONG_ANSWER}
    (choice,) = tool_client.chat.completions.create(**fields).choices
    assert choice.message.tool_calls and choice.finish_reason == "length"
    choices = [chunk.choices[0] for chunk in tool_client.chat.completions.create(**fields, stream=True)]
    assert any(each.delta.tool_calls for each in choices) and choices[-1].finish_reason == "length"


def tool(name: str, parameters: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **options}}


CITY: dict[str, Any] = {  # the reference must be resolved within the tool's own schema
    "$defs": {"place": {"enum": ["Bern", "Zürich"]}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [
        ("required", True, {"weather", 'say "hi"'}),
        pytest.param("required", False, {"weather", 'say "hi"'}, marks=pytest.mark.slow),
        pytest.param({"type": "function", "function": {"name": "weather"}}, True, {"weather"}, marks=pytest.mark.slow),
    ],
)
def test_chat_answer_that_must_be_a_call_is_one(
    tool_client: openai.OpenAI, choice: Any, parallel: bool, names: set[str]
) -> None:
    """Whatever the model would write: its logits are nearly flat here. Arguments match their schemas."""
    tools: list[Any] = [tool("weather", CITY), tool('say "hi"', NO_ARGUMENTS)]
    called, most = set(), 0
    for seed in range(5) if RUNS_ALL else (0, 3):
        fields: dict[str, Any] = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed}
        done = tool_client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=100, max_tokens=120, **fields
        )
        message, reason = done.choices[0].message, done.choices[0].finish_reason
        calls: list[Any] = message.tool_calls or []
        if parallel and reason == "length":  # one call after another
            continue
        assert reason == "tool_calls" and message.content is None and calls
        assert parallel or len(calls) == 1
        most = max(most, len(calls))
        for call in calls:
            arguments = json.loads(call.function.arguments)
            called.add(call.function.name)
            if call.function.name == "weather":
                assert arguments.keys() == {"city", "days"} and arguments["city"] in ("Bern", "Zürich")
                assert 1 <= arguments["days"] <= 7
            else:
                assert arguments == {}
    assert called == names
    assert parallel or most == 1


def test_chat_strict_tool_gets_arguments_of_its_schema(tool_client: openai.OpenAI) -> None:
    """The model copies a call without days; if the tool is strict it must add them. Text before the call is free."""
    for strict in (False, True):
        done = tool_client.chat.completions.create(
            model="tiny",
            messages=ASK_FOR_CALL,
            tools=[tool("weather", CITY, strict=strict)],  # type: ignore[list-item]
            temperature=0,
            max_tokens=120,
            extra_body={"stop": ["</tool_call>"], "include_stop_str_in_output": True},
        )
        message = done.choices[0].message
        assert message.content == " I will."
        (call,) = message.tool_calls or []
        assert ("days" in json.loads(call.function.arguments)) == strict  # type: ignore[union-attr]


def test_chat_replayed_call_with_invalid_json_reaches_the_template(tool_client: openai.OpenAI) -> None:
    """Regression: an agent whose model had once written a wrong call got status 400 from then on."""
    for arguments in ('{"city": ', "5", ""):
        calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
        messages: list[Any] = [*MESSAGES, {"role": "assistant", "tool_calls": calls}, *MESSAGES]
        assert tool_client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=1).choices


def test_chat_result_of_a_tool_reaches_the_template(tool_client: openai.OpenAI) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]
    messages: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "It rains in Bern today.<|endoftext|>"},
        {"role": "user", "content": "It rains"},
    ]
    done = tool_client.chat.completions.create(model="tiny", messages=messages, temperature=0, tools=TOOLS)
    assert done.choices[0].message.content == " in Bern today."


def test_chat_template_kwargs_reach_the_template(tool_client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "one line of words.<|endoftext|>\nand "}]
    extra = {"chat_template_kwargs": {"suffix": "one line"}}
    done = tool_client.chat.completions.create(model="tiny", messages=messages, temperature=0, extra_body=extra)
    assert done.choices[0].message.content == " of words."


def test_chat_bad_tools_are_refused(tool_client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        *(({"chat_template_kwargs": {name: ""}}, "chat_template_kwargs") for name in RESERVED),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required", "tools": [tool("f", {"type": 5})]}, "tools"),
        ({"tool_choice": "required", "tools": [tool("f", {"properties": 5})]}, "tools"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls[0]"),
    ]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError) as raised:
            tool_client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=fields)
        assert raised.value.param == param


def test_chat_tools_that_the_template_does_not_take_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not take tools"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)


def test_chat_text_of_the_template_is_limited_before_it_is_tokenized(tool_client: openai.OpenAI) -> None:
    """Regression: only the contents of messages were counted, so any length of tools was tokenized."""
    with pytest.raises(openai.BadRequestError, match=r"2\d+ characters > 16384 maximum"):
        extra = {"chat_template_kwargs": {"suffix": "x" * 20_000}}
        tool_client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)


def test_chat_tool_without_a_usable_name_is_refused(tool_client: openai.OpenAI) -> None:
    """An empty name was offered to the model, and half of a surrogate pair was answered with an internal error."""
    for name in ("", "a\ud800", "a\n"):
        with pytest.raises(openai.BadRequestError, match="the name of a tool is") as refused:
            body = json.dumps({"model": "tiny", "messages": MESSAGES, "tools": [tool(name)]}).encode()
            headers = {"Content-Type": "application/json"}
            tool_client.post("/chat/completions", cast_to=object, content=body, options={"headers": headers})
        assert refused.value.param == "tools[0].function.name"


def test_chat_required_call_leaves_out_what_a_grammar_cannot_express(tool_client: openai.OpenAI) -> None:
    """Regression: the request was refused, as were all of Claude Code's, whose tools have such schemas."""
    parameters = CITY | {
        "propertyNames": {"maxLength": 9},
        "properties": CITY["properties"] | {"city": {"type": "string", "format": "x"}},
    }
    fields: dict[str, Any] = {"model": "tiny", "messages": ASK_FOR_CALL, "max_tokens": 200, "temperature": 0}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        done = tool_client.chat.completions.create(
            tools=[tool("weather", parameters)], tool_choice=choice, parallel_tool_calls=False, **fields
        )
        (call,) = done.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments)["city"] == "Bern"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="tool 'weather': its schema cannot be used: 'propertyNames' at #"):
        tool_client.chat.completions.create(tools=[tool("weather", parameters, strict=True)], **fields)


def test_chat_schema_that_cannot_be_used_is_blamed_on_its_tool(tool_client: openai.OpenAI) -> None:
    for bad, message in (
        ({"properties": 5}, "tool 'bad': its parameters cannot be used: prop"),
        ({"description": "x" * 200_001}, "tool 'bad': its schema has .* at most"),
    ):
        tools: list[Any] = [tool("good", CITY), tool("bad", bad)]
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            tool_client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools, tool_choice="required")
        assert refused.value.param == "tools"
    # Regression: two tools of the name that tool_choice gives were an internal error
    named: Any = {"type": "function", "function": {"name": "bad"}}
    tools = [tool("good", CITY), tool("bad", CITY), tool("bad", {"properties": 5})]
    with pytest.raises(openai.BadRequestError, match="tool 'bad': its parameters cannot be used"):
        tool_client.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools, tool_choice=named)


def test_chat_progress_of_the_prompt_is_reported_from_beginning_to_end(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Read all of this. " * 80}]
    extra = {"return_progress": True}
    fields: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 2, "extra_body": extra}
    for is_cached in (False, True):
        chunks: list[Any] = list(client.chat.completions.create(**fields, stream=True))
        reports = [chunk.prompt_progress for chunk in chunks if hasattr(chunk, "prompt_progress")]
        total = reports[0]["total"]
        assert total > 1400 and reports[-1]["processed"] == total == reports[-1]["total"]
        assert [each["processed"] for each in reports] == sorted(each["processed"] for each in reports)
        assert (reports[-1]["cache"] > 0) == is_cached
        assert reports[-1]["time_ms"] >= reports[0]["time_ms"] >= 0
    with pytest.raises(openai.BadRequestError, match="return_progress needs stream=true"):
        client.chat.completions.create(**fields)
