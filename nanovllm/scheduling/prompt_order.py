"""In which order prompts share the budget of a step, and how much of it the oldest one is guaranteed.

A prompt's size is the number of tokens that it had to compute when it began to wait, without those in the prefix cache.
Sizes count by their magnitude: prompts of at most 1/SHORT_SHARE of a step are equal, and so are those between that and
twice as much, and so on. Equals are served in order of arrival, one after the other: to share a step among them would
end none of them sooner. A smaller prompt goes ahead of a larger one. So a short prompt is in the next step that is
planned, however many long ones arrived before it.

The oldest prompt is guaranteed half of what the step has for prompts, whatever its size. So it ends at most about twice
as late as alone, and then the next one is the oldest.
"""

from collections.abc import Iterable

from nanovllm.core.sequence import Sequence

SHORT_SHARE = 8


def size_class(seq: Sequence, step_tokens: int) -> int:
    """0 for a short prompt, and one more whenever the size doubles. `step_tokens`: the budget of a step."""
    return (max(0, seq.num_new_tokens - 1) * SHORT_SHARE // step_tokens).bit_length()


def in_order(prompts: Iterable[Sequence], step_tokens: int) -> list[Sequence]:
    """Smaller prompts first, and equals in order of arrival."""
    return sorted(prompts, key=lambda seq: (size_class(seq, step_tokens), seq.seq_id))


def oldest_of(prompts: Iterable[Sequence]) -> Sequence:
    return min(prompts, key=lambda seq: seq.seq_id)
