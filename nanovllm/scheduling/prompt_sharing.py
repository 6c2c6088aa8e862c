"""PromptSharing: in which order prompts share a step, and how many tokens each of them may run.

A prompt's size is the number of tokens that it had to compute when it began to wait, without those in the prefix cache.
Sizes count by their magnitude: prompts of at most 1/SHORT_SHARE of a step are equal, and so are those between that and
twice as much, and so on. Equals are served in order of arrival, one after the other: to share a step among them would
end none of them sooner. A smaller prompt goes ahead of a larger one. So a short prompt is in the next step that is
planned, however many long ones arrived before it.

The oldest prompt is guaranteed half of what the step has for prompts, whatever its size. So it ends at most about twice
as late as if it were served first, and then the next one is the oldest.
"""

from collections.abc import Iterable, Iterator

from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.kvcache.policy.base import KVCacheManager
from nanovllm.scheduling.planned_step import PlannedStep
from nanovllm.scheduling.step_bound import StepBound

SHORT_SHARE = 8


class PromptSharing:
    def __init__(self, step_tokens: int, bound: StepBound | None) -> None:
        """`step_tokens`: the budget of a step. `bound`: None if steps may take any time."""
        self.bound, self._step_tokens = bound, step_tokens

    def size_class(self, seq: Sequence) -> int:
        """0 for a short prompt, and one more whenever the size doubles."""
        return (max(0, seq.num_new_tokens - 1) * SHORT_SHARE // self._step_tokens).bit_length()

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
            num_ahead = sum(seq.num_new_tokens for seq in allowed[: allowed.index(oldest)])
            yield oldest, self._bounded(oldest, max(num_left_to_oldest, step.budget - num_ahead), is_oldest=True)
            allowed.remove(oldest)
            num_left_to_oldest = 0
        for seq in allowed:
            if seq is oldest:
                num_left_to_oldest = 0
            yield seq, self._bounded(seq, step.budget - num_left_to_oldest, is_oldest=seq is oldest)

    def _allowed(self, prompts: list[Sequence], num_answers: int, kv: KVCacheManager) -> list[Sequence]:
        """Those that may run in this step: all of them, or only the short ones."""
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
        position = max(seq.num_computed_tokens, seq.num_tokens - seq.num_new_tokens)  # after the hits it will have
        return min(num_tokens, self.bound.max_tokens(position, is_long=self.is_long(seq), is_oldest=is_oldest))

    def placed(self, seq: Sequence, num_tokens: int) -> None:
        """The step runs the next `num_tokens` tokens of this prompt."""
        if self.bound is not None:
            self.bound.chunk_placed(num_tokens, seq.num_computed_tokens, is_long=self.is_long(seq))


def _arrival(seq: Sequence) -> int:
    return seq.seq_id
