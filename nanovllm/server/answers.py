"""Answers on their way to the client: as server-sent events or as a whole, and no longer than the client is there.

A chunk's JSON is put together from parts made once per request, and only the new text is encoded. While the client or
the event loop is busy, the stream merges updates, so a slow connection gets fewer and longer chunks.

Log-probabilities have OpenAI's two forms, one for completions and one for chats, and vLLM's for prompts.
"""

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.core.outputs import Logprob, RequestOutput, TokenLogprobs
from nanovllm.core.sequence import TokenIds
from nanovllm.errors import EngineError
from nanovllm.request_stream import RequestStream, RequestUpdate
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.admission import Service
from nanovllm.server.errors import ApiError, ClientDisconnectedError, api_error, dumps_in_parts, json_response
from nanovllm.server.protocol import SamplingFields

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


class Answer(ABC):
    """Makes the response to one request: completions and chats have this in common."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, service: Service, body: SamplingFields, prompts: list[TokenIds], *, drops_answers: bool = False
    ) -> None:
        """prompts: the token ids of each. drops_answers: only the prompts are wanted."""
        self._service = service
        self._num_prompt_top = body.prompt_logprobs
        self._begun: set[int] = set()  # indices of the answers of which something was streamed
        self._num_answers = body.n or 1  # to each prompt
        self._includes_usage = body.includes_usage
        self._includes_usage_so_far = body.includes_usage_so_far
        self._drops_answers = drops_answers
        self._fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.whole_object,
            "created": int(time.time()),
            "model": service.model_names[0],
        }
        head = json.dumps(self._fields | {"object": self.chunk_object})
        self._chunk_start = f'data: {head[:-1]}, "choices": ['
        self._chunk_end = '], "usage": null}\n\n' if self._includes_usage else "]}\n\n"
        self._num_prompt_tokens = sum(len(token_ids) for token_ids in prompts)
        self._num_cached_tokens = self._num_completion_tokens = 0

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response that is not streamed. `outputs` are in the order of their indices."""
        for index, output in enumerate(outputs):
            self._count_tokens(output["token_ids"])
            self._count_cached(index, output)
        choices = []
        for index, output in enumerate(outputs):
            prompt_entries = outputs[index - index % self._num_answers].get("prompt_logprobs", [])
            choices.append(self._choice(index, output, prompt_entries))
            if self._num_prompt_top is not None:
                choices[-1]["prompt_logprobs"] = prompt_logprobs(prompt_entries, self._num_prompt_top)
        return self._fields | {"choices": choices, "usage": self._usage()}

    def update_events(self, update: RequestUpdate) -> str:
        """The events of an update, each "data: {...}" and an empty line; "" for nothing. Hot."""
        end = self._chunk_end
        if self._includes_usage_so_far:
            self._count_tokens(update.token_ids)
            end = f'], "usage": {json.dumps(self._usage())}}}\n\n'
        elif update.output is not None:
            self._count_tokens(update.output["token_ids"])
        if update.output is not None:
            self._count_cached(update.index, update.output)
        return "".join(f"{self._chunk_start}{choice}{end}" for choice in self._chunk_choices(update))

    def last_events(self) -> str:
        """The events after all answers have ended, without [DONE]."""
        if not self._includes_usage:
            return ""
        return f'{self._chunk_start}], "usage": {json.dumps(self._usage())}}}\n\n'

    @abstractmethod
    def _choice(
        self, index: int, output: RequestOutput, prompt_entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """An element of `choices` in a response that is not streamed, without prompt_logprobs.

        prompt_entries: log-probabilities of the prompt, which the engine reports with the first answer to it.
        """

    @abstractmethod
    def _chunk_choices(self, update: RequestUpdate) -> list[str]:
        """The JSON of the element of `choices` in each chunk of an update. Hot."""

    def _count_tokens(self, token_ids: Sequence[int]) -> None:
        if not self._drops_answers:
            self._num_completion_tokens += len(token_ids)

    def _count_cached(self, index: int, output: RequestOutput) -> None:
        """Each prompt counts once, whatever the number of answers to it."""
        if index % self._num_answers == 0:
            self._num_cached_tokens += output["num_cached_tokens"]

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }


async def respond(
    answer: Answer, stream: RequestStream, params: SamplingParams, receive: Receive, *, streams: bool
) -> Response:
    """The response to a request that was queued as `stream`, as events or as a whole.

    Log-probabilities can be megabytes, so their JSON is made in a thread.
    """
    if streams:
        return EventStream(stream, answer)
    outputs = await collect_outputs(stream, receive)
    if params.logprobs is None and params.prompt_logprobs is None:
        return json_response(answer.whole(outputs))
    return await asyncio.to_thread(lambda: json_response(dumps_in_parts(answer.whole(outputs))))


class EventStream(Response):
    """Sends the updates of a request as server-sent events, and closes its stream in the end."""

    def __init__(self, stream: RequestStream, answer: Answer) -> None:
        self.status_code, self.background = 200, None
        self._stream, self._answer = stream, answer
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
        async with aclosing(_events(self._stream, self._answer)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _events(stream: RequestStream, answer: Answer) -> AsyncGenerator[bytes, None]:
    """The status has been sent, so an error is an event, too."""
    try:
        async for update in stream:
            if update.output is not None:
                check_output(update.output)
            if event := answer.update_events(update):
                yield event.encode()
        if event := answer.last_events():
            yield event.encode()
    except Exception as error:
        yield f"data: {json.dumps(api_error(error).body())}\n\n".encode()
        if not isinstance(error, EngineError | ApiError):
            raise  # a bug, which the server logs


async def collect_outputs(stream: RequestStream, receive: Receive) -> list[RequestOutput]:
    """Wait for all answers, and close the stream. Raises ClientDisconnectedError as soon as the client has gone."""
    try:
        outputs = await while_connected(receive, stream.outputs())
    finally:
        stream.close()
    for output in outputs:
        check_output(output)
    return outputs


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


# -- log-probabilities -------------------------------------------------------------------------------------------------


def completion_logprobs(
    entries: Iterable[TokenLogprobs | None], num_top: int, *, first_text: str = "", offset: int = 0
) -> dict[str, Any]:
    """One entry per token. The entry of a prompt's first token is None, and its text is `first_text`.

    offset: where the first token begins in the text.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    for entry in entries:
        text, logprob, top = first_text, None, None
        if entry is not None:
            token_id, own = next(iter(entry.items()))
            text, logprob, top = token_text(token_id, own), own.logprob, _top_by_text(entry, num_top)
        tokens.append(text)
        token_logprobs.append(logprob)
        top_logprobs.append(top)
        text_offset.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def chat_logprobs(entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    content = []
    for entry in entries:
        token_id, own = next(iter(entry.items()))
        top = sorted((each for each in entry.items() if each[1].rank <= num_top), key=lambda each: each[1].rank)
        content.append(_chat_token(token_id, own) | {"top_logprobs": [_chat_token(*each) for each in top]})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Iterable[TokenLogprobs | None], num_top: int) -> Iterator[dict[str, Any] | None]:
    """vLLM's form: token id -> logprob, rank and text. An iterator, because those of a book would take gigabytes."""
    return (None if entry is None else _prompt_position(entry, num_top) for entry in entries)


def token_text(token_id: int, logprob: Logprob) -> str:
    """The token's text, or its id in vLLM's form without a tokenizer."""
    return f"token_id:{token_id}" if logprob.text is None else logprob.text


def _top_by_text(entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Text -> log-probability of the token itself and of the most likely ones.

    Several tokens can have the same text, such as parts of a character. The most likely of them counts.
    """
    top: dict[str, float] = {}
    for i, (token_id, each) in enumerate(entry.items()):
        if i == 0 or each.rank <= num_top:
            text = token_text(token_id, each)
            top[text] = max(each.logprob, top.get(text, each.logprob))
    return top


def _chat_token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = token_text(token_id, logprob)
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}


def _prompt_position(entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.text}
        for i, (token_id, each) in enumerate(entry.items())
        if i == 0 or each.rank <= num_top
    }
