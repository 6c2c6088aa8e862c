"""LogitEdits: how a step changes the logits of one sequence before it samples from them. Part of the plan.

A row of logits is edited in this order, which is vLLM's:

1. Tokens that `allowed` leaves out get -inf.
2. `biases` are added.
3. `penalties` are applied: the logit of every token in prompt or answer is divided by `repetition` if it is positive,
   else multiplied by it. Then `frequency` times the number of its occurrences in the answer, and `presence` if there is
   one, are subtracted.

The host may not know the newest tokens yet: the one that the last step is still sampling, and drafts. They are among
the step's own inputs, so the ranks count them.
"""

from typing import NamedTuple

import numpy as np

ALWAYS = -1  # a bias that does not depend on the token before


class Penalties(NamedTuple):
    """Penalties of one sequence, and the tokens that the host knows, without this step's guesses."""

    repetition: float
    frequency: float
    presence: float
    token_ids: np.ndarray  # int64 [N], distinct
    counts: np.ndarray  # int64 [N], occurrences in the answer; 0 for a token of the prompt alone


NO_PENALTIES = Penalties(1.0, 0.0, 0.0, np.zeros(0, np.int64), np.zeros(0, np.int64))


class Biases(NamedTuple):
    """What is added to some logits of a row, -inf to forbid a token. A token may occur more than once."""

    token_ids: np.ndarray  # int64 [N]
    values: np.ndarray  # float32 [N]
    after: np.ndarray  # int64 [N]: add only if the row's last token is this one, or ALWAYS

    @classmethod
    def of(cls, token_ids: list[int], value: float, after: list[int] | None = None) -> "Biases":
        """The same value for several tokens."""
        return cls(
            np.array(token_ids, np.int64),
            np.full(len(token_ids), value, np.float32),
            np.full(len(token_ids), ALWAYS, np.int64) if after is None else np.array(after, np.int64),
        )

    def __add__(self, other: object) -> "Biases":
        assert isinstance(other, Biases), "only biases can be added to biases"
        return Biases(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


NO_BIASES = Biases.of([], 0.0)


class RowEdits(NamedTuple):
    """The edits of one row that differ from those of the sequence's other rows."""

    biases: Biases = NO_BIASES
    allowed: np.ndarray | None = None  # int32 [ceil(vocab_size / 32)]: token t is bit t % 32 of entry t // 32


class LogitEdits(NamedTuple):
    """The edits of one sequence in one step."""

    penalties: Penalties
    num_new_tokens: int  # of the step's inputs up to the first sampled row that `penalties` does not know: 0 or 1
    rows: tuple[RowEdits, ...]  # one for each token that the step samples
