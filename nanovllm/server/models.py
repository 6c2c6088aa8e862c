"""The small endpoints: the models, tokens and text, and the state of the server."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from nanovllm import __version__
from nanovllm.server.chat import check_tools
from nanovllm.server.chat_prompt import encode_messages
from nanovllm.server.errors import api_error, json_response, model_not_found
from nanovllm.server.protocol import DetokenizeRequest, TokenizeRequest
from nanovllm.server.schema import BODY_ERRORS
from nanovllm.server.service import Service, salted


def add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(
            {"object": "list", "data": [_card(service, name) for name in service.settings.model_names]}
        )

    @app.get("/v1/models/{name:path}", responses={404: BODY_ERRORS[404]})
    async def retrieve_model(name: str) -> Response:
        if name not in service.settings.model_names:
            raise model_not_found(name)
        return json_response(_card(service, name))


def add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=BODY_ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_body(body)
        return json_response(await service.prepare(_tokenize, service, body, service.key_salt(request)))

    @app.post("/detokenize", responses=BODY_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.check_body(body)
        return json_response({"prompt": await service.prepare(service.llm.text.decode, body.tokens)})


def add_state(app: FastAPI, service: Service) -> None:
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
        token_ids = encode_messages(
            service,
            body.messages,
            body.tools or [],
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=bool(body.add_special_tokens),
            cache_salt=cache_salt,
        )
    else:
        add_special_tokens = body.add_special_tokens is not False
        prompt = salted(body.prompt or "", cache_salt)
        token_ids = llm.text.encode_prompt(prompt, add_special_tokens=add_special_tokens)
    tokens = token_ids.tolist()
    strings = llm.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": strings}
