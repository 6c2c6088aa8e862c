"""Service: what all endpoints share. It holds the engine and the settings, and checks what concerns every request."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from nanovllm.async_llm import AsyncLLM
from nanovllm.llm import LLM
from nanovllm.request_stream import RequestStream
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.admission import AdmissionQueue
from nanovllm.server.errors import ApiError, model_not_found
from nanovllm.server.gate import CACHE_SALT
from nanovllm.server.protocol import SamplingFields
from nanovllm.server.settings import ServerSettings
from nanovllm.text.request_check import Prompt

Result = TypeVar("Result")


class Service:
    def __init__(self, engine: AsyncLLM, settings: ServerSettings, queue: AdmissionQueue | None = None) -> None:
        self.engine, self.settings = engine, settings
        self._queue = queue
        self.started_s = int(time.time())

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.model_names[0]

    def check_body(self, body: BaseModel) -> None:
        """Raise ApiError for a model that is not served, and for a body that asks for too much.

        If the body names no model, it means the one that is served.
        """
        fields: Mapping[str, Any] = vars(body)
        name = fields["model"]
        if name is not None and name not in self.settings.model_names:
            raise model_not_found(name)
        if self._queue is not None:
            self._queue.check(fields)

    def cache_salt(self, body: SamplingFields, request: Request) -> str | None:
        """Requests share KV only if their salts are equal: that of the API key, if there is one, and the client's."""
        key_salt = self.key_salt(request)
        if key_salt is None or body.cache_salt is None:
            return key_salt or body.cache_salt
        return f"{key_salt} {body.cache_salt}"

    def key_salt(self, request: Request) -> str | None:
        """The salt of the request's API key, if keys have salts."""
        salt: str | None = getattr(request.state, CACHE_SALT, None)
        return salt

    async def prepare(self, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Call a function that takes long if the prompt is long, before the request is submitted.

        Raises Refusal if too many requests wait: what they have sent is in memory.
        """
        with self._queue.preparing() if self._queue is not None else nullcontext():
            return await in_thread(function, *args, **options)

    def check_chars(self, num_chars: int, param: str) -> None:
        """Raise ApiError for a text that is too long to be tokenized."""
        if self._queue is not None:
            self._queue.check_chars(num_chars, param)

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, with_tokens: bool, cache_salt: str | None = None
    ) -> RequestStream:
        """Queue the prompts of a request. Every request for an answer passes through here.

        Raises ApiError or RequestError for requests that are refused, EngineError if the engine has failed.
        """
        num_answers, limit = len(prompts) * params.n, self.settings.max_answers
        if num_answers > limit:
            prompts_text = "" if len(prompts) == 1 else f" for each of {len(prompts)} prompts"
            raise ApiError(f"n={params.n}{prompts_text} exceeds the limit of {limit} answers a request", param="n")
        prompts = [salted(prompt, cache_salt) for prompt in prompts]
        return await (self._queue or self.engine).submit(prompts, params, with_tokens=with_tokens)


def salted(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """A text or token ids as a prompt with this salt."""
    if cache_salt is None:
        return prompt
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt, "cache_salt": cache_salt}


async def in_thread(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Call a function that takes too long for the event loop."""
    return await asyncio.to_thread(function, *args, **options)
