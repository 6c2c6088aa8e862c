"""POST /v1/chat/completions: the next message of a conversation, by way of the model's chat template."""

import inspect
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from nanovllm.core.outputs import RequestOutput, TokenLogprobs
from nanovllm.core.sequence import TokenIds
from nanovllm.llm import LLM
from nanovllm.request_stream import RequestUpdate
from nanovllm.server.admission import Service
from nanovllm.server.answers import Answer, chat_logprobs, respond
from nanovllm.server.errors import ANSWERS, ApiError
from nanovllm.server.protocol import ChatRequest, Message, TokenizeRequest, Tool, ToolCall, chat_params
from nanovllm.server.tool_calls import Delta, ToolCallDelta, ToolCallParser, make_parser

_RENDERED_NAMES = ("messages", "conversations")  # what the tokenizer itself passes on to the template


def add_chat(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        service.check_body(body)
        tools = [] if body.tool_choice == "none" else body.tools or []
        if tools:
            check_tools(service)
        cache_salt = service.cache_salt(body, request)
        token_ids = await service.prepare(encode_messages, service, body, tools, cache_salt)
        num_free_tokens = service.llm.max_request_tokens - len(token_ids)
        params = chat_params(body, service.llm.sampling_defaults, num_free_tokens)
        with_tokens = bool(body.stream) and (bool(body.logprobs) or body.includes_usage_so_far)
        stream = await service.submit([token_ids], params, with_tokens=with_tokens, cache_salt=cache_salt)
        answer = ChatAnswer(service, body, stream.prompts, parses_tools=bool(tools))
        return await respond(answer, stream, params, request.receive, streams=bool(body.stream))


class ChatAnswer(Answer):
    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, prompts: list[TokenIds], *, parses_tools: bool) -> None:
        super().__init__(service, body, prompts)
        self._body, self._parses_tools = body, parses_tools
        self._num_top = body.top_logprobs or 0
        self._parsers: dict[int, ToolCallParser] = {}  # by index, of the answers that are streamed
        self._with_calls: set[int] = set()  # indices of the answers that called a tool

    def _choice(
        self, index: int, output: RequestOutput, prompt_entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        content: str | None = output["text"] or ""
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._parses_tools:
            parser = tool_call_parser(self._service)
            deltas = [*parser.feed(output["text"] or ""), *parser.finish()]
            calls = [_call(each) for each in deltas if not isinstance(each, str)]
            message["content"] = "".join(each for each in deltas if isinstance(each, str))
            if calls:
                self._with_calls.add(index)
                message |= {"content": message["content"] or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(output.get("logprobs", []), self._num_top) if self._body.logprobs else None,
            "finish_reason": self._finish_reason(index, output),
        }

    def _chunk_choices(self, update: RequestUpdate) -> list[str]:
        """First the role, then a chunk for the text or for each tool call, then the reason of the end."""
        index, output = update.index, update.output
        choices = []
        if index not in self._begun:
            self._begun.add(index)
            choices.append(_chunk_choice(index, '{"role": "assistant", "content": ""}'))
        logprobs = "null"
        if self._body.logprobs and update.logprobs:
            logprobs = json.dumps(chat_logprobs(update.logprobs, self._num_top))
        for delta in self._deltas(update):
            choices.append(_chunk_choice(index, delta, logprobs))
            logprobs = "null"
        if logprobs != "null":  # the text of these tokens is held back
            choices.append(_chunk_choice(index, '{"content": ""}', logprobs))
        if output is not None:
            choices.append(_chunk_choice(index, "{}", reason=f'"{self._finish_reason(index, output)}"'))
        return choices

    def _deltas(self, update: RequestUpdate) -> list[str]:
        """The JSON of what an update adds to the message."""
        if not self._parses_tools:
            return [f'{{"content": {json.dumps(update.text)}}}'] if update.text else []
        parser = self._parsers.get(update.index)
        if parser is None:
            parser = self._parsers[update.index] = tool_call_parser(self._service)
        deltas = parser.feed(update.text)
        if update.output is not None:
            deltas += parser.finish()
        if any(not isinstance(each, str) for each in deltas):
            self._with_calls.add(update.index)
        return [_delta_json(each) for each in deltas]

    def _finish_reason(self, index: int, output: RequestOutput) -> str:
        reason = output["finish_reason"]
        return "tool_calls" if reason == "stop" and index in self._with_calls else reason


def check_tools(service: Service) -> None:
    """Raise ApiError if the model's template does not take tools, or writes calls in a format that is not known."""
    if "tools" not in template_text(service.llm):
        raise ApiError("the model's chat template does not take tools; leave them out", param="tools")
    tool_call_parser(service)


def tool_call_parser(service: Service) -> ToolCallParser:
    parser = make_parser(f"{template_text(service.llm)}\n{service.llm.model_config.architecture}")
    if parser is None:
        raise ApiError("the format of this model's tool calls is not known; leave tools out", param="tools")
    return parser


def _chunk_choice(index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
    return f'{{"index": {index}, "delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}}}'


def _delta_json(delta: Delta) -> str:
    if isinstance(delta, str):
        return f'{{"content": {json.dumps(delta)}}}'
    return json.dumps({"tool_calls": [{"index": delta.call_index, **_call(delta)}]})


def _call(delta: ToolCallDelta) -> dict[str, Any]:
    return {
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


# -- the prompt --------------------------------------------------------------------------------------------------------


def encode_messages(
    service: Service, body: ChatRequest | TokenizeRequest, tools: Sequence[Tool], cache_salt: str | None
) -> TokenIds:
    """The token ids of the body's messages. Raises ApiError or RequestError for what the template cannot take."""
    llm = service.llm
    llm.check_chat_template()
    options = dict(body.chat_template_kwargs or {})
    _check_template_kwargs(llm, options)
    options["add_generation_prompt"] = body.add_generation_prompt
    if tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    conversation = [_for_template(message, f"messages[{i}]") for i, message in enumerate(body.messages or ())]
    (token_ids,) = llm.text.encode_chat(
        conversation,
        options,
        add_special_tokens=bool(body.add_special_tokens),
        cache_salt=cache_salt,
        check_text=lambda text: service.check_chars(len(text), "messages"),  # tools and tool calls are part of it
    )
    return token_ids


def template_text(llm: LLM) -> str:
    """The model's chat template; all of them if it has several, "" if it has none."""
    template = getattr(llm.tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _check_template_kwargs(llm: LLM, options: dict[str, Any]) -> None:
    """Refuse what belongs to the tokenizer and not to the template, above all a template of the client's own."""
    reserved = {*inspect.signature(llm.tokenizer.apply_chat_template).parameters, *_RENDERED_NAMES}
    if taken := sorted(reserved.intersection(options)):
        raise ApiError(f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs")


def _for_template(message: Message, name: str) -> dict[str, Any]:
    """A message as templates expect it: text as one string, and the arguments of tool calls as objects."""
    converted = message.model_dump(include={"name", "reasoning_content", "tool_call_id"}, exclude_none=True)
    converted["role"] = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if message.tool_calls:
        if message.role != "assistant":
            raise ApiError(f"{name} has tool_calls, which only the role 'assistant' can have", param="messages")
        converted["tool_calls"] = [_call_for_template(call, f"{name}.tool_calls") for call in message.tool_calls]
        content = content or ""  # templates put it before the calls
    converted["content"] = content
    return converted


def _call_for_template(call: ToolCall, name: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{name} has arguments that are not valid JSON: {error}", param="messages") from error
    if not isinstance(arguments, dict):
        raise ApiError(f"{name} has arguments that are not a JSON object", param="messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
