"""PlannedStep: a step while the scheduler plans it. StepDrafts: which of its sequences get draft tokens."""

from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.kvcache.block_manager import KVCacheManager, PagedKeys
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES, MAX_VERIFYING_ROWS
from nanovllm.plan.step_plan import PromptScores, SequenceStep, StepPlan
from nanovllm.schedule.seams import NO_GUESSES, Guesses, Load, Proposer, load_of

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
        """Run the next `num_tokens` tokens of a sequence, of which the last are draft tokens."""
        assert num_tokens > 0, f"sequence {seq.seq_id} was admitted, but no token of it can be placed"
        num_guesses = len(guesses.token_ids)
        kv.place(seq, num_tokens, num_guesses)
        self._placed.append((seq, num_tokens))
        if num_guesses:
            self._guesses[seq.seq_id] = guesses
        self.budget -= num_tokens
        self.num_rows -= 1 + num_guesses

    def finish(self, kv: KVCacheManager) -> StepPlan:
        """Make the frozen plan, and count its tokens as computed, except draft tokens."""
        self._placed.sort(key=_launch_order)
        keys, moves = kv.finish_step(self._placed)
        # Drafts run before the step's own pass: drafted tokens take the place of pending tokens
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
        samples, edits = end == seq.num_tokens, None
        if samples:
            edits = seq.editor.edits(seq.token_ids, has_pending=has_pending, guesses=guesses.token_ids)
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
            edits=edits,
            num_logprobs=seq.params.logprobs if samples else None,
            scores=None if seq.params.prompt_logprobs is None else _prompt_scores(seq, start, end),
        )


def _token_ids(seq: Sequence, start: int, end: int, guesses: tuple[int, ...]) -> np.ndarray:
    """Return tokens start to end - 1, the last of which may be pending, and draft tokens."""
    if start == len(seq.token_ids) and not guesses:
        return _PENDING
    token_ids = seq.token_ids[start:end]
    if end > len(seq.token_ids):
        token_ids.append(-1)
    token_ids.extend(guesses)
    return np.array(token_ids)


def _prompt_scores(seq: Sequence, start: int, end: int) -> PromptScores | None:
    """Return the prompt tokens whose log-probabilities a step of tokens start to end - 1 computes.

    Tokens that are computed again after a preemption were scored before.
    """
    assert seq.params.prompt_logprobs is not None, f"sequence {seq.seq_id} asks for no scores"
    first, last = max(start + 1, seq.num_scored_tokens), min(end, seq.num_prompt_tokens - 1)
    if last < first:
        return None
    seq.num_scored_tokens = last + 1
    return PromptScores(first - 1 - start, np.array(seq.token_ids[first : last + 1]), seq.params.prompt_logprobs)


def _launch_order(placed: tuple[Sequence, int]) -> tuple[bool, bool, int]:
    """Return the key that sorts a step: single tokens, then a few tokens, then chunks, because each kind has its own
    kernel. Each kind is sorted by context, longest first: the GPU starts a kernel's programs in order, so the long
    programs start first and the short programs fill the gaps at the end.
    """
    seq, num_tokens = placed
    return num_tokens > 1, num_tokens > MAX_DECODE_QUERIES, -seq.num_computed_tokens - num_tokens


class StepDrafts:
    """Decides which sequences of a step get draft tokens, and for how many there is room.

    A sequence gets draft tokens only if its newest token has arrived.
    """

    def __init__(self, proposer: Proposer, max_tokens: int, max_rows: int) -> None:
        """`max_tokens`: most new tokens of a step. `max_rows`: most tokens that a step samples."""
        self._proposer, self._max_tokens, self._max_rows = proposer, max_tokens, max_rows
        self._load = load_of(0, 0)  # the step's load if all running sequences decode in it
        self._num_admissible = 0

    def begin_step(self, running: Seq[Sequence], num_admissible: int) -> None:
        """`num_admissible`: waiting sequences that the step could admit. Draft tokens leave rows for them."""
        self._load, self._num_admissible = _load_of_all(running), num_admissible

    def guess(self, seq: Sequence, num_tokens: int, num_rows: int, num_others: int) -> Guesses:
        """Return as many draft tokens as are useful, if any. `num_tokens`, `num_rows`: what the step has left, of which
        `num_others` other running sequences get their share.
        """
        if not self._proposer.can_propose or not _can_guess(seq) or seq.num_pending_tokens:
            return NO_GUESSES
        num_left = seq.max_tokens - seq.num_output_tokens - 1  # after the token that this step samples anyway
        num_rows -= max(0, self._max_rows - MAX_VERIFYING_ROWS)
        room = min(num_tokens, num_rows) - 1 - num_others - self._num_admissible
        return self._proposer.guess(seq, min(num_left, room), self._load)

    def need_tokens(self, running: Seq[Sequence], num_waiting: int) -> bool:
        """Return True if the step in flight must be committed before the next step is planned: a running sequence
        verifies draft tokens in it, or would get some in the next step.
        """
        if not self._proposer.can_propose:
            return False
        if any(seq.num_pending_guesses for seq in running):
            return True
        num_rows = min(self._max_tokens, self._max_rows, MAX_VERIFYING_ROWS)
        num_admissible = min(self._num_admissible, num_waiting)  # the step before may have admitted some
        if num_rows <= len(running) + num_admissible:
            return False  # there is no room for draft tokens
        load = _load_of_all(running)
        return any(_can_guess(seq) and self._proposer.wants_to_guess(seq, load) for seq in running)


def _load_of_all(running: Seq[Sequence]) -> Load:
    """Return the load of a step in which all running sequences decode."""
    return load_of(len(running), sum(seq.num_computed_tokens for seq in running))


def _can_guess(seq: Sequence) -> bool:
    """Return True if the sequence decodes, will get more than one token, and has no grammar with slow masks. Its newest
    token may be pending.
    """
    is_slow = seq.constraint is not None and seq.constraint.is_slow
    return seq.num_uncomputed_tokens == 1 and seq.max_tokens - seq.num_output_tokens > 1 and not is_slow
