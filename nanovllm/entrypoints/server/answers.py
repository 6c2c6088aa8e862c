"""Sends answers to clients, whole or as server-sent events, and stops when a client disconnects.

A chunk's JSON is joined from parts that are made once per request, and only the new text is encoded. While the client
or the event loop is busy, the stream merges updates, so a slow connection gets fewer and longer chunks.
"""

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any, Generic, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.entrypoints.server.admission import Service
from nanovllm.entrypoints.server.errors import (
    ApiError,
    ClientDisconnectedError,
    api_error,
    dumps_in_parts,
    json_response,
)
from nanovllm.entrypoints.server.protocol import CompletionRequest, SamplingFields
from nanovllm.entrypoints.server.request_log import record_of
from nanovllm.errors import EngineError
from nanovllm.plan.outputs import Logprob, RequestOutput, TokenLogprobs
from nanovllm.request_stream import RequestStream, RequestUpdate
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.frontend import Prompt

DONE = b"data: [DONE]\n\n"
COMMENT = ": no new text yet\n"  # begins a keep-alive event; readers of events skip comments
PROGRESS = '], "prompt_progress": '  # begins a report of progress; inside a text the quotes would be escaped
MAX_SILENCE_S = 10.0
PROGRESS_S = 0.5  # between two reports of a prompt's progress
Result = TypeVar("Result")
BodyT = TypeVar("BodyT", bound=SamplingFields)
PromptEntries: TypeAlias = Sequence[TokenLogprobs | None]


class Answer(ABC, Generic[BodyT]):
    """The response to one request, with what completions and chats have in common."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    empty_choice: str  # the JSON of a chunk's choice without text
    prompt_param: str  # the field of the body that has the prompt
    end: bytes = DONE  # the stream's last event

    def __init__(self, service: Service, body: BodyT) -> None:
        self._service, self._body = service, body
        self._begun: set[int] = set()  # indices of the answers that have streamed something
        self._num_answers = body.n or 1  # to each prompt
        self._fields: dict[str, Any] = {
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
        self, prompts: Sequence[Prompt], params: SamplingParams, cache_salt: str | None, request: Request
    ) -> Response:
        """Queue the prompts, and return the response, streamed as events or whole.

        Log-probabilities can be megabytes, so their JSON is made in a thread. Raises Refusal like Service.submit.
        """
        body = self._body
        with_tokens = bool(body.stream) and (params.logprobs is not None or body.includes_usage_so_far)
        record = record_of(request.scope)
        record.id = self._fields["id"].partition("-")[2]
        stream = await self._service.submit(
            prompts, params, record, with_tokens=with_tokens, cache_salt=cache_salt, param=self.prompt_param
        )
        self._num_prompt_tokens = sum(seq.num_prompt_tokens for seq in stream.sequences)
        if body.stream:
            return EventStream(stream, self)
        try:
            outputs = await while_connected(request.receive, stream.outputs())
        finally:
            stream.close()
        for output in outputs:
            check_output(output)
        if params.logprobs is None and params.prompt_logprobs is None:
            return json_response(self.whole(outputs))
        text = await asyncio.to_thread(lambda: dumps_in_parts(self.whole(outputs)))
        return Response(text, media_type="application/json")

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the response that is not streamed. `outputs` are in the order of their indices."""
        choices = []
        for index, output in enumerate(outputs):
            self._count(index, output["token_ids"], output)
            prompt_entries = outputs[index - index % self._num_answers].get("prompt_logprobs", [])
            choices.append(self._choice(index, output, prompt_entries))
            if self._body.prompt_logprobs is not None:
                choices[-1]["prompt_logprobs"] = prompt_logprobs(prompt_entries, self._body.prompt_logprobs)
        return self._fields | {"choices": choices, "usage": self._usage()}

    def update_events(self, update: RequestUpdate) -> str:
        """Return the events of an update, each "data: {...}" and an empty line, or "" if there are none. Hot."""
        end = self._chunk_end
        if self._has_usage_so_far:
            self._count(update.index, update.token_ids, update.output)
            end = f'], "usage": {json.dumps(self._usage())}}}\n\n'
        elif update.output is not None:
            self._count(update.index, update.output["token_ids"], update.output)
        return "".join(f"{self._chunk_start}{choice}{end}" for choice in self._chunk_choices(update))

    def first_events(self) -> str:
        """Return the events that precede the first update.

        They are sent together with the first update, so that another replica can still take over before it.
        """
        return ""

    def waiting_events(self) -> str:
        """Return events without text, for clients that time out without events."""
        return f"{self._chunk_start}{self.empty_choice}{self._chunk_end}"

    def progress_event(self, stream: RequestStream, elapsed_s: float) -> str:
        """Return the event that says how much of the prompts is computed, in the form of llama.cpp's server.

        Return "" if the client has not asked for progress events.
        """
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
        """Return the events of a stream that fails."""
        return error.event()

    def last_events(self) -> str:
        """Return the events that follow the last answer, without [DONE]."""
        if not self._body.includes_usage:
            return ""
        return f'{self._chunk_start}], "usage": {json.dumps(self._usage())}}}\n\n'

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput, prompt_entries: PromptEntries) -> dict[str, Any]:
        """Return an element of `choices` in a response that is not streamed, without prompt_logprobs.

        prompt_entries: log-probabilities of the prompt, which the engine reports with the first answer to it.
        """

    @abstractmethod
    def _chunk_choices(self, update: RequestUpdate) -> list[str]:
        """Return the JSON of the element of `choices` in each chunk of an update. Hot."""

    def _count(self, index: int, token_ids: Sequence[int], output: RequestOutput | None) -> None:
        """Add new tokens to the usage. When a prompt's first answer ends, add the prompt's cached tokens."""
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
    prompt_param = "prompt"
    empty_choice = '{"index": 0, "text": "", "logprobs": null, "finish_reason": null}'

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
        """Return `output`; for max_tokens=0, remove the one token that the engine had to generate."""
        if self._body.max_tokens != 0:
            return output
        return RequestOutput(output, text="", token_ids=[], logprobs=[], finish_reason="length")

    def _choice(self, index: int, output: RequestOutput, prompt_entries: PromptEntries) -> dict[str, Any]:
        logprobs, text = None, self._prompt_text(index) + (output["text"] or "")
        if self._body.logprobs is not None:
            first_text = ""
            entries: Iterable[TokenLogprobs | None] = output.get("logprobs", [])
            if self._body.echo:
                first_text = self._service.llm.text.decode(output["prompt_token_ids"][:1])
                entries = chain(prompt_entries, entries)
            logprobs = completion_logprobs(entries, self._body.logprobs, first_text=first_text)
            if self._body.echo:
                shift_offsets(logprobs, text)
        return {
            "index": index,
            "text": text,
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


# -- log-probabilities, in the forms of OpenAI's completions and chats, and of vLLM's prompts --------------------------


def completion_logprobs(
    entries: Iterable[TokenLogprobs | None], num_top: int, *, first_text: str = "", offset: int = 0
) -> dict[str, Any]:
    """Return OpenAI's form, with one entry per token. A prompt's first token has the entry None and the text
    `first_text`.

    offset: the position in the text at which the first token begins.
    """
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        text, logprob, top = first_text, None, None
        if entry is not None:
            token_id, own = next(iter(entry.items()))
            text, logprob, top = _token_text(token_id, own), own.logprob, _top_by_text(entry, num_top)
        columns["tokens"].append(text)
        columns["token_logprobs"].append(logprob)
        columns["top_logprobs"].append(top)
        columns["text_offset"].append(offset)
        offset += len(text)
    return columns


def shift_offsets(columns: dict[str, Any], text: str) -> None:
    """Let offsets be places in `text`, which may lack what a tokenizer adds to a string: a token for the beginning, and
    the space before the first word.
    """
    beginning = "".join(columns["tokens"][:2])
    num_missing = next(i for i in range(len(beginning) + 1) if text.startswith(beginning[i:]))
    columns["text_offset"] = [max(0, offset - num_missing) for offset in columns["text_offset"]]


def chat_logprobs(entries: Iterable[TokenLogprobs], num_top: int) -> dict[str, Any]:
    content = []
    for entry in entries:
        top = sorted((each for each in entry.items() if each[1].rank <= num_top), key=lambda each: each[1].rank)
        own = _chat_token(*next(iter(entry.items())))
        content.append(own | {"top_logprobs": [_chat_token(*each) for each in top]})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: PromptEntries, num_top: int) -> Iterator[dict[str, Any] | None]:
    """Yield vLLM's form: token id -> logprob, rank and text. A list of a whole book's entries would take gigabytes."""
    for entry in entries:
        yield (
            None
            if entry is None
            else {
                str(token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.text}
                for token_id, each in _own_and_top(entry, num_top)
            }
        )


def _own_and_top(entry: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """Return the token itself, followed by the most likely tokens."""
    return [(token_id, each) for i, (token_id, each) in enumerate(entry.items()) if i == 0 or each.rank <= num_top]


def _top_by_text(entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Return the log-probabilities of the token itself and of the most likely tokens, by their texts.

    Several tokens can have the same text, such as parts of a character. The text gets the highest log-probability.
    """
    top: dict[str, float] = {}
    for token_id, each in _own_and_top(entry, num_top):
        text = _token_text(token_id, each)
        top[text] = max(each.logprob, top.get(text, each.logprob))
    return top


def _token_text(token_id: int, logprob: Logprob) -> str:
    """Return the token's text or, without a tokenizer, its id in vLLM's form."""
    return f"token_id:{token_id}" if logprob.text is None else logprob.text


def _chat_token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = _token_text(token_id, logprob)
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}


# -- sending -----------------------------------------------------------------------------------------------------------


class EventStream(Response):
    """Sends the updates of a request as server-sent events, and finally closes the request's stream.

    A long prompt is computed for minutes. Until the first token, an event without text every `silence_s` seconds keeps
    proxies and clients from timing out; some clients ignore comments. A client that has asked for progress events gets
    them from the beginning to the end of the prompt.
    """

    def __init__(self, stream: RequestStream, answer: Answer[Any], silence_s: float = MAX_SILENCE_S) -> None:
        self.status_code, self.background = 200, None
        self._stream, self._answer, self._silence_s = stream, answer, silence_s
        self._has_begun = False  # a token has arrived
        self._scope: Scope = {}
        self._start_s = self._sent_s = 0.0  # start of the stream and last send, by the loop's clock
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        try:
            with suppress(ClientDisconnectedError):
                await while_connected(receive, self._send(send))
        finally:
            self._stream.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        clock = asyncio.get_running_loop().time
        self._start_s = self._sent_s = clock()
        signs = asyncio.ensure_future(self._show_life(send))
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    self._sent_s = clock()
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        finally:
            signs.cancel()
        await send({"type": "http.response.body", "body": self._answer.end, "more_body": False})

    async def _show_life(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        with suppress(OSError):  # the client has disconnected, which `while_connected` notices too
            while True:
                progress = "" if self._has_begun else self._progress()
                if (left_s := self._sent_s + (PROGRESS_S if progress else self._silence_s) - clock()) > 0:
                    await asyncio.sleep(left_s)
                else:
                    self._sent_s = clock()
                    body = progress or f"{COMMENT}{self._answer.waiting_events()}"
                    await send({"type": "http.response.body", "body": body.encode(), "more_body": True})

    def _progress(self) -> str:
        return self._answer.progress_event(self._stream, asyncio.get_running_loop().time() - self._start_s)

    async def _events(self) -> AsyncGenerator[str, None]:
        """Yield all events. An error becomes an event, because the status has been sent already."""
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
            failure = api_error(error)
            failure.record(self._scope)
            yield self._answer.error_events(failure)
            if not isinstance(error, EngineError | ApiError):
                raise  # a bug; the server logs the exception


def is_sign_of_life(body: bytes) -> bool:
    """Return True if this part of an event stream has no part of the answer: an empty event or a progress event."""
    return body.startswith(COMMENT.encode()) or PROGRESS.encode() in body


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
