"""Bodies of requests, as OpenAI defines them, with vLLM's additional fields, and the SamplingParams of a body.

fields.py has the rule for unknown fields. SamplingParams checks the values. A field of SamplingFields with the name of
a sampling parameter sets this parameter. Each parameter comes from the first source that has it: the body, the model's
generation_config.json, the defaults of OpenAI's API, which are the defaults of SamplingParams.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import MinLen
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Discriminator, Field, Tag, TypeAdapter, ValidationError, WithJsonSchema, model_validator

from nanovllm.entrypoints.server.call_formats import CallFormat
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.fields import Body, Item, Items, WholeBody, log_once, printable, refuse
from nanovllm.errors import RequestError
from nanovllm.sampling_params import (
    MAX_LOGPROBS,
    AnswerTags,
    SamplingParams,
    StructuredOutputs,
    TaggedJson,
    token_id_keys,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
TEXT_ONLY = ", as the model reads only text"
Salt: TypeAlias = Annotated[str, MinLen(1)]

# Checked by the engine, because pydantic would take seconds for the token ids of a long document
_Several: TypeAlias = Annotated[list[Item], MinLen(1)]
_Prompt = TypeAdapter(str | _Several[str] | _Several[int] | _Several[list[int]])
PromptField = Annotated[Any, WithJsonSchema(_Prompt.json_schema())]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    name: str
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    NEUTRAL: ClassVar = {"schema": ()}  # other servers have the schema here

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputsField(Body):
    NEUTRAL: ClassVar = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "grammar": (),
        "structural_tag": (),
        "whitespace_pattern": (),
    }

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None


class SamplingFields(WholeBody):
    """Fields that both kinds of completions have. None stands for the default, as if the field were missing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    user: str | None = None
    cache_salt: Salt | None = None

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: Items[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None

    @model_validator(mode="after")
    def _check_streaming(self) -> "SamplingFields":
        if self.includes_usage and not self.stream:
            raise refuse("stream_options", "stream_options needs stream=true")
        if self.return_progress and not self.stream:
            raise refuse("return_progress", "return_progress needs stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise refuse("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out")
        return self

    @property
    def includes_usage(self) -> bool:
        """Return True if the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        """Return True if every chunk of the stream has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(SamplingFields):
    NEUTRAL: ClassVar = {"logprobs": (False,)}  # the value that chats may have

    prompt: PromptField
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refuse("best_of", f"best_of={self.best_of} is not supported; leave it out, or make it equal to n")
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens", "max_tokens=0 needs echo=true")
        if self.stream and self.echo and self.logprobs is not None:
            raise refuse("echo", "echo with logprobs cannot be streamed; leave stream, echo or logprobs out")
        return self


class TextPart(Body):
    KINDS: ClassVar = {  # input_text and output_text are the names in the Responses API
        **dict.fromkeys(("text", "input_text", "output_text"), ("text",)),
        "refusal": ("refusal",),
    }
    NOUN, WHY_NOT = "a part", TEXT_ONLY

    type: str
    text: str | None = None
    refusal: str | None = None


def content_branch(content: Any) -> str:
    """Return the tag of the type that `content` is checked against, so that errors are about that type alone."""
    return "list[part]" if isinstance(content, list) else "str"


# A string or a list. Errors leave the tags out of a field's path
TextOr: TypeAlias = Annotated[
    Annotated[str, Tag("str")] | Annotated[Items[Item], Tag("list[part]")], Discriminator(content_branch)
]
Content: TypeAlias = TextOr[TextPart]


def joined_text(content: Any) -> str:
    """Join the text of a string or of parts by line breaks; "" for None."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    NEUTRAL: ClassVar = {"audio": (), "function_call": (), "images": ([],), "partial": (False,), "prefix": (False,)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    reasoning_content: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    NEUTRAL: ClassVar = {"input_schema": ()}

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "Function":
        if not self.name or not self.name.isprintable():  # a lone surrogate is not printable either
            message = f"the name of a tool is {printable(self.name)!r}; give it one of printable characters"
            raise refuse("name", message)
        return self


class Tool(Body):
    type: Literal["function"]
    function: Function


class OtherTool(Body):
    """A tool that the model cannot be offered, such as a search that OpenAI's servers run. Its type is logged."""

    type: str

    @model_validator(mode="after")
    def _log(self) -> "OtherTool":
        log_once(self.type, "tools of type %r are left out, as the model can only be offered functions")
        return self


def tool_branch(*kinds: str) -> Discriminator:
    """Return a discriminator of tools: a tool's type if it is one of `kinds`, else "other".

    A tool without a type, or a function in the form of another API, is checked as one of the first kind.
    """

    def branch(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
        is_other = isinstance(kind, str) and kind not in (*kinds, "", "function")
        return "dict[other]" if is_other else f"dict[{kind if kind in kinds else kinds[0]}]"

    return Discriminator(branch)


AnyTool: TypeAlias = Annotated[
    Annotated[Tool, Tag("dict[function]")] | Annotated[OtherTool, Tag("dict[other]")], tool_branch("function")
]


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def functions_of(tools: Sequence[Any] | None) -> list[Tool]:
    """Return the tools that a model can be offered."""
    return [tool for tool in tools or () if isinstance(tool, Tool)]


def choice_branch(choice: Any) -> str:
    return "dict[NamedTool]" if isinstance(choice, dict | BaseModel) else "str"  # pydantic dumps a BaseModel


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedTool, Tag("dict[NamedTool]")],
    Discriminator(choice_branch),
]


class ChatRequest(SamplingFields):
    messages: Items[Message] = Field(min_length=1)
    tools: Items[AnyTool] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        """Return the tools that the model is told of."""
        return [] if self.tool_choice == "none" else functions_of(self.tools)

    @property
    def must_call(self) -> bool:
        """Return True if the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="after")
    def _check_fields(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "top_logprobs needs logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refuse("max_tokens", "max_tokens and max_completion_tokens mean the same; give one of them")
        if self.must_call and not self.offered_tools:
            raise refuse("tool_choice", "tool_choice needs tools that are functions")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.offered_tools]:
                raise refuse("tool_choice", f"tool_choice names {printable(name)!r}, but no tool has this name")
        return self


def chat_request(**fields: Any) -> ChatRequest:
    """Make the chat that a body of another API asks for. Raises RequestValidationError like the body of a chat."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error


class TokenizeRequest(WholeBody):
    """Either `prompt`, or `messages` and the other fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    tools: Items[AnyTool] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_fields(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(WholeBody):
    model: str | None = None
    tokens: Items[int]


# -- SamplingParams ----------------------------------------------------------------------------------------------------

# In a schema, llguidance's option to leave out what a grammar cannot express
LENIENT: dict[str, Any] = {"x-guidance": {"lenient": True}}
_CONVERTED = {"max_tokens", "logit_bias", "structured_outputs"}  # the body's values are converted
_COPIED = ({each.name for each in fields(SamplingParams)} & SamplingFields.model_fields.keys()) - _CONVERTED


def call_constraint(body: ChatRequest, call_format: CallFormat) -> TaggedJson | None:
    """Return the form that the answer's tool calls must have, or None if calls are optional, parallel calls are
    allowed, no tool is strict, and an answer without calls has no form.

    The arguments of a strict tool match the tool's schema. If the answer must be a call, the arguments of every tool
    match the tool's schema. A schema that a grammar cannot express is refused only for strict tools.
    """
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    functions = [tool.function for tool in body.offered_tools if named in (None, tool.function.name)]
    is_single = named is not None or body.parallel_tool_calls is False
    is_free = not (body.must_call or is_single or any(each.strict for each in functions))
    if not functions or (is_free and not has_form(body)):
        return None
    schemas: list[dict[str, Any]] = []
    for each in functions:
        if each.strict:
            schemas.append(_arguments_schema(each))
        elif body.must_call:
            schemas.append(_arguments_schema(each) | LENIENT)
        elif call_format.style != "tags":
            schemas.append({"type": "object"})
        else:  # constrain only the names of the properties
            schemas.append((each.parameters or {}) | {"required": []} | LENIENT)
    names = [each.name for each in functions]
    tools = list(zip(names, schemas, strict=True))
    return call_format.constraint(tools, is_required=body.must_call, is_single=is_single)


def has_form(body: ChatRequest) -> bool:
    """Return True if the body says what an answer without calls must match."""
    return not body.must_call and _structured_outputs(body) is not None


def _arguments_schema(function: Function) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object."""
    parameters = function.parameters or {}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        name = printable(function.name)
        raise ApiError(
            f"the parameters of tool {name!r} have type={printable(repr(kind))}, but arguments are an 'object'",
            param="tools",
        )
    return parameters | {"type": "object"}


def completion_params(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a completion. For max_tokens=0, which asks only about the prompt, one token is
    generated and discarded.
    """
    params = _common_params(body, defaults)
    params["max_tokens"] = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1
    params["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return SamplingParams(**params)


def chat_params(
    body: ChatRequest,
    defaults: Mapping[str, Any],
    calls: TaggedJson | None = None,
    reasoning: AnswerTags | None = None,
    shows_special_tokens: bool = False,
) -> SamplingParams:
    """Return the sampling parameters of a chat.

    calls: the form that tool calls must have, or None without a constraint. reasoning: how the answer may begin. An
    answer that need not be a call either consists of calls or matches the form that the body gives.
    shows_special_tokens: the parts of the answer are found by special tokens, which must not be skipped.
    """
    params = _common_params(body, defaults) | {"reasoning_tags": reasoning}
    if shows_special_tokens:
        params["skip_special_tokens"] = False
    if calls is not None:
        form = params["structured_outputs"] if has_form(body) else None
        params["structured_outputs"] = (
            StructuredOutputs(tagged_json=calls) if form is None else replace(form, tagged_json=calls)
        )
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params["max_tokens"] = defaults.get("max_tokens") if given is None else given
    params["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return SamplingParams(**params)


def _common_params(body: SamplingFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    converted = {"logit_bias": token_id_keys(body.logit_bias) or None, "structured_outputs": _structured_outputs(body)}
    return {**defaults, **given, **converted}


def _structured_outputs(body: SamplingFields) -> StructuredOutputs | None:
    """Return the constraint on the answer, which a body can give in one of five fields."""
    given: dict[str, Any] = {"response_format": _response_format(body.response_format)}
    if body.structured_outputs is not None:
        given["structured_outputs"] = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    for kind in ("json", "regex", "choice"):
        value = getattr(body, f"guided_{kind}")
        given[f"guided_{kind}"] = None if value is None else {kind: value}
    names = [name for name, pattern in given.items() if pattern is not None]
    if len(names) > 1:
        raise ApiError(f"{' and '.join(names)} both say what the answer must match; give one of them", param=names[1])
    if not names:
        return None
    try:
        return StructuredOutputs(**given[names[0]])
    except RequestError as error:
        raise ApiError(str(error).replace("StructuredOutputs", names[0]), param=names[0]) from error


def _response_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the fields of StructuredOutputs that `response_format` asks for, or None for plain text."""
    if wanted is None:
        return None
    if (wanted.json_schema is not None) != (wanted.type == "json_schema"):
        raise ApiError(
            f"response_format has type {wanted.type!r}; give json_schema with the type 'json_schema', and only with it",
            param="response_format",
        )
    if wanted.json_schema is not None and wanted.json_schema.json_schema is not None:
        return {"json": wanted.json_schema.json_schema}
    return None if wanted.type == "text" else {"json_object": True}
