"""Site: the application and everything around it, as one ASGI application."""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.admission import AdmissionQueue
from nanovllm.server.api_keys import ApiKeys
from nanovllm.server.app import make_app
from nanovllm.server.gate import ASGIApp, Gate
from nanovllm.server.kv_view import kv_router
from nanovllm.server.limits import RequestLimits
from nanovllm.server.metrics import Metrics, add_metrics
from nanovllm.server.options import ServerOptions
from nanovllm.server.page import page_paths, page_router
from nanovllm.server.settings import ServerSettings


@dataclass(frozen=True)
class Site:
    """The application of one engine behind its gate. `app` is the outermost one; answers carry `model_name`.

    Satisfies lifecycle.Served. The engine belongs to the caller.
    """

    engine: AsyncLLM
    app: ASGIApp
    gate: Gate
    queue: AdmissionQueue
    metrics: Metrics
    model_name: str

    @property
    def num_open(self) -> int:
        return self.queue.num_open

    async def warm_up(self) -> None:
        await warm_up(self.engine)

    async def wait_for_failure(self) -> EngineError:
        return await self.engine.wait_for_failure()

    async def abort(self) -> None:
        await self.engine.aclose()


def build_site(engine: AsyncLLM, options: ServerOptions, keys: ApiKeys, model_name: str) -> Site:
    """Everything that answers requests. `model_name` is the name of the model if the options give none."""
    metrics = Metrics(served_names(options, model_name)[0])
    app, queue = build_app(engine, options, model_name, metrics)
    add_metrics(app, metrics)
    gate = build_gate(app, options, keys, metrics.refused)
    return Site(engine, with_origins(gate, options), gate, queue, metrics, metrics.model_name)


def build_app(
    engine: AsyncLLM, options: ServerOptions, model_name: str, metrics: Metrics
) -> tuple[FastAPI, AdmissionQueue]:
    """The application without what stands before it, and the queue of the requests that it has admitted."""
    queue = AdmissionQueue(engine, options, RequestLimits(options, engine.llm.max_model_len), metrics)
    metrics.watch(engine.llm.stats, lambda: queue.num_waiting)
    settings = ServerSettings(model_names=served_names(options, model_name), max_answers=options.max_queue)
    app = make_app(engine, settings, queue)
    app.include_router(kv_router(engine.llm))
    app.include_router(page_router())
    return app, queue


def build_gate(app: ASGIApp, options: ServerOptions, keys: ApiKeys, on_refusal: Callable[[str], None]) -> Gate:
    return Gate(app, options, keys, on_refusal, page_paths())


def with_origins(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """`app`, which pages of the allowed origins may ask."""
    if not options.allowed_origins:
        return app
    return CORSMiddleware(
        app, allow_origins=options.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
    )


def served_names(options: ServerOptions, model_name: str) -> tuple[str, ...]:
    return options.served_model_name or (model_name,)


async def warm_up(engine: AsyncLLM) -> None:
    """Run one short request, so that the first client does not wait for what is made on first use."""
    num_tokens = min(2, max(1, engine.llm.max_request_tokens - 1))  # two: a prefill and a decode
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async for _ in engine.generate([[0]], params):
        pass
