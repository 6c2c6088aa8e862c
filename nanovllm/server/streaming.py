"""Answers on their way to the client: as server-sent events or as a whole, and no longer than the client is there.

A chunk's JSON is put together from parts made once per request, and only the new text is encoded. While the client or
the event loop is busy, the stream merges updates, so a slow connection gets fewer and longer chunks.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.core.outputs import RequestOutput
from nanovllm.errors import EngineError
from nanovllm.request_stream import RequestStream, RequestUpdate
from nanovllm.server.errors import ApiError, ClientDisconnectedError, api_error

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


class Chunks(Protocol):
    """Turns updates into events."""

    def update_events(self, update: RequestUpdate) -> str:
        """The events of an update, each "data: {...}" and an empty line; "" for nothing. Hot."""

    def last_events(self) -> str:
        """The events after all answers have ended, without [DONE]."""


class EventStream(Response):
    """Sends the updates of a request as server-sent events, and closes its stream in the end."""

    def __init__(self, stream: RequestStream, chunks: Chunks) -> None:
        self.status_code, self.background = 200, None
        self._stream, self._chunks = stream, chunks
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnectedError):
                await while_connected(receive, self._send(send))
        finally:
            self._stream.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(_events(self._stream, self._chunks)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _events(stream: RequestStream, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """The status has been sent, so an error is an event, too."""
    try:
        async for update in stream:
            if update.output is not None:
                check_output(update.output)
            if event := chunks.update_events(update):
                yield event.encode()
        if event := chunks.last_events():
            yield event.encode()
    except Exception as error:
        yield f"data: {json.dumps(api_error(error).body())}\n\n".encode()
        if not isinstance(error, EngineError | ApiError):
            raise  # a bug, which the server logs


async def collect_outputs(stream: RequestStream, receive: Receive) -> list[RequestOutput]:
    """Wait for all answers, and close the stream. Raises ClientDisconnectedError as soon as the client has gone."""
    try:
        outputs = await while_connected(receive, stream.outputs())
    finally:
        stream.close()
    for output in outputs:
        check_output(output)
    return outputs


def check_output(output: RequestOutput) -> None:
    """Raise ApiError if the request has failed."""
    if output["finish_reason"] == "error":
        status = 400 if output.get("error_cause") == "request" else 500
        raise ApiError(f"the request failed: {output.get('error')}", status=status, code="request_failed")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`. If the client disconnects first, cancel it and raise ClientDisconnectedError.

    The body must have been received already.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
