"""AsyncLLM: an LLM for asyncio. One thread owns the engine; any number of tasks wait for their own answers.

    engine thread                                   event loop
    steps while there are requests          --->    _dispatch: gives each stream its part
    sleeps on a condition otherwise         <---    submit, abort

All requests share one outbox. After a step the thread hands its content to the event loop and goes on with the next
step without waiting. What a consumer has not taken yet is merged into one update per answer. So a slow consumer holds
up nobody, and takes no more memory than its answers.

The loop and the engine's thread share Python's global lock. With hundreds of streams, passing on each token by itself
would slow the engine down. So a dispatch wakes a few consumers at a time, in turn, and the loop rests where that takes
too much of its time (wake_pace.py). A few streams do not notice; with many, each gets several tokens at a time.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.core.outputs import Outbox, Receiver, StepOutput
from nanovllm.core.sequence import Sequence, TokenIds
from nanovllm.engine.internals import Internals
from nanovllm.errors import EngineError, RequestError
from nanovllm.llm import LLM
from nanovllm.request_stream import RequestStream, RequestUpdate
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.request_check import Prompt, cache_salt, prompt_list
from nanovllm.wake_pace import WakePace

CHECK_INTERVAL_S = 1.0  # how often an idle engine makes sure that all its ranks are alive
MAX_PASSING_S = 0.02  # for which the engine waits, beside long steps, until consumers have what has arrived
MAX_WOKEN = 16  # consumers at a time


class AsyncLLM:
    """An LLM whose requests are awaited.

        async with AsyncLLM("path/to/model") as engine:
            async for update in engine.generate("Hello", SamplingParams(temperature=0)):
                print(update.text, end="")

    The constructor takes the arguments of LLM and raises the same errors. It blocks until the engine can answer.
    `llm` is the LLM; its methods may be called, too, but those that run requests block their thread.

    All requests are made on one event loop. Another loop can follow when that one is closed or no request is open.

    After an error inside a step, open and later requests raise an EngineError. `failure` then holds it.
    """

    def __init__(self, model: str | Path, *, internals: Internals = Internals(), **options: Any) -> None:
        self.llm = LLM(model, internals=internals, **options)
        self.failure: EngineError | None = None  # why the engine runs nothing more; None while it works
        self._outbox = Outbox()
        self._changed = threading.Condition()  # guards `_is_closing` and `_arrived`; notified if there may be work
        self._is_closing = False
        self._arrived: list[StepOutput] = []  # handed over by the thread, not dispatched yet
        self._streams: dict[int, RequestStream] = {}  # by request id; belongs to the event loop
        self._to_wake: dict[RequestStream, None] = {}  # in this order; belongs to the event loop, like the next two
        self._is_dispatching = False  # or resting after it
        self._pace = WakePace()
        self._is_passed_on = threading.Event()  # whether the consumers have taken all that has arrived
        self._is_passed_on.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        self._thread.start()

    @property
    def is_failed(self) -> bool:
        return self.failure is not None

    async def wait_for_failure(self) -> EngineError:
        """Wait until the engine fails, and return why. Waits forever if it is closed without a failure."""
        self._bind_loop()
        if self.failure is None:
            await self._failed.wait()
        assert self.failure is not None, "set before the event"
        return self.failure

    def close(self) -> None:
        """Abort open requests, end the thread, and close the LLM. Blocks for up to one step. Closing twice is fine.

        Each open answer gets a last update with finish_reason "abort".
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()
        self.llm.close()

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        with_tokens: bool = True,
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Answer one prompt or several, and yield the updates as they arrive.

        Arguments and errors are those of `submit`. Leaving the loop early aborts what has not ended. If the task may
        keep the generator alive after that, close it (`contextlib.aclosing`).
        """
        stream = await self.submit(prompts, sampling_params, with_tokens=with_tokens)
        try:
            async for update in stream:
                yield update
        finally:
            stream.close()

    async def submit(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        with_tokens: bool = True,
    ) -> RequestStream:
        """Queue one prompt or several, and return the stream of their updates, which the caller has to close.

        prompts: as in LLM.generate. Each has `n` answers; the index of answer i to prompt p is p * n + i.
        sampling_params: for all prompts; None means SamplingParams(). with_tokens: whether the updates before the last
        one have token_ids and logprobs, too. Raises RequestError, and queues nothing, if any prompt could never run.
        Raises EngineError if the engine has failed or is closed.
        """
        params = sampling_params or SamplingParams()
        self._check_open()
        self._bind_loop()
        # A long text takes a second to tokenize, and a large grammar to compile
        prompts_ids, sequences = await asyncio.to_thread(self._prepare, prompts, params)
        stream = RequestStream(prompts_ids, self._abort)
        try:
            for index, seq in enumerate(sequences):
                receiver = self.llm.text.receiver(self._outbox, seq.params, with_tokens)
                request_id = self._add(seq, receiver)
                stream.expect(request_id, index)
                self._streams[request_id] = stream
        except BaseException:
            stream.close()
            raise
        return stream

    def _prepare(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams
    ) -> tuple[list[TokenIds], list[Sequence]]:
        """The token ids of each prompt, and a sequence for each answer. Raises RequestError."""
        each_params = params.per_answer()
        listed = prompt_list(prompts)
        prompts_ids = [self.llm.check_request(prompt, each_params[0]) for prompt in listed]
        sequences = [
            self.llm.engine.make_sequence(token_ids, each, self.llm.text.rules(each), cache_salt(prompt))
            for token_ids, prompt in zip(prompts_ids, listed, strict=True)
            for each in each_params
        ]
        return prompts_ids, sequences

    def _add(self, seq: Sequence, receiver: Receiver) -> int:
        """Queue one answer and return its request id. Called on the loop, and so before any of its results arrive."""
        with self._changed:  # once `close` has been called, the thread aborts what is open, and nothing may follow
            self._check_open()
            try:
                request_id = self.llm.engine.add_sequence(seq, receiver)
            except (RequestError, EngineError):
                raise
            except Exception as error:  # a call that changes the scheduler failed, which has closed the engine
                raise _engine_error(error) from error
            finally:
                self._changed.notify()
        return request_id

    def _abort(self, request_ids: Iterable[int]) -> None:
        """End answers that nobody waits for any more. Their outputs are dropped."""
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self.llm.engine.abort(request_id)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure
        if self._is_closing:
            raise EngineError("the engine is closed; make a new one")

    def _bind_loop(self) -> None:
        """Make the running loop the one that the thread hands results to."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed() and self._streams:
            raise RuntimeError("an AsyncLLM has open requests on another event loop; use one loop at a time")
        self._abort(list(self._streams))  # those of a loop that was closed before they ended
        with self._changed:
            old_loop, self._loop = self._loop, loop
            self._arrived.clear()
        if old_loop is not None and not old_loop.is_closed():
            for stream in self._to_wake:  # all they wait for has arrived
                old_loop.call_soon_threadsafe(stream.wake)
        self._to_wake.clear()
        self._is_dispatching = False
        self._failed = asyncio.Event()

    # -- results, on the event loop ------------------------------------------------------------------------------

    def _begin_dispatch(self) -> None:
        """Dispatch, if that is not going on anyway. Hot."""
        if not self._is_dispatching and self._is_on_loop():
            self._dispatch()

    def _dispatch(self) -> None:
        """Merge what has arrived into the updates of its streams, and wake the consumers whose turn it is. Hot."""
        self._is_dispatching = True
        start_s = time.thread_time()
        try:
            self._merge_arrived()
            for stream in list(islice(self._to_wake, MAX_WOKEN)):
                del self._to_wake[stream]
                stream.wake()
        finally:
            asyncio.get_running_loop().call_soon(self._rest, start_s)  # after these consumers

    def _merge_arrived(self) -> None:
        with self._changed:
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
                    update.logprobs += new.logprobs
            for request_id, output in content.finished.items():
                if request_id in streams:
                    self._to_wake[streams[request_id]] = None
                    streams.pop(request_id).finish(request_id, output)

    def _update_of(self, request_id: int) -> RequestUpdate:
        """The next update of an answer, to be added to."""
        stream = self._streams[request_id]
        if not stream.wakes_at_ends:
            self._to_wake[stream] = None
        return stream.update_of(request_id)

    def _rest(self, start_s: float) -> None:
        """Go on when the engine's thread has had time for its steps, if there is anything to go on with."""
        if not (self._to_wake or self._arrived):
            self._is_passed_on.set()
        rest_s = self._pace.rest_s(time.thread_time() - start_s)
        if not self.llm.engine.has_requests:
            rest_s = 0.0
        asyncio.get_running_loop().call_later(rest_s, self._end_rest)

    def _end_rest(self) -> None:
        if not self._is_on_loop():
            return  # another loop has followed
        self._is_dispatching = False
        if self._to_wake or self._arrived:
            self._dispatch()

    def _is_on_loop(self) -> bool:
        return asyncio.get_running_loop() is self._loop

    def _dispatch_failure(self) -> None:
        """Tell all streams, and whoever waits for it, that the engine has failed."""
        assert self.failure is not None, "set by the thread"
        self._merge_arrived()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineError(str(self.failure)))
        self._failed.set()

    # -- the engine thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self.llm.engine
        try:
            while self._wait_for_work():
                self._hand_over(engine.next_output(self._outbox))
                if engine.is_beside_long_step:
                    self._is_passed_on.wait(MAX_PASSING_S)
            engine.abort_all(self._outbox)
            if self._outbox:
                self._hand_over(engine.next_output(self._outbox))
        except BaseException as error:
            self.failure = _engine_error(error)
            self._call_on_loop(self._dispatch_failure)

    def _wait_for_work(self) -> bool:
        """Sleep until there are requests or undelivered results. Returns False if the engine is to be closed."""
        while True:
            with self._changed:
                if self._changed.wait_for(self._has_work, timeout=CHECK_INTERVAL_S):
                    return not self._is_closing
            self.llm.engine.check_ranks()

    def _has_work(self) -> bool:
        return self._is_closing or self.llm.engine.has_requests or bool(self._outbox)

    def _hand_over(self, content: StepOutput) -> None:
        """Let the loop dispatch this, together with everything else that arrives before it gets round to it. Hot."""
        if not (content.text_sources or content.new_tokens or content.finished):
            return
        with self._changed:
            self._arrived.append(content)
            is_first = len(self._arrived) == 1
            self._is_passed_on.clear()
        if is_first:
            self._call_on_loop(self._begin_dispatch)

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has been closed, so nobody waits any more
                self._loop.call_soon_threadsafe(callback)


def _engine_error(error: BaseException) -> EngineError:
    """`error` as what requests raise. It keeps its message."""
    if isinstance(error, EngineError):
        return error
    engine_error = EngineError(f"a step failed with {type(error).__name__}: {error}")
    engine_error.__cause__ = error
    return engine_error
