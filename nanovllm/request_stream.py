"""RequestStream: the updates of one request, from AsyncLLM to the task that waits for them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm.core.outputs import LogprobList, RequestOutput, TextSource, TokenLogprobs
from nanovllm.core.sequence import TokenIds


@dataclass
class RequestUpdate:
    """New text and tokens of one answer. `index` is the answer's place among those of the request.

    - text: the new text. It can lag behind the tokens, because the end of the text is held back while it may still
      change. "" if there is none.
    - token_ids, logprobs: the new tokens, and one entry of logprobs for each if the request asked for them.
    - output: the answer's output, in its last update; None before.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobList[TokenLogprobs] = field(default_factory=LogprobList)
    output: RequestOutput | None = None
    text_source: TextSource | None = field(default=None, repr=False)  # where the text comes from when it is taken

    def take(self) -> bool:
        """Fill in the text. Returns whether there is anything new."""
        if self.text_source is not None:
            self.text = self.text_source.read_text()
        return bool(self.text or self.token_ids or self.output is not None)


class StreamObserver(Protocol):
    """Is told what happens to the answers of a stream, whether or not the consumer has taken it."""

    def updated(self, index: int) -> None:
        """An answer has something new. Hot."""

    def finished(self, output: RequestOutput) -> None:
        """An answer has ended."""

    def closed(self, num_open: int) -> None:
        """Nothing more will come of these answers: the consumer has left, or the engine has failed."""


class RequestStream:
    """The updates of a request, for one consumer: an async iterator that ends after the last update of each answer.

    Close it in the end; what has not finished by then is aborted. Use it only on the event loop that it was made on.
    Raises EngineError if the engine fails. `observer` may be set as soon as the stream is made.
    """

    def __init__(self, prompts: list[TokenIds], abort: Callable[[list[int]], None]) -> None:
        """Made by AsyncLLM.submit. prompts: the request's token ids. abort: ends the requests with these ids."""
        self.prompts = prompts
        self.observer: StreamObserver | None = None
        self._abort = abort
        self._indices: dict[int, int] = {}  # request id -> index, for the answers that have not ended
        self._updates: dict[int, RequestUpdate] = {}  # by index; what the consumer has not taken yet
        self.wakes_at_ends = False  # and not for every update
        self.has_begun = False  # whether the consumer has been woken
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # what the consumer waits for

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestUpdate:
        """The next update of any answer. It holds everything that has arrived for this answer."""
        while True:
            while self._updates:
                update = self._updates.pop(next(iter(self._updates)))
                if update.take():
                    return update
            if self._error is not None:
                raise self._error
            if not self._indices:
                raise StopAsyncIteration
            await self._wait()

    async def _wait(self) -> None:
        """Wait until there is an update, or an end without one."""
        assert self._waiter is None, "a stream has one consumer"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def outputs(self) -> list[RequestOutput]:
        """Wait for all answers, and return their outputs by index. Wakes the task only when an answer has ended."""
        self.wakes_at_ends = True
        ended = {update.index: update.output async for update in self}
        return [output for index in sorted(ended) if (output := ended[index]) is not None]

    def close(self) -> None:
        """Abort the answers that have not ended. Closing twice is fine."""
        self._abort(list(self._indices))
        self._tell_closed()
        self._indices.clear()
        self._updates.clear()

    # -- called by AsyncLLM on the event loop --------------------------------------------------------------------

    def expect(self, request_id: int, index: int) -> None:
        """An answer has been queued."""
        self._indices[request_id] = index

    def update_of(self, request_id: int) -> RequestUpdate:
        """The next update that the consumer will take of this answer, to be added to. Hot."""
        index = self._indices[request_id]
        update = self._updates.get(index)
        if update is None:
            update = self._updates[index] = RequestUpdate(index)
            if self.observer is not None:
                self.observer.updated(index)
        return update

    def finish(self, request_id: int, output: RequestOutput) -> None:
        self.update_of(request_id).output = output
        del self._indices[request_id]
        if self.observer is not None:
            self.observer.finished(output)

    def fail(self, error: Exception) -> None:
        """Let the consumer raise `error`, once it has taken what is there. The answers are not aborted."""
        self._error = error
        self._tell_closed()
        self._indices.clear()
        self.wake()

    def _tell_closed(self) -> None:
        if self.observer is not None and self._indices:
            self.observer.closed(len(self._indices))

    def wake(self) -> None:
        """Let the consumer run, if it waits."""
        self.has_begun = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
