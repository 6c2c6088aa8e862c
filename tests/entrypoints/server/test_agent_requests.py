"""Requests as coding agents send them, with the restrictions of Qwen3.5's template: they are answered, not refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from http_server import http_server, web_client
from model_files import copy_with_template

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server import fields
from nanovllm.entrypoints.server.call_formats import HERMES
from nanovllm.entrypoints.server.chat_answers import ChatAnswer, ChatForm
from nanovllm.entrypoints.server.messages import MessagesAnswer, MessagesRequest
from nanovllm.entrypoints.server.protocol import ChatRequest
from nanovllm.entrypoints.server.responses import ResponsesAnswer, ResponsesRequest
from nanovllm.request_stream import RequestUpdate

TEMPLATE = Path(__file__).parents[2] / "support" / "templates" / "qwen3.5.jinja"
MAX_TOKENS, SERVED_TOKENS = 4096, 2048  # context of the server here, and of the other tests'
QUESTION = "The passkey is 4711.\nThe passkey"
USER = {"role": "user", "content": QUESTION}
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = {"type": "function", "name": "shell", "description": "Runs it.", "strict": False, "parameters": PARAMETERS}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ],
    "tools": [
        SHELL,
        {"type": "namespace", "name": "team", "description": "Other agents.", "tools": [SHELL | {"name": "spawn"}]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x": "y"},
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32_000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "scope": "global"}},
    ],
    "messages": [USER, {"role": "system", "content": "Today is Monday."}],
    "tools": [
        {"name": "Bash", "description": "Runs it.", "input_schema": PARAMETERS, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "x"},
}


@pytest.fixture(scope="module")
def agents(retrieval_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server whose model has the chat template of Qwen3.5."""
    model = copy_with_template(retrieval_model, tmp_path_factory.mktemp("agents") / "model", TEMPLATE.read_text())
    engine = AsyncLLM(model, device="cpu", max_model_len=MAX_TOKENS, num_kvcache_blocks=64, max_num_batched_tokens=4096)
    with http_server(engine) as url, web_client(url) as client:
        yield client
    engine.close()


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def test_codex_first_request_is_answered(agents: httpx.Client) -> None:
    """Regression: 400 for a tool of type "namespace", for web search, and for the second system message."""
    answer = agents.post("/v1/responses", json=CODEX | {"max_output_tokens": 3})
    assert answer.status_code == 200, answer.text
    *_, last = events_of(answer.text)
    assert last["type"] == "response.incomplete" and last["response"]["tools"][1]["type"] == "namespace"


def test_claude_code_request_is_answered(agents: httpx.Client) -> None:
    answer = agents.post("/v1/messages?beta=true", json=CLAUDE_CODE | {"max_tokens": 3})
    assert answer.status_code == 200 and events_of(answer.text)[-1]["type"] == "message_stop", answer.text
    counted = {name: CLAUDE_CODE[name] for name in ("model", "system", "messages", "tools", "thinking")}
    assert agents.post("/v1/messages/count_tokens", json=counted).json()["input_tokens"] > 100


def test_tools_that_cannot_be_offered_are_left_out_and_named_in_the_log(
    agents: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_logged", set())
    caplog.set_level("INFO", "nanovllm")
    ResponsesRequest.model_validate(CODEX)
    logged = " ".join(record.getMessage() for record in caplog.records)
    assert all(f"tools of type {kind!r}" in logged for kind in ("web_search", "local_shell", "image_generation"))
    search = {"type": "web_search", "user_location": {}}
    for path, body in (
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 1}),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1}),
    ):
        assert agents.post(path, json=body | {"tools": [search]}).status_code == 200
        forced: Any = "required" if path != "/v1/messages" else {"type": "any"}
        refused = agents.post(path, json=body | {"tools": [search], "tool_choice": forced})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


def test_tools_of_namespaces_are_offered_as_functions_and_called_by_their_own_names() -> None:
    """The model knows a tool by both names. A custom tool is a function of one text to it."""
    asked = ResponsesRequest.model_validate(CODEX)
    functions = {tool.function.name: tool.function for tool in asked.as_chat().offered_tools}
    assert functions.keys() == {"shell", "team__spawn", "apply_patch"}
    assert functions["team__spawn"].description == "Other agents.\n\nRuns it."
    assert "lark" in (functions["apply_patch"].description or "")
    service: Any = SimpleNamespace(model_names=["tiny"])
    answer = ResponsesAnswer(service, asked.as_chat(), ChatForm(HERMES), asked)
    calls = (("team__spawn", {"command": "a"}), ("apply_patch", {"input": "*** Begin\n"}), ("unknown", {}))
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
    )
    output: Any = {"text": text, "token_ids": [1], "num_cached_tokens": 0, "finish_reason": "stop"}
    found = events_of(answer.update_events(RequestUpdate(0, text, output=output)))
    kinds = [re.sub(r"^response\.", "", event["type"]) for event in found]
    assert kinds[5:8] == ["custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"], kinds
    spawn, patch, _ = (event["item"] for event in found if event["type"] == "response.output_item.done")
    assert (spawn["type"], spawn["name"], spawn["namespace"]) == ("function_call", "spawn", "team")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n")
    choice = {"type": "function", "name": "spawn", "namespace": "team"}
    forced = ResponsesRequest.model_validate(CODEX | {"tool_choice": choice}).as_chat().tool_choice
    assert forced is not None and not isinstance(forced, str) and forced.function.name == "team__spawn"


def test_tools_that_an_item_adds_are_offered() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [SHELL | {"name": "late"}]}
    body = CODEX | {"input": [*CODEX["input"], item]}
    assert "late" in [tool.function.name for tool in ResponsesRequest.model_validate(body).as_chat().offered_tools]


# -- the length of the answer, and prompts that are too long -----------------------------------------------------------


def test_answer_is_cut_to_what_fits_in_every_api(web: httpx.Client) -> None:
    """Regression: opencode asks for 32,000 tokens, and was 400 where the context is 32,768."""
    chat, prompt = [{"role": "user", "content": "a" * (SERVED_TOKENS - 120)}], "a" * (SERVED_TOKENS - 5)
    for path, body in (
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": chat, "max_completion_tokens": 32_000}),
        ("/v1/completions", {"prompt": prompt, "max_tokens": 32_000}),
    ):
        answer = web.post(path, json=body | {"ignore_eos": True})
        assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] == SERVED_TOKENS, answer.text


def test_each_prompt_of_a_completion_is_cut_by_its_own_length(web: httpx.Client) -> None:
    prompts = [[65] * (SERVED_TOKENS - 3), [66] * (SERVED_TOKENS - 7)]
    body = {"prompt": prompts, "max_tokens": 10, "n": 2, "ignore_eos": True}
    answer = web.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 2 * 3 + 2 * 7
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


LONG = [{"role": "user", "content": "a" * (MAX_TOKENS + 10)}]


def test_prompt_that_is_too_long_is_recognized_by_agents(agents: httpx.Client) -> None:
    """Regression: error.code was null and the message spoke of max_tokens=1, so agents did not compact."""
    for path, body, param in (
        ("/v1/chat/completions", {"messages": LONG}, "messages"),
        ("/v1/completions", {"prompt": LONG[0]["content"]}, "prompt"),
        ("/v1/completions", {"prompt": [65] * (MAX_TOKENS + 1)}, "prompt"),
        ("/v1/completions", {"prompt": [65] * MAX_TOKENS, "max_tokens": 5}, "prompt"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/messages", {"messages": LONG, "max_tokens": 5}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 17 * MAX_TOKENS}]}, "messages"),
    ):
        answer = agents.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "prompt is too long" in error["message"] and "max_tokens" not in error["message"]
    with openai.OpenAI(base_url=f"{agents.base_url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=LONG, max_tokens=7)  # type: ignore[arg-type]
        assert refused.value.code == "context_length_exceeded"
        assert f"maximum context length is {MAX_TOKENS} tokens" in refused.value.message


def test_prompt_that_is_too_long_has_anthropics_words(agents: httpx.Client) -> None:
    answer = agents.post("/v1/messages", json={"messages": LONG, "max_tokens": 7})
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    found = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["error"]["message"])
    assert found and int(found[1]) > int(found[2]) == MAX_TOKENS - 1


def test_stream_of_responses_fails_where_the_prompt_is_too_long(agents: httpx.Client) -> None:
    """Codex compacts if response.failed has this code, and gives up at a status of 400."""
    for content in (LONG, "a" * 17 * MAX_TOKENS):
        answer = agents.post("/v1/responses", json={"input": content, "stream": True})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        first, *_, last = events_of(answer.text)
        assert first["type"] == "response.created" and last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "context_length_exceeded"
    refused = agents.post("/v1/chat/completions", json={"messages": LONG, "stream": True})
    assert refused.status_code == 400


# -- events of an answer that has not begun ----------------------------------------------------------------------------


def test_events_without_text_leave_the_answer_as_it_is() -> None:
    """Regression: during a long prompt only comments were sent, and clients that count events gave up."""
    service: Any = SimpleNamespace(model_names=["tiny"])
    chat = ChatRequest.model_validate({"messages": [USER], "stream": True})
    asked = ResponsesRequest.model_validate({"input": QUESTION, "stream": True})
    messages = MessagesRequest.model_validate({"messages": [USER], "max_tokens": 9, "stream": True}).as_chat()
    output: Any = {"text": "x", "token_ids": [1], "num_cached_tokens": 0, "finish_reason": "stop"}
    for make, waiting in (
        (lambda: ChatAnswer(service, chat, ChatForm()), [{"content": ""}] * 2),
        (lambda: MessagesAnswer(service, messages, ChatForm()), ["ping"] * 2),
        (
            lambda: ResponsesAnswer(service, asked.as_chat(), ChatForm(), asked),
            ["response.created", "response.in_progress", "response.in_progress"],
        ),
    ):
        answer: Any = make()
        before = events_of(answer.waiting_events() + answer.waiting_events())
        assert [event.get("type") or event["choices"][0]["delta"] for event in before] == waiting
        after = answer.first_events() + answer.update_events(RequestUpdate(0, "x", output=output))
        found = before + events_of(after + answer.last_events())
        if "sequence_number" in found[0]:
            assert [event["sequence_number"] for event in found] == list(range(len(found)))
            assert [event["type"] for event in found].count("response.created") == 1


# -- models ------------------------------------------------------------------------------------------------------------


def test_model_that_does_not_exist_is_answered_with_those_that_do(agents: httpx.Client) -> None:
    """Regression: "the model 'my-model' does not exist" did not say which one does."""
    refused = agents.post("/v1/chat/completions", json={"model": "gpt", "messages": [USER]})
    assert refused.status_code == 404 and "'tiny' and 'alias/of tiny'" in refused.json()["error"]["message"]
    assert "'tiny'" in agents.get("/v1/models/gpt").json()["error"]["message"]
    assert agents.get("/v1/models/").json() == agents.get("/v1/models").json()
