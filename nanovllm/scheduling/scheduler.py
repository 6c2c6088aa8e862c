"""Scheduler: decides which sequences run in the next step, and how many tokens of each. First come, first served.

It works on integers only. `schedule` plans a step, the engine runs it, and `commit` takes the tokens that it sampled.
The next step may be planned before these have arrived. A sampled token that has not arrived yet is *pending*: it has a
position but no id. Planning uses only what is certain without the id, namely whether a sequence has reached max_tokens.
An end token is noticed when it arrives, and anything that a later step has computed for that sequence is dropped.

With speculation a decoding sequence may run guesses behind its newest token, and the step samples after each of them.
`commit` keeps the sampled tokens up to the first that differs from the guess at its position: exactly those that the
sequence would have got without guesses. A sequence guesses only when its newest token has arrived (`needs_tokens`).
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from nanovllm.core.logit_edits import LogitEdits
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.core.step_limits import MAX_VERIFYING_ROWS
from nanovllm.core.step_plan import KVMoves, PromptScores, SamplingRow, SequenceStep, StepPlan
from nanovllm.core.support import MAX_DECODE_QUERIES
from nanovllm.kvcache.policy.base import KVCacheManager, PagedKeys
from nanovllm.sampling_params import INVALID_TOKEN
from nanovllm.speculation.drafters import NO_GUESSES, Guesses
from nanovllm.speculation.pace import Load, load_of
from nanovllm.speculation.speculator import Speculator
from nanovllm.speculation.verification import verified_tokens


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
    ) -> None:
        """`speculator`: None for no guesses. `max_step_rows`: the most tokens that a step can sample; by default
        `max_num_seqs`.
        """
        self.kv, self.speculator = kv, speculator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.max_step_rows = max_step_rows or max_num_seqs
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}  # all unfinished ones
        self.num_preemptions = 0
        self._placed: list[tuple[Sequence, int]] = []
        self._guesses: dict[int, Guesses] = {}  # by seq_id, in this step
        self._load = load_of(0, 0)  # of this step, if all running sequences decode in it
        self._budget = self._num_rows = 0  # left in this step: new tokens, tokens to sample

    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError if a request could never run. Changes nothing."""
        self.kv.check_fits(seq)

    def add(self, seq: Sequence) -> None:
        """Queue a request. Raises RequestError if it could never run."""
        self.check_fits(seq)
        self.waiting.append(seq)
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

    def finish(self, seq: Sequence, reason: str, error: str | None = None) -> None:
        """End a request. `error` says what happened if the reason is "error"."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self.kv.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.error = reason, error
        del self.sequences[seq.seq_id]
        if self.speculator is not None:
            self.speculator.forget(seq)

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None if no request is left, or if none can run before a pending token arrives."""
        self.kv.begin_step(self.running)
        self._placed = []
        self._guesses = {}
        self._budget, self._num_rows = self.max_num_batched_tokens, self.max_step_rows
        if self.speculator is not None:
            self._load = self._next_load()
        if self.chunked_prefill:
            if not self._place_running(self._can_run(self.running)):
                self._place_waiting()
        else:
            self._schedule_classic()
        if not self._placed:
            return None
        self._placed.sort(key=_launch_order)
        keys, moves = self.kv.finish_step(self._placed)
        return self._make_plan(keys, moves)

    def _schedule_classic(self) -> None:
        """Place prompts, whole if the budget and the slots allow. Decode only in steps where no prompt can run."""
        in_prefill = [seq for seq in self._can_run(self.running) if seq.num_uncomputed_tokens > 1]
        if not self._place_running(in_prefill):
            self._place_waiting(whole=True)
        if not self._placed:
            self._place_running(self._can_run(self.running))

    def _can_run(self, sequences: list[Sequence]) -> list[Sequence]:
        return [seq for seq in sequences if seq.num_output_tokens < seq.max_tokens and not seq.waits_for_token]

    def _place_running(self, sequences: list[Sequence]) -> bool:
        """Place running sequences in order of arrival. Returns whether one had to be preempted to make room."""
        preempted = False
        for i, seq in enumerate(sequences):
            if not self._budget or seq.status is not SequenceStatus.RUNNING:
                break  # the budget is used up, or this sequence and all after it were preempted
            num_known = min(seq.num_uncomputed_tokens, self._budget)
            guesses = self._guess(seq, num_others=len(sequences) - i - 1)
            wanted = num_known + len(guesses.token_ids)
            while not (num_tokens := self.kv.num_placeable(seq, wanted)):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is seq:
                    break
            if num_tokens:
                self._place(seq, num_tokens, guesses.first(num_tokens - num_known))
        return preempted

    def _guess(self, seq: Sequence, num_others: int) -> Guesses:
        """Guesses for a sequence that decodes, as many as are useful. Leaves room for `num_others` running sequences,
        and for those that wait.
        """
        if self.speculator is None or not self._can_guess(seq) or seq.num_pending_tokens:
            return NO_GUESSES
        num_left = seq.max_tokens - seq.num_output_tokens - 1  # after the token that this step samples anyway
        num_rows = self._num_rows - max(0, self.max_step_rows - MAX_VERIFYING_ROWS)
        room = min(self._budget, num_rows) - 1 - num_others - self._num_admissible
        guesses = self.speculator.guess(seq, min(num_left, room), self._load)
        must_know = seq.editor is not None and seq.editor.knows_all_but_last
        return guesses.without_drafts() if must_know else guesses

    @staticmethod
    def _can_guess(seq: Sequence) -> bool:
        """Whether the sequence decodes, and will get more than one token. Its newest token may be pending."""
        return seq.num_uncomputed_tokens == 1 and seq.max_tokens - seq.num_output_tokens > 1

    @property
    def _num_admissible(self) -> int:
        """The most waiting sequences that this step could admit."""
        return min(len(self.waiting), self.max_num_seqs - len(self.running))

    def _place_waiting(self, whole: bool = False) -> None:
        """Admit waiting sequences in order while there is room. `whole`: split only the first prompt of a step."""
        while self.waiting and self._budget and self._num_rows and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if seq.num_pending_tokens or not self.kv.can_admit(seq):
                return
            if whole and self._placed and seq.num_uncomputed_tokens > self._budget:
                return
            self.kv.admit(seq)
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = SequenceStatus.RUNNING
            self._place(seq, self.kv.num_placeable(seq, min(seq.num_uncomputed_tokens, self._budget)))

    def _place(self, seq: Sequence, num_tokens: int, guesses: Guesses = NO_GUESSES) -> None:
        assert num_tokens > 0, f"sequence {seq.seq_id} was admitted, but no token of it can be placed"
        num_guesses = len(guesses.token_ids)
        self.kv.place(seq, num_tokens, num_guesses)
        self._placed.append((seq, num_tokens))
        if num_guesses:
            self._guesses[seq.seq_id] = guesses
        self._budget -= num_tokens
        self._num_rows -= 1 + num_guesses

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.kv.preempt(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def needs_tokens(self) -> bool:
        """Whether the step in flight must be committed before the next one is planned: a sequence of it verifies
        guesses, or one wants to guess.
        """
        if self.speculator is None:
            return False
        if any(seq.num_pending_guesses for seq in self.running):
            return True
        num_rows = min(self.max_num_batched_tokens, self.max_step_rows, MAX_VERIFYING_ROWS)
        if num_rows <= len(self.running) + self._num_admissible:
            return False  # there is no room for guesses
        load = self._next_load()
        return any(self._can_guess(seq) and self.speculator.wants_to_guess(seq, load) for seq in self.running)

    def _next_load(self) -> Load:
        """That of a step in which all running sequences decode."""
        return load_of(len(self.running), sum(seq.num_computed_tokens for seq in self.running))

    def _make_plan(self, keys: list[PagedKeys], moves: KVMoves) -> StepPlan:
        """Make the frozen plan, and count its tokens as computed, except for guesses."""
        steps = []
        num_sampled = 0
        # Drafts run before the step's own pass: before its loads and copies, and their tokens take the place of pending
        # ones
        has_pending = any(seq.num_pending_tokens for seq, _ in self._placed)
        can_draft = not (moves.loads or moves.copies or has_pending)
        for (seq, num_tokens), paged in zip(self._placed, keys, strict=True):
            placed = self._guesses.get(seq.seq_id, NO_GUESSES)
            guesses = placed if can_draft else placed.without_drafts()
            num_dropped = len(placed.token_ids) - len(guesses.token_ids)
            start = seq.num_computed_tokens
            end = start + num_tokens - len(placed.token_ids)
            token_ids = seq.token_ids[start:end]
            previous_row = seq.pending_row if len(token_ids) < end - start else -1
            if previous_row >= 0:
                token_ids.append(-1)
            token_ids.extend(guesses.token_ids)
            samples = end == seq.num_tokens
            has_pending = previous_row >= 0
            step = SequenceStep(
                seq_id=seq.seq_id,
                token_ids=np.array(token_ids),
                position=start,
                num_prompt_tokens=seq.num_prompt_tokens,
                block_table=paged.block_table,
                num_paged_keys=paged.num_paged_keys - num_dropped,
                sampling=self._sampling_row(seq) if samples else None,
                previous_row=previous_row,
                num_guesses=len(guesses.token_ids),
                num_drafts=guesses.num_drafts,
                edits=self._edits(seq, has_pending, guesses) if samples else None,
                num_logprobs=seq.params.logprobs if samples else None,
                scores=self._prompt_scores(seq, start, end),
            )
            steps.append(step)
            seq.num_computed_tokens = end
            if samples:
                seq.num_pending_tokens += 1
                seq.pending_row = num_sampled
                seq.num_pending_guesses = step.num_guesses
                num_sampled += step.num_sampled
        return StepPlan(tuple(steps), moves)

    def _sampling_row(self, seq: Sequence) -> SamplingRow:
        p = seq.params
        return SamplingRow(p.temperature, max(p.top_k, 0), p.top_p, p.min_p, seq.seed, seq.num_tokens)

    @staticmethod
    def _edits(seq: Sequence, has_pending: bool, guesses: Guesses) -> LogitEdits | None:
        if seq.editor is None:
            return None
        return seq.editor.edits(seq.token_ids, has_pending=has_pending, guesses=guesses.token_ids)

    @staticmethod
    def _prompt_scores(seq: Sequence, start: int, end: int) -> PromptScores | None:
        """The prompt tokens whose log-probabilities a step of tokens start to end - 1 computes, if they are asked for.

        Tokens that are computed again after a preemption were scored before.
        """
        first, last = max(start + 1, seq.num_scored_tokens), min(end, seq.num_prompt_tokens - 1)
        if seq.params.prompt_logprobs is None or last < first:
            return None
        seq.num_scored_tokens = last + 1
        return PromptScores(first - 1 - start, np.array(seq.token_ids[first : last + 1]), seq.params.prompt_logprobs)

    # -- results -------------------------------------------------------------------------------------------------

    def commit(
        self, plan: StepPlan, token_ids: list[int], read: Callable[[Sequence], None] = lambda seq: None
    ) -> list[Sequence]:
        """Append the tokens that a step has sampled, as far as they are the sequences' own.

        `token_ids`: see StepPlan. `read` is called after each appended token, and may finish the sequence. Returns the
        sequences that got tokens, or that ended because theirs was invalid.
        """
        updated = []
        for step, tokens in zip(plan.sequences, verified_tokens(plan, token_ids), strict=True):
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
            self.finish(seq, "error", f"the model's logits for token {position} hold NaN or infinity")
        else:
            seq.append_pending(token_id, position)
            constraint = None if seq.editor is None else seq.editor.constraint
            is_eos = token_id in self.eos_token_ids and not seq.params.ignore_eos
            seq.has_end_token = is_eos or token_id in seq.stop_token_ids
            if constraint is not None and not constraint.accept(token_id):
                self.finish(seq, "error", f"token {token_id} does not match what structured_outputs asks for")
            elif seq.has_end_token or (constraint is not None and constraint.is_finished):
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


def _launch_order(placed: tuple[Sequence, int]) -> tuple[bool, bool, int]:
    """Single tokens, then a few tokens, then chunks, because each kind has its own kernel. Each is sorted longest
    context first: the GPU starts a kernel's programs in order, so the long ones start first and the short ones fill the
    gaps at the end.
    """
    seq, num_tokens = placed
    return num_tokens > 1, num_tokens > MAX_DECODE_QUERIES, -seq.num_computed_tokens - num_tokens
