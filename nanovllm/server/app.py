"""The HTTP application: all endpoints over one engine."""

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.server.admission import AdmissionQueue
from nanovllm.server.chat import add_chat
from nanovllm.server.completions import add_completions
from nanovllm.server.errors import add_error_handlers
from nanovllm.server.models import add_models, add_state, add_tokens
from nanovllm.server.schema import ANY_ERRORS
from nanovllm.server.service import Service
from nanovllm.server.settings import ServerSettings


def make_app(engine: AsyncLLM, settings: ServerSettings, queue: AdmissionQueue | None = None) -> FastAPI:
    """The application. It does not own the engine: close that when the server has ended.

    queue: checks and takes the requests instead of the engine.
    """
    telemetry: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}  # it records users' values
    app = FastAPI(
        title="nanovllm",
        version=__version__,
        docs_url=None,  # the pages of both load from other hosts
        redoc_url=None,
        telemetry=telemetry,
        responses=ANY_ERRORS,
    )
    service = Service(engine, settings, queue)
    app.state.service = service
    add_error_handlers(app)
    add_models(app, service)
    add_completions(app, service)
    add_chat(app, service)
    add_tokens(app, service)
    add_state(app, service)
    return app
