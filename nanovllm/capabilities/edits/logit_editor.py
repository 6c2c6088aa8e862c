"""LogitEditor: makes the edits of one request's logits, step by step. LogitEdits: those of one step, part of the plan.

A row of logits is edited in this order, which is vLLM's:

1. Tokens that `allowed` leaves out get -inf: a constraint or bad words forbid them.
2. `biases` are added.
3. `penalties` are applied: the logit of every token in prompt or answer is divided by `repetition` if it is positive,
   else multiplied by it. Then `frequency` times the number of its occurrences in the answer, and `presence` if there is
   one, are subtracted.

The host may not know the newest tokens yet: the one that the last step is still sampling, and drafts. They are among
the step's own inputs, so the ranks count them.
"""

import copy
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np

from nanovllm.capabilities.edits.bad_words import BadWords
from nanovllm.capabilities.edits.token_mask import TokenMask, token_mask
from nanovllm.sampling_params import SamplingParams


class Penalties(NamedTuple):
    """Penalties of one sequence, and the tokens that the host knows, without this step's guesses.

    The prompt is a mask because it can have as many distinct tokens as the vocabulary.
    """

    repetition: float
    frequency: float
    presence: float
    prompt_mask: np.ndarray | None  # int32 [ceil(vocab_size / 32)]: as RowEdits.allowed. None: repetition is 1
    token_ids: np.ndarray  # int32 [N], the answer's, distinct
    counts: np.ndarray  # int32 [N], how often it has each


NO_PENALTIES = Penalties(1.0, 0.0, 0.0, None, np.zeros(0, np.int32), np.zeros(0, np.int32))


class Biases(NamedTuple):
    """Numbers that are added to some logits of a row, -inf to forbid a token. A token may occur more than once.

    Rows often share one object. A step then carries it once.
    """

    token_ids: np.ndarray  # int32 [N]
    values: np.ndarray  # float32 [N]

    @classmethod
    def of(cls, token_ids: list[int], values: float | list[float]) -> "Biases":
        """`values`: one for all tokens, or one for each."""
        found = cls(*(np.empty(len(token_ids), dtype) for dtype in (np.int32, np.float32)))
        found.token_ids[:], found.values[:] = token_ids, values
        return found

    @classmethod
    def joined(cls, parts: Seq["Biases"]) -> "Biases":
        return cls(*map(np.concatenate, zip(NO_BIASES, *parts, strict=True)))


NO_BIASES = Biases.of([], 0.0)


class RowEdits(NamedTuple):
    """The edits of one row that differ from those of the sequence's other rows."""

    biases: Biases = NO_BIASES  # they change seldom, and many rows share them
    allowed: TokenMask | None = None  # None: every token

    @property
    def changes_logits(self) -> bool:
        return self.allowed is not None or bool(len(self.biases.token_ids))


class LogitEdits(NamedTuple):
    """The edits of one sequence in one step."""

    penalties: Penalties
    num_new_tokens: int  # inputs of the step up to the first sampled row that `penalties` does not know: 0 or 1
    rows: tuple[RowEdits, ...]  # one for each token that the step samples


_FORBID = float("-inf")


class TokenConstraint(Protocol):
    """The state of one answer. TokenMatcher (text/structured.py) implements it.

    It belongs to the thread that runs the engine: no two calls may overlap. Preempting a sequence does not change its
    answer, so the constraint stays as it is.
    """

    error: str | None
    """Why the answer cannot go on, such as a limit on the time of a mask. The request then ends with finish_reason
    "error". None while all is well.
    """

    @property
    def is_finished(self) -> bool:
        """True if the answer is complete: it has an end token, or nothing but an end token could follow.

        The request then ends with finish_reason "stop", even with ignore_eos or before min_tokens.
        """

    @property
    def is_ready(self) -> bool:
        """True if the next mask is known or takes little time. If not, another thread has begun to compute it, and the
        sequence waits for a later step.
        """

    @property
    def is_slow(self) -> bool:
        """True if masks take much time. Then there should be no guesses, which need one each."""

    def accept(self, token_id: int) -> bool:
        """Advance by the answer's next token.

        Returns False, and changes nothing but perhaps `error`, if the token is not allowed or there is an error. The
        request then ends with finish_reason "error". That happens only if a mask was not applied, or if a row of
        `masks_for` allowed every token because the masks after a guess exceeded a limit.
        """

    def masks_for(self, guesses: list[int]) -> list[TokenMask]:
        """The masks of the tokens that may follow 0, 1, ..., len(guesses) of the guesses. Does not change the state.

        There is one row more than guesses. From the first guess on that is not allowed or ends the answer, the rows
        allow every token: what is sampled there does not count, because the guess is rejected or the request has
        ended. Rows also allow every token if there is an `error`; then `accept` returns False.
        """


class AnswerRules(NamedTuple):
    """The parameters of a request that are given as text, in tokens."""

    bad_words: BadWords | None = None
    make_constraint: Callable[[], TokenConstraint] | None = None  # a new one for each answer


NO_RULES = AnswerRules()


class LogitEditor:
    def __init__(
        self,
        params: SamplingParams,
        prompt: Seq[int],
        end_token_ids: Iterable[int],
        vocab_size: int,
        rules: AnswerRules = NO_RULES,
    ) -> None:
        """`end_token_ids`: tokens that end the answer, which min_tokens forbids at first."""
        self._make_constraint = rules.make_constraint
        self.constraint = rules.make_constraint and rules.make_constraint()
        self._num_prompt_tokens = len(prompt)
        self._vocab_size = vocab_size
        self._min_tokens = params.min_tokens
        bias = params.logit_bias or {}
        ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
        self._biases = Biases.of(list(bias), list(bias.values()))
        self._first_biases = Biases.joined([self._biases, Biases.of(ends, _FORBID)])
        self._bad_words = rules.bad_words
        self._bad_words_state = self._num_followed = 0  # after so many tokens of the answer
        self._penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._prompt_mask = token_mask(prompt, vocab_size) if params.repetition_penalty != 1 else None
        self._counts = _TokenCounts() if self._penalties != NO_PENALTIES[:3] else None

    @classmethod
    def make(
        cls, params: SamplingParams, prompt: Seq[int], end_token_ids: Iterable[int], vocab_size: int, rules: AnswerRules
    ) -> "LogitEditor | None":
        """None for a request that edits nothing."""
        edits = params.min_tokens or params.logit_bias or rules != NO_RULES
        penalizes = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        return cls(params, prompt, end_token_ids, vocab_size, rules) if edits or penalizes else None

    def for_another_answer(self) -> "LogitEditor":
        """The editor of another answer to the same prompt. While neither has begun, they share all that is large."""
        assert self._num_followed == 0, "an answer has begun"
        other = copy.copy(self)
        other.constraint = self._make_constraint and self._make_constraint()
        other._counts = self._counts and _TokenCounts()
        return other

    @property
    def needs_all_tokens(self) -> bool:
        """True if the host must know all tokens before a sampled one. This rules out working ahead, and drafts."""
        return self._bad_words is not None or self.constraint is not None

    def edits(self, token_ids: Seq[int], *, has_pending: bool, guesses: Seq[int]) -> LogitEdits | None:
        """The edits of a step that samples after the last token and after each guess. None: it changes nothing.

        token_ids: all tokens that the host knows. has_pending: one more precedes the guesses. Hot: once per sequence
        and step.
        """
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
        """List the tokens that the constraint and the bad words allow in each row; [] without these."""
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
        """Return True if no token may follow these, which are all tokens of the sequence."""
        edits = self.edits(token_ids, has_pending=False, guesses=())
        row = RowEdits() if edits is None else edits.rows[0]
        is_allowed = np.ones(self._vocab_size, np.bool_)
        if row.allowed is not None:
            is_allowed = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")[: self._vocab_size] != 0
        is_allowed[row.biases.token_ids[row.biases.values == _FORBID]] = False
        return not is_allowed.any()


class _TokenCounts:
    """Counts of the tokens of an answer. Adding one takes O(1)."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._token_ids, self._counts = np.zeros((2, 64), np.int32)
        self._places: dict[int, int] = {}

    def add(self, token_ids: Seq[int]) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._counts):  # double the room
                self._token_ids, self._counts = (
                    np.concatenate([array, np.zeros_like(array)]) for array in (self._token_ids, self._counts)
                )
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self.num_tokens += len(token_ids)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and their counts. The counts are a copy, because a plan never changes."""
        return self._token_ids[: len(self._places)], self._counts[: len(self._places)].copy()
