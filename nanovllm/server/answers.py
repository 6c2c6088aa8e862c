"""Answer: what the responses of completions and of chats have in common, whole or in chunks."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from nanovllm.core.outputs import RequestOutput, TokenLogprobs
from nanovllm.core.sequence import TokenIds
from nanovllm.request_stream import RequestStream, RequestUpdate
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import dumps_in_parts, json_response
from nanovllm.server.protocol import SamplingFields
from nanovllm.server.service import in_thread
from nanovllm.server.streaming import EventStream, collect_outputs


class Answer(ABC):
    """Makes the response to one request."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, model_name: str, body: SamplingFields, prompts: list[TokenIds], *, drops_answers: bool = False
    ) -> None:
        """prompts: the token ids of each. drops_answers: only the prompts are wanted."""
        self._num_answers = body.n or 1  # to each prompt
        self._includes_usage = body.includes_usage
        self._includes_usage_so_far = body.includes_usage_so_far
        self._drops_answers = drops_answers
        self._fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.whole_object,
            "created": int(time.time()),
            "model": model_name,
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
        scored = [
            outputs[index - index % self._num_answers].get("prompt_logprobs", []) for index in range(len(outputs))
        ]
        choices = [self._choice(index, output, scored[index]) for index, output in enumerate(outputs)]
        return self._fields | {"choices": choices, "usage": self._usage()}

    def update_events(self, update: RequestUpdate) -> str:
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
        if not self._includes_usage:
            return ""
        return f'{self._chunk_start}], "usage": {json.dumps(self._usage())}}}\n\n'

    @abstractmethod
    def _choice(
        self, index: int, output: RequestOutput, prompt_entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """An element of `choices` in a response that is not streamed.

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
    return await in_thread(lambda: json_response(dumps_in_parts(answer.whole(outputs))))
