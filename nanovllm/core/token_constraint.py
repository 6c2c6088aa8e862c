"""TokenConstraint: what the engine needs to know about an answer that must match a grammar."""

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

# One position: bit i % 32 of word i // 32 is set if token i is allowed; int32 [ceil(vocab_size / 32)]
TokenMask: TypeAlias = npt.NDArray[np.int32]


class TokenConstraint(Protocol):
    """The state of one answer. TokenMatcher (text/structured.py) implements it.

    It belongs to the engine's thread: no two calls may overlap. Preempting a sequence does not change its answer, so
    the constraint stays as it is.
    """

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and no token can follow. The request then ends with finish_reason "stop".

        True after an end token, and as soon as nothing but an end token could follow.
        """

    def accept(self, token_id: int) -> bool:
        """Advance by the answer's next token. Returns False, and changes nothing, if the token is not allowed."""

    def masks_for(self, guesses: list[int]) -> list[TokenMask]:
        """The masks of the tokens that may follow 0, 1, ..., len(guesses) of the guesses. Does not change the state.

        There is always one row more than guesses. From the first guess that is not allowed, or that ends the answer,
        the rows after it allow every token: what is sampled there is dropped, because the guess is rejected or the
        request has ended.
        """
