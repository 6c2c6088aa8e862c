"""LogitEditor: makes the edits of one request's logits, step by step (see core/logit_edits.py)."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from nanovllm.core.bad_words import BadWords
from nanovllm.core.logit_edits import ALWAYS, NO_PENALTIES, Biases, LogitEdits, Penalties, RowEdits
from nanovllm.core.token_constraint import TokenConstraint
from nanovllm.sampling_params import SamplingParams

_FORBID = float("-inf")


class AnswerRules(NamedTuple):
    """What the parameters of a request that are text mean in tokens."""

    bad_words: BadWords | None = None
    constraint: TokenConstraint | None = None


NO_RULES = AnswerRules()


class LogitEditor:
    def __init__(
        self, params: SamplingParams, prompt: Seq[int], end_token_ids: Iterable[int], rules: AnswerRules = NO_RULES
    ) -> None:
        """`end_token_ids`: tokens that end the answer, which min_tokens forbids at first."""
        self.constraint = rules.constraint
        self._num_prompt_tokens = len(prompt)
        self._min_tokens = params.min_tokens
        self._bad_words = rules.bad_words
        self._ends = Biases.of(sorted(end_token_ids), _FORBID)
        bias = params.logit_bias or {}
        self._bias = Biases(
            np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32), np.full(len(bias), ALWAYS)
        )
        self._seen: _SeenTokens | None = None
        self._penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if self._penalties != NO_PENALTIES[:3]:
            self._seen = _SeenTokens(prompt if params.repetition_penalty != 1 else ())

    @classmethod
    def make(
        cls, params: SamplingParams, prompt: Seq[int], end_token_ids: Iterable[int], rules: AnswerRules
    ) -> "LogitEditor | None":
        """None for a request that edits nothing."""
        edits = params.min_tokens or params.logit_bias or rules != NO_RULES
        penalizes = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        return cls(params, prompt, end_token_ids, rules) if edits or penalizes else None

    @property
    def knows_all_but_last(self) -> bool:
        """Whether the host must know all tokens before a sampled one, but for the last of them. Rules out drafts."""
        return self._bad_words is not None or self.constraint is not None

    def edits(self, token_ids: Seq[int], *, has_pending: bool, guesses: Seq[int]) -> LogitEdits | None:
        """The edits of a step that samples after the last token and after each guess. None: it changes nothing.

        token_ids: all tokens that the host knows. has_pending: one more precedes the guesses.
        """
        penalties = NO_PENALTIES
        if self._seen is not None:
            self._seen.add(token_ids[self._num_prompt_tokens + self._seen.num_tokens :])
            penalties = Penalties(*self._penalties, *self._seen.arrays())
        num_new = len(token_ids) + has_pending - self._num_prompt_tokens  # tokens of the answer before the first row
        masks = [] if self.constraint is None else self.constraint.masks_for(list(guesses))
        tail = [*self._newest(token_ids), *([None] if has_pending else []), *guesses]
        rows = []
        for i in range(1 + len(guesses)):
            biases = self._bias
            if num_new + i < self._min_tokens:
                biases += self._ends
            if self._bad_words is not None:
                biases += self._bad_words.ends(tail[: len(tail) - len(guesses) + i])
            rows.append(RowEdits(biases, masks[i] if i < len(masks) else None))
        is_empty = self._seen is None and all(row.allowed is None and not len(row.biases.token_ids) for row in rows)
        return None if is_empty else LogitEdits(penalties, int(has_pending), tuple(rows))

    def forbids_all(self, token_ids: Seq[int]) -> bool:
        """Whether no token may follow these, which are all tokens of the sequence."""
        edits = self.edits(token_ids, has_pending=False, guesses=())
        biases, allowed = RowEdits() if edits is None else edits.rows[0]
        if allowed is None:
            return False  # the host does not know the size of the vocabulary, which biases alone hardly cover
        applies = (biases.after == ALWAYS) | (biases.after == token_ids[-1])
        (allowed_ids,) = np.unpackbits(allowed.view(np.uint8), bitorder="little").nonzero()
        return bool(np.isin(allowed_ids, biases.token_ids[applies & (biases.values == _FORBID)]).all())

    def _newest(self, token_ids: Seq[int]) -> list[int]:
        """The newest tokens of the answer, as many as bad words can begin with."""
        num_tokens = 0 if self._bad_words is None else self._bad_words.num_needed
        return list(token_ids[max(self._num_prompt_tokens, len(token_ids) - num_tokens) :])


class _SeenTokens:
    """Distinct tokens of the prompt and the answer, and how often the answer has each. Adding one takes O(1)."""

    def __init__(self, prompt: Seq[int]) -> None:
        self.num_tokens = 0  # of the answer
        self._token_ids = np.unique(np.asarray(prompt, np.int64))
        self._num_distinct = len(self._token_ids)
        self._counts = np.zeros(self._num_distinct, np.int64)
        self._places = dict(zip(self._token_ids.tolist(), range(self._num_distinct), strict=True))

    def add(self, token_ids: Seq[int]) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, self._num_distinct)
            if place == self._num_distinct:
                self._add_distinct(token_id)
            self._counts[place] += 1
        self.num_tokens += len(token_ids)

    def _add_distinct(self, token_id: int) -> None:
        if self._num_distinct == len(self._token_ids):  # double the room
            more = max(64, self._num_distinct)
            self._token_ids = np.concatenate([self._token_ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        self._token_ids[self._num_distinct] = token_id
        self._num_distinct += 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and their counts. The counts are a copy, because a plan never changes."""
        return self._token_ids[: self._num_distinct], self._counts[: self._num_distinct].copy()
