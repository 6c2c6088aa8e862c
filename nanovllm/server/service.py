"""Service: what all endpoints share. It holds the engine and the settings, and checks what concerns every request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nanovllm.async_llm import AsyncLLM
from nanovllm.llm import LLM
from nanovllm.request_stream import RequestStream
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import ApiError, model_not_found
from nanovllm.server.settings import ServerSettings
from nanovllm.text.request_check import Prompt

Result = TypeVar("Result")


class Service:
    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.started_s = int(time.time())

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served. None is the one that is."""
        if name is not None and name not in self.settings.model_names:
            raise model_not_found(name)

    async def submit(self, prompts: Sequence[Prompt], params: SamplingParams, with_tokens: bool) -> RequestStream:
        """Queue the prompts of a request. Every request for an answer passes through here.

        Raises ApiError or RequestError for requests that are refused, EngineError if the engine has failed.
        """
        num_answers, limit = len(prompts) * params.n, self.settings.max_answers
        if num_answers > limit:
            prompts_text = "" if len(prompts) == 1 else f" for each of {len(prompts)} prompts"
            raise ApiError(f"n={params.n}{prompts_text} exceeds the limit of {limit} answers a request", param="n")
        return await self.engine.submit(prompts, params, with_tokens=with_tokens)


async def in_thread(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Call a function that takes too long for the event loop if the prompt is long."""
    return await asyncio.to_thread(function, *args, **options)
