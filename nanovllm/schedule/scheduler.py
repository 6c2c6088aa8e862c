"""Scheduler: decides which sequences run in the next step, and how many tokens of each. First come, first served.

Prompts share a step by their size and age (prompts.py), and by how long the step may take (step_bound.py).

The scheduler works on integers only. `schedule` plans a step, the engine runs the step, and `commit` takes the tokens
that the step sampled. The next step may be planned before these tokens have arrived. A sampled token that has not
arrived yet is *pending*: it has a position but no id. Planning uses only what is certain without the id, namely whether
a sequence has reached max_tokens. An end token is noticed when it arrives, and anything that a later step has computed
for that sequence is dropped.

With speculation, draft tokens may follow the newest token of a decoding sequence, and the step samples after each draft
token. `commit` keeps the sampled tokens up to the first that differs from the draft token at its position. The kept
tokens are exactly the tokens that the sequence would have got without draft tokens. A sequence gets draft tokens only
once its newest token has arrived (`needs_tokens`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import islice

from nanovllm.kvcache.block_manager import KVCacheManager
from nanovllm.plan.sequence import ErrorCause, Sequence, SequenceStatus
from nanovllm.plan.step_limits import MAX_VERIFYING_ROWS
from nanovllm.plan.step_plan import StepPlan
from nanovllm.sampling_params import INVALID_TOKEN
from nanovllm.schedule.planned_step import PlannedStep, StepDrafts
from nanovllm.schedule.prompts import PromptSharing, PromptsUnderway, arrival
from nanovllm.schedule.seams import PromptStore, Proposer
from nanovllm.schedule.step_bound import StepBound


class Arrivals(list[Sequence]):
    """Sequences in order of arrival."""

    def add(self, seq: Sequence) -> None:
        insort(self, seq, key=arrival)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence, without a search through thousands of others."""
        place = bisect_left(self, arrival(seq), key=arrival)
        assert self[place] is seq, f"sequence {seq.seq_id} is not where it should be in the queue"
        del self[place]


class Scheduler:
    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        eos_token_ids: tuple[int, ...] = (),
        speculator: Proposer | None = None,
        max_step_rows: int | None = None,
        step_bound: StepBound | None = None,
        store: PromptStore | None = None,
    ) -> None:
        """`speculator`: proposes draft tokens; by default there are none. `max_step_rows`: the most tokens that a step
        can sample; by default `max_num_seqs`. `step_bound`: bounds the duration of steps, or None for chunks as long as
        the budget; unused without `chunked_prefill`. `store`: stores prompts outside of memory; by default, none does.
        """
        self.kv, self.speculator, self.store = kv, speculator or Proposer(), store or PromptStore()
        self.sharing = PromptSharing(max_num_batched_tokens, step_bound)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.max_step_rows = max_step_rows or max_num_seqs
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting = Arrivals()  # preempted sequences, too
        self.running = Arrivals()
        self.sequences: dict[int, Sequence] = {}  # all unfinished ones
        self._underway = PromptsUnderway(kv)
        self.num_preemptions = 0
        self._has_new_document = False  # what waiting prompts begin with was computed since hits were last looked up
        self.waits_for_masks = False  # the last plan left out a sequence for that reason
        self._step = PlannedStep(0, 0)  # the one being planned
        self._drafts = StepDrafts(self.speculator, self.max_num_batched_tokens, self.max_step_rows)

    def add(self, seq: Sequence) -> None:
        """Queue a request that KVCacheManager.check_fits has accepted."""
        self.sequences[seq.seq_id] = seq
        if not self.store.wait_for_load(seq):
            self._queue(seq)
        self.speculator.add(seq)

    def _queue(self, seq: Sequence) -> None:
        """Let a sequence wait for its admission."""
        self._expect_hits(seq)
        self.waiting.add(seq)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for their admission, or for a load before it."""
        return len(self.waiting) + self.store.num_waiting

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
        """End a request. If the reason is "error", `error` says what happened, and `cause` what is to blame."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._underway.remove(seq)
            self.store.store(seq)
        elif not self.store.forget(seq):
            self.waiting.remove(seq)
        self.kv.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.error, seq.error_cause = reason, error, cause
        del self.sequences[seq.seq_id]
        self.speculator.forget(seq)

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Returns None if no request is left, or if none can run before a pending token arrives."""
        for seq in self.store.take_ready():
            self._queue(seq)
        self.kv.begin_step(self.running)
        self._underway.begin_step()
        self._step = PlannedStep(self.max_num_batched_tokens, self.max_step_rows)
        if self.speculator.can_propose:
            self._drafts.begin_step(self.running, self._count_admissible())
        if self.chunked_prefill:
            self._schedule_mixed()
        else:
            self._schedule_classic()
        # The followers' hits are longer now, even of prompts that had no turn
        self._has_new_document |= self._underway.serve_followers(islice(self.waiting, self.max_num_seqs))
        step, self._step = self._step, PlannedStep(0, 0)
        return step.finish(self.kv) if len(step) else None

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
            # While a prompt runs, the hits of a waiting prompt may grow with each chunk; then it waits for all of them
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
        """Place chunks of running and waiting prompts. No prompt overtakes a prompt that lacks room."""
        has_room = True
        for seq, max_tokens in self.sharing.turns(prompts, self._step, self.kv, self._underway.leaders(prompts)):
            if max_tokens <= 0 or not self._step.has_room:
                continue
            if seq.status is SequenceStatus.WAITING:
                head = self.waiting[0]
                has_room = has_room and self._can_admit(head) and (seq is head or self._can_admit(seq))
                if not has_room or self._underway.waits_for_leader(seq, max_tokens):
                    continue
                self._admit(seq)
            num_tokens = self.kv.num_placeable(seq, min(seq.num_uncomputed_tokens, max_tokens))
            self._step.place(self.kv, seq, num_tokens)
            self._underway.placed(seq, num_tokens)
            self.sharing.placed(seq, num_tokens)
            self._has_new_document |= self.sharing.is_long(seq) and num_tokens == seq.num_uncomputed_tokens

    def _schedule_classic(self) -> None:
        """Place prompts, whole if the budget and the slots allow. Decode only in steps where no prompt can run."""
        self._place_running([seq for seq in self._can_run(self.running) if seq.num_uncomputed_tokens > 1])
        num_followers = 0
        while len(self.waiting) > num_followers and self._step.has_room:
            seq = self.waiting[num_followers]
            if not self._can_admit(seq):
                break
            if self._underway.waits_for_leader(seq, self._step.budget):
                num_followers += 1
                continue
            if len(self._step) and seq.num_uncomputed_tokens > self._step.budget:
                break  # only the first prompt of a step is split
            self._admit(seq)
            num_tokens = self.kv.num_placeable(seq, min(seq.num_uncomputed_tokens, self._step.budget))
            self._step.place(self.kv, seq, num_tokens)
            self._underway.placed(seq, num_tokens)
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
        """Place the next tokens of a running sequence, and draft tokens that leave room for `num_others` sequences."""
        num_known = min(seq.num_uncomputed_tokens, self._step.budget)
        guesses = self._drafts.guess(seq, self._step.budget, self._step.num_rows, num_others)
        if num_tokens := self._make_room(seq, num_known + len(guesses.token_ids)):
            self._step.place(self.kv, seq, num_tokens, guesses.first(num_tokens - num_known))
            if seq.num_uncomputed_tokens > 1:
                self._underway.placed(seq, num_tokens)

    def _make_room(self, seq: Sequence, num_tokens: int) -> int:
        """Count the sequence's next tokens for which there is room. If there is none, preempt the newest sequences
        first. Returns 0 if the sequence itself had to be preempted.
        """
        while not (num_placeable := self.kv.num_placeable(seq, num_tokens)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                break
        return num_placeable

    def _count_admissible(self) -> int:
        """Count the waiting sequences that this step could admit: none if the first has to wait, because no sequence
        overtakes it.
        """
        if not self.waiting or not self._can_admit(self.waiting[0]):
            return 0
        most = min(self.max_num_seqs - len(self.running), MAX_VERIFYING_ROWS)  # more leave no room for draft tokens
        return sum(self._can_admit(seq) for seq in islice(self.waiting, most))

    def _can_admit(self, seq: Sequence) -> bool:
        """Return True if a waiting sequence may start now. None may in a step that preempts."""
        if not self._step.admits or len(self.running) >= self.max_num_seqs:
            return False
        if not self.store.may_overtake(seq):
            return False
        return not seq.num_pending_tokens and self.kv.can_admit(seq)

    def _admit(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.kv.admit(seq)
        self.running.add(seq)
        seq.status = SequenceStatus.RUNNING
        seq.num_queued_tokens = seq.num_uncomputed_tokens

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._underway.remove(seq)
        self.kv.preempt(seq)
        seq.status = SequenceStatus.WAITING
        self._queue(seq)
        self._step.admits = False
        self.num_preemptions += 1

    def _expect_hits(self, seq: Sequence) -> None:
        """Note how much a waiting sequence would have to compute if it were admitted now."""
        seq.num_queued_tokens = seq.num_tokens - self.kv.num_known_tokens(seq)

    def needs_tokens(self) -> bool:
        """Return True if the step in flight must be committed before the next step is planned."""
        return self._drafts.need_tokens(self.running, len(self.waiting))

    # -- results -------------------------------------------------------------------------------------------------

    def commit(
        self, plan: StepPlan, token_ids: list[int], read: Callable[[Sequence], None] = lambda seq: None
    ) -> list[Sequence]:
        """Append each sequence's verified tokens from a finished step.

        `token_ids`: see StepPlan.verified_tokens. `read` is called after each appended token, and may finish the
        sequence. Returns the sequences that got tokens, or that ended because their token was invalid.
        """
        updated = []
        for step, tokens in zip(plan.sequences, plan.verified_tokens(token_ids), strict=True):
            seq = self.sequences.get(step.seq_id)
            if seq is None or step.sampling is None:
                continue  # ended or aborted while this step ran, or nothing is sampled
            updated.append(seq)
            seq.num_pending_guesses = 0
            if len(seq.token_ids) == seq.num_prompt_tokens:
                self.store.store(seq)
            if step.num_guesses:
                self.speculator.verified(seq, step.num_guesses, tokens)
            for i, token_id in enumerate(tokens):
                if i > 0:  # the token before was a draft token, so its K and V are there already
                    if seq.status is not SequenceStatus.RUNNING:
                        break
                    self.kv.accept(seq)
                    seq.num_pending_tokens += 1
                ending = append_token(seq, token_id, step.sampled_position + i, self.eos_token_ids)
                if ending is not None:
                    self.finish(seq, *ending)
                read(seq)
        return updated


def append_token(
    seq: Sequence, token_id: int, position: int, eos_token_ids: frozenset[int]
) -> tuple[str, str | None, ErrorCause] | None:
    """Append a token that a step has sampled. If the answer ends with the token, return the arguments of
    Scheduler.finish. An invalid token ends the answer and is not appended.
    """
    if token_id == INVALID_TOKEN:
        if seq.editor.forbids_all(seq.token_ids):
            return "error", f"the request's parameters forbid every token {position}", "request"
        return "error", f"the model's logits for token {position} hold NaN or infinity", "engine"
    seq.append_pending(token_id, position)
    is_eos = token_id in eos_token_ids and not seq.params.ignore_eos
    seq.has_end_token = is_eos or token_id in seq.stop_token_ids
    constraint = seq.constraint
    if constraint is not None and not constraint.accept(token_id):
        because = constraint.error or f"token {token_id} is not allowed"
        return "error", f"structured_outputs cannot go on: {because}", "request"
    if seq.has_end_token or (constraint is not None and constraint.is_finished):
        seq.stop_reason = token_id if seq.has_end_token and not is_eos else None
        return "stop", None, "engine"
    if len(seq.token_ids) - seq.num_prompt_tokens >= seq.max_tokens:
        return "length", None, "engine"
    return None
