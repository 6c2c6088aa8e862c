"""Log-probabilities of a step's tokens, on the way from the ranks to the requests that asked for them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from nanovllm.core.step_plan import StepPlan


class Logprob(NamedTuple):
    """The log-probability of a token at one position, by the model itself: before edits, temperature and filters."""

    logprob: float  # natural log
    rank: int  # 1 for the most likely token
    text: str | None  # the token's text; None without a tokenizer


# One position: token id -> Logprob. First the position's own token, then the most likely ones in order.
TokenLogprobs: TypeAlias = dict[int, Logprob]


class PositionLogprobs(NamedTuple):
    """N positions: their own tokens, and the K most likely ones of each. Logarithms are natural."""

    token_ids: np.ndarray  # int64 [N]
    logprobs: np.ndarray  # float32 [N]
    ranks: np.ndarray  # int64 [N], 1 for the most likely token
    top_ids: np.ndarray  # int64 [N, K], the most likely first
    top_logprobs: np.ndarray  # float32 [N, K]

    def part(self, start: int, end: int, num_top: int | None = None) -> "PositionLogprobs":
        """Positions start to end - 1, with the `num_top` most likely tokens of each, or all."""
        token_ids, logprobs, ranks, top_ids, top_logprobs = (array[start:end] for array in self)
        return PositionLogprobs(token_ids, logprobs, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top])

    def as_dicts(self, text_of: Callable[[int], str | None]) -> list[TokenLogprobs]:
        """As users see them. `text_of` is a token's text."""
        dicts = []
        for own_id, own_logprob, own_rank, top_ids, top_logprobs in zip(*(a.tolist() for a in self), strict=True):
            found = {own_id: Logprob(own_logprob, own_rank, text_of(own_id))}
            for rank, (token_id, logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
                found.setdefault(token_id, Logprob(logprob, rank, text_of(token_id)))
            dicts.append(found)
        return dicts


class StepLogprobs(NamedTuple):
    """Those of the tokens that a step has sampled, and of the prompt tokens that it has scored."""

    sampled: PositionLogprobs | None = None
    prompt: PositionLogprobs | None = None

    def by_sequence(self, plan: StepPlan) -> dict[int, PositionLogprobs]:
        """The sampled tokens' by seq_id, for the sequences that asked for them, in order of position."""
        if self.sampled is None:
            return {}
        found = {}
        first = 0
        for step in plan.sequences:
            if step.num_logprobs is not None:
                found[step.seq_id] = self.sampled.part(first, first + step.num_sampled, step.num_logprobs)
                first += step.num_sampled
        return found

    def of_prompts(self, plan: StepPlan) -> Iterator[tuple[int, PositionLogprobs]]:
        """The prompt tokens', with the seq_id of each sequence of which the step has scored some."""
        if self.prompt is None:
            return
        first = 0
        for step in plan.sequences:
            if step.scores is not None:
                end = first + len(step.scores.target_ids)
                yield step.seq_id, self.prompt.part(first, end, step.scores.num_logprobs)
                first = end


NO_LOGPROBS = StepLogprobs()
