"""A step while it is being planned: what is placed in it, what room is left, and how prompts share that room."""

from collections.abc import Iterable, Iterator

import numpy as np

from nanovllm.core.logit_editor import LogitEdits
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.core.step_limits import MAX_DECODE_QUERIES
from nanovllm.core.step_plan import PromptScores, SequenceStep, StepPlan
from nanovllm.kvcache.policy.base import KVCacheManager, PagedKeys
from nanovllm.scheduling.step_bound import StepBound
from nanovllm.speculation.drafters import NO_GUESSES, Guesses

_PENDING = np.array([-1], dtype=np.int64)  # the new tokens of a sequence that decodes ahead of its newest token
_PENDING.flags.writeable = False


class PlannedStep:
    """Knows what is placed in the step so far, and what room is left."""

    def __init__(self, num_tokens: int, num_rows: int) -> None:
        self.budget, self.num_rows = num_tokens, num_rows  # left in this step: new tokens, tokens to sample
        self.admits = True  # whether waiting sequences may start in it
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
        # Drafts run before the step's own pass: before its loads and copies, and their tokens take the place of pending
        # ones
        has_pending = any(seq.num_pending_tokens for seq, _ in self._placed)
        can_draft = not (moves.loads or moves.copies or has_pending)
        steps, num_sampled = [], 0
        for (seq, num_tokens), paged in zip(self._placed, keys, strict=True):
            step = self._sequence_step(seq, num_tokens, paged, can_draft)
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
        guesses = placed if can_draft else placed.without_drafts()
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
            sampling=seq.sampling.at(seq.num_tokens) if samples else None,
            previous_row=seq.pending_row if has_pending else -1,
            num_guesses=len(guesses.token_ids),
            num_drafts=guesses.num_drafts,
            edits=_edits(seq, has_pending, guesses) if samples and seq.editor is not None else None,
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


def _edits(seq: Sequence, has_pending: bool, guesses: Guesses) -> LogitEdits | None:
    assert seq.editor is not None, f"sequence {seq.seq_id} leaves the logits as they are"
    return seq.editor.edits(seq.token_ids, has_pending=has_pending, guesses=guesses.token_ids)


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
    """

    def __init__(self, step_tokens: int, bound: StepBound | None) -> None:
        """`step_tokens`: the budget of a step. `bound`: None if steps may take any time."""
        self.bound, self._step_tokens = bound, step_tokens

    def size_class(self, seq: Sequence) -> int:
        """0 for a short prompt, and one more whenever the size doubles."""
        return (max(0, seq.num_queued_tokens - 1) * SHORT_SHARE // self._step_tokens).bit_length()

    def is_long(self, seq: Sequence) -> bool:
        return self.size_class(seq) > 0

    def in_order(self, prompts: Iterable[Sequence]) -> list[Sequence]:
        """Smaller prompts first, and equals in order of arrival."""
        return sorted(prompts, key=lambda seq: (self.size_class(seq), seq.seq_id))

    def turns(self, prompts: list[Sequence], step: PlannedStep, kv: KVCacheManager) -> Iterator[tuple[Sequence, int]]:
        """Each prompt, and how many tokens it may run in this step. It must be placed before the next one is asked for.

        `step`: holds the running answers already.
        """
        allowed = self._allowed(self.in_order(prompts), len(step), kv)
        if not allowed:
            return
        oldest = min(allowed, key=_arrival)
        num_left_to_oldest = min(oldest.num_uncomputed_tokens, (step.budget + 1) // 2)
        if oldest.status is SequenceStatus.WAITING:  # it is admitted first, so that nobody else takes its room
            num_ahead = sum(seq.num_queued_tokens for seq in allowed[: allowed.index(oldest)])
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
        long = prompts[len(short) :]
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


def _arrival(seq: Sequence) -> int:
    return seq.seq_id
