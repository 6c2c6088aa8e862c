"""Engine: token ids in, token ids out. The engine handles no text, and calls the ranks only through the Executor.

The StepLoop runs the steps (step_loop.py). Each request has a Receiver, which puts the results into the outbox of the
call that waits for them. Every request ends with an output in its outbox, unless the engine fails or is closed first.

Any thread may call any method. One thread at a time runs a step (`Turns`); a request that is added or aborted during a
step takes effect when the step ends. After an exception inside a step, some plans were made but never run, and the
prefix index may list K and V that were never written. The engine therefore refuses all further use. An exception that
concerns a single request ends only that request.
"""

import hashlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from nanovllm.capabilities.edits.logit_editor import LogitEditor
from nanovllm.engine.setup import EngineSetup
from nanovllm.engine.step_loop import LinkMeter, StepLoop
from nanovllm.errors import EngineError, RequestError
from nanovllm.executor.base import Executor
from nanovllm.plan.kv_spec import KVCacheSizes, StartReport
from nanovllm.plan.outputs import Outbox, Receiver, StepOutput
from nanovllm.plan.sequence import Request, Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.schedule.seams import StepMeter
from nanovllm.utils.interrupt import deferred_interrupt


class Turns:
    """Lets one thread at a time run a step of the engine. Other threads queue calls for it, or wait for outputs.

    A step takes from a millisecond to a second, so no thread holds a lock while a step runs. `lock` guards only short
    sections: beginning and ending a turn, queueing calls, and delivering outputs. A thread that waits for outputs is
    woken after every step, and takes the next turn itself if its outputs have not arrived. A thread that needs a turn,
    for example to close the engine, goes before the threads that wait for outputs.
    """

    def __init__(self) -> None:
        # Reentrant: any allocation may run the garbage collector, which may close an abandoned stream. Closing a stream
        # aborts its request, which takes this lock
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # `with lock` is safe from Ctrl-C, `with _changed` is not
        self._owner: int | None = None  # the thread whose turn it is
        self._queue: deque[object] = deque()  # tickets of threads that need a turn, first come, first served
        self._calls: deque[Callable[[], None]] = deque()

    def begin(self, unless: Callable[[], bool] | None = None) -> bool:
        """Wait for a turn and take it. Returns False, without a turn, if `unless()` becomes true first.

        Without `unless`, the thread queues for a turn. Always call `end` afterwards, even if this returns False or
        raises. Raises EngineError if this thread already has the turn.
        """
        ticket = object()
        with self.lock:
            if self._owner == threading.get_ident():
                raise EngineError(
                    "this thread is already running a step of the engine, perhaps interrupted by a signal handler; "
                    "call the engine again after the step"
                )
            if unless is None:
                self._queue.append(ticket)
            try:
                while unless is None or not unless():
                    if self._owner is None and (not self._queue or self._queue[0] is ticket):
                        self._owner = threading.get_ident()
                        return True
                    self._changed.wait()
                return False
            finally:
                if unless is None:
                    self._queue.remove(ticket)
                    self._changed.notify_all()  # wake the next in the queue in case this thread leaves without a turn

    def end(self) -> None:
        """End this thread's turn, if it has one: make the calls queued meanwhile, and wake all waiting threads."""
        with self.lock:
            if self._owner == threading.get_ident():
                self._make_calls()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function`, which changes the engine's state, now or at the end of the turn in progress.

        The call runs with the lock held, and perhaps in another thread.
        """
        with self.lock:
            self._calls.append(function)
            if self._owner is None:
                self._owner = threading.get_ident()
                self._make_calls()

    def _make_calls(self) -> None:
        """Make all queued calls, including calls that they add, and end the turn, even if a call raises."""
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._owner = None
            self._changed.notify_all()


Result = TypeVar("Result")


class Engine:
    """Runs requests of token ids.

    Once the engine has failed or is closed, add_sequence, step, next_output and stats raise EngineError.
    """

    def __init__(
        self, setup: EngineSetup, executor: Executor, scheduler: Scheduler, sizes: KVCacheSizes, report: StartReport
    ) -> None:
        """Called by startup.start_engine. The engine owns the executor and closes it."""
        self.setup, self.executor, self.scheduler = setup, executor, scheduler
        num_kv_tokens = (sizes.num_cpu_blocks or sizes.num_gpu_blocks) * setup.config.block_size
        self.max_request_tokens = min(setup.max_model_len, num_kv_tokens + 1)  # nothing reads the last token's K and V
        # Beyond this length, dynamic rope makes a key's rotation depend on the prompt's length, so only prompts of
        # the same length may share blocks
        self._max_shared_prompt_tokens = setup.max_model_len
        if report.needs_rope_lens:
            self._max_shared_prompt_tokens = setup.model_config.rope.original_max_position_embeddings
        self.closed_because: str | None = None  # why the engine can no longer be used
        self._turns = Turns()
        self._request_ids = itertools.count()
        self._link_byte_per_s = report.link_byte_per_s
        self._link_meter: LinkMeter | None = None  # stays None if no blocks cross the link
        if setup.config.enable_cpu_offload:
            self._link_meter = LinkMeter(setup.plan.spec.block_bytes, setup.plan.spec.block_size)
        self._steps = StepLoop(
            executor, scheduler, self._meters(), works_ahead=setup.works_ahead, delivering=self._turns.lock
        )

    def _meters(self) -> Iterator[StepMeter]:
        speculator, bound = self.scheduler.speculator, self.scheduler.sharing.bound
        if self._link_meter is not None:
            yield self._link_meter
        yield from speculator.meters()
        if bound is not None:
            yield bound.times

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Return True if a request has not ended yet."""
        return bool(self._steps.receivers)

    @property
    def has_work(self) -> bool:
        """Return True if a request has not ended, or if a long step is planned, which runs even if its requests end."""
        return self._steps.has_work

    @property
    def is_next_to_long_step(self) -> bool:
        """Return True if a long step has just ended or is planned. Pass on all new tokens before the next turn.

        After a long step, answers have already waited long for their tokens. Before a long step, the launch would delay
        their tokens.
        """
        return self._steps.is_next_to_long_step

    def make_sequences(self, request: Request) -> list[Sequence]:
        """Make the sequences of all answers to a request, without queueing them. The sequences share the prompt.

        Raises RequestError if the request is too long for the engine.
        """
        self._check_length(len(request.token_ids), request.params.required_tokens)
        first, *others = (self._make_sequence(request, params) for params in request.params.per_answer())
        self.scheduler.kv.check_fits(first)
        end_token_ids = self.scheduler.eos_token_ids | first.stop_token_ids
        vocab_size = self.setup.model_config.vocab_size
        first.editor = LogitEditor.make(request.params, request.token_ids, end_token_ids, vocab_size, request.rules)
        for seq in others:
            seq.editor = first.editor.for_another_answer()
        return [first, *others]

    def _check_length(self, num_tokens: int, required_tokens: int | None) -> None:
        limit = self.setup.max_model_len
        if required_tokens is None and num_tokens >= limit:
            raise RequestError(
                f"prompt of {num_tokens} tokens leaves no room for an answer in max_model_len={limit}; shorten the "
                "prompt or raise max_model_len"
            )
        if num_tokens + (required_tokens or 1) > limit:
            raise RequestError(
                f"prompt of {num_tokens} tokens + max_tokens={required_tokens} exceeds max_model_len={limit}; shorten "
                "the prompt, lower max_tokens or raise max_model_len"
            )

    def _make_sequence(self, request: Request, params: SamplingParams) -> Sequence:
        """Fill in the seed and max_tokens if they are not given, and make the sequence of one answer."""
        request_id, num_tokens = next(self._request_ids), len(request.token_ids)
        drawn = (self.setup.config.seed * 1_000_003 + request_id) & (2**63 - 1)
        seed = drawn if params.seed is None else params.seed
        salt = num_tokens if num_tokens > self._max_shared_prompt_tokens else 0
        if request.cache_salt is not None:
            text = f"{salt} {request.cache_salt}".encode(errors="surrogatepass")
            salt = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
        params = params.within(self.max_request_tokens - num_tokens)
        seq = Sequence(request_id, request.token_ids, params, seed, salt)
        seq.prompt = request.text
        return seq

    def add_sequence(self, seq: Sequence, receiver: Receiver) -> int:
        """Queue a sequence from `make_sequences`, and return its id."""
        self._check_open()
        with deferred_interrupt():
            self._steps.receivers[seq.seq_id] = receiver
            self._turns.call(partial(self._add, seq))
        return seq.seq_id

    def _add(self, seq: Sequence) -> None:
        if self.closed_because is None:
            with self._closed_by_errors():
                self.scheduler.add(seq)

    def abort(self, request_id: int) -> bool:
        """End a request, now or when the step in progress ends. See LLM.abort."""
        if self.closed_because is not None or request_id not in self._steps.receivers:
            return False
        with deferred_interrupt():
            self._turns.call(partial(self._abort, request_id))
        return True

    def abort_all(self, outbox: Outbox) -> None:
        """End all requests of an abandoned call, including requests whose ids it never received."""
        with deferred_interrupt():
            for request_id, receiver in self._steps.receivers.copy().items():
                if receiver.outbox is outbox:
                    self.abort(request_id)

    def _abort(self, request_id: int) -> None:
        if self.closed_because is not None:
            return
        with self._closed_by_errors():
            seq = self.scheduler.abort(request_id)
            if seq is not None:
                self._steps.deliver(seq)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, outbox: Outbox) -> StepOutput:
        """Run the next step, and return what has arrived in `outbox`. See LLM.step."""
        return self._fetch_after_step(outbox)

    def next_output(self, outbox: Outbox) -> StepOutput:
        """Return what has arrived in `outbox`. If the outbox is empty, run a step first, or wait for another thread's
        step.
        """
        return self._fetch_after_step(outbox, unless=lambda: bool(outbox))

    def _fetch_after_step(self, outbox: Outbox, unless: Callable[[], bool] | None = None) -> StepOutput:
        """Run one step, or none if `unless()` becomes true while this thread waits for its turn."""
        self._in_turn(partial(self._run, self._steps.advance), unless)
        with self._turns.lock:
            return outbox.fetch()

    def check_ranks(self) -> None:
        """Raise EngineError if a rank has died. Called between requests, when no step would notice a dead rank."""
        self._in_turn(partial(self._run, self.executor.check))

    def _in_turn(self, call: Callable[[], Result], unless: Callable[[], bool] | None = None) -> Result | None:
        """Wait for a turn and make a call in it. Returns None, without the call, if `unless()` becomes true first."""
        with deferred_interrupt() as held:
            try:
                with held.second_acts_at_once():
                    return call() if self._turns.begin(unless) else None
            finally:
                self._turns.end()

    def _run(self, call: Callable[[], Result]) -> Result:
        """Make a call to the ranks. Raises EngineError if the engine is closed; any error closes it."""
        self._check_open()
        with self._closed_by_errors():
            return call()

    # -- state and end -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters since the start. See LLM.stats."""
        self._check_open()
        stats: dict[str, Any] = {
            "num_waiting": self.scheduler.num_waiting,
            "num_running": len(self.scheduler.running),
            "num_preemptions": self.scheduler.num_preemptions,
            "block_bytes": self.setup.plan.spec.block_bytes,
            "block_size": self.setup.plan.spec.block_size,
        }
        if (experts := self.setup.model_config.experts) is not None and experts.cpu_layers:
            stats |= {"num_cpu_expert_layers": len(experts.cpu_layers)}
            stats |= {"cpu_expert_bytes": self.setup.plan.host_expert_bytes}
        stats |= self._steps.stats() | self.scheduler.kv.stats() | dict(self.executor.runner.stats())
        stats |= self.scheduler.store.stats()
        if self._link_meter is not None:
            stats |= self._link_meter.stats(self._link_byte_per_s)
        return stats | self.scheduler.speculator.stats()

    def block_states(self) -> bytes:
        """Return the BlockState of every KV block, one byte each. See LLM.block_states."""
        self._check_open()
        return self.scheduler.kv.block_map()

    def close(self) -> None:
        """Stop the workers and release all memory. See LLM.close."""
        self._in_turn(self._close)  # waits until another thread has finished its step

    def _close(self) -> None:
        is_first, self.closed_because = self.closed_because is None, self.closed_because or "it is closed"
        self._steps.wait_for_last()
        try:
            if is_first:  # after a failure it is unknown which K and V were written
                self._steps.store_all()
        finally:
            self.executor.close()
            self.scheduler.store.close()

    def _check_open(self) -> None:
        if self.closed_because is not None:
            raise EngineError(f"the engine cannot be used: {self.closed_because}; make a new one")

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Refuse all further use after any exception, because planned K and V may not have been written."""
        try:
            yield
        except BaseException as error:
            self.closed_because = self.closed_because or f"a step failed with {type(error).__name__}: {error}"
            raise
