"""Answer: what the responses of completions and of chats have in common, whole or in chunks."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from nanovllm.core.outputs import RequestOutput, TokenLogprobs
from nanovllm.request_stream import RequestStream, RequestUpdate
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import dumps_in_parts, json_response
from nanovllm.server.service import in_thread
from nanovllm.server.streaming import EventStream, collect_outputs


class Answer(ABC):
    """Makes the response to one request. `num_answers` is its `n`, the answers to each prompt."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model_name: str, num_answers: int, *, includes_usage: bool, drops_answers: bool = False) -> None:
        """includes_usage: whether the stream ends with a chunk of usage. drops_answers: only the prompts are wanted."""
        self._num_answers = num_answers
        self._includes_usage = includes_usage
        self._drops_answers = drops_answers
        self._fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.whole_object,
            "created": int(time.time()),
            "model": model_name,
        }
        head = json.dumps(self._fields | {"object": self.chunk_object})
        self._chunk_start = f'data: {head[:-1]}, "choices": ['
        self._chunk_end = '], "usage": null}\n\n' if includes_usage else "]}\n\n"
        self._num_prompt_tokens = self._num_cached_tokens = self._num_completion_tokens = 0

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The response that is not streamed. `outputs` are in the order of their indices."""
        for index, output in enumerate(outputs):
            self._count(index, output)
        scored = [
            outputs[index - index % self._num_answers].get("prompt_logprobs", []) for index in range(len(outputs))
        ]
        choices = [self._choice(index, output, scored[index]) for index, output in enumerate(outputs)]
        return self._fields | {"choices": choices, "usage": self._usage()}

    def update_events(self, update: RequestUpdate) -> str:
        if update.output is not None:
            self._count(update.index, update.output)
        choices = self._chunk_choices(update)
        return "".join(f"{self._chunk_start}{choice}{self._chunk_end}" for choice in choices)

    def last_events(self) -> str:
        if not self._includes_usage:
            return ""
        return f'{self._chunk_start}], "usage": {json.dumps(self._usage())}}}\n\n'

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput, prompt_entries: list[TokenLogprobs | None]) -> dict[str, Any]:
        """An element of `choices` in a response that is not streamed.

        prompt_entries: log-probabilities of the prompt, which the engine reports with the first answer to it.
        """

    @abstractmethod
    def _chunk_choices(self, update: RequestUpdate) -> list[str]:
        """The JSON of the element of `choices` in each chunk of an update. Hot."""

    def _count(self, index: int, output: RequestOutput) -> None:
        """Each prompt counts once, whatever the number of answers to it."""
        if index % self._num_answers == 0:
            self._num_prompt_tokens += output["num_prompt_tokens"]
            self._num_cached_tokens += output["num_cached_tokens"]
        if not self._drops_answers:
            self._num_completion_tokens += len(output["token_ids"])

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
    return await in_thread(lambda: json_response(dumps_in_parts(answer.whole(outputs))))
