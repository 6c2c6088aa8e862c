"""RowAnswerer: answers rows in an engine, in an order in which they profit from each other's KV."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.cluster.batch_plan import NO_DOCUMENT, RowPlace, runs_of
from nanovllm.cluster.batch_rows import RowDefaults, RowRequest, answer_columns, error_columns, make_request
from nanovllm.core.outputs import RequestOutput
from nanovllm.errors import RequestError
from nanovllm.request_stream import RequestStream
from nanovllm.text.request_check import Prompt

NUM_DOCUMENTS = 2  # that are read at once; more would push each other's KV out of the cache
NUM_ROWS = 1024  # that are in the engine at once; the others of a huge document wait outside


class RowAnswerer:
    """Any number of units may be answered at once, on one event loop."""

    def __init__(self, engine: AsyncLLM, defaults: RowDefaults) -> None:
        self._engine, self._defaults = engine, defaults
        self._documents = asyncio.Semaphore(NUM_DOCUMENTS)
        self._rows = asyncio.Semaphore(NUM_ROWS)

    async def answer_unit(
        self, rows: Sequence[Mapping[str, Any] | RequestError], places: Sequence[RowPlace]
    ) -> list[dict[str, Any]]:
        """The added columns of each row. Raises EngineError if the engine fails; a row that cannot run gets an error.

        Rows without a document are submitted together. The first row of a document goes ahead of its others, so that
        they find the document in the prefix cache.
        """
        added: list[dict[str, Any]] = [{} for _ in rows]

        async def answer(i: int, begun: asyncio.Event | None = None) -> None:
            added[i] = await self._answer_row(rows[i], places[i], begun)

        async def answer_document(run: Sequence[int]) -> None:
            async with self._documents:
                begun = asyncio.Event()
                first = asyncio.create_task(answer(run[0], begun))
                await begun.wait()
                await asyncio.gather(first, *map(answer, run[1:]))

        has_document = {i for i, place in enumerate(places) if place.document != NO_DOCUMENT}
        runs = runs_of(places)
        await asyncio.gather(*(answer_document(run) if run[0] in has_document else answer(run[0]) for run in runs))
        return added

    async def _answer_row(
        self, row: Mapping[str, Any] | RequestError, place: RowPlace, begun: asyncio.Event | None
    ) -> dict[str, Any]:
        """`begun` is set as soon as the row's prompt has been read, or the row has ended."""
        try:
            async with self._rows:
                if isinstance(row, RequestError):
                    raise row
                request = make_request(row, place, self._defaults)
                prompt = await self._prompt(request)
                stream = await self._engine.submit(prompt, request.params, with_tokens=begun is not None)
                outputs = await (stream.outputs() if begun is None else _outputs(stream, begun))
                return answer_columns(outputs, request.params)
        except RequestError as error:
            return error_columns(str(error))
        finally:
            if begun is not None:
                begun.set()

    async def _prompt(self, request: RowRequest) -> Prompt:
        if request.messages is None:
            assert request.prompt is not None, "a request has one of both"
            return request.prompt
        (token_ids,) = await asyncio.to_thread(self._engine.llm.chat_token_ids, request.messages)
        return token_ids


async def _outputs(stream: RequestStream, begun: asyncio.Event) -> list[RequestOutput]:
    """Like `stream.outputs()`, and sets `begun` at the first token."""
    ended: dict[int, RequestOutput] = {}
    async for update in stream:
        begun.set()
        if update.output is not None:
            ended[update.index] = update.output
    return [ended[index] for index in sorted(ended)]
