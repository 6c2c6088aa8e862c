"""OpenAI's Responses API: a body becomes a ChatRequest, and a chat's answer becomes items, whole or as events.

Nothing is stored, so a client sends the whole conversation each time. Parts that only OpenAI's servers can read, such
as encrypted reasoning, are left out of the prompt.
"""

import json
import time
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from annotated_types import MinLen
from pydantic import Discriminator, Field, Tag, model_validator

from nanovllm.entrypoints.server.admission import Service
from nanovllm.entrypoints.server.chat_answers import AnswerBlock, BlockAnswer, ChatForm
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.fields import Body, Items, WholeBody, refuse
from nanovllm.entrypoints.server.protocol import (
    ChatRequest,
    Effort,
    OtherTool,
    Salt,
    TextOr,
    TextPart,
    chat_request,
    choice_branch,
    content_branch,
    joined_text,
    tool_branch,
)
from nanovllm.plan.outputs import RequestOutput

CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_IN_CHATS_TOO = {
    "model",
    "stream",
    "cache_salt",
    "chat_template_kwargs",
    "temperature",
    "top_p",
    "parallel_tool_calls",
}
LOGPROBS = "message.output_text.logprobs"


class ResponsePart(TextPart):
    KINDS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"), ())


ResponseContent: TypeAlias = TextOr[ResponsePart]


class ResponseFunction(Body):
    NEUTRAL: ClassVar = {"function": (), "input_schema": ()}  # other APIs have the function and its parameters here

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Body):
    """A tool that takes a text of any form. The model is offered a function with this text as the only argument."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None  # such as a grammar; the description that the model reads includes the format


NamedResponseTool: TypeAlias = Annotated[
    Annotated[ResponseFunction, Tag("dict[function]")]
    | Annotated[CustomTool, Tag("dict[custom]")]
    | Annotated[OtherTool, Tag("dict[other]")],
    tool_branch("function", "custom"),
]


class Namespace(Body):
    """A group of tools. The name that the model is offered for a tool joins the names of the group and of the tool."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Items[NamedResponseTool]


ResponseTool: TypeAlias = Annotated[
    Annotated[ResponseFunction, Tag("dict[function]")]
    | Annotated[CustomTool, Tag("dict[custom]")]
    | Annotated[Namespace, Tag("dict[namespace]")]
    | Annotated[OtherTool, Tag("dict[other]")],
    tool_branch("function", "custom", "namespace"),
]


class InputItem(Body):
    """An item of a conversation. The item's type determines the item's fields."""

    KINDS: ClassVar = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call": ("call_id", "name", "input"),
        "custom_tool_call_output": ("call_id", "output"),
        "additional_tools": ("tools",),
        "reasoning": (),
    }
    NOUN = "an item"

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: ResponseContent | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: ResponseContent | None = None
    tools: Items[ResponseTool] | None = None


class ResponseToolName(Body):
    KINDS: ClassVar = {"function": ("name",), "custom": ("name",)}
    NOUN = "a tool_choice"

    type: str
    name: str
    namespace: str | None = None


ResponseToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[ResponseToolName, Tag("dict[NamedTool]")],
    Discriminator(choice_branch),
]


class TextFormat(Body):
    NEUTRAL: ClassVar = {"json_schema": ()}  # chats have the schema here

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    NEUTRAL: ClassVar = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: Effort | None = None


class ResponsesRequest(WholeBody):
    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("str")] | Annotated[Items[InputItem], MinLen(1), Tag("list[part]")],
        Discriminator(content_branch),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    tools: Items[ResponseTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Items[str] | None = None  # what the server cannot provide, such as encrypted reasoning, is ignored

    @model_validator(mode="after")
    def _check_fields(self) -> "ResponsesRequest":
        if self.previous_response_id is not None:
            message = "responses are not stored, so there is no previous one; send the whole conversation as input"
            raise refuse("previous_response_id", message)
        if LOGPROBS in (self.include or ()):
            raise refuse("include", f"include={LOGPROBS!r} is not supported; chat completions have log-probabilities")
        return self

    def as_chat(self) -> ChatRequest:
        """Return the chat that the body asks for. Raises RequestValidationError like the body of a chat."""
        tools = [{"type": "function", "function": offered.function} for offered in self.offered.values()]
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseToolName):
            choice = {"type": "function", "function": {"name": _offered_name(choice.name, choice.namespace)}}
        form = self.text and self.text.format
        response_format: dict[str, Any] | None = None
        if form:
            response_format = {"type": form.type}
            if form.type == "json_schema":
                response_format["json_schema"] = {"name": form.name, "schema": form.schema_}
        return chat_request(
            messages=self._messages(),
            tools=tools or None,
            tool_choice=choice,
            response_format=response_format,
            max_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning and self.reasoning.effort,
            **self.model_dump(include=_IN_CHATS_TOO),
        )

    @cached_property
    def offered(self) -> dict[str, "OfferedTool"]:
        """The functions that the model is offered, by the names in the prompt."""
        tools = list(self.tools or ())
        for item in self.input if isinstance(self.input, list) else ():
            tools += item.tools or ()
        found: dict[str, OfferedTool] = {}
        for tool in tools:
            if isinstance(tool, Namespace):
                about = tool.description
                for each in tool.tools:
                    if not isinstance(each, OtherTool):
                        found[_offered_name(each.name, tool.name)] = _offer(each, tool.name, about)
                        about = None  # the first tool of the namespace has the description
            elif not isinstance(tool, OtherTool):
                found[tool.name] = _offer(tool, None, None)
        return found

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages of a chat. The model's items of one turn become one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if item.type == "additional_tools":
                continue
            if item.type.endswith("_output"):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined_text(item.output)})
                continue
            role = item.role if item.type == "message" else "assistant"
            if role != "assistant":
                messages.append({"role": role, "content": joined_text(item.content)})
                continue
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if item.name is not None and item.type.endswith("_call"):
                is_custom = item.type == "custom_tool_call"
                arguments = json.dumps({"input": item.input}) if is_custom else item.arguments
                function = {"name": _offered_name(item.name, item.namespace), "arguments": arguments}
                messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            else:
                field = "content" if item.type == "message" else "reasoning_content"
                messages[-1][field] = messages[-1].get(field, "") + joined_text(item.content)
        return messages


class OfferedTool(NamedTuple):
    """A function that the model is offered, and the client's tool that the function stands for."""

    function: dict[str, Any]
    name: str
    namespace: str | None
    is_custom: bool


def _offered_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def _offer(tool: ResponseFunction | CustomTool, namespace: str | None, about: str | None) -> OfferedTool:
    """Return the function that stands for `tool`. about: the namespace's description, which precedes the tool's."""
    is_custom = isinstance(tool, CustomTool)
    texts = [text for text in (about, tool.description) if text]
    if isinstance(tool, CustomTool):
        if tool.format is not None and tool.format.get("type", "text") != "text":
            texts.append(f"The input has this format: {json.dumps(tool.format, ensure_ascii=False)}")
        parameters: dict[str, Any] | None = CUSTOM_PARAMETERS
        strict = None
    else:
        parameters, strict = tool.parameters, tool.strict
    function = {
        "name": _offered_name(tool.name, namespace),
        "description": "\n\n".join(texts) or None,
        "parameters": parameters,
        "strict": strict,
    }
    return OfferedTool(function, tool.name, namespace, is_custom)


class ResponsesAnswer(BlockAnswer):
    id_prefix, whole_object, chunk_object = "resp", "response", "response"
    prompt_param = "input"

    def __init__(self, service: Service, body: ChatRequest, form: ChatForm, asked: ResponsesRequest) -> None:
        super().__init__(service, body, form)
        self._asked, self._num_events = asked, 0

    def first_events(self) -> str:
        return "" if self._num_events else self._state_events("response.created", "response.in_progress")

    def waiting_events(self) -> str:
        return self.first_events() or self._state_events("response.in_progress")

    def _state_events(self, *kinds: str) -> str:
        response = self._body_of(None)
        return self._sse([{"type": kind, "response": response} for kind in kinds])

    def last_events(self) -> str:
        response = self._body_of(self._output)
        return self._sse([{"type": f"response.{response['status']}", "response": response}])

    def error_events(self, error: ApiError) -> str:
        first = self.first_events()  # clients expect the first events of a failed stream, too
        response = self._body_of(None) | {"status": "failed"}
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        details = {"code": error.code, "message": error.message, "param": error.param}
        return first + self._sse([{"type": "error", **details}, {"type": "response.failed", "response": response}])

    def _sse(self, events: Any) -> str:
        numbered = []
        for event in filter(None, events):
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
            "output": [self._item(block, self._is_cut(block)) for block in self._blocks],
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

    def _is_cut(self, block: AnswerBlock) -> bool:
        """Return True if the answer was cut off within this block."""
        output = self._output
        return output is not None and output["finish_reason"] != "stop" and block is self._blocks[-1]

    def _begun_events(self, block: AnswerBlock) -> list[dict[str, Any]]:
        item = self._item(block) | {"status": "in_progress"}
        place: dict[str, Any] = {"output_index": block.index}
        if block.kind == "call":
            return [{"type": "response.output_item.added", **place, "item": item}]
        (part,) = item["content"]
        added = {**place, "item_id": item["id"], "content_index": 0, "part": part}
        return [
            {"type": "response.output_item.added", **place, "item": item | {"content": []}},
            {"type": "response.content_part.added", **added},
        ]

    def _piece_event(self, block: AnswerBlock, piece: str) -> dict[str, Any]:
        """Return the event of a piece, or {} for a piece of a custom call, whose input is sent when it is complete."""
        if self._is_custom(block):
            return {}
        return {"type": f"{_EVENTS[block.kind]}.delta", **self._place(block), "delta": piece}

    def _ended_events(self, block: AnswerBlock) -> list[dict[str, Any]]:
        item, place = self._item(block, self._is_cut(block)), self._place(block)
        ended = [{"type": "response.output_item.done", "output_index": block.index, "item": item}]
        kind = f"{_EVENTS[block.kind]}.done"
        if self._is_custom(block):
            kind, text = "response.custom_tool_call_input", item["input"]
            return [
                {"type": f"{kind}.delta", **place, "delta": text},
                {"type": f"{kind}.done", **place, "input": text},
                *ended,
            ]
        if block.kind == "call":
            return [{"type": kind, **place, "name": item["name"], "arguments": block.text}, *ended]
        part = {
            "item_id": place["item_id"],
            "output_index": block.index,
            "content_index": 0,
            "part": item["content"][0],
        }
        return [{"type": kind, **place, "text": block.text}, {"type": "response.content_part.done", **part}, *ended]

    def _is_custom(self, block: AnswerBlock) -> bool:
        called = self._asked.offered.get(block.name)
        return block.kind == "call" and called is not None and called.is_custom

    def _item_id(self, block: AnswerBlock) -> str:
        return f"{'ctc' if self._is_custom(block) else _PREFIXES[block.kind]}_{block.block_id}"

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        """Return the fields by which an event names the block."""
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        if block.kind == "text":
            place["logprobs"] = []
        return place

    def _item(self, block: AnswerBlock, is_cut: bool = False) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": "incomplete" if is_cut else "completed"}
        if block.kind == "call":
            called = self._asked.offered.get(block.name)
            item |= {"call_id": block.call_id, "name": block.name if called is None else called.name}
            if called is not None and called.namespace is not None:
                item["namespace"] = called.namespace
            if self._is_custom(block):
                return {"type": "custom_tool_call", **item, "input": _custom_input(block.text)}
            return {"type": "function_call", **item, "arguments": block.text}
        if block.kind == "reasoning":
            content: list[dict[str, Any]] = [{"type": "reasoning_text", "text": block.text}]
            return {"type": "reasoning", **item, "summary": [], "content": content}
        content = [{"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}]
        return {"type": "message", **item, "role": "assistant", "content": content}


def _custom_input(arguments: str) -> str:
    """Return the text that a custom tool is called with. Truncated arguments are returned unchanged."""
    with suppress(ValueError, RecursionError):
        parsed = json.loads(arguments)
        if isinstance(parsed, dict) and isinstance(parsed.get("input"), str):
            return str(parsed["input"])
    return arguments


_PREFIXES = {"call": "fc", "text": "msg", "reasoning": "rs"}
_EVENTS = {
    "call": "response.function_call_arguments",
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
}
