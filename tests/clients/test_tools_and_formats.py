"""Python clients combine tools with a form of the answer: first the model calls, then its answer has the form.

The server has the official chat template of Qwen3.5, so the model reasons before each.
"""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest
from conftest import KEY
from pydantic import BaseModel

pytestmark = pytest.mark.clients

WEATHER = "It rains."


class Report(BaseModel):
    city: str
    sky: str


REPORT = Report(city="Bern", sky="grey")
CALL = "How is the weather? <<call weather|city|Bern>>"
ASK = f"{CALL} <<then {REPORT.model_dump_json()}>>"
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """The weather in a city."""
    return WEATHER if city == "Bern" else "?"


@pytest.fixture(scope="module")
def client(scripted_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted_url}/v1", api_key=KEY, max_retries=0)


# -- openai and anthropic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_with_a_format(client: openai.OpenAI, strict: bool, stream: bool) -> None:
    """The grammar of `response_format` made calls impossible, and with a strict tool the request was refused."""
    function = {"name": "weather", "parameters": CITY, "strict": strict}
    schema = {"name": "report", "schema": Report.model_json_schema(), "strict": strict}
    fields: dict[str, Any] = {
        "model": "m",
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]

    def answer() -> Any:
        if not stream:
            return client.chat.completions.create(messages=messages, **fields).choices[0].message
        with client.chat.completions.stream(messages=messages, **fields) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0].message

    first = answer()
    (call,) = first.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
    assert first.reasoning_content and not first.content
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    assert Report.model_validate_json(answer().content) == REPORT


def test_openai_chat_parse(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(type("weather", (BaseModel,), {"__annotations__": {"city": str}}))
    messages: list[Any] = [{"role": "user", "content": ASK}]
    fields: dict[str, Any] = {"model": "m", "tools": [tool], "response_format": Report}
    message = client.chat.completions.parse(messages=messages, **fields).choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.parsed_arguments.city == "Bern"  # type: ignore[union-attr]
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": WEATHER}]
    assert client.chat.completions.parse(messages=messages, **fields).choices[0].message.parsed == REPORT


@pytest.mark.parametrize("strict", [False, True])
def test_openai_responses_parse(client: openai.OpenAI, strict: bool) -> None:
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": strict}]
    items: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": ASK}]
    fields: dict[str, Any] = {"model": "m", "tools": tools, "instructions": "Be kind.", "text_format": Report}
    done = client.responses.parse(input=items, **fields)
    (call,) = [item for item in done.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Bern"}
    items += [*done.output, {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}]
    assert client.responses.parse(input=items, **fields).output_parsed == REPORT
    with client.responses.stream(input=items, **fields) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == REPORT


def test_anthropic_with_a_format(scripted_url: str) -> None:
    client = anthropic.Anthropic(base_url=scripted_url, api_key=KEY, max_retries=0)
    schema = Report.model_json_schema() | {"additionalProperties": False}
    fields: dict[str, Any] = {
        "model": "m",
        "max_tokens": 1000,
        "system": "Be brief.",
        "tools": [{"name": "weather", "input_schema": CITY, "strict": True}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    messages: list[Any] = [{"role": "user", "content": ASK}]
    done = client.messages.create(messages=messages, **fields)
    (call,) = [block for block in done.content if block.type == "tool_use"]
    assert call.input == {"city": "Bern"} and done.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}
    messages += [{"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **fields) as stream:
        (text,) = [block.text for block in stream.get_final_message().content if block.type == "text"]
    assert Report.model_validate_json(text) == REPORT


# -- frameworks --------------------------------------------------------------------------------------------------------


def test_langchain_with_a_format(scripted_url: str) -> None:
    """It takes only strict tools together with a format."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="m", base_url=f"{scripted_url}/v1", api_key=KEY)  # type: ignore[arg-type]
    bound = chat.bind_tools([weather], strict=True, response_format=Report)
    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage(ASK)]
    message: Any = bound.invoke(messages)
    (call,) = message.tool_calls
    assert call["args"] == {"city": "Bern"}
    messages += [message, ToolMessage(WEATHER, tool_call_id=call["id"])]
    done: Any = bound.invoke(messages)
    assert Report.model_validate_json(done.content) == REPORT
    formed = chat.with_structured_output(Report, method="json_schema", include_raw=True, tools=[weather], strict=True)
    both: Any = formed.invoke([HumanMessage(ASK)])
    assert both["raw"].tool_calls and both["parsing_error"] is None


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(scripted_url: str, method: Any) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="m", base_url=f"{scripted_url}/v1", api_key=KEY)  # type: ignore[arg-type]
    asked = f"<<call Report|city|Bern|sky|grey>> <<then {REPORT.model_dump_json()}>>"
    assert chat.with_structured_output(Report, method=method).invoke(asked) == REPORT


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_with_an_output_type(scripted_url: str, api: str) -> None:
    import agents

    agents.set_tracing_disabled(True)

    async def converse() -> tuple[Any, Any]:
        client = openai.AsyncOpenAI(base_url=f"{scripted_url}/v1", api_key=KEY, max_retries=0)
        kind: Any = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        tools: list[Any] = [agents.function_tool(weather)]
        agent = agents.Agent("a", instructions="Be brief.", model=kind("m", client), tools=tools, output_type=Report)
        done = await agents.Runner.run(agent, ASK)
        streamed = agents.Runner.run_streamed(agent, ASK)
        async for _ in streamed.stream_events():
            pass
        return done.final_output, streamed.final_output

    assert asyncio.run(converse()) == (REPORT, REPORT)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("kind", ["native", "tool", "prompted"])
def test_pydantic_ai_with_an_output_type(scripted_url: str, api: str, kind: str) -> None:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    made: Any = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    model = made("m", provider=OpenAIProvider(base_url=f"{scripted_url}/v1", api_key=KEY))
    form: Any = {"native": NativeOutput, "tool": ToolOutput, "prompted": PromptedOutput}[kind](Report)
    agent: Any = Agent(model, output_type=form, instructions="Be brief.", tools=[weather])
    asked = "<<call final_result|city|Bern|sky|grey>>" if kind == "tool" else ASK
    assert agent.run_sync(asked).output == REPORT

    async def stream() -> Any:
        async with agent.run_stream(asked) as streamed:
            return await streamed.get_output()

    assert asyncio.run(stream()) == REPORT


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(client: openai.OpenAI, mode: str) -> None:
    import instructor

    patched: Any = instructor.from_openai(client, mode=instructor.Mode[mode])
    asked = f"<<call Report|city|Bern|sky|grey>> <<then {REPORT.model_dump_json()}>>"
    messages = [{"role": "user", "content": asked}]
    made = patched.chat.completions.create(model="m", messages=messages, response_model=Report)
    assert made.model_dump() == REPORT.model_dump()  # its class is instructor's own


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_litellm(scripted_url: str, monkeypatch: pytest.MonkeyPatch, provider: str, stream: bool) -> None:
    """It sends `provider_specific_fields` back on messages that had reasoning."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    base = scripted_url if provider == "anthropic" else f"{scripted_url}/v1"
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    fields: dict[str, Any] = {"model": f"{provider}/m", "api_base": base, "api_key": KEY, "tools": [tool]}
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": CALL}]

    def answer() -> Any:
        done: Any = litellm.completion(messages=messages, stream=stream, num_retries=0, **fields)
        return (litellm.stream_chunk_builder(list(done)) if stream else done).choices[0].message

    message = answer()
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    assert answer().content == f"It says: {WEATHER}"
    if not stream and provider != "anthropic":
        messages[1]["content"] = ASK
        fields["response_format"] = Report
        assert Report.model_validate_json(answer().content) == REPORT
