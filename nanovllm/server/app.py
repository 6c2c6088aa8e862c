"""The HTTP application of one engine, and the site: the application behind its gate.

The two large endpoints are in completions.py and chat.py. The small ones are here: the models, tokens and text, and the
state of the server.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.telemetry import TelemetryConfig
from starlette.responses import Response

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.admission import Service, salted
from nanovllm.server.chat import add_chat, check_tools, encode_messages
from nanovllm.server.completions import add_completions
from nanovllm.server.errors import (
    ANY_ERRORS,
    BODY_ERRORS,
    add_error_handlers,
    api_error,
    json_response,
    model_not_found,
)
from nanovllm.server.gate import ApiKeys, Gate
from nanovllm.server.metrics import add_metrics
from nanovllm.server.options import ServerOptions
from nanovllm.server.page import kv_router, page_router
from nanovllm.server.protocol import DetokenizeRequest, TokenizeRequest


def make_app(engine: AsyncLLM, options: ServerOptions, replica: str | None = None) -> FastAPI:
    """All endpoints over one engine, without the gate: keys and limits on bodies and connections are not checked.

    The application does not own the engine: close that when the server has ended. `app.state.service` is its Service.
    replica: see Metrics. Raises ConfigError if `options` have no served_model_name.
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
    service = app.state.service = Service(engine, options, replica)
    add_error_handlers(app)
    add_completions(app, service)
    add_chat(app, service)
    add_small_endpoints(app, service)
    add_metrics(app, service.metrics)
    app.include_router(kv_router(engine.llm))
    app.include_router(page_router())
    return app


class Site:
    """The application of one engine behind its gate. Satisfies lifecycle.Served. The engine belongs to the caller."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions, keys: ApiKeys) -> None:
        app = make_app(engine, options)
        self.service: Service = app.state.service
        self.gate = Gate(app, options, keys, self.service.metrics.refused)
        self._engine = engine

    @property
    def num_open(self) -> int:
        return self.service.num_open

    async def warm_up(self) -> None:
        await warm_up(self._engine)

    async def wait_for_failure(self) -> EngineError:
        return await self._engine.wait_for_failure()

    async def abort(self) -> None:
        await self._engine.aclose()


async def warm_up(engine: AsyncLLM) -> None:
    """Run one short request, so that the first client does not wait for what is made on first use."""
    num_tokens = min(2, max(1, engine.llm.max_request_tokens - 1))  # two: a prefill and a decode
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async for _ in engine.generate([[0]], params):
        pass


# -- the small endpoints -----------------------------------------------------------------------------------------------


def add_small_endpoints(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [_card(service, name) for name in service.model_names]})

    @app.get("/v1/models/{name:path}", responses={404: BODY_ERRORS[404]})
    async def retrieve_model(name: str) -> Response:
        if name not in service.model_names:
            raise model_not_found(name)
        return json_response(_card(service, name))

    @app.post("/tokenize", responses=BODY_ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_body(body)
        return json_response(await service.prepare(_tokenize, service, body, service.key_salt(request)))

    @app.post("/detokenize", responses=BODY_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_body(body)
        return json_response({"prompt": await service.prepare(service.llm.text.decode, body.tokens)})

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Status 200 if requests are answered, 503 with the reason if the engine has failed."""
        failure = service.engine.failure
        return json_response({"status": "ready"}) if failure is None else api_error(failure).response()

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "nanovllm",
        "max_model_len": service.llm.max_model_len,
        "max_request_tokens": service.llm.max_request_tokens,  # fewer if the KV cache is smaller
    }


def _tokenize(service: Service, body: TokenizeRequest, cache_salt: str | None) -> dict[str, Any]:
    llm = service.llm
    if body.messages is not None:
        if body.tools:
            check_tools(service)
        token_ids = encode_messages(service, body, body.tools or [], cache_salt)
    else:
        add_special_tokens = body.add_special_tokens is not False
        prompt = salted(body.prompt or "", cache_salt)
        token_ids = llm.text.encode_prompt(prompt, add_special_tokens=add_special_tokens)
    tokens = token_ids.tolist()
    strings = llm.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": strings}
