"""Site: the application and everything around it, as one ASGI application."""

from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware

from nanovllm.async_llm import AsyncLLM
from nanovllm.server.admission import AdmissionQueue
from nanovllm.server.api_keys import ApiKeys
from nanovllm.server.app import make_app
from nanovllm.server.gate import OPEN_PATHS, ASGIApp, Gate
from nanovllm.server.kv_view import kv_router
from nanovllm.server.limits import RequestLimits
from nanovllm.server.metrics import Metrics, add_metrics
from nanovllm.server.options import ServerOptions
from nanovllm.server.page import page_paths, page_router
from nanovllm.server.settings import ServerSettings


@dataclass(frozen=True)
class Site:
    """`app` is the outermost application. `model_name` is the name that answers carry."""

    app: ASGIApp
    gate: Gate
    queue: AdmissionQueue
    metrics: Metrics
    model_name: str


def build_site(engine: AsyncLLM, options: ServerOptions, keys: ApiKeys, model_name: str) -> Site:
    """Everything that answers requests. `model_name` is the name of the model if the options give none."""
    names = options.served_model_name or (model_name,)
    metrics = Metrics(names[0])
    queue = AdmissionQueue(engine, options, RequestLimits(options, engine.llm.max_model_len), metrics)
    metrics.watch(engine.llm.stats, lambda: queue.num_waiting)
    settings = ServerSettings(model_names=names, max_answers=options.max_queue)
    app = make_app(engine, settings, queue)
    add_metrics(app, metrics)
    app.include_router(kv_router(engine.llm))
    app.include_router(page_router())
    gate = Gate(
        app,
        keys=keys,
        max_body_bytes=options.max_body_bytes,
        max_receive_s=options.max_receive_s,
        cache_salt_per_key=options.cache_salt_per_key,
        on_refusal=metrics.refused,
        open_paths=(*OPEN_PATHS, *page_paths()),
    )
    outermost: ASGIApp = gate
    if options.allowed_origins:
        outermost = CORSMiddleware(
            gate, allow_origins=options.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return Site(outermost, gate, queue, metrics, names[0])
