"""TokenConstraint: what the engine needs to know about an answer that must match a grammar."""

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

# One position: bit i % 32 of word i // 32 is set if token i is allowed; int32 [ceil(vocab_size / 32)], read-only
TokenMask: TypeAlias = npt.NDArray[np.int32]


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
        """Whether the answer is complete: it has got an end token, or nothing but an end token could follow.

        The request then ends with finish_reason "stop", even with ignore_eos or before min_tokens.
        """

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
