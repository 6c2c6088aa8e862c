"""StepLoop: plan a step, launch it on every rank, and give its tokens to the scheduler and the receivers.

A step is planned and launched; then the scheduler gets the tokens of the previous step. On a GPU, the host thus works
one step ahead. On the CPU, launching a step also runs the step, so the scheduler gets the step's tokens at once.

Each request has a Receiver (text/detokenizer.py). The Receiver reads the request's tokens, may end the request because
of a token, and puts the results into the outbox of the call that waits for them.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple

from nanovllm.errors import EngineError
from nanovllm.executor.base import Executor, LaunchedStep, Runner
from nanovllm.plan.outputs import PositionLogprobs, Receiver
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import StepPlan
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.schedule.seams import StepMeter

logger = logging.getLogger("nanovllm")


class LinkMeter:
    """Measures the rates at which decode steps that miss blocks bring in their keys.

    The rates are the bytes that cross the link, and the bytes that the CPU attends to, divided by the duration of the
    steps. The duration of a step runs from the end of the previous step to its end. A step counts only if it and the
    previous step are decode steps that miss blocks: then the duration contains no prefill, and work that overlaps two
    steps is counted once. Durations include moments in which the link is idle, because the rates show how much of the
    link decoding uses in practice. Only pauses are left out (StepMeter).
    """

    def __init__(self, block_bytes: int, block_size: int) -> None:
        self._block_bytes, self._block_size = block_bytes, block_size
        self._num_link_tokens = self._num_cpu_tokens = 0
        self._seconds = 0.0
        self._counts_last = False  # True if the previous step was a decode step that misses blocks

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        """See StepMeter. Hot."""
        moves = plan.moves
        counts_last, self._counts_last = self._counts_last, plan.is_decode and moves.brings_in_keys
        if counts_last and self._counts_last and seconds is not None:
            self._num_link_tokens += sum(group.num_tokens(self._block_size) for group in moves.streamed)
            self._num_link_tokens += sum(load.num_tokens for load in moves.loads)
            self._num_cpu_tokens += sum(span.end - span.start for spans in moves.cpu_spans for span in spans)
            self._seconds += seconds

    def stats(self, link_byte_per_s: float | None) -> dict[str, float | None]:
        """Return the rates for LLM.stats. link_byte_per_s: the link's measured rate, or None if unknown."""
        if not self._seconds:
            return {"load_byte_per_s": None, "cpu_load_byte_per_s": None, "link_share": None}
        token_bytes_per_s = self._block_bytes / self._block_size / self._seconds
        loaded = self._num_link_tokens * token_bytes_per_s
        return {
            "load_byte_per_s": loaded,
            "cpu_load_byte_per_s": self._num_cpu_tokens * token_bytes_per_s,
            "link_share": loaded / link_byte_per_s if link_byte_per_s else None,
        }


PAUSE_S = 0.05  # the caller has paused if this time passes between two steps
STORE_ALL_S = 60.0  # time limit for writing the remaining prompts when the engine is closed
MASK_PAUSE_S = 0.5e-3  # interval between checks for masks that other threads compute, if no step can run


class _InFlight(NamedTuple):
    plan: StepPlan
    launched: LaunchedStep
    follows_pause: bool  # see StepMeter
    is_long: bool  # see StepBound.is_long_step


class StepLoop:
    """Runs steps, for one thread at a time. `receivers`: the receivers of unfinished requests, by request id."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        meters: Iterable[StepMeter],
        *,
        works_ahead: bool,
        delivering: AbstractContextManager[Any],
    ) -> None:
        """works_ahead: launch a step before the tokens of the previous step are back. delivering: a lock that is held
        while outboxes change.
        """
        self.receivers: dict[int, Receiver] = {}
        self._executor, self._scheduler, self._works_ahead = executor, scheduler, works_ahead
        self._meters, self._delivering = list(meters), delivering
        self._in_flight: _InFlight | None = None
        # The next step, if it is planned but not launched yet. A planned step must run even if all its requests are
        # aborted, because the KV cache manager already counts on what the step writes and moves.
        self._planned: StepPlan | None = None
        self._ended_long = False  # True if the last committed step was long
        self._had_no_requests = True  # True if there were no requests at some time since the last launch
        self._last_turn_s = 0.0  # time at which `advance` last returned
        self._num_steps = self._num_prefill_tokens = self._num_decode_tokens = 0

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return bool(self.receivers) or self._planned is not None

    @property
    def is_next_to_long_step(self) -> bool:
        """See Engine."""
        return self._planned is not None or self._ended_long

    def advance(self) -> None:
        """Launch the next step and commit the previous step; without working ahead, commit the step just launched.

        If a sequence gets draft tokens, commit the previous step first, because draft tokens follow the newest token.
        Before a slow launch, also commit the previous step first, and end the turn, so that callers get their tokens
        before the launch.
        """
        follows_pause = self._has_paused()
        has_answers = self._in_flight is not None and self._in_flight.plan.has_samples
        if self._in_flight is not None and self._scheduler.needs_tokens():
            self._commit_in_flight(None)
        plan, self._planned = self._planned or self._scheduler.schedule(), None
        bound = self._scheduler.sharing.bound
        is_long = plan is not None and bound is not None and bound.is_long_step
        if is_long and has_answers:
            self._planned = plan
            self._commit_in_flight(None)
            self._last_turn_s = time.perf_counter()
            return
        launched = None
        if plan is not None:
            launched = _InFlight(plan, self._executor.launch(plan), follows_pause, is_long)
            self._num_steps += 1
            self._had_no_requests = False
        elif self._in_flight is None and self._scheduler.has_unfinished:
            store = self._scheduler.store
            is_loading = bool(store.num_waiting or store.holders)
            assert self._scheduler.waits_for_masks or is_loading, "requests are waiting, but none of them can run"
            self._had_no_requests = True  # waiting counts as a pause for the meters
            time.sleep(MASK_PAUSE_S)
        if not self._works_ahead:
            self._in_flight, launched = launched, None
        self._commit_in_flight(launched)
        self._move_stored()
        self._last_turn_s = time.perf_counter()

    def _move_stored(self) -> None:
        """Let the ranks move prompts between memory and their store. All planned steps must have been launched."""
        if (moves := self._scheduler.store.next_moves()) is not None:
            self._executor.call(Runner.move, moves)

    def _has_paused(self) -> bool:
        """Return True if a step that is launched now would follow a pause (see StepMeter)."""
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
        self._executor.wait_for(launched)
        token_ids = launched.token_ids()
        seconds = None if step.follows_pause else launched.seconds()
        for meter in self._meters:
            meter.step_ended(plan, seconds)
        for splitter in self._scheduler.kv.key_splitters:
            splitter.step_ended(plan, launched.layer_times())
        logprobs = launched.logprobs()
        for seq_id, prompt in logprobs.of_prompts(plan):
            if seq_id in self.receivers:
                self.receivers[seq_id].read_prompt(prompt)
        num_new: dict[int, int] = {}  # tokens by seq_id
        read = partial(self._read, num_new, logprobs.by_sequence(plan))
        updated = self._scheduler.commit(plan, token_ids, read)
        with self._delivering:
            self._count_tokens(plan, num_new)
            for seq in updated:
                self.deliver(seq)
        if not self._scheduler.has_unfinished:
            self._had_no_requests = True

    def _read(self, num_new: dict[int, int], logprobs: Mapping[int, PositionLogprobs], seq: Sequence) -> None:
        """Let the receiver read a sequence's new token, and end the sequence if the receiver wants to end it. Hot.

        num_new: the number of new tokens by seq_id, updated here. logprobs: by seq_id, the log-probabilities of all
        tokens that the step has sampled.
        """
        seq_id = seq.seq_id
        number = num_new.get(seq_id, 0)
        num_new[seq_id] = number + 1
        known = logprobs.get(seq_id)
        ending = self.receivers[seq_id].read(seq, known and known.part(number, number + 1))
        if ending is None:
            return
        if seq.finish_reason is None:
            self._scheduler.finish(seq, ending.finish_reason, ending.error)
        elif seq.finish_reason != "error":  # scheduler and receiver end at this token; the receiver's reason is exact
            seq.finish_reason, seq.error = ending

    def _count_tokens(self, plan: StepPlan, num_new: Mapping[int, int]) -> None:
        """Count the step's prompt tokens, and its answer tokens except first tokens, in total and for each caller."""
        for step in plan.sequences:
            receiver = self.receivers.get(step.seq_id)
            if receiver is None:
                continue  # aborted while the step ran
            content, num_tokens = receiver.outbox.content, num_new.get(step.seq_id, 0)
            if step.num_tokens > step.num_sampled or step.position < step.num_prompt_tokens:
                num_computed = step.num_tokens - step.num_guesses  # draft tokens may follow the last prompt token
                content.num_prefill_tokens += num_computed
                self._num_prefill_tokens += num_computed
                num_tokens = max(0, num_tokens - 1)
            content.num_decode_tokens += num_tokens
            self._num_decode_tokens += num_tokens

    def deliver(self, seq: Sequence) -> None:
        """Put a sequence's new tokens and its output into its outbox. `delivering` must be held."""
        self.receivers[seq.seq_id].deliver(seq)
        if seq.finish_reason is not None:
            del self.receivers[seq.seq_id]

    def stats(self) -> dict[str, int]:
        """Return counters since the start (see LLM.stats)."""
        return {
            "num_steps": self._num_steps,
            "num_prefill_tokens": self._num_prefill_tokens,
            "num_decode_tokens": self._num_decode_tokens,
        }

    def wait_for_last(self) -> None:
        """Wait for the step in flight, and drop its tokens. No step may be launched afterwards."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            with suppress(EngineError):  # if a rank died in this step, the GPU would wait for it forever
                self._executor.wait_for(in_flight.launched)

    def store_all(self) -> None:
        """Wait until the prompts that have been computed are stored, before the engine is closed."""
        if self._planned is not None:  # the K and V of the planned step have not been computed
            return
        store = self._scheduler.store
        self._move_stored()
        start_s = time.monotonic()
        is_told = False
        while store.num_pending and (waited_s := time.monotonic() - start_s) < STORE_ALL_S:
            if waited_s > 1 and not is_told:
                logger.info("closing: %d pieces of prompts still have to be written", store.num_pending)
                is_told = True
            time.sleep(MASK_PAUSE_S)
