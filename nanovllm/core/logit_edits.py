"""LogitEdits: how a step changes the logits of one sequence before it samples from them. Part of the plan.

A row of logits is edited in this order, which is vLLM's:

1. Tokens that `allowed` leaves out get -inf.
2. `biases` and `bad_ends` are added.
3. `penalties` are applied: the logit of every token in prompt or answer is divided by `repetition` if it is positive,
   else multiplied by it. Then `frequency` times the number of its occurrences in the answer, and `presence` if there is
   one, are subtracted.

The host may not know the newest tokens yet: the one that the last step is still sampling, and drafts. They are among
the step's own inputs, so the ranks count them.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

ALWAYS = -1  # a bias that does not depend on the token before


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
    """What is added to some logits of a row, -inf to forbid a token. A token may occur more than once.

    Rows often share one object. A step then carries it once.
    """

    token_ids: np.ndarray  # int32 [N]
    values: np.ndarray  # float32 [N]
    after: np.ndarray  # int32 [N]: add only if the row's last token is this one, or ALWAYS

    @classmethod
    def of(cls, token_ids: list[int], values: float | list[float], after: int | list[int] = ALWAYS) -> "Biases":
        """`values` and `after`: one for all tokens, or one for each."""
        found = cls(*(np.empty(len(token_ids), dtype) for dtype in (np.int32, np.float32, np.int32)))
        found.token_ids[:], found.values[:], found.after[:] = token_ids, values, after
        return found

    @classmethod
    def joined(cls, parts: Seq["Biases"]) -> "Biases":
        return cls(*map(np.concatenate, zip(NO_BIASES, *parts, strict=True)))


NO_BIASES = Biases.of([], 0.0)


class RowEdits(NamedTuple):
    """The edits of one row that differ from those of the sequence's other rows."""

    biases: Biases = NO_BIASES  # what changes seldom, and is shared by many rows
    bad_ends: Biases = NO_BIASES  # what bad words forbid
    allowed: np.ndarray | None = None  # int32 [ceil(vocab_size / 32)]: token t is bit t % 32 of entry t // 32

    @property
    def changes_logits(self) -> bool:
        return self.allowed is not None or bool(len(self.biases.token_ids) or len(self.bad_ends.token_ids))


class LogitEdits(NamedTuple):
    """The edits of one sequence in one step."""

    penalties: Penalties
    num_new_tokens: int  # of the step's inputs up to the first sampled row that `penalties` does not know: 0 or 1
    rows: tuple[RowEdits, ...]  # one for each token that the step samples
