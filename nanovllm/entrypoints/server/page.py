"""The page at /: documents, a chat about the documents, and a live view of the KV cache, from /kvcache. The files of
the page are in page/.

The page has no build step. The Content-Security-Policy ensures that the page loads nothing from other hosts. The page's
files must be served without an API key, because a browser cannot send a key when it opens a page. The scripts send the
key that the user types with their requests to the API and to /kvcache.

A snapshot of the cache costs about a millisecond for 8,192 blocks, and is made only when a page asks. All viewers share
one snapshot for MIN_INTERVAL_S. The event loop's thread makes the snapshot while the engine's thread runs: block_states
and stats only read, and neither waits for a step.
"""

import base64
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.staticfiles import StaticFiles

from nanovllm.entrypoints.haystack import build_example
from nanovllm.llm import LLM
from nanovllm.models.retrieval_model import CHAT_TEMPLATE
from nanovllm.plan.kv_spec import BlockState

DIRECTORY = Path(__file__).parent / "page"
FILES_PATH = "/page"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",  # no text of a model can become HTML
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks each time whether the file has changed (ETag)
}

ROOT_ID = ~0  # the id of the empty prefix, for requests without a cache salt
MIN_INTERVAL_S = 0.1  # at most ten snapshots a second
RATE_WINDOW_S = 2.0  # a rate is the mean over about this time; a step of a long prompt can take a second
MAX_WINDOW_S = 10.0  # after a longer pause no rate is shown


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Serve index.html at / and the other files below FILES_PATH. The files contain nothing secret."""
    files = _PageFiles(directory=DIRECTORY)
    app.mount(FILES_PATH, files)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)


# -- /kvcache ----------------------------------------------------------------------------------------------------------


class KVView:
    """The engine's cache as the page shows it."""

    def __init__(self, engine: LLM, now_s: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._now_s = engine, now_s
        self._name = secrets.token_hex(4)  # tells replicas apart
        self._history: deque[tuple[float, dict[str, float]]] = deque()  # times and sums, oldest first
        self._last: tuple[float, dict[str, Any]] | None = None  # the last snapshot, after the time of its making

    def snapshot(self) -> dict[str, Any]:
        """Return a snapshot of the cache, at most MIN_INTERVAL_S old. Raises EngineError if the engine has failed."""
        now_s = self._now_s()
        if self._last is None or now_s - self._last[0] >= MIN_INTERVAL_S:
            self._last = now_s, self._make(now_s)
        return self._last[1]

    def _make(self, now_s: float) -> dict[str, Any]:
        states, stats = self._engine.block_states(), self._engine.stats()
        return {
            "engine": self._name,
            "has_gpu": self._engine.device.type == "cuda",
            "num_blocks": len(states),
            "block_size": stats["block_size"],
            "num_slots": stats["num_gpu_blocks"] if "num_cpu_blocks" in stats else None,  # None without offload
            "state_names": [state.name.lower() for state in BlockState],
            "states": base64.b64encode(states).decode(),  # one byte for each block: an index into state_names
            "num_running": stats["num_running"],
            "num_waiting": stats["num_waiting"],
            "rates": self._rates(now_s, stats),
            "limits": {
                "link_byte_per_s": stats.get("link_byte_per_s"),
                "cpu_byte_per_s": stats.get("cpu_attention_byte_per_s"),
            },
            "guess_acceptance": stats.get("guess_acceptance"),
            "tokens_per_pass": stats.get("tokens_per_pass"),
            "drafters": stats.get("drafters", {}),
        }

    def locate(self, token_ids: list[int]) -> dict[str, Any]:
        """Return the blocks that hold the beginning of these tokens for later prompts, in order.

        For display only: the engine may be about to overwrite a block. Blocks of another cache salt are not found, nor
        are blocks of prompts whose keys depend on the length of the prompt.
        """
        wanted = array("q", token_ids)
        by_parent: dict[int, list[Any]] = {}  # blocks by the prefix before them
        for block in self._engine.scheduler.kv.pool.blocks:
            if prefix_ids := tuple(block.prefix_ids):  # a copy, because the engine's thread changes the original
                by_parent.setdefault(prefix_ids[0], []).append(block)
        block_ids: list[int] = []
        parent_id, start = ROOT_ID, 0
        while True:
            for block in by_parent.get(parent_id, ()):
                held, prefix_ids = block.token_ids[:], tuple(block.prefix_ids)
                if held and held == wanted[start : start + len(held)]:
                    break
            else:
                return {"engine": self._name, "block_ids": block_ids}
            block_ids.append(block.block_id)
            parent_id, start = prefix_ids[-1], start + len(held)

    def _rates(self, now_s: float, stats: dict[str, Any]) -> dict[str, float | None]:
        """Return the mean rates over RATE_WINDOW_S, or since the oldest snapshot if all snapshots are more recent."""
        sums = {  # since the engine's start
            "decode_token_per_s": stats["num_decode_tokens"],
            "prefill_token_per_s": stats["num_prefill_tokens"],
            "link_byte_per_s": stats.get("num_loaded_bytes", 0),
            "cpu_byte_per_s": stats.get("num_cpu_tokens", 0) * stats["block_bytes"] / stats["block_size"],
        }
        history = self._history
        while history and now_s - history[0][0] > MAX_WINDOW_S:
            history.popleft()
        while len(history) > 1 and now_s - history[1][0] >= RATE_WINDOW_S:
            history.popleft()
        history.append((now_s, sums))
        then_s, then = history[0]
        seconds = now_s - then_s
        return {name: (value - then[name]) / seconds if seconds else None for name, value in sums.items()}


class LocateRequest(BaseModel):
    tokens: list[int]


def kv_router(engine: LLM) -> APIRouter:
    """Return the routes of the page's data.

    GET /kvcache: a JSON object (KVView). The application answers an EngineError with status 503.
    POST /kvcache: the blocks that hold the beginning of a prompt (KVView.locate).
    GET /example: the Example that the page offers to try, or null unless the model is the built-in one.

    If the server asks for API keys, include this router with the same check as the API: the state of the cache reveals
    the sizes of other clients' prompts.
    """
    router, view = APIRouter(), KVView(engine)

    @router.get("/example", include_in_schema=False)
    async def example() -> Response:
        is_built_in = getattr(engine.tokenizer, "chat_template", None) == CHAT_TEMPLATE
        offered = build_example(engine.max_request_tokens) if is_built_in else None
        return JSONResponse(None if offered is None else asdict(offered))

    @router.post("/kvcache", include_in_schema=False)
    def locate(body: LocateRequest) -> Response:  # in a thread, because a million tokens take a while
        return JSONResponse(view.locate(body.tokens), headers={"Cache-Control": "no-store"})

    @router.get("/kvcache", include_in_schema=False)
    async def kvcache() -> Response:
        return JSONResponse(view.snapshot(), headers={"Cache-Control": "no-store"})

    return router
