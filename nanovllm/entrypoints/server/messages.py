"""Anthropic's Messages API: a body becomes a ChatRequest, and a chat's answer becomes content blocks."""

import json
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import MinLen
from pydantic import Field, Tag, model_validator

from nanovllm.entrypoints.server.chat_answers import AnswerBlock, BlockAnswer
from nanovllm.entrypoints.server.errors import MESSAGES_PATH, ApiError
from nanovllm.entrypoints.server.fields import Body, Items, WholeBody, refuse
from nanovllm.entrypoints.server.protocol import (
    TEXT_ONLY,
    ChatRequest,
    Content,
    Effort,
    OtherTool,
    Salt,
    TextOr,
    chat_request,
    joined_text,
    tool_branch,
)
from nanovllm.plan.outputs import RequestOutput

BILLING_HEADER = (
    "x-anthropic-billing-header:"  # Claude Code's, removed from the prompt because each request has another value
)


class ContentBlock(Body):
    """A part of a message. The part's type determines the part's fields."""

    KINDS: ClassVar = {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }
    NOUN, WHY_NOT = "a content block", TEXT_ONLY

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Content | None = None
    is_error: bool | None = None


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: TextOr[ContentBlock]


class AnthropicTool(Body):
    NEUTRAL: ClassVar = {"parameters": ()}

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


AnyAnthropicTool: TypeAlias = Annotated[
    Annotated[AnthropicTool, Tag("dict[custom]")] | Annotated[OtherTool, Tag("dict[other]")], tool_branch("custom")
]


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "AnthropicToolChoice":
        if self.type == "tool" and self.name is None:
            raise refuse("name", "a tool_choice of type 'tool' needs 'name'")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(WholeBody):
    model: str | None = None
    messages: Items[AnthropicMessage] = Field(min_length=1)
    system: Content | None = None
    tools: Items[AnyAnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the name of output_config.format in Anthropic's beta API

    def as_chat(self) -> ChatRequest:
        """Return the chat that the body asks for. Raises RequestValidationError like the body of a chat."""
        return chat_request(**self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "messages": self._messages()}
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": each.name,
                    "description": each.description,
                    "parameters": each.input_schema,
                    "strict": each.strict,
                },
            }
            for each in self.tools or ()
            if isinstance(each, AnthropicTool)
        ]
        choice = self.tool_choice
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": is_on}
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
        if form := (self.output_config and self.output_config.format) or self.output_format:
            json_schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        return fields

    def _messages(self) -> list[dict[str, Any]]:
        system = self.system
        if isinstance(system, list):
            system = [block for block in system if not joined_text([block]).startswith(BILLING_HEADER)]
        messages = [{"role": "system", "content": joined_text(system)}] if system else []
        for message in self.messages:
            if isinstance(message.content, str):
                messages.append({"role": message.role, "content": message.content})
            else:
                messages += _chat_messages(message.role, message.content)
        return messages


def _chat_messages(role: str, blocks: list[ContentBlock]) -> list[dict[str, Any]]:
    """Return a chat's messages of one turn: first the results of tools, then one message with the rest."""
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined_text(block.content)}
        for block in blocks
        if block.type == "tool_result"
    ]
    texts = [block.text or "" for block in blocks if block.type == "text"]
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts := [block.thinking or "" for block in blocks if block.type == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if block.type == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return results if len(results) == len(blocks) > 0 else [*results, message]


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: Items[Annotated[str, MinLen(1)]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: Salt | None = None

    def _chat_fields(self) -> dict[str, Any]:
        names = {"max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt"}
        return super()._chat_fields() | self.model_dump(include=names) | {"stop": self.stop_sequences or None}


class MessagesAnswer(BlockAnswer):
    id_prefix, whole_object, chunk_object = "msg", "message", "message"

    def first_events(self) -> str:
        return self._sse([{"type": "message_start", "message": self._body_of(None)}])

    def waiting_events(self) -> str:
        return self._sse([{"type": "ping"}])

    def last_events(self) -> str:
        body = self._body_of(self._output)
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        ended = {"type": "message_delta", "delta": delta, "usage": body["usage"]}
        return self._sse([ended, {"type": "message_stop"}])

    def error_events(self, error: ApiError) -> str:
        return error.event(MESSAGES_PATH)

    def _body_of(self, output: RequestOutput | None) -> dict[str, Any]:
        reason, stop_sequence = (None, None) if output is None else self._end(output)
        return {
            "id": str(self._fields["id"]).replace("-", "_"),
            "type": "message",
            "role": "assistant",
            "model": self._fields["model"],
            "content": [_content(block) for block in self._blocks],
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": self._num_prompt_tokens - self._num_cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": self._num_cached_tokens,
                "output_tokens": self._num_completion_tokens,
            },
        }

    def _end(self, output: RequestOutput) -> tuple[str, str | None]:
        """Return the stop reason, and the stop sequence that was generated or None."""
        if output["finish_reason"] != "stop":
            is_full = output["finish_reason"] == "length" and len(output["token_ids"]) < (self._body.max_tokens or 0)
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if self._with_calls:
            return "tool_use", None
        if not self._is_at_stop_string(output):
            return "end_turn", None
        given = self._body.stop or ()
        num_tokens = 4 * max(map(len, given), default=0)  # at most one token for each byte
        newest = [*output["prompt_token_ids"][-1:], *output["token_ids"][-num_tokens - 1 :]]
        end = self._service.llm.text.decode(newest[1:], after=newest[:1]) if given else ""
        found = next((each for each in given if each in end), None)
        return "stop_sequence" if found else "end_turn", found

    def _begun_events(self, block: AnswerBlock) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": block.index, "content_block": _content(block)}]

    def _piece_event(self, block: AnswerBlock, piece: str) -> dict[str, Any]:
        kind, field = {
            "call": ("input_json_delta", "partial_json"),
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
        }[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: piece}}

    def _ended_events(self, block: AnswerBlock) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": block.index}]


def _content(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        given = json.loads(block.text or "{}")
    except (ValueError, RecursionError):  # the arguments are truncated or nested too deeply
        given = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}
