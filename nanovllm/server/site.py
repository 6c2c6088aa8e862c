"""Site: the application and everything around it, as one ASGI application."""

from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware

from nanovllm.async_llm import AsyncLLM
from nanovllm.server.admission import AdmissionQueue
from nanovllm.server.api_keys import ApiKeys
from nanovllm.server.app import make_app
from nanovllm.server.gate import ASGIApp, Gate
from nanovllm.server.limits import RequestLimits
from nanovllm.server.metrics import Metrics, add_metrics
from nanovllm.server.options import ServerOptions


@dataclass(frozen=True)
class Site:
    """`app` is the outermost application. `model_name` is the name that answers carry."""

    app: ASGIApp
    gate: Gate
    queue: AdmissionQueue
    metrics: Metrics
    model_name: str
