"""The HTTP application of one engine: its endpoints, and the Site, which puts the gate in front of the application.

The endpoints turn a request into prompts and SamplingParams. answers.py makes the response.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.telemetry import TelemetryConfig
from starlette.responses import Response

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.entrypoints.documents import text_by_program
from nanovllm.entrypoints.server.admission import Service
from nanovllm.entrypoints.server.answers import CompletionAnswer
from nanovllm.entrypoints.server.chat_answers import (
    ChatAnswer,
    ChatForm,
    blame_tool,
    chat_form,
    find_call_format,
)
from nanovllm.entrypoints.server.conversation import Conversation, render_messages
from nanovllm.entrypoints.server.errors import (
    ANSWERS,
    ANY_ERRORS,
    BODY_ERRORS,
    CONTEXT_EXCEEDED,
    ApiError,
    add_error_handlers,
    api_error,
    json_response,
    model_not_found,
)
from nanovllm.entrypoints.server.gate import ApiKeys, Gate
from nanovllm.entrypoints.server.messages import CountTokensRequest, MessagesAnswer, MessagesRequest
from nanovllm.entrypoints.server.metrics import CONTENT_TYPE, log_throughput
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.entrypoints.server.page import add_page, kv_router
from nanovllm.entrypoints.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Tool,
    call_constraint,
    chat_params,
    completion_params,
    functions_of,
    has_form,
)
from nanovllm.entrypoints.server.responses import ResponsesAnswer, ResponsesRequest
from nanovllm.errors import EngineError, RequestError
from nanovllm.plan.sequence import TokenIds
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.frontend import Prompt, check_conversations, prompt_list, render_chat
from nanovllm.text.harmony import HARMONY_MARK

MAX_READERS = 2  # processes that read documents at the same time
MAX_NAME_CHARS = 255  # of a document's name in messages
FILE_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_HARMONY_EFFORTS: dict[str | None, str] = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_RENDERED_NAMES = ("messages", "conversations")  # the tokenizer itself gives these names to the template


def make_app(engine: AsyncLLM, options: ServerOptions, replica: str | None = None) -> FastAPI:
    """Make the application: all endpoints over one engine, without the gate, which checks keys, bodies and connections.

    The application does not close the engine: the caller closes the engine after the server has ended.
    `app.state.service` is the application's Service.
    replica: see Metrics. Raises ConfigError if `options` have no served_model_name.
    """
    telemetry: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}  # telemetry records users' values
    app = FastAPI(
        title="nanovllm",
        version=__version__,
        docs_url=None,  # both documentation pages load scripts from other hosts
        redoc_url=None,
        telemetry=telemetry,
        responses=ANY_ERRORS,
    )
    service = app.state.service = Service(engine, options, replica)
    add_error_handlers(app)
    add_answers(app, service)
    add_small_endpoints(app, service)
    app.include_router(kv_router(engine.llm))
    add_page(app)
    return app


class Site:
    """The application of one engine with the gate in front. Satisfies lifecycle.Served. The caller owns the engine."""

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
        self._throughput = asyncio.ensure_future(log_throughput(self._engine.llm.stats))

    async def wait_for_failure(self) -> EngineError:
        return await self._engine.wait_for_failure()

    async def abort(self) -> None:
        await self._engine.aclose()


async def warm_up(engine: AsyncLLM) -> None:
    """Run one short request, so that the first client does not wait for lazy initialization."""
    num_tokens = min(2, max(1, engine.llm.max_request_tokens - 1))  # 2 tokens need a prefill and a decode step
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async for _ in engine.generate([[0]], params):
        pass


# -- answers -----------------------------------------------------------------------------------------------------------


def add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=ANSWERS)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        service.check_body(body)
        prompts = _prompts(body.prompt)
        params = completion_params(body, service.llm.sampling_defaults)
        echoed = await service.prepare(_texts, service, prompts) if body.echo else []
        cache_salt = service.cache_salt(body, request)
        encoded: Sequence[Prompt] = prompts
        if any(isinstance(prompt, str) for prompt in prompts):
            service.check_num_answers(len(prompts) * params.n)
            encoded = await service.prepare(_encode, service, prompts, body.add_special_tokens is not False, cache_salt)
        answer = CompletionAnswer(service, body, echoed)
        return await answer.respond(encoded, params, cache_salt, request)

    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return await _answer_chat(service, body, request, ChatAnswer)

    @app.post("/v1/responses", responses=ANSWERS)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        chat, make_answer = _as_chat(service, body), partial(ResponsesAnswer, asked=body)
        try:
            return await _answer_chat(service, chat, request, make_answer)
        except ApiError as error:
            if error.code != CONTEXT_EXCEEDED or not body.stream:
                raise
            error.record(request.scope)
            events = make_answer(service, chat, ChatForm()).error_events(error)  # where OpenAI's clients look for it
            return Response(events, media_type="text/event-stream")

    @app.post("/v1/messages", responses=ANSWERS)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        return await _answer_chat(service, _as_chat(service, body), request, MessagesAnswer)

    @app.post("/v1/messages/count_tokens", responses=BODY_ERRORS)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        chat = _as_chat(service, body)
        service.check_body(chat)
        if chat.offered_tools:
            find_call_format(service)
        token_ids = await service.prepare(encode_messages, service, chat, chat.offered_tools, service.key_salt(request))
        return json_response({"input_tokens": len(token_ids)})


def _as_chat(service: Service, body: ResponsesRequest | CountTokensRequest) -> ChatRequest:
    """Return the chat that the body asks for. The lengths of the body's lists are checked before the conversion."""
    service.check_body(body)
    return body.as_chat()


async def _answer_chat(
    service: Service,
    body: ChatRequest,
    request: Request,
    make_answer: Callable[[Service, ChatRequest, ChatForm], ChatAnswer],
) -> Response:
    service.check_body(body)
    tools = body.offered_tools
    call_format = find_call_format(service) if tools else None
    constraint = None if call_format is None else call_constraint(body, call_format)
    cache_salt = service.cache_salt(body, request)
    token_ids = await service.prepare(encode_messages, service, body, tools, cache_salt)
    form = chat_form(service, call_format, token_ids)
    params = chat_params(body, service.llm.sampling_defaults, constraint, form.tags, form.shows_special_tokens)
    answer = make_answer(service, body, form._replace(is_alternative=has_form(body)))
    try:
        return await answer.respond([token_ids], params, cache_salt, request)
    except RequestError as error:
        if constraint is not None and "structured_outputs" in str(error):
            await service.prepare(blame_tool, service, params, constraint, body)
        raise


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of a body: text or token ids, one or several."""
    prompts = prompt_list(prompt) if isinstance(prompt, str | list) else []
    if not prompts or not all(isinstance(each, str | list) for each in prompts):
        raise ApiError("prompt must be a string, a list of strings, token ids, or a list of token ids", param="prompt")
    return prompts


def _texts(service: Service, prompts: list[str | list[int]]) -> list[str]:
    """Return the texts of prompts for an echo."""
    return [prompt if isinstance(prompt, str) else service.llm.text.decode(prompt) for prompt in prompts]


def _encode(
    service: Service, prompts: Sequence[str | list[int]], add_special_tokens: bool, cache_salt: str | None
) -> list[TokenIds]:
    encode = service.llm.text.encode_prompt
    return [encode(prompt, add_special_tokens=add_special_tokens, cache_salt=cache_salt) for prompt in prompts]


def encode_messages(
    service: Service, body: ChatRequest | TokenizeRequest, tools: Sequence[Tool], cache_salt: str | None
) -> TokenIds:
    """Return the token ids of the body's messages.

    Raises ApiError or RequestError for messages that the template refuses.
    """
    llm = service.llm
    llm.check_chat_template()
    options = dict(body.chat_template_kwargs or {})
    # These arguments are the tokenizer's and not the template's; above all, a client must not choose the template
    reserved = {*inspect.signature(llm.tokenizer.apply_chat_template).parameters, *_RENDERED_NAMES}
    if taken := sorted(reserved.intersection(options)):
        raise ApiError(f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs")
    template = llm.text.chat_template()
    is_harmony = HARMONY_MARK in template
    effort = body.reasoning_effort if isinstance(body, ChatRequest) else None
    if effort is not None:  # a hint; templates without reasoning ignore this variable
        if "reasoning_effort" in template:
            options.setdefault("reasoning_effort", _HARMONY_EFFORTS.get(effort, effort) if is_harmony else effort)
        elif "enable_thinking" in template:
            options.setdefault("enable_thinking", effort not in ("none", "minimal"))
    options["add_generation_prompt"] = body.add_generation_prompt
    if tools:
        options["tools"] = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
        if is_harmony:  # the template of gpt-oss joins each description to a text
            for tool in options["tools"]:
                tool["function"].setdefault("description", "")

    def render(conversation: Conversation) -> str:
        (checked,) = check_conversations(conversation)
        return render_chat(llm.tokenizer, checked, options)

    text = render_messages(body.messages or (), template, render)
    service.check_chars(len(text), "messages")  # the text includes tools and tool calls
    return llm.text.encode_prompt(text, add_special_tokens=bool(body.add_special_tokens), cache_salt=cache_salt)


# -- the small endpoints -----------------------------------------------------------------------------------------------


def add_small_endpoints(app: FastAPI, service: Service) -> None:
    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [_card(service, name) for name in service.model_names]})

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}", responses={404: BODY_ERRORS[404]})
    async def retrieve_model(name: str) -> Response:
        if name not in service.model_names:
            raise model_not_found(name, service.model_names)
        return json_response(_card(service, name))

    @app.post("/tokenize", responses=BODY_ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_body(body)
        return json_response(await service.prepare(_tokenize, service, body, service.key_salt(request)))

    readers = asyncio.Semaphore(MAX_READERS)

    @app.post("/v1/documents/text", responses=BODY_ERRORS, openapi_extra=FILE_BODY)
    async def read_document(name: str, request: Request) -> Response:
        """Return the text of a file: plain text in any encoding, PDF, DOCX or HTML."""
        content = await request.body()
        async with readers:
            most = service.options.max_body_bytes
            text = await service.prepare(text_by_program, name[:MAX_NAME_CHARS], content, most)
        return json_response({"name": name, "text": text})

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

    @app.head("/version", include_in_schema=False)
    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def render_metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "nanovllm",
        "max_model_len": service.llm.max_model_len,
        "max_request_tokens": service.llm.max_request_tokens,  # fewer than max_model_len if the KV cache is smaller
    }


def _tokenize(service: Service, body: TokenizeRequest, cache_salt: str | None) -> dict[str, Any]:
    llm = service.llm
    if body.messages is not None:
        tools = functions_of(body.tools)
        if tools:
            find_call_format(service)
        token_ids = encode_messages(service, body, tools, cache_salt)
    else:
        adds_special = body.add_special_tokens is not False
        token_ids = llm.text.encode_prompt(body.prompt or "", add_special_tokens=adds_special, cache_salt=cache_salt)
    tokens = token_ids.tolist()
    strings = llm.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens, "token_strs": strings}
