"""Scheduler: decides which sequences run in the next step, and how many tokens of each. First come, first served.

Prompts share a step by their size and age (PromptSharing), and by how long it may take (step_bound.py).

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
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import numpy as np

from nanovllm.kvcache.block_manager import KVCacheManager, PagedKeys
from nanovllm.plan.sequence import ErrorCause, Sequence, SequenceStatus
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES, MAX_VERIFYING_ROWS
from nanovllm.plan.step_plan import PromptScores, SequenceStep, StepPlan
from nanovllm.sampling_params import INVALID_TOKEN
from nanovllm.schedule.prompt_store import PromptStore
from nanovllm.schedule.prompts_underway import PromptsUnderway
from nanovllm.schedule.proposer import NO_GUESSES, Guesses, Proposer, StepDrafts
from nanovllm.schedule.step_bound import StepBound

_PENDING = np.array([-1], dtype=np.int64)  # the new tokens of a sequence that decodes ahead of its newest token
_PENDING.flags.writeable = False


class PlannedStep:
    """A step while it is being planned: what is placed in it so far, and what room is left."""

    def __init__(self, num_tokens: int, num_rows: int) -> None:
        self.budget, self.num_rows = num_tokens, num_rows  # left in this step: new tokens, tokens to sample
        self.admits = True  # waiting sequences may start in it
        self._placed: list[tuple[Sequence, int]] = []
        self._guesses: dict[int, Guesses] = {}  # by seq_id

    def __len__(self) -> int:
        """Number of sequences placed."""
        return len(self._placed)

    @property
    def has_room(self) -> bool:
        """True if one more sequence can be placed."""
        return bool(self.budget and self.num_rows)

    def place(self, kv: KVCacheManager, seq: Sequence, num_tokens: int, guesses: Guesses = NO_GUESSES) -> None:
        """Run the next `num_tokens` tokens of a sequence. The last of them are the guesses."""
        assert num_tokens > 0, f"sequence {seq.seq_id} was admitted, but no token of it can be placed"
        num_guesses = len(guesses.token_ids)
        kv.place(seq, num_tokens, num_guesses)
        self._placed.append((seq, num_tokens))
        if num_guesses:
            self._guesses[seq.seq_id] = guesses
        self.budget -= num_tokens
        self.num_rows -= 1 + num_guesses

    def finish(self, kv: KVCacheManager) -> StepPlan:
        """Make the frozen plan, and count its tokens as computed, except for guesses."""
        self._placed.sort(key=_launch_order)
        keys, moves = kv.finish_step(self._placed)
        # Drafts run before the step's own pass: drafted tokens take the place of pending ones
        has_pending = any(seq.num_pending_tokens for seq, _ in self._placed)
        steps, num_sampled = [], 0
        for (seq, num_tokens), paged in zip(self._placed, keys, strict=True):
            step = self._sequence_step(seq, num_tokens, paged, not has_pending and kv.can_draft(seq, moves))
            has_drafts = step.num_drafts > 0
            payloads = kv.companions.plan_sequence(
                seq, step.num_tokens, step.num_guesses, kv.gpu_block, has_drafts=has_drafts
            )
            if payloads:
                step = step._replace(payloads=payloads)
            steps.append(step)
            seq.num_computed_tokens += num_tokens - len(self._guesses_of(seq).token_ids)
            if step.sampling is not None:
                seq.num_pending_tokens += 1
                seq.pending_row = num_sampled
                seq.num_pending_guesses = step.num_guesses
                num_sampled += step.num_sampled
        return StepPlan(tuple(steps), moves)

    def _guesses_of(self, seq: Sequence) -> Guesses:
        return self._guesses.get(seq.seq_id, NO_GUESSES)

    def _sequence_step(self, seq: Sequence, num_tokens: int, paged: PagedKeys, can_draft: bool) -> SequenceStep:
        """Hot: once per sequence and step."""
        placed = self._guesses_of(seq)
        guesses = placed if can_draft or placed is NO_GUESSES else placed.without_drafts()
        num_dropped = len(placed.token_ids) - len(guesses.token_ids)
        start = seq.num_computed_tokens
        end = start + num_tokens - len(placed.token_ids)
        has_pending = end > len(seq.token_ids)
        samples = end == seq.num_tokens
        return SequenceStep(
            seq_id=seq.seq_id,
            token_ids=_token_ids(seq, start, end, guesses.token_ids),
            position=start,
            num_prompt_tokens=seq.num_prompt_tokens,
            block_table=paged.block_table,
            num_paged_keys=paged.num_paged_keys - num_dropped,
            sampling=seq.sampling if samples else None,
            previous_row=seq.pending_row if has_pending else -1,
            num_guesses=len(guesses.token_ids),
            num_drafts=guesses.num_drafts,
            edits=seq.editor.edits(seq.token_ids, has_pending=has_pending, guesses=guesses.token_ids)
            if samples
            else None,
            num_logprobs=seq.params.logprobs if samples else None,
            scores=None if seq.params.prompt_logprobs is None else _prompt_scores(seq, start, end),
        )


def _token_ids(seq: Sequence, start: int, end: int, guesses: tuple[int, ...]) -> np.ndarray:
    """Tokens start to end - 1, the last of which may be pending, and guesses."""
    if start == len(seq.token_ids) and not guesses:
        return _PENDING
    token_ids = seq.token_ids[start:end]
    if end > len(seq.token_ids):
        token_ids.append(-1)
    token_ids.extend(guesses)
    return np.array(token_ids)


def _prompt_scores(seq: Sequence, start: int, end: int) -> PromptScores | None:
    """The prompt tokens whose log-probabilities a step of tokens start to end - 1 computes.

    Tokens that are computed again after a preemption were scored before.
    """
    assert seq.params.prompt_logprobs is not None, f"sequence {seq.seq_id} asks for no scores"
    first, last = max(start + 1, seq.num_scored_tokens), min(end, seq.num_prompt_tokens - 1)
    if last < first:
        return None
    seq.num_scored_tokens = last + 1
    return PromptScores(first - 1 - start, np.array(seq.token_ids[first : last + 1]), seq.params.prompt_logprobs)


def _launch_order(placed: tuple[Sequence, int]) -> tuple[bool, bool, int]:
    """Single tokens, then a few tokens, then chunks, because each kind has its own kernel. Each is sorted longest
    context first: the GPU starts a kernel's programs in order, so the long ones start first and the short ones fill the
    gaps at the end.
    """
    seq, num_tokens = placed
    return num_tokens > 1, num_tokens > MAX_DECODE_QUERIES, -seq.num_computed_tokens - num_tokens


SHORT_SHARE = 8


class PromptSharing:
    """Decides in which order prompts share a step, and how many tokens each of them may run.

    A prompt's size is the number of tokens that it had to compute when it began to wait, without those in the prefix
    cache. Sizes count by their magnitude: prompts of at most 1/SHORT_SHARE of a step are equal, and so are those
    between that and twice as much, and so on. Equals are served in order of arrival, one after the other: sharing a
    step finishes none of them sooner. A smaller prompt goes ahead of a larger one. So a short prompt is in the next
    step that is planned, however many long ones arrived before it.

    The oldest prompt is guaranteed half of what the step has for prompts, whatever its size. So it ends at most about
    twice as late as if it were served first, and then the next one is the oldest.

    If a waiting prompt has a leader (prompts_underway.py), the leader goes directly before it, and has its guarantee.
    """

    def __init__(self, step_tokens: int, bound: StepBound | None) -> None:
        """`step_tokens`: the budget of a step. `bound`: None if steps may take any time."""
        self.bound, self._step_tokens = bound, step_tokens

    def size_class(self, seq: Sequence) -> int:
        """0 for a short prompt, and one more whenever the size doubles."""
        return (max(0, seq.num_queued_tokens - 1) * SHORT_SHARE // self._step_tokens).bit_length()

    def is_long(self, seq: Sequence) -> bool:
        return self.size_class(seq) > 0

    def in_order(self, prompts: list[Sequence], leaders: Mapping[int, Sequence]) -> list[Sequence]:
        """Smaller prompts first, and equals in order of arrival. `leaders`: see turns."""
        places = {seq.seq_id: (self.size_class(seq), seq.seq_id, 1) for seq in prompts}
        for seq_id, leader in leaders.items():
            places[leader.seq_id] = min(places[leader.seq_id], (*places[seq_id][:2], 0))
        return sorted(prompts, key=lambda seq: places[seq.seq_id])

    def turns(
        self, prompts: list[Sequence], step: PlannedStep, kv: KVCacheManager, leaders: Mapping[int, Sequence]
    ) -> Iterator[tuple[Sequence, int]]:
        """Each prompt, and how many tokens it may run in this step. It must be placed before the next one is asked for.

        `step`: holds the running answers already. `leaders`: among `prompts`, by the seq_id of prompts that wait.
        """
        allowed = self._allowed(self.in_order(prompts, leaders), len(step), kv)
        if not allowed:
            return
        oldest = min(allowed, key=_arrival)
        leader = leaders.get(oldest.seq_id, oldest)
        oldest = leader if leader in allowed else oldest
        num_left_to_oldest = min(oldest.num_uncomputed_tokens, (step.budget + 1) // 2)
        if oldest.status is SequenceStatus.WAITING:  # it is admitted first, so that nobody else takes its room
            ahead = allowed[: allowed.index(oldest)]
            num_ahead = sum(seq.num_queued_tokens for seq in ahead if seq.seq_id not in leaders)
            yield oldest, self._bounded(oldest, max(num_left_to_oldest, step.budget - num_ahead), is_oldest=True)
            allowed.remove(oldest)
            num_left_to_oldest = 0
        for seq in allowed:
            if seq is oldest:
                num_left_to_oldest = 0
            yield seq, self._bounded(seq, step.budget - num_left_to_oldest, is_oldest=seq is oldest)

    def _allowed(self, prompts: list[Sequence], num_answers: int, kv: KVCacheManager) -> list[Sequence]:
        """Return the prompts that may run in this step: all of them, or only the short ones."""
        if self.bound is None:
            return prompts
        short = [seq for seq in prompts if not self.is_long(seq)]
        long = [seq for seq in prompts if self.is_long(seq)]
        num_missing_tokens = kv.num_missing_tokens(min(long, key=_arrival)) if long else 0
        self.bound.begin_step(num_answers + len(short), len(long), num_missing_tokens)
        return prompts if self.bound.runs_long_prompts else short

    def _bounded(self, seq: Sequence, num_tokens: int, is_oldest: bool) -> int:
        if self.bound is None:
            return num_tokens
        position = max(seq.num_computed_tokens, seq.num_tokens - seq.num_queued_tokens)  # after the hits it will have
        return min(num_tokens, self.bound.max_tokens(position, is_long=self.is_long(seq), is_oldest=is_oldest))

    def placed(self, seq: Sequence, num_tokens: int) -> None:
        """The step runs the next `num_tokens` tokens of this prompt."""
        if self.bound is not None:
            self.bound.chunk_placed(num_tokens, seq.num_computed_tokens, is_long=self.is_long(seq))


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
        """`speculator`: where guesses come from; by default there are none. `max_step_rows`: the most tokens that a
        step can sample; by default `max_num_seqs`. `step_bound`: None for chunks as long as the budget; not used with
        `chunked_prefill` off. `store`: keeps prompts outside of memory; by default, none does.
        """
        self.kv, self.speculator, self.store = kv, speculator or Proposer(), store or PromptStore()
        self.sharing = PromptSharing(max_num_batched_tokens, step_bound)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.max_step_rows = max_step_rows or max_num_seqs
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: list[Sequence] = []  # in order of arrival, preempted ones too
        self.running: list[Sequence] = []  # in order of arrival
        self.sequences: dict[int, Sequence] = {}  # all unfinished ones
        self._underway = PromptsUnderway(kv)
        self.num_preemptions = 0
        self._has_new_document = False  # what waiting prompts begin with was computed since hits were last looked up
        self.waits_for_masks = False  # the last plan left out a sequence for that reason
        self._step = PlannedStep(0, 0)  # the one being planned
        self._drafts = StepDrafts(self.speculator, self.max_num_batched_tokens, self.max_step_rows)

    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError if a request could never run. Changes nothing."""
        self.kv.check_fits(seq)

    def add(self, seq: Sequence) -> None:
        """Queue a request that `check_fits` has accepted."""
        self.sequences[seq.seq_id] = seq
        if not self.store.wait_for_load(seq):
            self._queue(seq)
        self.speculator.add(seq)

    def _queue(self, seq: Sequence) -> None:
        """Let a sequence wait for its admission."""
        self._expect_hits(seq)
        insort(self.waiting, seq, key=_arrival)

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
        """End a request. `error` and `cause` say what happened, and whose fault it is, if the reason is "error"."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._underway.remove(seq)
            self.store.store(seq)
        elif not self.store.forget(seq):
            self._leave_queue(seq)
        self.kv.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.error, seq.error_cause = reason, error, cause
        del self.sequences[seq.seq_id]
        self.speculator.forget(seq)

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None if no request is left, or if none can run before a pending token arrives."""
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
            self._place_prompt(seq, num_tokens)
            self.sharing.placed(seq, num_tokens)
            self._has_new_document |= self.sharing.is_long(seq) and num_tokens == seq.num_uncomputed_tokens

    def _place_prompt(self, seq: Sequence, num_tokens: int) -> None:
        self._step.place(self.kv, seq, num_tokens)
        self._underway.placed(seq, num_tokens)

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
            self._place_prompt(seq, num_tokens)
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
        guesses = self._drafts.guess(seq, self._step.budget, self._step.num_rows, num_others)
        if num_tokens := self._make_room(seq, num_known + len(guesses.token_ids)):
            self._step.place(self.kv, seq, num_tokens, guesses.first(num_tokens - num_known))
            if seq.num_uncomputed_tokens > 1:
                self._underway.placed(seq, num_tokens)

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

    def _count_admissible(self) -> int:
        """Count the waiting sequences that this step could admit: none if the first has to wait, because no sequence
        overtakes it.
        """
        if not self.waiting or not self._can_admit(self.waiting[0]):
            return 0
        most = min(self.max_num_seqs - len(self.running), MAX_VERIFYING_ROWS)  # more leave no room for guesses
        return sum(self._can_admit(seq) for seq in islice(self.waiting, most))

    def _can_admit(self, seq: Sequence) -> bool:
        """Return True if a waiting sequence may start now. None may in a step that preempts."""
        if not self._step.admits or len(self.running) >= self.max_num_seqs:
            return False
        if not self.store.may_overtake(seq):
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
        self._underway.remove(seq)
        self.kv.preempt(seq)
        seq.status = SequenceStatus.WAITING
        self._queue(seq)
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
        """Return True if the step in flight must be committed before the next step is planned."""
        return self._drafts.need_tokens(self.running, len(self.waiting))

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
            if len(seq.token_ids) == seq.num_prompt_tokens:
                self.store.store(seq)
            if step.num_guesses:
                self.speculator.verified(seq, step.num_guesses, tokens)
            for i, token_id in enumerate(tokens):
                if i > 0:  # the token before was guessed, so its K and V are there already
                    if seq.status is not SequenceStatus.RUNNING:
                        break
                    self.kv.accept(seq)
                    seq.num_pending_tokens += 1
                self._append(seq, token_id, step.sampled_position + i, read)
        return updated

    def _append(self, seq: Sequence, token_id: int, position: int, read: Callable[[Sequence], None]) -> None:
        """Append a token, and end the sequence if it is the last one."""
        if token_id == INVALID_TOKEN:
            if seq.editor.forbids_all(seq.token_ids):
                self.finish(seq, "error", f"the request's parameters forbid every token {position}", "request")
            else:
                self.finish(seq, "error", f"the model's logits for token {position} hold NaN or infinity")
        else:
            seq.append_pending(token_id, position)
            is_eos = token_id in self.eos_token_ids and not seq.params.ignore_eos
            seq.has_end_token = is_eos or token_id in seq.stop_token_ids
            constraint = seq.constraint
            if constraint is not None and not constraint.accept(token_id):
                because = constraint.error or f"token {token_id} is not allowed"
                self.finish(seq, "error", f"structured_outputs cannot go on: {because}", "request")
            elif seq.has_end_token or (constraint is not None and constraint.is_finished):
                self.finish(seq, "stop")
            elif len(seq.token_ids) - seq.num_prompt_tokens >= seq.max_tokens:
                self.finish(seq, "length")
        read(seq)


def _arrival(seq: Sequence) -> int:
    return seq.seq_id
