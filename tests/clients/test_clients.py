"""Each client holds a small conversation with a tool: it is asked for a call, and answers with what the tool says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from conftest import KEY
from pydantic import BaseModel

pytestmark = pytest.mark.clients

QUESTION = "How is the weather in Bern?"
WEATHER = "It rains."
ANSWER = f"The tool says {WEATHER}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = {"city": "Bern"}


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


# -- openai ------------------------------------------------------------------------------------------------------------


def test_openai_chat(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: dict[str, Any] = {"model": "tiny", "tools": tools}
    message: Any = client.chat.completions.create(messages=messages, **fields).choices[0].message
    assert (message.reasoning, message.reasoning_content) == ("I ask.", "I ask.")
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    with client.chat.completions.stream(messages=messages, **fields) as stream:
        kinds = {event.type for event in stream}
        streamed: Any = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert json.loads(streamed.tool_calls[0].function.arguments) == ARGUMENTS
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    done = client.chat.completions.create(messages=messages, **fields)
    assert done.choices[0].message.content == ANSWER


def test_openai_chat_reasoning_on_and_off(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    done: Any = client.chat.completions.create(**fields)
    message = done.choices[0].message
    assert (message.reasoning, message.content) == ("Hm.", "Hello!")
    assert done.usage.completion_tokens_details.reasoning_tokens == len("Hm.") + 2  # each byte and each tag is a token
    extras: list[dict[str, Any]] = [
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ]
    for extra in extras:
        message = client.chat.completions.create(**fields, **extra).choices[0].message
        assert message.content == "Hello!" and not hasattr(message, "reasoning")


def test_openai_responses(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: dict[str, Any] = {"model": "tiny", "tools": tools, "store": False, "instructions": "Be brief."}
    done = client.responses.create(input=items, **fields)
    assert [item.type for item in done.output] == ["reasoning", "function_call"] and done.status == "completed"
    with client.responses.stream(input=items, **fields) as stream:
        kinds = [event.type for event in stream]
        streamed: Any = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds and kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.delta") == 1  # a call in JSON arrives whole
    call = streamed.output[1]
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
    items += [*streamed.output, {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}]
    assert client.responses.create(input=items, **fields).output_text == ANSWER
    with client.responses.stream(input=items, **fields) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == ANSWER
        final = stream.get_final_response()
    assert final.usage is not None and final.usage.output_tokens > len(ANSWER)
    with pytest.raises(openai.BadRequestError, match="responses are not stored") as refused:
        client.responses.create(input="x", model="tiny", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


# -- anthropic ---------------------------------------------------------------------------------------------------------


def test_anthropic_messages(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    tools: list[Any] = [{"name": "weather", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}]
    part = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": [part]}]
    fields: dict[str, Any] = {"model": "tiny", "tools": tools, "max_tokens": 200}
    done: Any = client.messages.create(messages=messages, **fields)
    assert [block.type for block in done.content] == ["thinking", "tool_use"] and done.stop_reason == "tool_use"
    with client.messages.stream(messages=messages, **fields) as stream:
        kinds = [event.type for event in stream]
        streamed: Any = stream.get_final_message()
    assert kinds.count("input_json") == 1  # a call in JSON arrives whole
    assert [block.type for block in streamed.content] == ["thinking", "tool_use"]
    call = streamed.content[1]
    assert (call.name, call.input) == ("weather", ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": WEATHER}]}
    messages += [{"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
    done = client.messages.create(messages=messages, **fields)
    assert (done.content[0].text, done.stop_reason) == (ANSWER, "end_turn")
    fields.pop("max_tokens")
    counted = client.messages.count_tokens(messages=messages, **fields)
    assert counted.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens


def test_anthropic_errors(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="a content block of type 'image'"):
        client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": "x"}]
        )


# -- frameworks --------------------------------------------------------------------------------------------------------


def test_langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return WEATHER if city == "Bern" else "?"

    chat = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key=KEY)  # type: ignore[arg-type]
    for choice in ("auto", "any"):
        bound = chat.bind_tools([weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
        messages: list[Any] = [HumanMessage(QUESTION)]
        message: Any = bound.invoke(messages)
        (call,) = message.tool_calls
        messages += [message, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
        done = chat.bind_tools([weather]).invoke(messages)
        assert done.content == ANSWER
    streamed = [chunk.content for chunk in chat.bind_tools([weather]).stream(messages)]
    assert "".join(map(str, streamed)) == ANSWER


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(url: str, api: str) -> None:
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return WEATHER if city == "Bern" else "?"

    async def converse() -> tuple[str, str]:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        kind: Any = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        agent = agents.Agent(name="a", instructions="Be brief.", model=kind("tiny", client), tools=[weather])
        done = await agents.Runner.run(agent, QUESTION)
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        return done.final_output, streamed.final_output

    assert asyncio.run(converse()) == (ANSWER, ANSWER)


def test_pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)))

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        return WEATHER if city == "Bern" else "?"

    assert agent.run_sync(QUESTION).output == ANSWER


def test_instructor(client: openai.OpenAI) -> None:
    import instructor

    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    place = patched.chat.completions.create(model="tiny", messages=messages, response_model=Place)
    assert place.city == "Bern"


# -- tools together with a form of the answer --------------------------------------------------------------------------


class Place(BaseModel):
    city: str


PLACE = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema(), "strict": True}}
PLACE_TEXT = '{"city": "Bern"}'


@pytest.mark.parametrize("is_strict", [False, True])
def test_openai_tools_with_response_format(client: openai.OpenAI, is_strict: bool) -> None:
    """Regression: with response_format no tool could be called, and a strict one was refused."""
    function = {"name": "weather", "parameters": CITY | {"additionalProperties": False}, "strict": is_strict}
    tools: list[Any] = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: dict[str, Any] = {"model": "tiny", "tools": tools, "response_format": PLACE}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        for extra in ({}, {"parallel_tool_calls": False}):
            message: Any = client.chat.completions.create(messages=messages, tool_choice=choice, **fields, **extra)
            message = message.choices[0].message
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == ARGUMENTS and not message.content
            assert message.reasoning == "I ask."
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": PLACE_TEXT}]
    for choice in ("auto", "none"):
        done: Any = client.chat.completions.create(messages=messages, tool_choice=choice, **fields)
        assert done.choices[0].message.content == PLACE_TEXT and done.choices[0].message.reasoning == "So."
        stream = client.chat.completions.create(messages=messages, tool_choice=choice, stream=True, **fields)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == PLACE_TEXT
    if is_strict:
        parsed = client.chat.completions.parse(
            model="tiny", messages=messages, tools=[openai.pydantic_function_tool(Place)], response_format=Place
        )
        assert parsed.choices[0].message.parsed == Place(city="Bern")


def test_openai_responses_with_tools_and_a_form(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: dict[str, Any] = {"model": "tiny", "tools": tools, "text_format": Place}
    done = client.responses.parse(input=items, **fields)
    assert [item.type for item in done.output] == ["reasoning", "function_call"]
    call: Any = done.output[1]
    items += [{"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": PLACE_TEXT}]
    assert client.responses.parse(input=items, **fields).output_parsed == Place(city="Bern")


def test_anthropic_tools_with_an_output_format(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    tools: list[Any] = [{"name": "weather", "input_schema": CITY}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    form = {"format": {"type": "json_schema", "schema": Place.model_json_schema()}}
    fields: dict[str, Any] = {"model": "tiny", "tools": tools, "max_tokens": 200, "extra_body": {"output_config": form}}
    done: Any = client.messages.create(messages=messages, **fields)
    assert [block.type for block in done.content] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": done.content[1].id, "content": PLACE_TEXT}
    messages += [{"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
    done = client.messages.create(messages=messages, **fields)
    assert done.content[-1].text == PLACE_TEXT


def test_stop_strings_leave_the_reasoning_alone(client: openai.OpenAI, url: str) -> None:
    """Regression: a stop string in the reasoning left the answer without content."""
    fields: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    for stop, content in ((".", "Hello!"), ("l", "He"), (["m", "!"], "Hello")):
        done: Any = client.chat.completions.create(stop=stop, **fields)
        assert (done.choices[0].message.reasoning, done.choices[0].message.content) == ("Hm.", content)
        stream: Any = client.chat.completions.create(stop=stop, stream=True, **fields)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == content
    included: Any = client.chat.completions.create(stop="l", extra_body={"include_stop_str_in_output": True}, **fields)
    assert included.choices[0].message.content == "Hel"
    messages = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0).messages
    for sequence, reason, found, text in ((".", "end_turn", None, "Hello!"), ("l", "stop_sequence", "l", "He")):
        message: Any = messages.create(stop_sequences=[sequence], max_tokens=50, **fields)
        assert (message.stop_reason, message.stop_sequence, message.content[-1].text) == (reason, found, text)


def test_lm_eval(url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    rows = [{"text": "It is 4711.\nIt is", "label": 0, "choices": [" 4711", " 8042"]}] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "passkey",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    arguments = f"model=tiny,base_url={url}/v1/completions,tokenizer={model},max_length=1024"
    results = lm_eval.simple_evaluate(
        "local-completions", model_args=arguments, tasks=[task], task_manager=TaskManager(include_defaults=False)
    )
    assert results["results"]["passkey"]["acc,none"] == 1.0
