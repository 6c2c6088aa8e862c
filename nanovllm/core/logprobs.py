"""Log-probabilities of a step's tokens, on the way from the ranks to the requests that asked for them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np

from nanovllm.core.step_plan import StepPlan


class Logprob(NamedTuple):
    """The log-probability of a token at one position, by the model itself: before edits, temperature and filters."""

    logprob: float  # natural log
    rank: int  # 1 for the most likely token
    text: str | None  # the token's text; None without a tokenizer


# One position: token id -> Logprob. First the position's own token, then the most likely ones in order.
TokenLogprobs: TypeAlias = dict[int, Logprob]

_PART_POSITIONS = 100  # whose dicts are made at once
TextOf: TypeAlias = Callable[[int], str | None]  # the text of a token
Entry = TypeVar("Entry", bound=TokenLogprobs | None)


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

    def copy(self) -> "PositionLogprobs":
        return PositionLogprobs(*(array.copy() for array in self))

    def as_dicts(self, text_of: TextOf) -> list[TokenLogprobs]:
        """As users see them. Takes 10 us a position with 20 most likely tokens."""
        dicts = []
        for own_id, own_logprob, own_rank, top_ids, top_logprobs in zip(*(a.tolist() for a in self), strict=True):
            found = {own_id: Logprob(own_logprob, own_rank, text_of(own_id))}
            for rank, (token_id, logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
                found.setdefault(token_id, Logprob(logprob, rank, text_of(token_id)))
            dicts.append(found)
        return dicts


class LogprobList(Sequence[Entry]):
    """One entry for each of several tokens in a row.

    It holds arrays, and makes the dicts for whoever reads it, so that the engine's thread need not. Going through it
    makes a few at a time and keeps none; the first index makes and keeps all.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: list[Any] = list(entries)
        self._arrays: list[tuple[PositionLogprobs, TextOf]] = []  # of the tokens after these

    def add(self, positions: PositionLogprobs, text_of: TextOf) -> None:
        self._arrays.append((positions, text_of))

    def extend(self, other: "LogprobList[Entry]") -> None:
        """Append all of `other`."""
        if other._entries:
            self._entries, self._arrays = [*self, *other._entries], []
        self._arrays += other._arrays

    def __len__(self) -> int:
        return len(self._entries) + sum(len(positions.token_ids) for positions, _ in self._arrays)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._entries
        for positions, text_of in self._arrays:
            for start in range(0, len(positions.token_ids), _PART_POSITIONS):
                part: Iterable[Any] = positions.part(start, start + _PART_POSITIONS).as_dicts(text_of)
                yield from part

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        self._entries, self._arrays = list(self), []
        return self._entries[index]


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
