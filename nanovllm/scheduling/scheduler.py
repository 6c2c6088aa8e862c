"""Scheduler: decides which sequences run in the next step, and how many tokens of each. First come, first served.

It works on integers only. `schedule` plans a step, the engine runs it, and `commit` takes the tokens that it sampled.
The next step may be planned before these have arrived. A sampled token that has not arrived yet is *pending*: it has a
position but no id. Planning uses only what is certain without the id, namely whether a sequence has reached max_tokens.
An end token is noticed when it arrives, and anything that a later step has computed for that sequence is dropped.
"""

from collections import deque

import numpy as np

from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.core.step_plan import KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.kvcache.policy.base import KVCacheManager, PagedKeys
from nanovllm.sampling_params import INVALID_TOKEN


class Scheduler:
    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}  # all unfinished ones
        self.num_preemptions = 0
        self._placed: list[tuple[Sequence, int]] = []
        self._budget = 0

    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError if a request could never run. Changes nothing."""
        self.kv.check_fits(seq)

    def add(self, seq: Sequence) -> None:
        """Queue a request. Raises RequestError if it could never run."""
        self.check_fits(seq)
        self.waiting.append(seq)
        self.sequences[seq.seq_id] = seq

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

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None if no request is left, or if none can run before a pending token arrives."""
        self.kv.begin_step(self.running)
        self._placed = []
        self._budget = self.max_num_batched_tokens
        if self.chunked_prefill:
            if not self._place_running(self._can_run(self.running)):
                self._place_waiting()
        else:
            self._schedule_classic()
        if not self._placed:
            return None
        # Single tokens come first, and each kind is sorted longest context first: the GPU starts a kernel's programs
        # in order, so the long ones start first and the short ones fill the gaps at the end.
        self._placed.sort(key=lambda placed: (placed[1] > 1, -placed[0].num_computed_tokens - placed[1]))
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
        return [seq for seq in sequences if seq.num_output_tokens < seq.max_tokens]

    def _place_running(self, sequences: list[Sequence]) -> bool:
        """Place running sequences in order of arrival. Returns whether one had to be preempted to make room."""
        preempted = False
        for seq in sequences:
            if not self._budget or seq.status is not SequenceStatus.RUNNING:
                break  # the budget is used up, or this sequence and all after it were preempted
            wanted = min(seq.num_uncomputed_tokens, self._budget)
            while not (num_tokens := self.kv.num_placeable(seq, wanted)):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is seq:
                    break
            if num_tokens:
                self._place(seq, num_tokens)
        return preempted

    def _place_waiting(self, whole: bool = False) -> None:
        """Admit waiting sequences in order while there is room. `whole`: split only the first prompt of a step."""
        while self.waiting and self._budget and len(self.running) < self.max_num_seqs:
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

    def _place(self, seq: Sequence, num_tokens: int) -> None:
        assert num_tokens > 0, f"sequence {seq.seq_id} was admitted, but no token of it can be placed"
        self.kv.place(seq, num_tokens)
        self._placed.append((seq, num_tokens))
        self._budget -= num_tokens

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.kv.preempt(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _make_plan(self, keys: list[PagedKeys], moves: KVMoves) -> StepPlan:
        """Make the frozen plan, and count its tokens as computed."""
        steps = []
        num_sampled = 0
        for (seq, num_tokens), paged in zip(self._placed, keys, strict=True):
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
            token_ids = seq.token_ids[start:end]
            previous_row = seq.pending_row if len(token_ids) < num_tokens else -1
            if previous_row >= 0:
                token_ids.append(-1)
            samples = end == seq.num_tokens
            steps.append(
                SequenceStep(
                    seq_id=seq.seq_id,
                    token_ids=np.array(token_ids),
                    position=start,
                    num_prompt_tokens=seq.num_prompt_tokens,
                    block_table=paged.block_table,
                    num_paged_keys=paged.num_paged_keys,
                    sampling=self._sampling_row(seq) if samples else None,
                    previous_row=previous_row,
                )
            )
            seq.num_computed_tokens = end
            if samples:
                seq.num_pending_tokens += 1
                seq.pending_row = num_sampled
                num_sampled += 1
        return StepPlan(tuple(steps), moves)

    def _sampling_row(self, seq: Sequence) -> SamplingRow:
        p = seq.params
        return SamplingRow(p.temperature, max(p.top_k, 0), p.top_p, p.min_p, seq.seed, seq.num_tokens)

    # -- results -------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, token_ids: list[int]) -> list[Sequence]:
        """Append the tokens that a step has sampled: one for each sequence that samples, in the order of the plan.

        Returns the sequences that got a token, or that ended because theirs was invalid.
        """
        rows = [(step.seq_id, step.sampling.position) for step in plan.sequences if step.sampling is not None]
        updated = []
        for (seq_id, position), token_id in zip(rows, token_ids, strict=True):
            seq = self.sequences.get(seq_id)
            if seq is None:
                continue  # ended or aborted while this step ran
            updated.append(seq)
            if token_id == INVALID_TOKEN:
                self.finish(seq, "error", f"the model's logits for token {position} hold NaN or infinity")
                continue
            seq.append_pending(token_id, position)
            is_eos = token_id in self.eos_token_ids and not seq.params.ignore_eos
            if is_eos or token_id in seq.stop_token_ids:
                self.finish(seq, "stop")
            elif len(seq.token_ids) - seq.num_prompt_tokens >= seq.max_tokens:
                self.finish(seq, "length")
        return updated

    def check_integrity(self) -> None:
        assert len(self.sequences) == len(self.waiting) + len(self.running), "a sequence is neither waiting nor running"
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING, f"sequence {seq.seq_id} runs with status {seq.status}"
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING, f"sequence {seq.seq_id} waits with status {seq.status}"
        self.kv.check_integrity(list(self.sequences.values()))
