"""AdmissionQueue: takes requests for the engine, as many as may wait, and for as long as they may wait.

An answer waits until its first token arrives. What runs is bounded by the engine itself (max_num_seqs).
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from nanovllm.async_llm import AsyncLLM
from nanovllm.core.outputs import RequestOutput
from nanovllm.request_stream import RequestStream
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.limits import RequestLimits
from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import Refusal
from nanovllm.text.request_check import Prompt

_NEWEST_WAIT_SHARE = 0.1  # of the newest wait in the average of all
_MAX_RETRY_AFTER_S = 60.0


class RequestCounters(Protocol):
    """What the queue reports (metrics.py)."""

    def answer_ended(self, output: RequestOutput) -> None: ...

    def answers_abandoned(self, num_answers: int) -> None: ...

    def refused(self, reason: str) -> None: ...


class AdmissionQueue:
    """Used on the event loop only. `num_waiting` counts answers without a first token, `num_open` those not ended."""

    def __init__(
        self, engine: AsyncLLM, options: ServerOptions, limits: RequestLimits, counters: RequestCounters
    ) -> None:
        self.num_waiting = self.num_open = 0
        self.counters = counters
        self.max_wait_s = options.max_wait_s
        self._engine, self._limits, self._max_queue = engine, limits, options.max_queue
        self._mean_wait_s = 1.0

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise Refusal for a body that asks for too much. `fields`: its entries."""
        with self._counted():
            self._limits.check(fields)

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, with_tokens: bool = True
    ) -> RequestStream:
        """Like AsyncLLM.submit. Raises Refusal, and queues nothing, if too many answers wait already.

        The stream raises Refusal, and its answers are aborted, if none of them has begun after `max_wait_s`.
        """
        with self._counted():
            place = self._enter(len(prompts) * params.n)
        try:
            stream = await self._engine.submit(prompts, params, with_tokens=with_tokens)
        except BaseException:
            place.leave()
            raise
        place.watch(stream)
        return stream

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request that is tokenized before it is submitted as one that waits. Raises Refusal like `submit`."""
        with self._counted():
            place = self._enter(1)
        try:
            yield
        finally:
            place.leave()

    def check_chars(self, num_chars: int, param: str) -> None:
        """Raise Refusal for a text that must not be tokenized."""
        with self._counted():
            self._limits.check_chars(num_chars, param)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            self.counters.refused(refusal.reason)
            raise

    def _enter(self, num_answers: int) -> "_Place":
        if num_answers > self._max_queue:
            message = f"{num_answers} answers in one request are more than max_queue={self._max_queue}; ask for fewer"
            raise Refusal(400, "queue", message)
        if self.num_waiting + num_answers > self._max_queue:
            message = f"{self.num_waiting} answers are waiting, at most {self._max_queue} may wait; ask again later"
            raise Refusal(429, "queue", message, retry_after_s=self.retry_after_s)
        return _Place(self, num_answers)

    @property
    def retry_after_s(self) -> float:
        """How long answers have waited of late."""
        return min(self._mean_wait_s, _MAX_RETRY_AFTER_S)

    def add_wait(self, wait_s: float) -> None:
        """An answer has got its first token after this time."""
        self._mean_wait_s += _NEWEST_WAIT_SHARE * (wait_s - self._mean_wait_s)


class _Place:
    """One request's place in the queue. It observes the request's stream (StreamObserver)."""

    def __init__(self, queue: AdmissionQueue, num_answers: int) -> None:
        self._queue = queue
        self._entered_s = time.monotonic()
        self._num_open = num_answers
        self._waiting = set(range(num_answers))
        self._timer: asyncio.TimerHandle | None = None
        queue.num_waiting += num_answers
        queue.num_open += num_answers

    def watch(self, stream: RequestStream) -> None:
        """Follow the stream, and end it if it does not begin in time."""
        stream.observer = self
        loop = asyncio.get_running_loop()
        rest_s = self._entered_s + self._queue.max_wait_s - time.monotonic()
        self._timer = loop.call_later(max(0.0, rest_s), self._expire, stream)

    def _expire(self, stream: RequestStream) -> None:
        self._timer = None
        stream.close()
        message = f"no token within max_wait_s={self._queue.max_wait_s:g} seconds, as the server is busy; ask later"
        self._queue.counters.refused("wait")
        stream.fail(Refusal(503, "wait", message, retry_after_s=self._queue.retry_after_s))

    def updated(self, index: int) -> None:
        """Hot."""
        if index in self._waiting:
            self._waiting.remove(index)
            self._queue.num_waiting -= 1
            self._queue.add_wait(time.monotonic() - self._entered_s)
            self._stop_timer()

    def finished(self, output: RequestOutput) -> None:
        self._num_open -= 1
        self._queue.num_open -= 1
        self._queue.counters.answer_ended(output)

    def closed(self, num_open: int) -> None:
        assert num_open == self._num_open, f"{num_open} answers are open, {self._num_open} were expected"
        self._queue.counters.answers_abandoned(num_open)
        self.leave()

    def leave(self) -> None:
        """None of the answers that are open will end."""
        self._queue.num_waiting -= len(self._waiting)
        self._queue.num_open -= self._num_open
        self._waiting.clear()
        self._num_open = 0
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
