"""Scheduler: decides which sequences run in the next step, and how many tokens of each. First come, first served.

Prompts share a step by their size and age (planned_step.py), and by how long it may take (step_bound.py).

The scheduler works on integers only. `schedule` plans a step, the engine runs it, and `commit` takes the tokens that it
sampled. The next step may be planned before these have arrived. A sampled token that has not arrived yet is *pending*:
it has a position but no id. Planning uses only what is certain without the id, namely whether a sequence has reached
max_tokens. An end token is noticed when it arrives, and anything that a later step has computed for that sequence is
dropped.

With speculation a decoding sequence may run guesses behind its newest token, and the step samples after each of them.
`commit` keeps the sampled tokens up to the first that differs from the guess at its position: exactly those that the
sequence would have got without guesses. A sequence guesses only when its newest token has arrived (`needs_tokens`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import islice

from nanovllm.core.sequence import ErrorCause, Sequence, SequenceStatus
from nanovllm.core.step_limits import MAX_VERIFYING_ROWS
from nanovllm.core.step_plan import StepPlan
from nanovllm.kvcache.policy.base import KVCacheManager
from nanovllm.sampling_params import INVALID_TOKEN
from nanovllm.scheduling.planned_step import PlannedStep, PromptSharing
from nanovllm.scheduling.step_bound import StepBound
from nanovllm.speculation.drafters import NO_GUESSES, Guesses
from nanovllm.speculation.pace import Load, load_of
from nanovllm.speculation.speculator import Speculator


class Scheduler:
    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        eos_token_ids: tuple[int, ...] = (),
        speculator: Speculator | None = None,
        max_step_rows: int | None = None,
        step_bound: StepBound | None = None,
    ) -> None:
        """`speculator`: None for no guesses. `max_step_rows`: the most tokens that a step can sample; by default
        `max_num_seqs`. `step_bound`: None for chunks as long as the budget; not used with `chunked_prefill` off.
        """
        self.kv, self.speculator = kv, speculator
        self.sharing = PromptSharing(max_num_batched_tokens, step_bound)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.max_step_rows = max_step_rows or max_num_seqs
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: list[Sequence] = []  # in order of arrival, preempted ones too
        self.running: list[Sequence] = []  # in order of arrival
        self.sequences: dict[int, Sequence] = {}  # all unfinished ones
        self.num_preemptions = 0
        self._has_new_document = False  # whether a long prompt has been computed since hits were last looked up
        self.waits_for_masks = False  # whether the last plan left out a sequence for that reason
        self._step = PlannedStep(0, 0)  # the one being planned
        self._load = load_of(0, 0)  # the step's load if all running sequences decode in it
        self._num_admissible = 0  # waiting sequences that this step could admit; guesses leave rows for them

    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError if a request could never run. Changes nothing."""
        self.kv.check_fits(seq)

    def add(self, seq: Sequence) -> None:
        """Queue a request. Raises RequestError if it could never run."""
        self.check_fits(seq)
        self._expect_hits(seq)
        insort(self.waiting, seq, key=_arrival)
        self.sequences[seq.seq_id] = seq
        if self.speculator is not None:
            self.speculator.add(seq)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    def abort(self, seq_id: int) -> Sequence | None:
        """End a waiting or running request now, and return its sequence. Returns None if it is unknown or has ended."""
        seq = self.sequences.get(seq_id)
        if seq is not None:
            self.finish(seq, "abort")
        return seq

    def finish(self, seq: Sequence, reason: str, error: str | None = None, cause: ErrorCause = "engine") -> None:
        """End a request. `error` and `cause` say what happened, and whose fault it is, if the reason is "error"."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        else:
            self._leave_queue(seq)
        self.kv.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.error, seq.error_cause = reason, error, cause
        del self.sequences[seq.seq_id]
        if self.speculator is not None:
            self.speculator.forget(seq)

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None if no request is left, or if none can run before a pending token arrives."""
        self.kv.begin_step(self.running)
        self._step = PlannedStep(self.max_num_batched_tokens, self.max_step_rows)
        if self.speculator is not None:
            self._load = self._next_load()
            self._num_admissible = self._count_admissible()
        if self.chunked_prefill:
            self._schedule_mixed()
        else:
            self._schedule_classic()
        return self._step.finish(self.kv) if len(self._step) else None

    def _schedule_mixed(self) -> None:
        """Place answers in order of arrival, then chunks of prompts."""
        running, prompts = self._can_run(self.running), []
        for i, seq in enumerate(running):
            if seq.status is not SequenceStatus.RUNNING:
                break  # this sequence and all after it were preempted
            if seq.num_uncomputed_tokens > 1:
                if self._make_room(seq, 1):
                    prompts.append(seq)
            elif self._step.budget:
                self._place_next(seq, num_others=len(running) - i - 1 + len(prompts))
        if self.waiting and self._can_admit(self.waiting[0]):
            # Beside a running prompt, the hits of a waiting one may grow with each chunk: then it waits for all of them
            if not prompts:
                self._expect_hits(self.waiting[0])
            if self._has_new_document:  # questions about it are short prompts now
                for seq in filter(self.sharing.is_long, islice(self.waiting, self.max_num_seqs)):
                    self._expect_hits(seq)
                self._has_new_document = False
            prompts.extend(islice(self.waiting, self.max_num_seqs))
        self._place_prompts(prompts)
        if not len(self._step):  # long prompts were held back for short ones, which found no room
            self._place_prompts([seq for seq in prompts if self.sharing.is_long(seq)])

    def _place_prompts(self, prompts: list[Sequence]) -> None:
        """Place chunks of running and waiting prompts. Nobody overtakes a prompt that lacks room."""
        has_room = True
        for seq, max_tokens in self.sharing.turns(prompts, self._step, self.kv):
            if max_tokens <= 0 or not self._step.has_room:
                continue
            if seq.status is SequenceStatus.WAITING:
                head = self.waiting[0]
                has_room = has_room and self._can_admit(head) and (seq is head or self._can_admit(seq))
                if not has_room:
                    continue
                self._admit(seq)
            num_tokens = self.kv.num_placeable(seq, min(seq.num_uncomputed_tokens, max_tokens))
            self._step.place(self.kv, seq, num_tokens)
            self.sharing.placed(seq, num_tokens)
            self._has_new_document |= self.sharing.is_long(seq) and num_tokens == seq.num_uncomputed_tokens

    def _schedule_classic(self) -> None:
        """Place prompts, whole if the budget and the slots allow. Decode only in steps where no prompt can run."""
        self._place_running([seq for seq in self._can_run(self.running) if seq.num_uncomputed_tokens > 1])
        while self.waiting and self._step.has_room and self._can_admit(self.waiting[0]):
            seq = self.waiting[0]
            if len(self._step) and seq.num_uncomputed_tokens > self._step.budget:
                break  # only the first prompt of a step is split
            self._admit(seq)
            num_tokens = self.kv.num_placeable(seq, min(seq.num_uncomputed_tokens, self._step.budget))
            self._step.place(self.kv, seq, num_tokens)
        if not len(self._step):
            self._place_running(self._can_run(self.running))

    def _can_run(self, sequences: list[Sequence]) -> list[Sequence]:
        sequences = [seq for seq in sequences if seq.num_output_tokens < seq.max_tokens and not seq.waits_for_token]
        ready = [seq for seq in sequences if not seq.waits_for_mask]
        self.waits_for_masks = len(ready) < len(sequences)
        return ready

    def _place_running(self, sequences: list[Sequence]) -> None:
        """Place running sequences in order of arrival."""
        for i, seq in enumerate(sequences):
            if not self._step.budget or seq.status is not SequenceStatus.RUNNING:
                break  # the budget is used up, or this sequence and all after it were preempted
            self._place_next(seq, num_others=len(sequences) - i - 1)

    def _place_next(self, seq: Sequence, num_others: int) -> None:
        """Place the next tokens of a running sequence, and guesses that leave room for `num_others` others."""
        num_known = min(seq.num_uncomputed_tokens, self._step.budget)
        guesses = self._guess(seq, num_others)
        if num_tokens := self._make_room(seq, num_known + len(guesses.token_ids)):
            self._step.place(self.kv, seq, num_tokens, guesses.first(num_tokens - num_known))

    def _make_room(self, seq: Sequence, num_tokens: int) -> int:
        """Count its next tokens that there is room for, after preempting from the tail if there is none. 0 if it had
        to be preempted itself.
        """
        while not (num_placeable := self.kv.num_placeable(seq, num_tokens)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                break
        return num_placeable

    def _guess(self, seq: Sequence, num_others: int) -> Guesses:
        """Guesses for a sequence that decodes, as many as are useful. Leaves room for `num_others` running sequences,
        and for those that wait.
        """
        if self.speculator is None or not self._can_guess(seq) or seq.num_pending_tokens:
            return NO_GUESSES
        num_left = seq.max_tokens - seq.num_output_tokens - 1  # after the token that this step samples anyway
        num_rows = self._step.num_rows - max(0, self.max_step_rows - MAX_VERIFYING_ROWS)
        room = min(self._step.budget, num_rows) - 1 - num_others - self._num_admissible
        return self.speculator.guess(seq, min(num_left, room), self._load)

    @staticmethod
    def _can_guess(seq: Sequence) -> bool:
        """Return True if it decodes, will get more than one token, and need not pause for them. Its newest token
        may be pending.
        """
        is_slow = seq.constraint is not None and seq.constraint.is_slow
        return seq.num_uncomputed_tokens == 1 and seq.max_tokens - seq.num_output_tokens > 1 and not is_slow

    def _count_admissible(self) -> int:
        """The most waiting sequences that this step could admit. None if the first has to wait: nobody overtakes it."""
        if not self.waiting or not self._can_admit(self.waiting[0]):
            return 0
        most = min(self.max_num_seqs - len(self.running), MAX_VERIFYING_ROWS)  # more leave no room for guesses
        return sum(self._can_admit(seq) for seq in islice(self.waiting, most))

    def _can_admit(self, seq: Sequence) -> bool:
        """Return True if a waiting sequence may start now. None may in a step that preempts."""
        if not self._step.admits or len(self.running) >= self.max_num_seqs:
            return False
        return not seq.num_pending_tokens and self.kv.can_admit(seq)

    def _admit(self, seq: Sequence) -> None:
        self._leave_queue(seq)
        self.kv.admit(seq)
        insort(self.running, seq, key=_arrival)
        seq.status = SequenceStatus.RUNNING
        seq.num_queued_tokens = seq.num_uncomputed_tokens

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.kv.preempt(seq)
        seq.status = SequenceStatus.WAITING
        self._expect_hits(seq)
        insort(self.waiting, seq, key=_arrival)
        self._step.admits = False
        self.num_preemptions += 1

    def _leave_queue(self, seq: Sequence) -> None:
        """Remove a waiting sequence, without a search through thousands of others."""
        place = bisect_left(self.waiting, _arrival(seq), key=_arrival)
        assert self.waiting[place] is seq, f"sequence {seq.seq_id} is not where it should be in the queue"
        del self.waiting[place]

    def _expect_hits(self, seq: Sequence) -> None:
        """Note how much a waiting sequence would have to compute if it were admitted now."""
        seq.num_queued_tokens = seq.num_tokens - self.kv.num_known_tokens(seq)

    def needs_tokens(self) -> bool:
        """Return True if the step in flight must be committed before the next one is planned: a sequence of it verifies
        guesses, or one wants to guess.
        """
        if self.speculator is None:
            return False
        if any(seq.num_pending_guesses for seq in self.running):
            return True
        num_rows = min(self.max_num_batched_tokens, self.max_step_rows, MAX_VERIFYING_ROWS)
        num_admissible = min(self._num_admissible, len(self.waiting))  # the step before may have admitted some
        if num_rows <= len(self.running) + num_admissible:
            return False  # there is no room for guesses
        load = self._next_load()
        return any(self._can_guess(seq) and self.speculator.wants_to_guess(seq, load) for seq in self.running)

    def _next_load(self) -> Load:
        """That of a step in which all running sequences decode."""
        return load_of(len(self.running), sum(seq.num_computed_tokens for seq in self.running))

    # -- results -------------------------------------------------------------------------------------------------

    def commit(
        self, plan: StepPlan, token_ids: list[int], read: Callable[[Sequence], None] = lambda seq: None
    ) -> list[Sequence]:
        """Append the tokens that a step has sampled, as far as they are the sequences' own.

        `token_ids`: see StepPlan. `read` is called after each appended token, and may finish the sequence. Returns the
        sequences that got tokens, or that ended because theirs was invalid.
        """
        updated = []
        for step, tokens in zip(plan.sequences, plan.verified_tokens(token_ids), strict=True):
            seq = self.sequences.get(step.seq_id)
            if seq is None or step.sampling is None:
                continue  # ended or aborted while this step ran, or nothing is sampled
            updated.append(seq)
            seq.num_pending_guesses = 0
            for i, token_id in enumerate(tokens):
                if i > 0:  # the token before was guessed, so its K and V are there already
                    if seq.status is not SequenceStatus.RUNNING:
                        break
                    self.kv.accept(seq)
                    seq.num_pending_tokens += 1
                self._append(seq, token_id, step.sampling.position + i, read)
            if self.speculator is not None and step.num_guesses:
                self.speculator.verified(seq, step.num_guesses, len(tokens) - 1)
        return updated

    def _append(self, seq: Sequence, token_id: int, position: int, read: Callable[[Sequence], None]) -> None:
        """Append a token, and end the sequence if it is the last one."""
        if token_id == INVALID_TOKEN:
            if seq.editor is not None and seq.editor.forbids_all(seq.token_ids):
                self.finish(seq, "error", f"the request's parameters forbid every token {position}", "request")
            else:
                self.finish(seq, "error", f"the model's logits for token {position} hold NaN or infinity")
        else:
            seq.append_pending(token_id, position)
            is_eos = token_id in self.eos_token_ids and not seq.params.ignore_eos
            seq.has_end_token = is_eos or token_id in seq.stop_token_ids
            if seq.constraint is not None and not seq.constraint.accept(token_id):
                because = seq.constraint.error or f"token {token_id} is not allowed"
                self.finish(seq, "error", f"structured_outputs cannot go on: {because}", "request")
            elif seq.has_end_token or (seq.constraint is not None and seq.constraint.is_finished):
                self.finish(seq, "stop")
            elif len(seq.token_ids) - seq.num_prompt_tokens >= seq.max_tokens:
                self.finish(seq, "length")
        read(seq)

    def check_integrity(self) -> None:
        assert len(self.sequences) == len(self.waiting) + len(self.running), "a sequence is neither waiting nor running"
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING, f"sequence {seq.seq_id} runs with status {seq.status}"
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING, f"sequence {seq.seq_id} waits with status {seq.status}"
        self.kv.check_integrity(list(self.sequences.values()))


def _arrival(seq: Sequence) -> int:
    return seq.seq_id
