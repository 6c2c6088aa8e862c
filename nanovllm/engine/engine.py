"""Engine: token ids in, token ids out. It never sees text, and it reaches the ranks only through the Executor.

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

from nanovllm.capabilities.edits.logit_editor import NO_RULES, AnswerRules, LogitEditor
from nanovllm.engine.setup import EngineSetup
from nanovllm.engine.step_loop import LinkMeter, StepLoop, StepMeter
from nanovllm.errors import EngineError, RequestError
from nanovllm.executor.base import Executor, Runner
from nanovllm.plan.kv_spec import KVCacheSizes, StartReport
from nanovllm.plan.outputs import Outbox, Receiver, StepOutput
from nanovllm.plan.sequence import Sequence, TokenIds
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.utils.interrupt import deferred_interrupt


class Admission:
    """Checks whether the engine can ever run a request, and makes the Sequence of an accepted one."""

    def __init__(self, setup: EngineSetup, sizes: KVCacheSizes, report: StartReport) -> None:
        num_kv_tokens = (sizes.num_cpu_blocks or sizes.num_gpu_blocks) * setup.config.block_size
        self.max_model_len = setup.max_model_len
        self.max_request_tokens = min(setup.max_model_len, num_kv_tokens + 1)  # nothing reads the last token's K/V
        self._vocab_size = setup.model_config.vocab_size
        self._seed = setup.config.seed
        # Beyond this length, dynamic rope makes a key's rotation depend on the prompt's length, so only prompts of
        # the same length may share blocks
        self._max_shared_prompt_tokens: int | None = None
        if report.needs_rope_lens:
            self._max_shared_prompt_tokens = setup.model_config.rope.original_max_position_embeddings

    def check(self, token_ids: TokenIds, params: SamplingParams) -> None:
        """Raise RequestError for a request that can never run. `token_ids` must be in the vocabulary."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params has type {type(params).__name__}, expected SamplingParams")
        if params.n != 1:
            raise RequestError(f"n={params.n} applies to generate and chat; here, add a request for each answer")
        if not token_ids:
            raise RequestError("the prompt is empty; it needs at least one token")
        if not params.required_tokens and len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"prompt of {len(token_ids)} tokens leaves no room for an answer in max_model_len="
                f"{self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        num_required = params.required_tokens or 1
        if len(token_ids) + num_required > self.max_model_len:
            raise RequestError(
                f"prompt of {len(token_ids)} tokens + max_tokens={num_required} exceeds "
                f"max_model_len={self.max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len"
            )
        for name in ("stop_token_ids", "logit_bias"):
            if unknown := [token_id for token_id in getattr(params, name) or () if token_id >= self._vocab_size]:
                last = self._vocab_size - 1
                raise RequestError(f"{name} {unknown} are outside the vocabulary 0..{last}; leave them out")

    def make_sequence(
        self, request_id: int, token_ids: TokenIds, params: SamplingParams, cache_salt: str | None
    ) -> Sequence:
        """Make the sequence of a request that has passed `check`. Fills in the seed and max_tokens if not given."""
        drawn = (self._seed * 1_000_003 + request_id) & (2**63 - 1)
        seed = drawn if params.seed is None else params.seed
        params = params.within(self.max_request_tokens - len(token_ids))
        limit = self._max_shared_prompt_tokens
        salt = len(token_ids) if limit is not None and len(token_ids) > limit else 0
        if cache_salt is not None:
            text = f"{salt} {cache_salt}".encode(errors="surrogatepass")
            salt = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
        return Sequence(request_id, token_ids, params, seed, salt)


class Turns:
    """Lets one thread at a time run a step of the engine. Other threads queue calls for it, or wait for outputs.

    A step takes from a millisecond to a second, so no thread holds a lock while one runs. `lock` guards only short
    sections: beginning and ending a turn, queueing calls, and delivering outputs. A thread that waits for outputs is
    woken after every step, and takes the next turn itself if its own have not arrived. A thread that needs a turn of
    its own, for example to close the engine, goes before those that wait for outputs.
    """

    def __init__(self) -> None:
        # Reentrant: any allocation may run the garbage collector, which may close an abandoned stream; closing it
        # aborts its request, which takes this lock
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # `with lock` is safe from Ctrl-C, `with _changed` is not
        self._owner: int | None = None  # the thread whose turn it is
        self._queue: deque[object] = deque()  # tickets of threads that need a turn, first come, first served
        self._calls: deque[Callable[[], None]] = deque()

    def begin(self, unless: Callable[[], bool] | None = None) -> bool:
        """Wait for a turn and take it. Returns False, without a turn, if `unless()` becomes true first.

        Without `unless`, the thread queues for a turn of its own. Call `end` afterwards, whatever this returns or
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

        It runs with the lock held, and perhaps in another thread.
        """
        with self.lock:
            self._calls.append(function)
            if self._owner is None:
                self._owner = threading.get_ident()
                self._make_calls()

    def _make_calls(self) -> None:
        """Make all queued calls, including any that these add, and end the turn, even if one of them raises."""
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._owner = None
            self._changed.notify_all()


Result = TypeVar("Result")


class Engine:
    """Runs requests of token ids. Once it has failed or is closed, add_request, step, next_output and stats raise
    EngineError.
    """

    def __init__(
        self, setup: EngineSetup, executor: Executor, scheduler: Scheduler, sizes: KVCacheSizes, report: StartReport
    ) -> None:
        """Called by startup.start_engine. The engine owns the executor and closes it."""
        self.setup, self.executor, self.scheduler = setup, executor, scheduler
        self.admission = Admission(setup, sizes, report)
        self.closed_because: str | None = None  # why the engine can no longer be used
        self._turns = Turns()
        self._request_ids = itertools.count()
        self._link_byte_per_s = report.link_byte_per_s
        self._link_meter: LinkMeter | None = None  # None: no blocks cross the link
        if setup.config.enable_cpu_offload:
            self._link_meter = LinkMeter(setup.plan.spec.block_bytes, setup.plan.spec.block_size)
        self._steps = StepLoop(
            executor, scheduler, self._meters(), works_ahead=setup.works_ahead, delivering=self._turns.lock
        )

    def _meters(self) -> Iterator[StepMeter]:
        speculator, bound = self.scheduler.speculator, self.scheduler.sharing.bound
        if self._link_meter is not None:
            yield self._link_meter
        if speculator is not None and speculator.times is not None:
            yield speculator.times
        if bound is not None:
            yield bound.times

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """True if a request has not ended yet."""
        return bool(self._steps.receivers)

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or if a long step is planned, which runs even if its requests end."""
        return self._steps.has_work

    @property
    def is_beside_long_step(self) -> bool:
        """True if a long step has just ended, or is planned. Pass on what has arrived before the next turn.

        Answers have already waited for a step that has ended. Launching a planned one holds up everything else.
        """
        return self._steps.is_beside_long_step

    def add_request(
        self,
        token_ids: TokenIds,
        params: SamplingParams,
        receiver: Receiver,
        rules: AnswerRules = NO_RULES,
        cache_salt: str | None = None,
    ) -> int:
        """Queue a request that `admission.check` has accepted, and return its id.

        It shares KV only with requests of the same `cache_salt`. Raises RequestError, and changes nothing, if the KV
        cache is too small for it.
        """
        self._check_open()
        return self.add_sequence(self.make_sequence(token_ids, params, rules, cache_salt), receiver)

    def make_sequence(
        self,
        token_ids: TokenIds,
        params: SamplingParams,
        rules: AnswerRules,
        cache_salt: str | None,
        first: Sequence | None = None,
    ) -> Sequence:
        """Make the sequence of a request that `admission.check` has accepted.

        `first`: the sequence of another answer to the same prompt, not queued yet. They share what they can. Raises
        RequestError if the KV cache is too small.
        """
        seq = self.admission.make_sequence(next(self._request_ids), token_ids, params, cache_salt)
        self.scheduler.check_fits(seq)
        if first is not None:
            seq.editor = first.editor and first.editor.for_another_answer(rules)
        else:
            end_token_ids = self.scheduler.eos_token_ids | seq.stop_token_ids
            vocab_size = self.setup.model_config.vocab_size
            seq.editor = LogitEditor.make(params, token_ids, end_token_ids, vocab_size, rules)
        return seq

    def add_sequence(self, seq: Sequence, receiver: Receiver) -> int:
        """Queue a sequence from `make_sequence`, and return its id."""
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
        """End all requests of an abandoned call, including those whose ids it never received."""
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
        """Return what has arrived in `outbox`. If it is empty, run a step first, or wait for another thread's."""
        return self._fetch_after_step(outbox, unless=lambda: bool(outbox))

    def _fetch_after_step(self, outbox: Outbox, unless: Callable[[], bool] | None = None) -> StepOutput:
        """Run one step, or none if `unless()` becomes true while this thread waits for its turn."""
        self._in_turn(partial(self._run, self._steps.advance), unless)
        with self._turns.lock:
            return outbox.fetch()

    def check_ranks(self) -> None:
        """Raise EngineError if a rank has died. For the time between requests, when no step would notice."""
        self._in_turn(partial(self._run, self.executor.check))

    def build_next_plan(self) -> bool:
        """Call Runner.build_next_plan. For the time between requests. Raises what `check_ranks` raises."""
        build = partial(self.executor.call, Runner.build_next_plan)
        return bool(self._in_turn(partial(self._run, build)))

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
        stats |= self._steps.stats() | self.scheduler.kv.stats() | dict(self.executor.runner.stats())
        if self.scheduler.disk is not None:
            stats |= self.scheduler.disk.stats()
        if self._link_meter is not None:
            stats |= self._link_meter.stats(self._link_byte_per_s)
        if self.scheduler.speculator is not None:
            stats |= self.scheduler.speculator.stats()
        return stats

    def block_states(self) -> bytes:
        """Return the BlockState of every KV block, one byte each. See LLM.block_states."""
        self._check_open()
        return self.scheduler.kv.block_states()

    def close(self) -> None:
        """Stop the workers and release all memory. See LLM.close."""
        self._in_turn(self._close)  # waits until another thread has finished its step

    def _close(self) -> None:
        is_first, self.closed_because = self.closed_because is None, self.closed_because or "it is closed"
        self._steps.wait_for_last()
        try:
            if is_first:  # after a failure nobody knows which K and V were written
                self._steps.store_all()
        finally:
            self.executor.close()
            if self.scheduler.disk is not None:
                self.scheduler.disk.board.close()

    def _check_open(self) -> None:
        if self.closed_because is not None:
            raise EngineError(f"the engine cannot be used: {self.closed_because}; make a new one")

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Refuse all further use after any exception: it is unknown which of the planned K and V were written."""
        try:
            yield
        except BaseException as error:
            self.closed_because = self.closed_because or f"a step failed with {type(error).__name__}: {error}"
            raise
