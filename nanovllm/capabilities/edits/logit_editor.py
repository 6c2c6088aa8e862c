"""LogitEditor: makes the edits of one request's logits, step by step (see plan/logit_edits.py)."""

import copy
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.capabilities.edits.bad_words import BadWords
from nanovllm.plan.logit_edits import (
    NO_EDITS,
    NO_PENALTIES,
    NO_RULES,
    AnswerRules,
    Biases,
    Editor,
    LogitEdits,
    Penalties,
    RowEdits,
    TokenMask,
    token_mask,
)
from nanovllm.sampling_params import SamplingParams

_FORBID = float("-inf")


class LogitEditor:
    """Holds the biases, the bad words, the counts of the answer's tokens and the constraint of one request."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Seq[int],
        end_token_ids: Iterable[int],
        vocab_size: int,
        rules: AnswerRules = NO_RULES,
    ) -> None:
        """end_token_ids: the tokens that end the answer. They are forbidden until the answer has min_tokens tokens."""
        self._make_constraint = rules.make_constraint
        self.constraint = rules.make_constraint and rules.make_constraint()
        self._num_prompt_tokens = len(prompt)
        self._vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        bias = params.logit_bias or {}
        ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
        self._biases = Biases.of(list(bias), list(bias.values()))
        self._first_biases = Biases.joined([self._biases, Biases.of(ends, _FORBID)])
        assert isinstance(rules.bad_words, BadWords | None), f"{rules.bad_words} is not a BadWords"
        self._bad_words = rules.bad_words
        self._bad_words_state = 0
        self._num_followed = 0  # tokens of the answer that led to self._bad_words_state
        self._penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._prompt_mask = token_mask(prompt, vocab_size) if params.repetition_penalty != 1 else None
        self._counts = _TokenCounts() if self._penalties != NO_PENALTIES[:3] else None

    @classmethod
    def make(
        cls, params: SamplingParams, prompt: Seq[int], end_token_ids: Iterable[int], vocab_size: int, rules: AnswerRules
    ) -> Editor:
        """Make the editor of a request, which is NO_EDITS if the request edits nothing."""
        edits = params.min_tokens or params.logit_bias or rules != NO_RULES
        penalizes = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        return cls(params, prompt, end_token_ids, vocab_size, rules) if edits or penalizes else NO_EDITS

    def for_another_answer(self) -> "LogitEditor":
        """See Editor. The two editors share all large objects."""
        assert self._num_followed == 0, "an answer has begun"
        other = copy.copy(self)
        other.constraint = self._make_constraint and self._make_constraint()
        other._counts = self._counts and _TokenCounts()
        return other

    @property
    def needs_all_tokens(self) -> bool:
        """See Editor."""
        return self._bad_words is not None or self.constraint is not None

    def edits(self, token_ids: Seq[int], *, has_pending: bool, guesses: Seq[int]) -> LogitEdits | None:
        """See Editor. Hot: once per sequence and step."""
        num_known = len(token_ids) - self._num_prompt_tokens  # tokens of the answer
        penalties = NO_PENALTIES
        if self._counts is not None:
            self._counts.add(token_ids[self._num_prompt_tokens + self._counts.num_tokens :])
            penalties = Penalties(*self._penalties, self._prompt_mask, *self._counts.arrays())
        masks = self._masks(token_ids, has_pending, guesses)
        rows = tuple(
            RowEdits(
                self._first_biases if num_known + has_pending + i < self._min_tokens else self._biases,
                masks[i] if i < len(masks) else None,
            )
            for i in range(1 + len(guesses))
        )
        is_empty = self._counts is None and not any(row.changes_logits for row in rows)
        return None if is_empty else LogitEdits(penalties, int(has_pending), rows)

    def _masks(self, token_ids: Seq[int], has_pending: bool, guesses: Seq[int]) -> list[TokenMask]:
        """Return each row's mask of the tokens that the constraint and the bad words allow, or [] without both."""
        masks = [] if self.constraint is None else self.constraint.masks_for(list(guesses))
        if self._bad_words is None:
            return masks
        assert not has_pending, "bad words depend on a token that is not known yet"
        for token_id in token_ids[self._num_prompt_tokens + self._num_followed :]:
            self._bad_words_state = self._bad_words.follow(self._bad_words_state, token_id)
        self._num_followed = len(token_ids) - self._num_prompt_tokens
        states = [self._bad_words_state]
        for token_id in guesses:
            states.append(self._bad_words.follow(states[-1], token_id))
        allowed = [self._bad_words.mask(state) for state in states]
        return [mask & other for mask, other in zip(masks, allowed, strict=True)] if masks else allowed

    def forbids_all(self, token_ids: Seq[int]) -> bool:
        """See Editor."""
        edits = self.edits(token_ids, has_pending=False, guesses=())
        row = RowEdits() if edits is None else edits.rows[0]
        is_allowed = np.ones(self._vocab_size, np.bool_)
        if row.allowed is not None:
            is_allowed = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")[: self._vocab_size] != 0
        is_allowed[row.biases.token_ids[row.biases.values == _FORBID]] = False
        return not is_allowed.any()


class _TokenCounts:
    """Counts of the tokens of an answer. Adding a token takes O(1)."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._token_ids, self._counts = np.zeros((2, 64), np.int32)
        self._places: dict[int, int] = {}

    def add(self, token_ids: Seq[int]) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._counts):  # double the size of the arrays
                self._token_ids, self._counts = (
                    np.concatenate([array, np.zeros_like(array)]) for array in (self._token_ids, self._counts)
                )
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self.num_tokens += len(token_ids)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and their counts. The counts are copied, because a plan must not change later."""
        return self._token_ids[: len(self._places)], self._counts[: len(self._places)].copy()
