"""POST /v1/completions: the text that follows one prompt or several."""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from nanovllm.core.outputs import RequestOutput, TokenLogprobs
from nanovllm.core.sequence import TokenIds
from nanovllm.request_stream import RequestUpdate
from nanovllm.server.admission import Service, salted
from nanovllm.server.answers import Answer, completion_logprobs, respond
from nanovllm.server.errors import ANSWERS, ApiError
from nanovllm.server.protocol import CompletionRequest, completion_params
from nanovllm.text.request_check import Prompt, prompt_list


def add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=ANSWERS)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        service.check_body(body)
        prompts = _prompts(body.prompt)
        params = completion_params(body, service.llm.sampling_defaults)
        texts = await service.prepare(_texts, service, prompts) if body.echo else []
        cache_salt = service.cache_salt(body, request)
        encoded: Sequence[Prompt] = prompts
        if body.add_special_tokens is not None:
            encoded = await service.prepare(_encode, service, prompts, body.add_special_tokens, cache_salt)
        with_tokens = bool(body.stream) and (body.logprobs is not None or body.includes_usage_so_far)
        stream = await service.submit(encoded, params, with_tokens=with_tokens, cache_salt=cache_salt)
        answer = CompletionAnswer(service, body, stream.prompts, texts)
        return await respond(answer, stream, params, request.receive, streams=bool(body.stream))


class CompletionAnswer(Answer):
    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, service: Service, body: CompletionRequest, prompts: list[TokenIds], prompt_texts: list[str]
    ) -> None:
        """`prompt_texts` are empty without echo."""
        super().__init__(service, body, prompts, drops_answers=body.max_tokens == 0)
        self._body, self._prompt_texts = body, prompt_texts
        self._offsets: dict[int, int] = {}  # by index: characters in the tokens that were streamed

    def _choice(
        self, index: int, output: RequestOutput, prompt_entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        text = "" if self._drops_answers else output["text"] or ""
        return {
            "index": index,
            "text": self._prompt_text(index) + text,
            "logprobs": self._whole_logprobs(output, prompt_entries),
            "finish_reason": "length" if self._drops_answers else output["finish_reason"],
        }

    def _whole_logprobs(
        self, output: RequestOutput, prompt_entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any] | None:
        """Log-probabilities of the answer, after those of the prompt if it is echoed."""
        if self._body.logprobs is None:
            return None
        first_text = ""
        entries: Iterable[TokenLogprobs | None] = [] if self._drops_answers else output.get("logprobs", [])
        if self._body.echo:
            first_text = self._service.llm.text.decode(output["prompt_token_ids"][:1])
            entries = chain(prompt_entries, entries)
        return completion_logprobs(entries, self._body.logprobs, first_text=first_text)

    def _chunk_choices(self, update: RequestUpdate) -> list[str]:
        index, text, output = update.index, "" if self._drops_answers else update.text, update.output
        if index not in self._begun:
            self._begun.add(index)
            text = self._prompt_text(index) + text
        logprobs = "null"
        if self._body.logprobs is not None and update.logprobs:
            logprobs = self._chunk_logprobs(update)
        elif not text and output is None:
            return []
        reason = "null"
        if output is not None:
            reason = f'"{"length" if self._drops_answers else output["finish_reason"]}"'
        return [f'{{"index": {index}, "text": {json.dumps(text)}, "logprobs": {logprobs}, "finish_reason": {reason}}}']

    def _chunk_logprobs(self, update: RequestUpdate) -> str:
        assert self._body.logprobs is not None
        offset = self._offsets.get(update.index, 0)
        logprobs = completion_logprobs(update.logprobs, self._body.logprobs, offset=offset)
        self._offsets[update.index] = offset + sum(len(text) for text in logprobs["tokens"])
        return json.dumps(logprobs)

    def _prompt_text(self, index: int) -> str:
        return self._prompt_texts[index // self._num_answers] if self._prompt_texts else ""


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a body: text or token ids, one or several."""
    prompts = prompt_list(prompt) if isinstance(prompt, str | list) else []
    if not prompts or not all(isinstance(each, str | list) for each in prompts):
        raise ApiError("prompt must be a string, a list of strings, token ids, or a list of token ids", param="prompt")
    return prompts


def _encode(
    service: Service, prompts: Sequence[Prompt], add_special_tokens: bool, cache_salt: str | None
) -> list[TokenIds]:
    encode = service.llm.text.encode_prompt
    return [encode(salted(prompt, cache_salt), add_special_tokens=add_special_tokens) for prompt in prompts]


def _texts(service: Service, prompts: list[str | list[int]]) -> list[str]:
    """The texts of prompts that are echoed."""
    return [prompt if isinstance(prompt, str) else service.llm.text.decode(prompt) for prompt in prompts]
