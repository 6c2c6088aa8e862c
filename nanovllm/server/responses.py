"""OpenAI's Responses API: a body becomes a ChatRequest, and a chat's answer becomes items, whole or as events.

Nothing is stored, so a client sends the whole conversation each time. Parts that only OpenAI's servers can read, such
as encrypted reasoning, are left out of the prompt.
"""

import time
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import MinLen
from pydantic import Discriminator, Field, Tag, model_validator

from nanovllm.core.outputs import RequestOutput
from nanovllm.server.admission import Service
from nanovllm.server.chat_answers import Block, BlockAnswer, ChatForm
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import (
    TEXT_ONLY,
    Body,
    ChatRequest,
    Effort,
    Items,
    WholeBody,
    chat_request,
    choice_branch,
    content_branch,
    refuse,
)

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class ResponsePart(Body):
    HINTS = frozenset(("annotations", "logprobs", "prompt_cache_breakpoint"))
    KINDS = dict.fromkeys(TEXT_PARTS, ())
    NOUN, WHY_NOT = "a part", TEXT_ONLY

    type: str
    text: str | None = None
    refusal: str | None = None


ResponseContent: TypeAlias = Annotated[
    Annotated[str, Tag("str")] | Annotated[Items[ResponsePart], Tag("list[part]")], Discriminator(content_branch)
]


class InputItem(Body):
    """An item of a conversation. Its type says which of the fields it has."""

    HINTS = frozenset(("id", "status", "phase", "encrypted_content", "summary", "caller", "created_by"))
    KINDS: ClassVar = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
    }
    NOUN = "an item"

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: ResponseContent | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: ResponseContent | None = None


class ResponseTool(Body):
    HINTS = frozenset(("defer_loading", "output_schema", "allowed_callers"))
    KINDS: ClassVar = {"function": ()}
    NOUN, WHY_NOT = "a tool", ", only functions are"

    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolName(Body):
    KINDS: ClassVar = {"function": ()}
    NOUN = "a tool_choice"

    type: Literal["function"]
    name: str


ResponseToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[ResponseToolName, Tag("dict[NamedTool]")],
    Discriminator(choice_branch),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    HINTS = frozenset(("verbosity",))

    format: TextFormat | None = None


class ReasoningOptions(Body):
    HINTS = frozenset(("summary", "generate_summary", "context", "mode"))

    effort: Effort | None = None


class ResponsesRequest(WholeBody):
    NEUTRAL: ClassVar = {
        "background": (None, False),
        "conversation": (None,),
        "max_tool_calls": (None,),
        "prompt": (None,),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }
    HINTS = frozenset(
        (
            *("client_metadata", "context_management", "include", "metadata", "moderation", "prompt_cache_key"),
            *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
            *("stream_options", "user"),
        )
    )

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("str")] | Annotated[Items[InputItem], MinLen(1), Tag("list[part]")],
        Discriminator(content_branch),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    tools: Items[ResponseTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "ResponsesRequest":
        if self.previous_response_id is not None:
            message = "responses are not stored, so there is no previous one; send the whole conversation as input"
            raise refuse("previous_response_id", message)
        return self

    def as_chat(self) -> ChatRequest:
        """Return the chat that this asks for. Raises RequestValidationError as the body of a chat would."""
        tools = [{"type": "function", "function": each.model_dump(exclude={"type"})} for each in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolName):
            choice = {"type": "function", "function": {"name": choice.name}}
        form = self.text and self.text.format
        response_format: dict[str, Any] | None = None
        if form:
            response_format = {"type": form.type}
            if form.type == "json_schema":
                response_format["json_schema"] = {"name": form.name, "schema": form.schema_}
        return chat_request(
            messages=self._messages(),
            tools=tools or None,
            tool_choice=choice if tools or choice != "auto" else None,
            response_format=response_format,
            max_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning and self.reasoning.effort,
            **self.model_dump(
                include={"model", "stream", "cache_salt", "chat_template_kwargs", "temperature", "top_p"}
                | ({"parallel_tool_calls"} if tools else set())
            ),
        )

    def _messages(self) -> list[dict[str, Any]]:
        """The messages of a chat. What the model said in one turn, between two others, is one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if item.type == "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                continue
            role = item.role if item.type == "message" else "assistant"
            if role != "assistant":
                messages.append({"role": role, "content": _text(item.content)})
                continue
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if item.type == "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            else:
                field = "content" if item.type == "message" else "reasoning_content"
                messages[-1][field] = messages[-1].get(field, "") + _text(item.content)
        return messages


def _text(content: Any) -> str:
    """Join the text of a string or of parts; "" for None."""
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal or "" for part in content or ())


class ResponsesAnswer(BlockAnswer):
    id_prefix, whole_object, chunk_object = "resp", "response", "response"

    def __init__(self, service: Service, body: ChatRequest, form: ChatForm, asked: ResponsesRequest) -> None:
        super().__init__(service, body, form)
        self._asked, self._num_events = asked, 0

    def first_events(self) -> str:
        response = self._body_of(None)
        kinds = ("response.created", "response.in_progress")
        return self._sse([{"type": kind, "response": response} for kind in kinds])

    def last_events(self) -> str:
        response = self._body_of(self._output)
        return self._sse([{"type": f"response.{response['status']}", "response": response}])

    def error_events(self, error: ApiError) -> str:
        first = "" if self._num_events else self.first_events()  # which clients expect in any case
        response = self._body_of(None) | {"status": "failed"}
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        details = {"code": error.code, "message": error.message, "param": error.param}
        return first + self._sse([{"type": "error", **details}, {"type": "response.failed", "response": response}])

    def _sse(self, events: Any) -> str:
        numbered = []
        for event in events:
            numbered.append(event | {"sequence_number": self._num_events})
            self._num_events += 1
        return super()._sse(numbered)

    def _body_of(self, output: RequestOutput | None) -> dict[str, Any]:
        names = ("instructions", "max_output_tokens", "temperature", "top_p", "reasoning")
        fields = {*names, "parallel_tool_calls", "text", "tool_choice", "tools"}
        asked = self._asked.model_dump(include=fields, exclude_none=True, by_alias=True)
        is_cut = output is not None and output["finish_reason"] != "stop"
        status = "in_progress" if output is None else "incomplete" if is_cut else "completed"
        usage = None
        if output is not None:
            chat = self._usage()
            usage = {
                "input_tokens": chat["prompt_tokens"],
                "input_tokens_details": chat["prompt_tokens_details"],
                "output_tokens": chat["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": chat["total_tokens"],
            }
        return {
            "id": str(self._fields["id"]).replace("-", "_"),
            "object": "response",
            "created_at": self._fields["created"],
            "completed_at": None if output is None else int(time.time()),
            "model": self._fields["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [_item(block, self._is_cut(block)) for block in self._blocks],
            "usage": usage,
            **{name: asked.get(name) for name in names},
            "metadata": {},
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}} | asked.get("text", {}),
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
        }

    def _is_cut(self, block: Block) -> bool:
        """Return True if the answer has ended within this block, but not by itself."""
        output = self._output
        return output is not None and output["finish_reason"] != "stop" and block is self._blocks[-1]

    def _begun_events(self, block: Block) -> list[dict[str, Any]]:
        item = _item(block) | {"status": "in_progress"}
        place: dict[str, Any] = {"output_index": block.index}
        if block.kind == "call":
            return [{"type": "response.output_item.added", **place, "item": item}]
        (part,) = item["content"]
        added = {
            "type": "response.content_part.added",
            **place,
            "item_id": item["id"],
            "content_index": 0,
            "part": part,
        }
        return [{"type": "response.output_item.added", **place, "item": item | {"content": []}}, added]

    def _piece_event(self, block: Block, piece: str) -> dict[str, Any]:
        return {"type": f"{_EVENTS[block.kind]}.delta", **_place(block), "delta": piece}

    def _ended_events(self, block: Block) -> list[dict[str, Any]]:
        item, place = _item(block, self._is_cut(block)), _place(block)
        ended = [{"type": "response.output_item.done", "output_index": block.index, "item": item}]
        kind = f"{_EVENTS[block.kind]}.done"
        if block.kind == "call":
            return [{"type": kind, **place, "name": block.name, "arguments": block.text}, *ended]
        part = {
            "item_id": place["item_id"],
            "output_index": block.index,
            "content_index": 0,
            "part": item["content"][0],
        }
        return [{"type": kind, **place, "text": block.text}, {"type": "response.content_part.done", **part}, *ended]


_PREFIXES = {"call": "fc", "text": "msg", "reasoning": "rs"}
_EVENTS = {
    "call": "response.function_call_arguments",
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
}


def _place(block: Block) -> dict[str, Any]:
    """Return the place of a piece of a block, as its events give it."""
    place: dict[str, Any] = {"item_id": _item_id(block), "output_index": block.index}
    if block.kind != "call":
        place["content_index"] = 0
    if block.kind == "text":
        place["logprobs"] = []
    return place


def _item_id(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.block_id}"


def _item(block: Block, is_cut: bool = False) -> dict[str, Any]:
    status = "incomplete" if is_cut else "completed"
    if block.kind == "call":
        fields = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"type": "function_call", "id": _item_id(block), "status": status, **fields}
    if block.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": block.text}]
        return {"type": "reasoning", "id": _item_id(block), "summary": [], "content": content, "status": status}
    content = [{"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}]  # type: ignore[dict-item]
    return {"type": "message", "id": _item_id(block), "role": "assistant", "status": status, "content": content}
