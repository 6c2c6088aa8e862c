"""RequestStream: the updates of one request, from the engine's thread to the task that waits for them.

    engine thread                                   event loop
    Dispatcher.hand_over  --------------------->    _dispatch: merges the new results, wakes some consumers
    Dispatcher.wait_until_passed_on  ---------->    _hurry: no rests until all results are passed on

The engine's thread does not wait for consumers, except before and after long steps. Results that a consumer has not
taken yet are merged into one update per answer. So a slow consumer delays no other consumer, and its updates take no
more memory than its answers.

The loop and the engine's thread share Python's global lock. With hundreds of streams, passing on each token separately
would slow the engine down. A dispatch therefore wakes only a few consumers, in turn, and then the loop rests for three
times the duration of the dispatch. With few streams, each token is still passed on at once; with many streams, each
stream gets several tokens at a time.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol

from nanovllm.errors import EngineError
from nanovllm.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from nanovllm.plan.outputs import LogprobList, StepOutput, TextSource
from nanovllm.plan.sequence import Sequence

MAX_PASSING_S = 0.02  # longest wait of the engine's thread for consumers to take their updates
MAX_WOKEN = 16  # consumers per dispatch
MAX_FIRST_WOKEN = 12  # of these, consumers that wait for their first update, if others wait, too
REST_RATIO = 3.0  # duration of the rest relative to the dispatch before it: dispatching takes a quarter of the time
MAX_REST_S = 0.1


@dataclass
class AnswerSoFar:
    """All updates of one answer until now."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobList[TokenLogprobs] = field(default_factory=LogprobList)


@dataclass
class RequestUpdate:
    """New results of one answer.

    - index: the answer's index among the answers of the request.
    - text: the new text, or "". The text can arrive later than its tokens, because the end of the text is held back
      while the next tokens may still change it.
    - token_ids, logprobs: the new tokens, and one entry of logprobs per token if the request set logprobs.
    - output: the answer's output in its last update, or None in all earlier updates.

    As in vLLM, an update from AsyncLLM.generate also has `outputs`, a list with the whole answer so far, `request_id`,
    and `finished`, which is True in the last update of the request.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobList[TokenLogprobs] = field(default_factory=LogprobList)
    output: RequestOutput | None = None
    text_source: TextSource | None = field(default=None, repr=False)  # `take` reads the text from it
    so_far: AnswerSoFar | None = field(default=None, repr=False)  # for `outputs`
    request_id: str = ""
    finished: bool = False

    def take(self) -> bool:
        """Fill in the text. Returns False if the update has nothing new."""
        if self.text_source is not None:
            self.text = self.text_source.read_text()
        return bool(self.text or self.token_ids or self.output is not None)

    def add_to(self, answer: AnswerSoFar) -> None:
        """Add the update to the updates before it."""
        self.so_far = answer
        answer.pieces.append(self.text)
        answer.token_ids += self.token_ids
        answer.logprobs.extend(self.logprobs)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The whole answer so far, in a list; only what is new if the request's output_kind is "delta".

        After the next update, the answer so far also has the text of that update.
        """
        assert self.so_far is not None, "only updates from AsyncLLM.generate have outputs; use text and token_ids"
        text, token_ids = "".join(self.so_far.pieces), self.so_far.token_ids[:]
        answer = CompletionOutput(index=self.index, text=text, token_ids=token_ids)
        if self.so_far.logprobs:
            answer["logprobs"] = LogprobList[TokenLogprobs]()
            answer["logprobs"].extend(self.so_far.logprobs)
        if self.output is not None:
            answer |= {name: self.output[name] for name in ("finish_reason", "stop_reason")}
        return [answer]


class StreamObserver(Protocol):
    """Gets notified of new results of a stream's answers, before the consumer takes the update."""

    def updated(self, index: int) -> None:
        """Note that an answer has something new. Hot."""

    def finished(self, output: RequestOutput) -> None:
        """Note that an answer has ended."""

    def closed(self, num_open: int) -> None:
        """Note that `num_open` answers get no more updates: the consumer has left, or the engine has failed."""


class RequestStream:
    """The updates of a request, for one consumer: an async iterator that ends after the last update of each answer.

    Close the stream in the end: closing aborts the answers that have not ended. Use the stream only on the event loop
    that made it. Raises EngineError if the engine fails. `observer` may be set at any time.
    """

    def __init__(self, sequences: list[Sequence], abort: Callable[[list[int]], None]) -> None:
        """sequences: one for each prompt, whose state shows how far the prompt has been computed. abort: a function
        that ends the requests with the given ids.
        """
        self.sequences = sequences
        self.observer: StreamObserver | None = None
        self.wakes_at_ends = False  # True to wake the consumer only when an answer ends, not for every update
        self.has_begun = False  # True once the consumer has been woken
        self.num_answers = 0
        self._abort = abort
        self._indices: dict[int, int] = {}  # request id -> index, for the answers that have not ended
        self._updates: dict[int, RequestUpdate] = {}  # by index; updates that the consumer has not taken yet
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # the future that the consumer awaits, if any

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestUpdate:
        """Return the next update of any answer. The update holds all results that have arrived for the answer."""
        while True:
            while self._updates:
                update = self._updates.pop(next(iter(self._updates)))
                if update.take():
                    return update
            if self._error is not None:
                raise self._error
            if not self._indices:
                raise StopAsyncIteration
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
        """Abort the answers that have not ended. Closing twice is allowed."""
        self._abort(list(self._indices))
        self._tell_closed()
        self._indices.clear()
        self._updates.clear()

    # -- called on the event loop --------------------------------------------------------------------------------

    def expect(self, request_id: int, index: int) -> None:
        """Expect updates of a queued answer."""
        self._indices[request_id] = index
        self.num_answers += 1

    def update_of(self, request_id: int) -> RequestUpdate:
        """Return the answer's update that the consumer will take next, for adding new results to it. Hot."""
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
        """Let the consumer raise `error` after it has taken all waiting updates. The answers are not aborted."""
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


class Dispatcher:
    """Gives each stream its results. Used on the event loop that was bound last, except where noted."""

    def __init__(
        self,
        rests: Callable[[], bool],
        *,
        rest_ratio: float = REST_RATIO,
        max_rest_s: float = MAX_REST_S,
        max_passing_s: float = MAX_PASSING_S,
    ) -> None:
        """rests: called after each dispatch; returns True if the loop should rest."""
        self._rests, self._rest_ratio, self._max_rest_s = rests, rest_ratio, max_rest_s
        self._max_passing_s = max_passing_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, RequestStream] = {}  # by request id
        self._to_begin: dict[RequestStream, None] = {}  # streams to wake for their first update, in order
        self._to_wake: dict[RequestStream, None] = {}  # streams to wake for a later update, in order
        self._is_dispatching = False  # True during a dispatch and the rest after it
        self._resting: asyncio.TimerHandle | None = None  # the timer that ends the rest
        self._is_hurried = False  # True while the engine's thread waits for consumers, so the loop does not rest
        self._is_passed_on = threading.Event()  # set when the consumers have taken all results
        self._is_passed_on.set()
        self._lock = threading.Lock()  # guards `_arrived`
        self._arrived: list[StepOutput] = []  # results that were handed over, but not dispatched yet

    # -- the engine's thread -------------------------------------------------------------------------------------

    def hand_over(self, content: StepOutput) -> None:
        """Let the loop dispatch `content`, together with all results that arrive before the dispatch. Hot."""
        if not (content.text_sources or content.new_tokens or content.finished):
            return
        with self._lock:
            self._arrived.append(content)
            is_first = len(self._arrived) == 1
            self._is_passed_on.clear()
        if is_first:
            self.call_on_loop(self._begin_dispatch)

    def wait_until_passed_on(self) -> None:
        """Wait a short time until the consumers have taken all results. The loop does not rest until then."""
        if not self._is_passed_on.is_set():
            self.call_on_loop(self._hurry)
            if not self._is_passed_on.wait(self._max_passing_s):
                self.call_on_loop(self._stop_hurrying)

    def call_on_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has been closed, so its consumers are gone
                self._loop.call_soon_threadsafe(callback)

    # -- streams -------------------------------------------------------------------------------------------------

    @property
    def is_bound(self) -> bool:
        """Return True if results are handed to the running loop."""
        return asyncio.get_running_loop() is self._loop

    def bind(self) -> list[int]:
        """Hand results to the running loop from now on. Returns the abandoned requests of a loop that was closed.

        Raises RuntimeError if there are open requests on another loop.
        """
        if self._loop is not None and not self._loop.is_closed() and self._streams:
            raise RuntimeError("an AsyncLLM has open requests on another event loop; use one loop at a time")
        abandoned = list(self._streams)
        self._streams.clear()
        with self._lock:
            old_loop, self._loop = self._loop, asyncio.get_running_loop()
            self._arrived.clear()
            self._is_passed_on.set()
        if old_loop is not None and not old_loop.is_closed():
            for stream in chain(self._to_begin, self._to_wake):  # their answers have ended
                old_loop.call_soon_threadsafe(stream.wake)
        self._to_begin.clear()
        self._to_wake.clear()
        self._is_dispatching = self._is_hurried = False
        self._resting = None
        return abandoned

    def add(self, request_id: int, stream: RequestStream) -> None:
        """Pass the request's results to the stream until the request ends. Results without a stream are dropped."""
        self._streams[request_id] = stream

    def remove(self, request_id: int) -> bool:
        """Drop the results of a request from now on. Returns False if the request was not open."""
        return self._streams.pop(request_id, None) is not None

    def fail(self, message: str) -> None:
        """Make the consumers of all open requests raise an EngineError after they have taken all waiting updates."""
        self._merge_arrived()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineError(message))
        for stream in chain(self._to_begin, self._to_wake):  # including streams whose answers have ended
            stream.wake()
        self._to_begin.clear()
        self._to_wake.clear()

    # -- results -------------------------------------------------------------------------------------------------

    def _begin_dispatch(self) -> None:
        """Dispatch, unless a dispatch or a rest is in progress. Hot."""
        if not self._is_dispatching and self.is_bound:
            self._dispatch()

    def _dispatch(self) -> None:
        """Merge the new results into the updates of their streams, and wake the next consumers. Hot."""
        self._is_dispatching = True
        start_s = time.thread_time()
        try:
            self._merge_arrived()
            for stream in self._next_consumers():
                self._to_begin.pop(stream, None)
                self._to_wake.pop(stream, None)
                stream.wake()
        finally:
            asyncio.get_running_loop().call_soon(self._rest, start_s)  # runs after the woken consumers

    def _next_consumers(self) -> list[RequestStream]:
        """Return the streams to wake now. Streams with a first update come first, but leave some places to others."""
        num_first = min(len(self._to_begin), MAX_FIRST_WOKEN)
        others = list(islice(self._to_wake, MAX_WOKEN - num_first))
        return [*islice(self._to_begin, MAX_WOKEN - len(others)), *others]

    def _merge_arrived(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        streams = self._streams
        for content in arrived:
            for request_id, source in content.text_sources.items():
                if request_id in streams:
                    self._update_of(request_id).text_source = source
            for request_id, new in content.new_tokens.items():
                if request_id in streams:
                    update = self._update_of(request_id)
                    update.token_ids += new.token_ids
                    update.logprobs.extend(new.logprobs)
            for request_id, output in content.finished.items():
                if request_id in streams:
                    self._queue(streams[request_id])
                    streams.pop(request_id).finish(request_id, output)

    def _update_of(self, request_id: int) -> RequestUpdate:
        stream = self._streams[request_id]
        if not stream.wakes_at_ends:
            self._queue(stream)
        return stream.update_of(request_id)

    def _queue(self, stream: RequestStream) -> None:
        """Wake the stream's consumer when its turn comes."""
        (self._to_wake if stream.has_begun else self._to_begin)[stream] = None

    @property
    def _has_more(self) -> bool:
        return bool(self._to_begin or self._to_wake or self._arrived)

    def _rest(self, start_s: float) -> None:
        """Leave the engine's thread time for its steps, then continue."""
        if not self.is_bound:
            return  # another loop has been bound
        with self._lock:
            if not self._has_more:
                self._is_passed_on.set()
                self._is_hurried = False
        rest_s = 0.0
        if self._rests() and not self._is_hurried:
            rest_s = min(self._max_rest_s, self._rest_ratio * (time.thread_time() - start_s))
        self._resting = asyncio.get_running_loop().call_later(rest_s, self._end_rest)

    def _hurry(self) -> None:
        """Pass on all results without a rest, because the engine's thread waits until all are passed on."""
        if not self.is_bound:
            return
        self._is_hurried = self._has_more
        if self._is_hurried and self._resting is not None:
            self._resting.cancel()
            self._end_rest()

    def _stop_hurrying(self) -> None:
        self._is_hurried = False

    def _end_rest(self) -> None:
        if not self.is_bound:
            return
        self._resting = None
        self._is_dispatching = False
        if self._has_more:
            self._dispatch()
