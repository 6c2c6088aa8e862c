"""Engine: token ids in, token ids out. It never sees text, and it reaches the ranks only through the Executor protocol.

A step is planned and launched on every rank; then the tokens of the step before it go back to the scheduler. On a GPU
the host thus works one step ahead. On the CPU, launching a step also runs it, so its own tokens go back at once.

Each request has a Receiver. It reads the request's tokens, may end the request because of them, and puts the results
into the outbox of the call that waits for them (text/answer.py). Every request ends with an output in its outbox,
unless the engine itself fails or is closed first.

Any thread may call any method. One thread at a time runs a step (turns.py); a request that is added or aborted during
a step takes effect when the step ends. After an exception inside a step, some plans were made but never run, and the
prefix index may list K and V that were never written. The engine therefore refuses all further use. An exception that
concerns a single request ends only that request.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from nanovllm.core.kv_spec import KVCacheSizes
from nanovllm.core.logit_editor import NO_RULES, AnswerRules, LogitEditor
from nanovllm.core.logprobs import PositionLogprobs
from nanovllm.core.outputs import Outbox, Receiver, StepOutput
from nanovllm.core.sequence import Sequence, TokenIds
from nanovllm.core.start_report import StartReport
from nanovllm.core.step_plan import StepPlan
from nanovllm.engine.admission import Admission
from nanovllm.engine.link_meter import LinkMeter
from nanovllm.engine.setup import EngineSetup
from nanovllm.engine.turns import Turns
from nanovllm.errors import EngineError
from nanovllm.executor.base import Executor, LaunchedStep
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.utils.interrupt import deferred_interrupt

PAUSE_S = 0.05  # a caller that stays away so long between two steps has paused


class StepMeter(Protocol):
    """Learns from how long steps take."""

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        """Called for every step, in order. Hot.

        `seconds`: see LaunchedStep. None after a pause: the GPU had nothing to do, because there were no requests, or
        because nobody called for the next step.
        """


class _InFlight(NamedTuple):
    plan: StepPlan
    launched: LaunchedStep
    follows_pause: bool  # see StepMeter
    is_long: bool  # see StepBound.is_long_step


class Engine:
    """Runs requests of token ids. Once it has failed or is closed, it runs nothing more: add_request, step, next_output
    and stats raise EngineError.
    """

    def __init__(
        self, setup: EngineSetup, executor: Executor, scheduler: Scheduler, sizes: KVCacheSizes, report: StartReport
    ) -> None:
        """Called by startup.start_engine. The engine owns the executor and closes it."""
        self.setup, self.executor, self.scheduler = setup, executor, scheduler
        self.admission = Admission(setup, sizes, report)
        self.works_ahead = setup.works_ahead
        self.closed_because: str | None = None  # why the engine can no longer be used
        self._turns = Turns()
        self._request_ids = itertools.count()
        self._receivers: dict[int, Receiver] = {}  # by request id; unfinished requests only
        self._in_flight: _InFlight | None = None
        self._planned: StepPlan | None = None  # the next step, if it is planned but not launched yet
        self._ended_long = False  # whether the step committed last was long
        self._had_no_requests = True  # since the last launch
        self._last_turn_s = 0.0  # when a thread ended a step
        self._num_steps = self._num_prefill_tokens = self._num_decode_tokens = 0
        self._link_byte_per_s = report.link_byte_per_s
        self._link_meter: LinkMeter | None = None  # None: no blocks cross the link
        self._meters: list[StepMeter] = []
        if setup.config.enable_cpu_offload:
            self._link_meter = LinkMeter(setup.plan.spec.block_bytes, setup.plan.spec.block_size)
            self._meters.append(self._link_meter)
        if scheduler.speculator is not None and scheduler.speculator.times is not None:
            self._meters.append(scheduler.speculator.times)
        if scheduler.sharing.bound is not None:
            self._meters.append(scheduler.sharing.bound.times)

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether a request has not ended yet."""
        return bool(self._receivers)

    @property
    def is_beside_long_step(self) -> bool:
        """Whether a long step has just ended, or is planned. What has arrived should be passed on before the next turn:
        answers have waited for the one, and its launch holds up everything else for the other.
        """
        return self._planned is not None or self._ended_long

    def check_request(self, token_ids: TokenIds, params: SamplingParams) -> None:
        """Raise RequestError for a request that can never run. `token_ids` must be in the vocabulary."""
        self.admission.check(token_ids, params)

    def add_request(
        self,
        token_ids: TokenIds,
        params: SamplingParams,
        receiver: Receiver,
        rules: AnswerRules = NO_RULES,
        cache_salt: str | None = None,
    ) -> int:
        """Queue a request that `check_request` has accepted, and return its id.

        It shares KV only with requests of the same `cache_salt`. Raises RequestError, and changes nothing, if the KV
        cache is too small for it.
        """
        self._check_open()
        return self.add_sequence(self.make_sequence(token_ids, params, rules, cache_salt), receiver)

    def make_sequence(
        self, token_ids: TokenIds, params: SamplingParams, rules: AnswerRules, cache_salt: str | None
    ) -> Sequence:
        """The sequence that `add_request` would queue. With a repetition penalty, a long prompt takes 0.1 s."""
        seq = self.admission.make_sequence(next(self._request_ids), token_ids, params, cache_salt)
        seq.editor = LogitEditor.make(params, token_ids, self.scheduler.eos_token_ids | seq.stop_token_ids, rules)
        return seq

    def add_sequence(self, seq: Sequence, receiver: Receiver) -> int:
        """Queue what `make_sequence` has made, and return its id. Raises what `add_request` raises."""
        self._check_open()
        self.scheduler.check_fits(seq)
        with deferred_interrupt():
            self._receivers[seq.seq_id] = receiver
            self._turns.call(partial(self._add, seq))
        return seq.seq_id

    def _add(self, seq: Sequence) -> None:
        if self.closed_because is None:
            with self._closed_by_errors():
                self.scheduler.add(seq)

    def abort(self, request_id: int) -> bool:
        """End a request, now or as soon as the step in progress ends. Returns False if it has ended or is unknown.

        The request still gets an output, which holds what was generated and has finish_reason "abort".
        """
        if self.closed_because is not None or request_id not in self._receivers:
            return False
        with deferred_interrupt():
            self._turns.call(partial(self._abort, request_id))
        return True

    def abort_all(self, outbox: Outbox) -> None:
        """End all requests of a call that is being abandoned, including those whose ids it never received."""
        with deferred_interrupt():
            for request_id, receiver in self._receivers.copy().items():
                if receiver.outbox is outbox:
                    self.abort(request_id)

    def _abort(self, request_id: int) -> None:
        if self.closed_because is not None:
            return
        with self._closed_by_errors():
            seq = self.scheduler.abort(request_id)
            if seq is not None:
                self._deliver(seq)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, outbox: Outbox) -> StepOutput:
        """Run the next step, and return what has arrived in `outbox`.

        On a GPU, the tokens returned are those of the step before, because the engine works one step ahead. Raises
        EngineError if a worker has died, an earlier step has failed, or the engine is closed.
        """
        self._take_step()
        with self._turns.lock:
            return outbox.fetch()

    def next_output(self, outbox: Outbox) -> StepOutput:
        """Return what has arrived in `outbox`. If it is empty, run a step first, or wait for another thread's."""
        self._take_step(unless=lambda: bool(outbox))
        with self._turns.lock:
            return outbox.fetch()

    def _take_step(self, unless: Callable[[], bool] | None = None) -> None:
        """Wait for a turn and run one step. Returns without running one if `unless()` becomes true before the turn."""
        with deferred_interrupt() as held:
            try:
                with held.second_acts_at_once():
                    if not self._turns.begin(unless):
                        return
                    self._check_open()
                    with self._closed_by_errors():
                        self._advance()
            finally:
                self._turns.end()

    def check_ranks(self) -> None:
        """Raise EngineError if a rank has died. For the time between requests, when no step would notice."""
        with deferred_interrupt() as held:
            try:
                with held.second_acts_at_once():
                    self._turns.begin()
                    self._check_open()
                    with self._closed_by_errors():
                        self.executor.check()
            finally:
                self._turns.end()

    def _advance(self) -> None:
        """Launch the next step and commit the one before it; without working ahead, commit the one just launched.

        A sequence that guesses needs its newest token to guess from. Then the step before is committed first. So it is
        where launching takes long, and in a turn of its own, so that its tokens are passed on before.
        """
        follows_pause = self._has_paused()
        if self._in_flight is not None and self.scheduler.needs_tokens():
            self._commit_in_flight(None)
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        bound = self.scheduler.sharing.bound
        is_long = plan is not None and bound is not None and bound.is_long_step
        if is_long and self._in_flight is not None and self._in_flight.plan.has_samples:
            self._planned = plan
            self._commit_in_flight(None)
            self._last_turn_s = time.perf_counter()
            return
        launched = None
        if plan is not None:
            launched = _InFlight(plan, self.executor.launch(plan), follows_pause, is_long)
            self._num_steps += 1
            self._had_no_requests = False
        elif self._in_flight is None and self.scheduler.has_unfinished:
            raise AssertionError("requests are waiting, but none of them can run")
        if not self.works_ahead:
            self._in_flight, launched = launched, None
        self._commit_in_flight(launched)
        self._last_turn_s = time.perf_counter()

    def _has_paused(self) -> bool:
        """Whether a step that is launched now would follow a pause (see StepMeter)."""
        if self._had_no_requests:
            return True
        is_idle = self._in_flight is None or self._in_flight.launched.is_done()
        return is_idle and time.perf_counter() - self._last_turn_s > PAUSE_S

    def _commit_in_flight(self, launched: _InFlight | None) -> None:
        """Commit the step in flight, if there is one. `launched` takes its place."""
        done, self._in_flight = self._in_flight, launched
        if done is not None:
            self._commit(done)
            self._ended_long = done.is_long

    def _commit(self, step: _InFlight) -> None:
        """Hand the tokens of a step to the scheduler, and the results to the callers that wait for them."""
        plan, launched = step.plan, step.launched
        self.executor.wait_for(launched)
        token_ids = launched.token_ids()
        seconds = None if step.follows_pause else launched.seconds()
        for meter in self._meters:
            meter.step_ended(plan, seconds)
        logprobs = launched.logprobs()
        for seq_id, prompt in logprobs.of_prompts(plan):
            if seq_id in self._receivers:
                self._receivers[seq_id].read_prompt(prompt)
        num_new: Counter[int] = Counter()  # tokens by seq_id
        read = partial(self._read, num_new, logprobs.by_sequence(plan))
        updated = self.scheduler.commit(plan, token_ids, read)
        with self._turns.lock:
            self._count_tokens(plan, num_new)
            for seq in updated:
                self._deliver(seq)
        if not self.scheduler.has_unfinished:
            self._had_no_requests = True

    def _read(self, num_new: Counter[int], logprobs: Mapping[int, PositionLogprobs], seq: Sequence) -> None:
        """Let the receiver read a sequence's new token, and end the sequence if it says so.

        `logprobs` has those of all tokens that the step has sampled for a sequence, by seq_id.
        """
        number = num_new[seq.seq_id]
        num_new[seq.seq_id] += 1
        known = logprobs.get(seq.seq_id)
        ending = self._receivers[seq.seq_id].read(seq, known and known.part(number, number + 1))
        if ending is None:
            return
        if seq.finish_reason is None:
            self.scheduler.finish(seq, ending.finish_reason, ending.error)
        elif seq.finish_reason != "error":  # both ended it at this token; the receiver's reason is the more precise
            seq.finish_reason, seq.error = ending

    def _count_tokens(self, plan: StepPlan, num_new: Counter[int]) -> None:
        """Count the tokens of prompts that were in the step, and the tokens that answers got, in all and by caller."""
        for step in plan.sequences:
            receiver = self._receivers.get(step.seq_id)
            if receiver is None:
                continue  # aborted while the step ran
            content = receiver.outbox.content
            if step.num_tokens == step.num_sampled:
                content.num_decode_tokens += num_new[step.seq_id]
                self._num_decode_tokens += num_new[step.seq_id]
            else:
                content.num_prefill_tokens += step.num_tokens
                self._num_prefill_tokens += step.num_tokens

    def _deliver(self, seq: Sequence) -> None:
        self._receivers[seq.seq_id].deliver(seq)
        if seq.finish_reason is not None:
            del self._receivers[seq.seq_id]

    # -- state and end -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start (see LLM.stats). Raises EngineError if the engine has failed or is closed."""
        self._check_open()
        stats: dict[str, Any] = {
            "num_steps": self._num_steps,
            "num_waiting": len(self.scheduler.waiting),
            "num_running": len(self.scheduler.running),
            "num_preemptions": self.scheduler.num_preemptions,
            "num_prefill_tokens": self._num_prefill_tokens,
            "num_decode_tokens": self._num_decode_tokens,
            "block_bytes": self.setup.plan.spec.block_bytes,
            "block_size": self.setup.plan.spec.block_size,
        }
        stats |= self.scheduler.kv.stats() | dict(self.executor.stats())
        if self._link_meter is not None:
            stats |= self._link_meter.stats(self._link_byte_per_s)
        if self.scheduler.speculator is not None:
            stats |= self.scheduler.speculator.stats()
        return stats

    def block_states(self) -> bytes:
        """The BlockState of every KV block, one byte each (see LLM.block_states)."""
        self._check_open()
        return self.scheduler.kv.block_states()

    def close(self) -> None:
        """Stop the workers and release all memory. The engine cannot be used afterwards; closing twice is fine."""
        with deferred_interrupt() as held:
            try:
                with held.second_acts_at_once():
                    self._turns.begin()  # lets another thread finish its step first
                    self._close()
            finally:
                self._turns.end()

    def _close(self) -> None:
        self.closed_because = self.closed_because or "it is closed"
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            with suppress(EngineError):  # if a rank died in this step, the GPU would wait for it forever
                self.executor.wait_for(in_flight.launched)
        self.executor.close()

    def _check_open(self) -> None:
        if self.closed_because is not None:
            raise EngineError(f"the engine cannot be used: {self.closed_because}; make a new one")

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Refuse all further use after any exception, since it is unknown which of the planned K and V were written."""
        try:
            yield
        except BaseException as error:
            self.closed_because = self.closed_because or f"a step failed with {type(error).__name__}: {error}"
            raise
