"""Answers on their way to the client: as server-sent events or as a whole, and no longer than the client is there.

A chunk's JSON is put together from parts made once per request, and only the new text is encoded. While the client or
the event loop is busy, the stream merges updates, so a slow connection gets fewer and longer chunks.
"""

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.core.outputs import RequestOutput, TokenLogprobs
from nanovllm.errors import EngineError
from nanovllm.request_stream import RequestStream, RequestUpdate
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.admission import Service
from nanovllm.server.call_formats import CallFormat
from nanovllm.server.errors import ApiError, ClientDisconnectedError, api_error, dumps_in_parts, json_response
from nanovllm.server.logprobs import PromptEntries, chat_logprobs, completion_logprobs, prompt_logprobs
from nanovllm.server.protocol import ChatRequest, CompletionRequest, SamplingFields
from nanovllm.server.tool_calls import (
    Delta,
    ReasoningDelta,
    ReasoningSplitter,
    TaggedCallParser,
    ToolCallDelta,
    ToolCallParser,
    make_parser,
)
from nanovllm.text.request_check import Prompt

DONE = b"data: [DONE]\n\n"
COMMENT = b": no new text yet\n\n"  # which readers of server-sent events skip
PROGRESS = '], "prompt_progress": '  # begins the report of a prompt's progress; in a text its quotes would be escaped
MAX_SILENCE_S = 10.0
MAX_LEADING_TOKENS = 4  # white space before the tag of reasoning
PROGRESS_S = 0.5  # between two reports of a prompt's progress
Result = TypeVar("Result")
BodyT = TypeVar("BodyT", bound=SamplingFields)


class Answer(ABC, Generic[BodyT]):
    """The response to one request. Completions and chats have this in common."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    end: bytes = DONE  # of a stream

    def __init__(self, service: Service, body: BodyT) -> None:
        self._service, self._body = service, body
        self._begun: set[int] = set()  # indices of the answers of which something was streamed
        self._num_answers = body.n or 1  # to each prompt
        self._fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.whole_object,
            "created": int(time.time()),
            "model": service.model_names[0],
        }
        head = json.dumps(self._fields | {"object": self.chunk_object})
        self._chunk_start = f'data: {head[:-1]}, "choices": ['
        self._has_usage_so_far = body.includes_usage_so_far
        self._chunk_end = '], "usage": null}\n\n' if body.includes_usage else "]}\n\n"
        self._num_prompt_tokens = self._num_cached_tokens = self._num_completion_tokens = 0

    async def respond(
        self, prompts: Sequence[Prompt], params: SamplingParams, cache_salt: str | None, receive: Receive
    ) -> Response:
        """Queue the prompts, and return the response as events or as a whole.

        Log-probabilities can be megabytes, so their JSON is made in a thread. Raises Refusal like Service.submit.
        """
        body = self._body
        with_tokens = bool(body.stream) and (params.logprobs is not None or body.includes_usage_so_far)
        stream = await self._service.submit(prompts, params, with_tokens=with_tokens, cache_salt=cache_salt)
        self._num_prompt_tokens = sum(map(len, stream.prompts))
        if body.stream:
            return EventStream(stream, self)
        try:
            outputs = await while_connected(receive, stream.outputs())
        finally:
            stream.close()
        for output in outputs:
            check_output(output)
        if params.logprobs is None and params.prompt_logprobs is None:
            return json_response(self.whole(outputs))
        text = await asyncio.to_thread(lambda: dumps_in_parts(self.whole(outputs)))
        return Response(text, media_type="application/json")

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response that is not streamed. `outputs` are in the order of their indices."""
        choices = []
        for index, output in enumerate(outputs):
            self._count(index, output["token_ids"], output)
            prompt_entries = outputs[index - index % self._num_answers].get("prompt_logprobs", [])
            choices.append(self._choice(index, output, prompt_entries))
            if self._body.prompt_logprobs is not None:
                choices[-1]["prompt_logprobs"] = prompt_logprobs(prompt_entries, self._body.prompt_logprobs)
        return self._fields | {"choices": choices, "usage": self._usage()}

    def update_events(self, update: RequestUpdate) -> str:
        """The events of an update, each "data: {...}" and an empty line; "" for nothing. Hot."""
        end = self._chunk_end
        if self._has_usage_so_far:
            self._count(update.index, update.token_ids, update.output)
            end = f'], "usage": {json.dumps(self._usage())}}}\n\n'
        elif update.output is not None:
            self._count(update.index, update.output["token_ids"], update.output)
        return "".join(f"{self._chunk_start}{choice}{end}" for choice in self._chunk_choices(update))

    def first_events(self) -> str:
        """The events before the first update. With it, since until then another replica may still answer."""
        return ""

    def progress_event(self, stream: RequestStream, elapsed_s: float) -> str:
        """The event that says how much of the prompts is computed, as llama.cpp's server has it; "" if not wanted."""
        if not self._body.return_progress:
            return ""
        progress = {
            "total": self._num_prompt_tokens,
            "cache": sum(seq.num_hit_tokens or 0 for seq in stream.sequences),
            "processed": sum(min(seq.num_computed_tokens, seq.num_prompt_tokens) for seq in stream.sequences),
            "time_ms": round(1000 * elapsed_s),
        }
        return f"{self._chunk_start}{PROGRESS}{json.dumps(progress)}}}\n\n"

    def error_events(self, error: ApiError) -> str:
        """The events of a stream that fails."""
        return error.event()

    def last_events(self) -> str:
        """The events after all answers have ended, without [DONE]."""
        if not self._body.includes_usage:
            return ""
        return f'{self._chunk_start}], "usage": {json.dumps(self._usage())}}}\n\n'

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput, prompt_entries: PromptEntries) -> dict[str, Any]:
        """An element of `choices` in a response that is not streamed, without prompt_logprobs.

        prompt_entries: log-probabilities of the prompt, which the engine reports with the first answer to it.
        """

    @abstractmethod
    def _chunk_choices(self, update: RequestUpdate) -> list[str]:
        """The JSON of the element of `choices` in each chunk of an update. Hot."""

    def _count(self, index: int, token_ids: Sequence[int], output: RequestOutput | None) -> None:
        """Add new tokens to the usage. When an answer ends, add its cached tokens: once for each prompt."""
        self._num_completion_tokens += len(token_ids)
        if output is not None and index % self._num_answers == 0:
            self._num_cached_tokens += output["num_cached_tokens"]

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }


class CompletionAnswer(Answer[CompletionRequest]):
    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, prompt_texts: list[str]) -> None:
        """`prompt_texts` are empty without echo."""
        super().__init__(service, body)
        self._prompt_texts = prompt_texts
        self._offsets: dict[int, int] = {}  # by index: characters in the tokens that were streamed

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return super().whole([self._wanted(output) for output in outputs])

    def update_events(self, update: RequestUpdate) -> str:
        if self._body.max_tokens == 0:
            update = RequestUpdate(update.index, output=update.output and self._wanted(update.output))
        return super().update_events(update)

    def _wanted(self, output: RequestOutput) -> RequestOutput:
        """`output`, for max_tokens=0 without the token that had to be generated."""
        if self._body.max_tokens != 0:
            return output
        return output | {"text": "", "token_ids": [], "logprobs": [], "finish_reason": "length"}

    def _choice(self, index: int, output: RequestOutput, prompt_entries: PromptEntries) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            first_text = ""
            entries: Iterable[TokenLogprobs | None] = output.get("logprobs", [])
            if self._body.echo:
                first_text = self._service.llm.text.decode(output["prompt_token_ids"][:1])
                entries = chain(prompt_entries, entries)
            logprobs = completion_logprobs(entries, self._body.logprobs, first_text=first_text)
        return {
            "index": index,
            "text": self._prompt_text(index) + (output["text"] or ""),
            "logprobs": logprobs,
            "finish_reason": output["finish_reason"],
        }

    def _chunk_choices(self, update: RequestUpdate) -> list[str]:
        index, text, output = update.index, update.text, update.output
        if index not in self._begun:
            self._begun.add(index)
            text = self._prompt_text(index) + text
        logprobs = "null"
        if self._body.logprobs is not None and update.logprobs:
            offset = self._offsets.get(index, 0)
            columns = completion_logprobs(update.logprobs, self._body.logprobs, offset=offset)
            self._offsets[index] = offset + sum(map(len, columns["tokens"]))
            logprobs = json.dumps(columns)
        elif not text and output is None:
            return []
        reason = "null" if output is None else f'"{output["finish_reason"]}"'
        return [f'{{"index": {index}, "text": {json.dumps(text)}, "logprobs": {logprobs}, "finish_reason": {reason}}}']

    def _prompt_text(self, index: int) -> str:
        return self._prompt_texts[index // self._num_answers] if self._prompt_texts else ""


class ChatForm(NamedTuple):
    """The form in which the model writes its answers to one request.

    call_format: how it writes tool calls; None if the request has no tools. has_reasoning: the template knows
    reasoning. begins_in_reasoning: the prompt has opened it. reasoning_tags: the tokens that begin and end it, if each
    is one token.
    """

    call_format: CallFormat | None = None
    has_reasoning: bool = False
    begins_in_reasoning: bool = False
    reasoning_tags: tuple[int, int] | None = None


class ChatAnswer(Answer[ChatRequest]):
    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, form: ChatForm) -> None:
        super().__init__(service, body)
        self._form, self._num_top = form, body.top_logprobs or 0
        self._parsers: dict[int, ToolCallParser | TaggedCallParser] = {}  # by index of the answer
        self._splitters: dict[int, ReasoningSplitter] = {}
        self._spaces: dict[int, list[str]] = {}  # white space that parsers would hold back, and search again each time
        self._with_calls: set[int] = set()  # indices of the answers that called a tool
        self._num_reasoning_tokens = 0

    def _choice(self, index: int, output: RequestOutput, prompt_entries: PromptEntries) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        content = reasoning = ""
        for delta in self._deltas(index, output["text"] or "", is_last=True):
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
        """First the role, then a chunk for the text or for each tool call, then the reason of the end."""
        index, output = update.index, update.output
        choices = []
        if index not in self._begun:
            self._begun.add(index)
            choices.append(_chunk_choice(index, '{"role": "assistant", "content": ""}'))
        logprobs = "null"
        if self._body.logprobs and update.logprobs:
            logprobs = json.dumps(chat_logprobs(update.logprobs, self._num_top))
        for delta in self._deltas(index, update.text, is_last=output is not None):
            choices.append(_chunk_choice(index, _delta_json(delta), logprobs))
            logprobs = "null"
        if logprobs != "null":  # the text of these tokens is held back
            choices.append(_chunk_choice(index, '{"content": ""}', logprobs))
        if output is not None:
            choices.append(_chunk_choice(index, "{}", reason=f'"{self._finish_reason(index, output)}"'))
        return choices

    def _deltas(self, index: int, text: str, is_last: bool) -> list[Delta]:
        """The reasoning, the contents and the tool calls that `text` adds to the message. Hot."""
        form = self._form
        if form.call_format is None and not form.has_reasoning:
            return [text] if text else []
        if text.isspace() and not is_last:
            self._spaces.setdefault(index, []).append(text)
            return []
        if self._spaces and index in self._spaces:
            text = "".join((*self._spaces.pop(index), text))
        deltas: list[Delta] = []
        if form.has_reasoning:
            if index not in self._splitters:
                self._splitters[index] = ReasoningSplitter(form.begins_in_reasoning)
            reasoning, text = self._splitters[index].feed(text, is_last)
            deltas += [ReasoningDelta(reasoning)] if reasoning else []
        if form.call_format is None:
            return [*deltas, text] if text else deltas
        if index not in self._parsers:
            schemas = {tool.function.name: tool.function.parameters or {} for tool in self._body.offered_tools}
            self._parsers[index] = make_parser(form.call_format, schemas, in_pieces=bool(self._body.stream))
        parser = self._parsers[index]
        deltas += parser.feed(text)
        if is_last:
            deltas += parser.finish()
        if any(isinstance(each, ToolCallDelta) for each in deltas):
            self._with_calls.add(index)
        return deltas

    def _count(self, index: int, token_ids: Sequence[int], output: RequestOutput | None) -> None:
        super()._count(index, token_ids, output)
        form = self._form
        if output is not None and form.reasoning_tags is not None:
            answer, (begin, end) = output["token_ids"], form.reasoning_tags
            if form.begins_in_reasoning or begin in answer[:MAX_LEADING_TOKENS]:
                self._num_reasoning_tokens += answer.index(end) + 1 if end in answer else len(answer)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._form.has_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage

    def _finish_reason(self, index: int, output: RequestOutput) -> str:
        """Return "tool_calls" only if the model has ended its answer itself."""
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
    """Clients look for it under one of two names."""
    return {"reasoning": text, "reasoning_content": text}


def _call(delta: ToolCallDelta) -> dict[str, Any]:
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": delta.call_id, "type": "function", "function": function}


# -- sending -----------------------------------------------------------------------------------------------------------


class EventStream(Response):
    """Sends the updates of a request as server-sent events, and closes its stream in the end.

    A long prompt is computed for minutes. Meanwhile a comment every `silence_s` seconds keeps proxies and clients from
    giving up. A client that has asked for it is told how much of the prompt is computed, from the beginning to the end.
    """

    def __init__(self, stream: RequestStream, answer: Answer[Any], silence_s: float = MAX_SILENCE_S) -> None:
        self.status_code, self.background = 200, None
        self._stream, self._answer, self._silence_s = stream, answer, silence_s
        self._has_begun = False  # a token has arrived
        self._start_s = self._sent_s = (
            0.0  # when the stream began, and when something was sent last, by the loop's clock
        )
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnectedError):
                await while_connected(receive, self._send(send))
        finally:
            self._stream.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        clock = asyncio.get_running_loop().time
        self._start_s = self._sent_s = clock()
        comments = asyncio.ensure_future(self._comment(send))
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    self._sent_s = clock()
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        finally:
            comments.cancel()
        await send({"type": "http.response.body", "body": self._answer.end, "more_body": False})

    async def _comment(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        with suppress(OSError):  # the client has gone, which others notice too
            while True:
                progress = "" if self._has_begun else self._progress()
                if (left_s := self._sent_s + (PROGRESS_S if progress else self._silence_s) - clock()) > 0:
                    await asyncio.sleep(left_s)
                else:
                    self._sent_s = clock()
                    await send({"type": "http.response.body", "body": progress.encode() or COMMENT, "more_body": True})

    def _progress(self) -> str:
        return self._answer.progress_event(self._stream, asyncio.get_running_loop().time() - self._start_s)

    async def _events(self) -> AsyncGenerator[str, None]:
        """The status has been sent, so an error is an event, too."""
        try:
            if event := self._progress():
                yield event
            async for update in self._stream:
                if not self._has_begun:
                    self._has_begun = True
                    if event := self._progress() + self._answer.first_events():
                        yield event
                if update.output is not None:
                    check_output(update.output)
                if event := self._answer.update_events(update):
                    yield event
            if event := self._answer.last_events():
                yield event
        except Exception as error:
            yield self._answer.error_events(api_error(error))
            if not isinstance(error, EngineError | ApiError):
                raise  # a bug, which the server logs


def is_sign_of_life(body: bytes) -> bool:
    """Return True if this part of an event stream has nothing of the answer yet: a comment, or a prompt's progress."""
    return body == COMMENT or PROGRESS.encode() in body


def check_output(output: RequestOutput) -> None:
    """Raise ApiError if the request has failed."""
    if output["finish_reason"] == "error":
        status = 400 if output.get("error_cause") == "request" else 500
        raise ApiError(f"the request failed: {output.get('error')}", status=status, code="request_failed")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`. If the client disconnects first, cancel it and raise ClientDisconnectedError.

    The body must have been received already.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
