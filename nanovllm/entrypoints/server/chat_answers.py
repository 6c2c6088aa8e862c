"""A chat's answer: its text divided into reasoning, content and tool calls, in the form of one of three APIs.

ChatAnswer has the form of OpenAI's chat completions. The APIs of responses (responses.py) and of messages (messages.py)
have sequences of blocks instead, each with separate events; BlockAnswer is what the two block APIs have in common.
"""

import json
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from nanovllm.entrypoints.server.admission import Service
from nanovllm.entrypoints.server.answers import Answer, PromptEntries, chat_logprobs
from nanovllm.entrypoints.server.call_formats import CallFormat, call_format_of
from nanovllm.entrypoints.server.call_parser import CallParser, Delta, ReasoningDelta, ToolCallDelta
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.harmony_parser import HarmonyParser
from nanovllm.entrypoints.server.protocol import ChatRequest, NamedTool
from nanovllm.errors import RequestError
from nanovllm.plan.outputs import RequestOutput
from nanovllm.plan.sequence import TokenIds
from nanovllm.request_stream import RequestUpdate
from nanovllm.sampling_params import (
    AnswerTags,
    HarmonyTags,
    ReasoningTags,
    SamplingParams,
    StructuredOutputs,
    TaggedJson,
)
from nanovllm.text.answer_parts import answer_tags, needs_special_tokens
from nanovllm.text.answer_scan import ReasoningSplitter
from nanovllm.text.harmony import END, HARMONY_MARK, num_analysis_tokens

MAX_LEADING_TOKENS = 4  # white space before the tag of reasoning


class ReasoningIds(NamedTuple):
    """The tokens of the tags around the reasoning."""

    begin: tuple[int, ...]
    end: int


class ChatForm(NamedTuple):
    """The form in which the model writes its answers to one request.

    call_format: the model's format of tool calls, or None if the request has no tools. tags: the tags of the reasoning,
    or None if the template does not support reasoning. reasoning_ids: their tokens, or None if the closing tag is not
    one token. is_alternative: the answer is either calls or a text of a given form, which may look like calls.
    shows_special_tokens: some tags are tokens that decoders skip unless told otherwise.
    """

    call_format: CallFormat | None = None
    tags: AnswerTags | None = None
    reasoning_ids: ReasoningIds | None = None
    is_alternative: bool = False
    shows_special_tokens: bool = False


def find_call_format(service: Service) -> CallFormat:
    """Return the model's format of tool calls.

    Raises ApiError if the model's template does not take tools, or if the format of calls is not known.
    """
    template = service.llm.text.chat_template()
    if "tools" not in template:
        raise ApiError("the model's chat template does not take tools; leave them out", param="tools")
    call_format = call_format_of(f"{template}\n{service.llm.model_config.architecture}")
    if call_format is None:
        raise ApiError("the format of this model's tool calls is not known; leave tools out", param="tools")
    return call_format


def chat_form(service: Service, call_format: CallFormat | None, token_ids: TokenIds) -> ChatForm:
    """Return the form of the answer to this prompt."""
    text = service.llm.text
    tags = answer_tags(text, token_ids)
    marks = () if call_format is None else (call_format.opening, call_format.closing)
    reasoning_ids = None
    if tags is not None:
        pair = (HARMONY_MARK, END) if isinstance(tags, HarmonyTags) else (tags.begin, tags.end)
        begin_ids, end_ids = (service.llm.tokenizer.encode(each, add_special_tokens=False) for each in pair)
        reasoning_ids = ReasoningIds(tuple(begin_ids), end_ids[0]) if len(end_ids) == 1 else None
    return ChatForm(call_format, tags, reasoning_ids, shows_special_tokens=needs_special_tokens(text, tags, marks))


def blame_tool(service: Service, params: SamplingParams, constraint: TaggedJson, body: ChatRequest) -> None:
    """Raise ApiError about the first tool whose calls alone cannot be constrained."""
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    names = [tool.function.name for tool in body.offered_tools if named in (None, tool.function.name)]
    for name, tag in zip(names, constraint.tags, strict=True):
        alone = replace(constraint, tags=(tag,), names=(name,))
        try:
            service.llm.text.rules(replace(params, structured_outputs=StructuredOutputs(tagged_json=alone)))
        except RequestError as error:
            message = str(error).replace("structured_outputs.tagged_json", "its parameters")
            message = message.replace("structured_outputs.json", "its schema")
            raise ApiError(f"tool {name!r}: {message}", param="tools") from error


class ChatAnswer(Answer[ChatRequest]):
    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_param = "messages"
    empty_choice = '{"index": 0, "delta": {"content": ""}, "logprobs": null, "finish_reason": null}'

    def __init__(self, service: Service, body: ChatRequest, form: ChatForm) -> None:
        super().__init__(service, body)
        self._form, self._num_top = form, body.top_logprobs or 0
        self._parsers: dict[int, CallParser | HarmonyParser] = {}  # by index of the answer
        self._splitters: dict[int, ReasoningSplitter] = {}
        self._spaces: dict[int, list[str]] = {}  # white space that a parser would hold back and search each time
        self._with_calls: set[int] = set()  # indices of the answers that called a tool
        self._num_reasoning_tokens = 0

    def _choice(self, index: int, output: RequestOutput, prompt_entries: PromptEntries) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        content = reasoning = ""
        for delta in self._deltas(index, output["text"] or "", output):
            if isinstance(delta, str):
                content += delta
            elif isinstance(delta, ReasoningDelta):
                reasoning += delta.text
            elif delta.call_id:
                calls.append(_call(delta))
            else:
                calls[-1]["function"]["arguments"] += delta.arguments
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(output.get("logprobs", []), self._num_top) if self._body.logprobs else None,
            "finish_reason": self._finish_reason(index, output),
        }

    def _chunk_choices(self, update: RequestUpdate) -> list[str]:
        """Return the role, then a chunk for the text or for each tool call, then the finish reason."""
        index, output = update.index, update.output
        choices = []
        if index not in self._begun:
            self._begun.add(index)
            choices.append(_chunk_choice(index, '{"role": "assistant", "content": ""}'))
        logprobs = "null"
        if self._body.logprobs and update.logprobs:
            logprobs = json.dumps(chat_logprobs(update.logprobs, self._num_top))
        for delta in self._deltas(index, update.text, output):
            choices.append(_chunk_choice(index, _delta_json(delta), logprobs))
            logprobs = "null"
        if logprobs != "null":  # the parser holds back the text of these tokens
            choices.append(_chunk_choice(index, '{"content": ""}', logprobs))
        if output is not None:
            choices.append(_chunk_choice(index, "{}", reason=f'"{self._finish_reason(index, output)}"'))
        return choices

    def _deltas(self, index: int, text: str, output: RequestOutput | None) -> list[Delta]:
        """Return the reasoning, the contents and the tool calls that `text` adds to the message. Hot.

        output: the answer's output, or None if the answer goes on after `text`.
        """
        form, is_last = self._form, output is not None
        if form.call_format is None and form.tags is None:
            return [text] if text else []
        if text.isspace() and not is_last:
            self._spaces.setdefault(index, []).append(text)
            return []
        if self._spaces and index in self._spaces:
            text = "".join((*self._spaces.pop(index), text))
        deltas: list[Delta] = []
        if isinstance(form.tags, ReasoningTags):
            if index not in self._splitters:
                self._splitters[index] = ReasoningSplitter(form.tags)
            _, reasoning, _, text = self._splitters[index].split(text, is_last)
            deltas += [ReasoningDelta(reasoning)] if reasoning else []
            if form.call_format is None:
                return [*deltas, text] if text else deltas
        if index not in self._parsers:
            self._parsers[index] = self._new_parser()
        parser = self._parsers[index]
        deltas += parser.feed(text)
        if output is not None:
            deltas += parser.finish(is_cut=output["finish_reason"] != "stop" or self._is_at_stop_string(output))
        if any(isinstance(each, ToolCallDelta) for each in deltas):
            self._with_calls.add(index)
        return deltas

    def _new_parser(self) -> CallParser | HarmonyParser:
        form = self._form
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self._body.offered_tools}
        if isinstance(form.tags, HarmonyTags):
            return HarmonyParser(form.tags.begun, schemas)
        assert form.call_format is not None, "without calls, only the reasoning is parsed"
        return CallParser(form.call_format, schemas, is_alternative=form.is_alternative)

    def _count(self, index: int, token_ids: Sequence[int], output: RequestOutput | None) -> None:
        super()._count(index, token_ids, output)
        if output is not None and self._form.reasoning_ids is not None:
            self._num_reasoning_tokens += self._count_reasoning(output["token_ids"], self._form.reasoning_ids)

    def _count_reasoning(self, answer: Sequence[int], ids: ReasoningIds) -> int:
        """Return the number of tokens of an answer's reasoning and of its tags."""
        tags, (begin, end) = self._form.tags, ids
        if isinstance(tags, HarmonyTags):
            return num_analysis_tokens(answer, begin, end)
        starts = [tuple(answer[i : i + len(begin)]) for i in range(MAX_LEADING_TOKENS)]
        if not (tags and tags.has_begun) and begin not in starts:
            return 0
        return answer.index(end) + 1 if end in answer else len(answer)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._form.tags is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage

    def _is_at_stop_string(self, output: RequestOutput) -> bool:
        """Return True if a stop string has ended the answer, which may be inside a call."""
        if not self._body.stop or output["finish_reason"] != "stop":
            return False
        ends = {*self._service.llm.text.end_token_ids, *(self._body.stop_token_ids or ())}
        return not ends.intersection(output["token_ids"][-1:])

    def _finish_reason(self, index: int, output: RequestOutput) -> str:
        """Return the finish reason, which is "tool_calls" only if the model has ended its answer itself."""
        reason = output["finish_reason"]
        return "tool_calls" if reason == "stop" and index in self._with_calls else reason


def _chunk_choice(index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
    return f'{{"index": {index}, "delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}}}'


def _delta_json(delta: Delta) -> str:
    if isinstance(delta, str):
        return f'{{"content": {json.dumps(delta)}}}'
    if isinstance(delta, ReasoningDelta):
        return json.dumps(_reasoning(delta.text))
    call = _call(delta) if delta.call_id else {"function": {"arguments": delta.arguments}}
    return json.dumps({"tool_calls": [{"index": delta.call_index, **call}]})


def _reasoning(text: str) -> dict[str, Any]:
    """Return the reasoning under the two names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _call(delta: ToolCallDelta) -> dict[str, Any]:
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": delta.call_id, "type": "function", "function": function}


# -- answers as sequences of blocks ------------------------------------------------------------------------------------

BlockKind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass
class AnswerBlock:
    """A part of an answer: its reasoning, its text, or a tool call."""

    kind: BlockKind
    index: int
    block_id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # appending to one string would copy the string for each token

    @property
    def text(self) -> str:
        """Return the text of the block. The text of a tool call is the call's arguments."""
        return "".join(self.pieces)


class BlockAnswer(ChatAnswer):
    """A chat answer as a sequence of blocks, each with events for its beginning, its pieces and its end.

    The APIs with blocks have one answer per request, and name the type of each event.
    """

    end = b""

    def __init__(self, service: Service, body: ChatRequest, form: ChatForm) -> None:
        super().__init__(service, body, form)
        self._blocks: list[AnswerBlock] = []
        self._output: RequestOutput | None = None

    @abstractmethod
    def _body_of(self, output: RequestOutput | None) -> dict[str, Any]:
        """Return the response with all blocks so far. output: the answer's output, or None before the answer's end."""

    @abstractmethod
    def _begun_events(self, block: AnswerBlock) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _piece_event(self, block: AnswerBlock, piece: str) -> dict[str, Any]: ...

    @abstractmethod
    def _ended_events(self, block: AnswerBlock) -> list[dict[str, Any]]: ...

    def _sse(self, events: Iterable[dict[str, Any]]) -> str:
        return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (self._output,) = outputs
        self._count(0, self._output["token_ids"], self._output)
        self._add(self._output["text"] or "", self._output)
        return self._body_of(self._output)

    def update_events(self, update: RequestUpdate) -> str:
        if update.output is not None:
            self._output = update.output
            self._count(0, update.output["token_ids"], update.output)
        return self._sse(self._add(update.text, update.output))

    def _add(self, text: str, output: RequestOutput | None) -> list[dict[str, Any]]:
        """Add `text` to the blocks, and return the events of the change. output: see _deltas."""
        events = []
        for delta in self._deltas(0, text, output):
            kind: BlockKind
            if isinstance(delta, ToolCallDelta):
                kind, piece, call_id, name = "call", delta.arguments, delta.call_id, delta.name
            else:
                kind, piece = ("text", delta) if isinstance(delta, str) else ("reasoning", delta.text)
                call_id = name = ""
            if not self._blocks or kind != self._blocks[-1].kind or call_id:
                self._blocks.append(AnswerBlock(kind, len(self._blocks), secrets.token_hex(12), call_id, name))
                events += self._ended_events(self._blocks[-2]) if len(self._blocks) > 1 else []
                events += self._begun_events(self._blocks[-1])
            if piece:
                self._blocks[-1].pieces.append(piece)
                events.append(self._piece_event(self._blocks[-1], piece))
        if output is not None and self._blocks:
            events += self._ended_events(self._blocks[-1])
        return events
