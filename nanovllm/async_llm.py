"""AsyncLLM: an LLM for asyncio. One thread owns the engine, and any number of tasks wait for answers.

    engine thread                                   event loop
    starts the engine
    steps while there are requests          --->    Dispatcher: gives each stream its part
    sleeps on a condition otherwise         <---    submit, abort

All requests share one outbox. After a step, the engine thread hands the outbox's content to the event loop
(request_stream.py) and starts the next step without waiting. The thread that runs the steps also starts the engine,
because start-up builds cuDNN plans, which only the thread that built them can use.
"""

import asyncio
import ctypes
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.compat import CALL, no_attribute, translated
from nanovllm.config import Config, EngineOptions
from nanovllm.engine.engine import Engine
from nanovllm.errors import EngineError, RequestError
from nanovllm.llm import LLM
from nanovllm.plan.outputs import Outbox, Receiver
from nanovllm.plan.sequence import Sequence
from nanovllm.request_stream import AnswerSoFar, Dispatcher, RequestStream, RequestUpdate
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.frontend import Prompt
from nanovllm.utils.options import documented

if TYPE_CHECKING:
    from typing_extensions import Unpack

CHECK_INTERVAL_S = 1.0  # interval at which an idle engine checks that all its ranks are alive


@documented(Config)
class AsyncLLM:
    """An LLM for use with asyncio.

        async with AsyncLLM("path/to/model") as engine:
            async for update in engine.generate("Hello", SamplingParams(temperature=0)):
                print(update.text, end="")

    The constructor takes the arguments of LLM and raises the same errors. The constructor blocks until the engine can
    answer. `llm` is the LLM. Its methods may be called, too, but `generate`, `chat` and `stream` block their thread.

    All requests must be made on one event loop. After that loop is closed, or while no request is open, requests may be
    made on another loop.

    After an error inside a step, open and later requests raise an EngineError, which is also in `failure`.
    """

    def __init__(self, model: str | Path, **options: "Unpack[EngineOptions]") -> None:
        self._thread = _EngineThread(partial(LLM, model, **options))
        self.llm = self._thread.start_engine()
        self._dispatcher = self._thread.dispatcher
        weakref.finalize(self, self._thread.stop).atexit = False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    async def get_tokenizer(self) -> Any:
        """Like LLM.get_tokenizer."""
        return self.llm.get_tokenizer()

    async def reset_prefix_cache(self) -> bool:
        """Like LLM.reset_prefix_cache."""
        return self.llm.reset_prefix_cache()

    @property
    def failure(self) -> EngineError | None:
        """The error with which the engine has failed, or None while it works."""
        return self._thread.failure

    async def wait_for_failure(self) -> EngineError:
        """Wait until the engine fails, and return the error. Never returns if the engine is closed before it fails."""
        self._bind_loop()
        if self.failure is None:
            await self._thread.failed.wait()
        assert self.failure is not None, "set before the event"
        return self.failure

    def close(self) -> None:
        """Abort open requests, end the thread, and close the LLM. Blocks for up to one step. Closing twice is allowed.

        Each open answer gets a last update with finish_reason "abort".
        """
        self._thread.stop()
        self._thread.join()
        self.llm.close()

    shutdown = close  # vLLM's name

    async def aclose(self) -> None:
        """Like `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @classmethod
    def from_engine_args(cls, engine_args: Mapping[str, Any]) -> "AsyncLLM":
        """Make an engine with these arguments, such as EngineArgs."""
        return cls(**engine_args)

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        request_id: str = "",
        *,
        prompt: Prompt | None = None,
        with_tokens: bool = True,
        **others: Any,
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Answer one prompt or several, and yield the updates as they arrive.

        The arguments and errors are the same as in `submit`. As in vLLM, `prompt` may take the place of `prompts`, and
        each update has the request_id. Leaving the loop early aborts the answers that have not
        ended, once the generator is closed. Use `contextlib.aclosing` if the task may keep the generator alive.
        others: arguments of vLLM that change nothing (nanovllm/compat.py).
        """
        translated(others, (), CALL, RequestError, "AsyncLLM.generate")
        wanted = prompt if prompts is None else prompts
        if wanted is None:
            raise RequestError("generate needs a prompt")
        stream = await self.submit(wanted, sampling_params, with_tokens=with_tokens)
        params = [seq.params for seq in stream.sequences for _ in range(stream.num_answers // len(stream.sequences))]
        answers = [AnswerSoFar() for _ in params]
        stream.wakes_at_ends = all(each.output_kind == "final_only" for each in params)
        num_ended = 0
        try:
            async for update in stream:
                is_delta = params[update.index].output_kind == "delta"
                update.add_to(AnswerSoFar() if is_delta else answers[update.index])
                num_ended += update.output is not None
                update.request_id, update.finished = request_id, num_ended == stream.num_answers
                yield update
        finally:
            stream.close()

    async def submit(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        with_tokens: bool = True,
    ) -> RequestStream:
        """Queue one prompt or several, and return the stream of their updates, which the caller has to close.

        prompts: as in LLM.generate. Each prompt has `n` answers; the index of answer i to prompt p is p * n + i.
        sampling_params: one for all prompts, or a list with one per prompt, all with the same `n`. None means
        SamplingParams(). with_tokens: if False, only the last update of an answer has token ids and log-probabilities
        (in its `output`). Raises RequestError, and queues nothing, if any prompt could never run. Raises EngineError if
        the engine has failed or is closed.
        """
        self._check_open()
        self._bind_loop()
        # In a thread: tokenizing a long text, or compiling a large grammar, takes a second
        sequences = await asyncio.to_thread(self.llm.make_sequences, prompts, sampling_params)
        stream = RequestStream([answers[0] for answers in sequences], self._abort)
        try:
            for index, seq in enumerate(chain.from_iterable(sequences)):
                receiver = self.llm.text.receiver(self._thread.outbox, seq.params, seq.token_ids, with_tokens)
                request_id = self._add(seq, receiver)
                stream.expect(request_id, index)
                self._dispatcher.add(request_id, stream)
        except BaseException:
            stream.close()
            raise
        return stream

    def _add(self, seq: Sequence, receiver: Receiver) -> int:
        """Queue one answer and return its request id. Called on the loop, so no result arrives before this returns."""
        with self._thread.changed:
            self._check_open()  # after `close` the thread aborts all open requests, and no request may be added
            try:
                request_id = self.llm.engine.add_sequence(seq, receiver)
            except EngineError:
                raise
            except Exception as error:  # changing the scheduler has failed, so the engine has closed itself
                raise _engine_error(error) from error
            finally:
                self._thread.changed.notify()
        return request_id

    def _abort(self, request_ids: Iterable[int]) -> None:
        """End answers whose consumer has left, and drop their outputs."""
        for request_id in request_ids:
            if self._dispatcher.remove(request_id):
                self.llm.engine.abort(request_id)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure
        if self._thread.is_closing:
            raise EngineError("the engine is closed; make a new one")

    def _bind_loop(self) -> None:
        """Let the thread hand results to the running event loop from now on."""
        if self._dispatcher.is_bound:
            return
        for request_id in self._dispatcher.bind():
            self.llm.engine.abort(request_id)
        self._thread.failed = asyncio.Event()


class _EngineThread(threading.Thread):
    """The thread that starts the engine and runs its steps, and the state that the thread shares with the event loop.

    The thread does not refer to the AsyncLLM. So an AsyncLLM that is dropped without `close` is garbage-collected. Its
    finalizer stops the thread, and then the engine is collected, too.
    """

    def __init__(self, make_llm: Callable[[], LLM]) -> None:
        super().__init__(name="nanovllm-engine", daemon=True)
        self.outbox = Outbox()
        self.failure: EngineError | None = None
        self.failed = asyncio.Event()  # belongs to the event loop that was bound last
        self.changed = threading.Condition()  # guards `is_closing`; notified when there may be work
        self.is_closing = False
        self._make_llm = make_llm
        self._starting: Future[LLM] = Future()

    def start_engine(self) -> LLM:
        """Start the thread, wait until the engine has started, and return the LLM. Raises the errors of the start.

        Ctrl-C, or any other exception while this method waits, interrupts the start. The exception is raised after the
        start has released everything. A second Ctrl-C ends the wait at once.
        """
        try:
            self.start()
            return self._starting.result()
        except BaseException:
            if self.ident is not None:
                self._end_start(self.ident)
            raise

    def _end_start(self, thread_id: int) -> None:
        """Interrupt the start if it is still running, and wait until the start has released everything."""
        if not self._starting.done():
            # Only the main thread receives signals, so raise what Ctrl-C raises there in the engine's thread, too
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(KeyboardInterrupt))
        self.stop()
        self.join()
        if self._starting.done() and self._starting.exception() is None:  # the start ended before the interrupt
            self._starting.result().close()
        del self._starting  # breaks a cycle: the future's exception refers to this thread

    def stop(self) -> None:
        """Let the thread abort open requests and end. Does not wait for the thread."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()

    def run(self) -> None:
        try:
            llm = self._make_llm()
        except BaseException as error:
            self._starting.set_exception(error)
            return
        engine = llm.engine
        self.dispatcher = Dispatcher(rests=lambda: engine.has_requests)
        self._starting.set_result(llm)
        try:
            while self._wait_for_work(engine):
                self.dispatcher.hand_over(engine.next_output(self.outbox))
                if engine.is_next_to_long_step:
                    self.dispatcher.wait_until_passed_on()
            engine.abort_all(self.outbox)
            if self.outbox:
                self.dispatcher.hand_over(engine.next_output(self.outbox))
        except BaseException as error:
            self.failure = _engine_error(error)
            self.dispatcher.call_on_loop(self._tell_failure)

    def _tell_failure(self) -> None:
        """Tell all streams and all waiting tasks that the engine has failed. Called on the loop."""
        self.dispatcher.fail(str(self.failure))
        self.failed.set()

    def _wait_for_work(self, engine: Engine) -> bool:
        """Sleep until there are steps to run or undelivered results. Returns False if the engine is to be closed."""

        def has_work() -> bool:
            return self.is_closing or engine.has_work or bool(self.outbox)

        while True:
            with self.changed:
                if self.changed.wait_for(has_work, CHECK_INTERVAL_S):
                    return not self.is_closing
            engine.check_ranks()


def _engine_error(error: BaseException) -> EngineError:
    """Return the error that requests raise because of `error`, with its message."""
    if isinstance(error, EngineError):
        return error
    engine_error = EngineError(f"a step failed with {type(error).__name__}: {error}")
    engine_error.__cause__ = error
    return engine_error
