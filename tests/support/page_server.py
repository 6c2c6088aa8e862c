"""The page, served without an engine: canned answers, and a cache whose blocks a test sets."""

import asyncio
import json
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import JSONResponse, Response, StreamingResponse

from nanovllm.entrypoints.server.page import add_page, kv_router
from nanovllm.kvcache.block_pool import Block
from nanovllm.plan.kv_spec import BlockState

if TYPE_CHECKING:  # playwright is an extra
    from playwright.sync_api import Page

OpenPage = Callable[..., "Page"]  # see tests/browser/conftest.py
MODEL = "fake/model-1B"
NUM_PROMPT_TOKENS = 81  # whatever is asked, as far as `max_model_len` goes
PIECE_S = 0.02
PROGRESS = [{"total": 45_000, "cache": 0, "processed": 18_000, "time_ms": 16_000}]
MARKDOWN = """\
<think>First I *think*.</think>
# A heading

Some **bold**, *slanted* and `code`, a [link](https://example.org/a), and
[a bad one](javascript:alert(1)).

- one
  1. nested
- two

| name | tokens |
|---|--:|
| report | 1,234 |

> A quote.

```python
print("<b>hello</b>")  # a line that is long enough to have to be scrolled to its end on a phone's narrow screen
```"""


class FakeEngine:
    """The part of an engine that the page shows."""

    max_request_tokens = 10**6

    def __init__(self) -> None:
        self.states = bytes(64)
        self.device = SimpleNamespace(type="cuda")
        self.tokenizer = SimpleNamespace(chat_template="")
        self.blocks = [Block(block_id) for block_id in range(64)]
        self.scheduler = SimpleNamespace(kv=SimpleNamespace(pool=SimpleNamespace(blocks=self.blocks)))
        self.counters: dict[str, Any] = {
            "block_size": 256,
            "block_bytes": 28 * 2**20,
            "num_cpu_blocks": 64,
            "num_gpu_blocks": 8,
            "num_running": 0,
            "num_waiting": 0,
            "num_prefill_tokens": 0,
            "num_decode_tokens": 0,
            "num_loaded_bytes": 0,
            "num_cpu_tokens": 0,
            "link_byte_per_s": 55e9,
            "cpu_attention_byte_per_s": 48e9,
            "guess_acceptance": None,
            "tokens_per_pass": None,
        }

    def block_states(self) -> bytes:
        return self.states

    def stats(self) -> dict[str, Any]:
        return dict(self.counters)

    def hold(self, text: str, block_ids: list[int]) -> None:
        """Let these blocks hold the beginning of the text, a character being a token."""
        size = self.counters["block_size"]
        for i, block_id in enumerate(block_ids):
            block = self.blocks[block_id]
            block.token_ids = array("q", map(ord, text[i * size : (i + 1) * size]))
            block.prefix_ids = [i or -1, i + 1]  # -1: the prefix of no tokens

    def show(self, **counts: int) -> None:
        """Set the blocks: so many in each state, by the state's name; all others are free."""
        states = b"".join(bytes([BlockState[name.upper()]]) * count for name, count in counts.items())
        self.states = states + bytes(64 - len(states))


class FakeServer:
    """Answers by the last line of the question: see `_pieces` and `_refuse`. Remembers the bodies that it was sent."""

    def __init__(self, url: str = "") -> None:
        """`url`: where its `app` is served."""
        self.url = url
        self.engine = FakeEngine()
        self.api_key: str | None = None
        self.has_template = True
        self.has_progress = False
        self.reads_documents = False
        self.model, self.max_model_len = MODEL, 10**6
        self.bodies: list[dict[str, Any]] = []
        self.num_cached_tokens = 3072
        self.num_abandoned = 0  # answers whose client has gone
        self.may_go_on = threading.Event()  # while it is not set, answers stop after ten words
        self.may_go_on.set()

    def app(self) -> FastAPI:
        app, router = FastAPI(openapi_url=None), APIRouter(dependencies=[Depends(self._check_key)])
        router.get("/openapi.json")(self._openapi)
        router.get("/v1/models")(self._models)
        router.post("/tokenize")(self._tokenize)
        router.post("/v1/documents/text")(self._read_document)
        router.post("/v1/chat/completions")(self._chat)
        router.post("/v1/completions")(self._complete)
        router.include_router(kv_router(self.engine))
        app.include_router(router)
        add_page(app)
        app.exception_handler(HTTPException)(_openai_error)
        return app

    def _check_key(self, request: Request) -> None:
        if self.api_key is not None and request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise HTTPException(401, "the API key is missing or wrong")

    async def _models(self) -> dict[str, Any]:
        card = {"id": self.model, "object": "model", "max_request_tokens": self.max_model_len}
        return {"object": "list", "data": [card]}

    async def _openapi(self) -> dict[str, Any]:
        fields = {"messages": {}} | ({"return_progress": {}} if self.has_progress else {})
        paths = {"/v1/documents/text": {}} if self.reads_documents else {}
        return {"paths": paths, "components": {"schemas": {"ChatRequest": {"properties": fields}}}}

    async def _read_document(self, request: Request, name: str) -> dict[str, Any]:
        if not name.endswith((".pdf", ".html")):
            raise HTTPException(400, f"{name} is a picture" if name.endswith(".png") else "this format is not known")
        return {"name": name, "text": f"{len(await request.body())} bytes of {name}"}

    async def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """A character is a token. Refuses what is much longer than the context."""
        texts = [message["content"] for message in body.get("messages", ())]
        tokens = [ord(character) for character in body.get("prompt", "\n".join(texts))]
        if len(tokens) > 16 * self.max_model_len:
            raise HTTPException(400, f"prompt has {len(tokens)} characters; shorten it")
        return {"count": len(tokens), "tokens": tokens}

    async def _chat(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        if not self.has_template:
            raise HTTPException(400, "chat needs a tokenizer with a chat template, but this model has none")
        question = body["messages"][-1]["content"].rpartition("\n")[2]
        return self._answer(body, question, lambda text: {"delta": {"content": text}})

    async def _complete(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        prompt = body["prompt"] if isinstance(body["prompt"], str) else "".join(map(chr, body["prompt"]))
        return self._answer(body, prompt.rpartition("\n")[2], lambda text: {"text": text})

    def _answer(self, body: dict[str, Any], question: str, choice_of: Any) -> Response:
        if body.get("model", self.model) != self.model:
            raise HTTPException(404, f"the model {body['model']!r} does not exist")
        if NUM_PROMPT_TOKENS + (body.get("max_tokens") or 1) > self.max_model_len:
            asked = f"prompt of {NUM_PROMPT_TOKENS} tokens + max_tokens={body.get('max_tokens')}"
            raise HTTPException(400, f"{asked} exceeds max_model_len={self.max_model_len}; shorten the prompt")
        _refuse(question)
        progress = PROGRESS if body.get("return_progress") else []
        return StreamingResponse(self._events(question, choice_of, progress), media_type="text/event-stream")

    async def _events(self, question: str, choice_of: Any, progress: list[dict[str, int]]) -> AsyncIterator[str]:
        num_pieces = 0
        try:
            for each in progress:
                yield _event({"choices": [], "prompt_progress": each})
                while not self.may_go_on.is_set():
                    await asyncio.sleep(PIECE_S)
            if question == "think":
                for thought in ("Let me *see*", ", it is easy."):
                    yield _event({"choices": [{"delta": {"reasoning_content": thought}, "finish_reason": None}]})
            async for text in _pieces(question):
                while num_pieces == 10 and not self.may_go_on.is_set():
                    await asyncio.sleep(PIECE_S)
                num_pieces += 1
                yield _event({"choices": [choice_of(text) | {"finish_reason": None}]})
        except asyncio.CancelledError:
            self.num_abandoned += 1
            raise
        if question == "break off":
            return
        if question == "fail":
            yield _event({"error": {"message": "the request failed: NaN in its logits", "type": "server_error"}})
            return
        yield _event({"choices": [choice_of("") | {"finish_reason": "length" if question == "be long" else "stop"}]})
        usage = {
            "prompt_tokens": 3214,
            "completion_tokens": num_pieces,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _refuse(question: str) -> None:
    if question == "refuse":
        raise HTTPException(400, "prompt of 5,000 tokens exceeds max_model_len=4096; shorten the prompt")
    if question == "be too long":
        message = "prompt is too long: 140225 characters > 131072 maximum (max_prompt_chars)"
        raise HTTPException(400, {"message": message, "code": "context_length_exceeded"})
    if question == "be busy":
        raise HTTPException(429, "100 requests are waiting", {"Retry-After": "7"})
    if question == "crash":
        raise HTTPException(500, "the engine cannot be used: a step failed")


async def _pieces(question: str) -> AsyncIterator[str]:
    """The answer, word by word; without an end if the question is "go on"."""
    said = MARKDOWN if question == "show markdown" else f"You said: {question} <b>so</b> & _so_."
    words = ["on "] * 10**6 if question == "go on" else said.split(" ")
    for i, word in enumerate(words):
        yield word if i == 0 else f" {word}"
        await asyncio.sleep(PIECE_S)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _openai_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return await http_exception_handler(request, error)  # type: ignore[arg-type]
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}
    if isinstance(error.detail, dict):
        body |= error.detail
    return JSONResponse({"error": body}, error.status_code, error.headers)


class Host:
    """Hands each request to `app`, which a test may change."""

    def __init__(self) -> None:
        self.app: Any = FastAPI()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve `app` in a thread, on a free port of this machine. Yields its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
