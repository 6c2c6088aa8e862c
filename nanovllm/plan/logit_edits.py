"""LogitEdits: the edits of one sequence's logits in one step, as part of the step's plan. An Editor makes the edits.

A row of logits is edited in this order, which is vLLM's:

1. Tokens that `allowed` leaves out get -inf: a constraint or bad words forbid them.
2. `biases` are added.
3. `penalties` are applied: the logit of every token in prompt or answer is divided by `repetition` if it is positive,
   and otherwise multiplied by it. Then `frequency` times the number of the token's occurrences in the answer, and
   `presence` if there is an occurrence, are subtracted.

When a step is planned, the host may not know the newest tokens: the token that the last step is still sampling, and
draft tokens. The unknown tokens are inputs of the step, so the ranks count them.

Editor and TokenConstraint are interfaces. LogitEditor (capabilities/edits/) and TokenMatcher (text/structured.py)
implement them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nanovllm.utils.arithmetic import ceil_div

# A set of token ids: bit i % 32 of word i // 32 is set if token i is allowed; int32 [ceil(vocab_size / 32)], read-only
TokenMask: TypeAlias = npt.NDArray[np.int32]


def token_mask(token_ids: Sequence[int], vocab_size: int) -> TokenMask:
    """Return the mask with the bits of these tokens."""
    bits = np.zeros(vocab_size, np.bool_)
    bits[np.asarray(token_ids, np.int64)] = True
    return packed_mask(bits)


def packed_mask(bits: npt.NDArray[np.bool_]) -> TokenMask:
    """Return the mask of the tokens whose entry is True. `bits`: bool [vocab_size]."""
    packed = np.zeros(ceil_div(len(bits), 32) * 4, np.uint8)
    packed[: ceil_div(len(bits), 8)] = np.packbits(bits, bitorder="little")
    mask: TokenMask = packed.view(np.int32)
    mask.flags.writeable = False
    return mask


class Penalties(NamedTuple):
    """Penalties of one sequence, and the tokens that the host knows, without this step's draft tokens.

    The prompt's tokens are a mask because a prompt can contain every token of the vocabulary.
    """

    repetition: float
    frequency: float
    presence: float
    prompt_mask: TokenMask | None  # or None if repetition is 1
    token_ids: np.ndarray  # int32 [N], the distinct tokens of the answer
    counts: np.ndarray  # int32 [N], how often each of `token_ids` occurs in the answer


NO_PENALTIES = Penalties(1.0, 0.0, 0.0, None, np.zeros(0, np.int32), np.zeros(0, np.int32))


class Biases(NamedTuple):
    """Numbers that are added to some logits of a row, -inf to forbid a token. A token may occur more than once.

    Rows often share one Biases object. A step then carries the object once.
    """

    token_ids: np.ndarray  # int32 [N]
    values: np.ndarray  # float32 [N]

    @classmethod
    def of(cls, token_ids: list[int], values: float | list[float]) -> "Biases":
        """Make biases from one value for all tokens, or one value for each token."""
        found = cls(*(np.empty(len(token_ids), dtype) for dtype in (np.int32, np.float32)))
        found.token_ids[:], found.values[:] = token_ids, values
        return found

    @classmethod
    def joined(cls, parts: Sequence["Biases"]) -> "Biases":
        return cls(*map(np.concatenate, zip(NO_BIASES, *parts, strict=True)))


NO_BIASES = Biases.of([], 0.0)


class RowEdits(NamedTuple):
    """The edits of one row that can differ from the edits of the sequence's other rows."""

    biases: Biases = NO_BIASES  # change seldom, so rows share one object
    allowed: TokenMask | None = None  # or None if every token is allowed

    @property
    def changes_logits(self) -> bool:
        return self.allowed is not None or bool(len(self.biases.token_ids))


class LogitEdits(NamedTuple):
    """The edits of one sequence in one step."""

    penalties: Penalties
    num_new_tokens: int  # inputs of the step up to the first sampled row that `penalties` does not know: 0 or 1
    rows: tuple[RowEdits, ...]  # one for each token that the step samples


class TokenConstraint(Protocol):
    """The state of one answer that must match a grammar.

    Only the thread that runs the engine calls a constraint: no two calls may overlap. Preempting a sequence does not
    change its answer, so preemption leaves the constraint unchanged.
    """

    error: str | None
    """Why the answer cannot go on (for example, computing a mask exceeded its time limit), or None. With an error, the
    request ends with finish_reason "error".
    """

    @property
    def is_finished(self) -> bool:
        """Return True if the answer is complete: it has an end token, or only an end token could follow.

        The request then ends with finish_reason "stop", even with ignore_eos or before min_tokens.
        """

    @property
    def is_ready(self) -> bool:
        """Return True if the next mask is known or quick to compute. Otherwise another thread has begun to compute the
        mask, and the sequence waits for a later step.
        """

    @property
    def is_slow(self) -> bool:
        """Return True if masks are slow to compute. The sequence then gets no draft tokens: each would need a mask."""

    def accept(self, token_id: int) -> bool:
        """Advance by the answer's next token.

        Returns False, and changes nothing but perhaps `error`, if the token is not allowed or there is an error. The
        request then ends with finish_reason "error". A token is refused only if a mask was not applied, or if
        `masks_for` set `error`.
        """

    def masks_for(self, guesses: list[int]) -> list[TokenMask]:
        """Return the masks of the tokens that may follow 0, 1, ..., len(guesses) of the draft tokens.

        Does not advance. From the first draft token that is not allowed, that ends the answer, or whose mask cannot be
        computed, the masks allow every token: tokens sampled with these masks are discarded, because the draft token is
        rejected or the request has ended. The masks also allow every token if there is an `error`. For such a token,
        `accept` then returns False.
        """


class AnswerRules(NamedTuple):
    """Rules on tokens, made from those parameters of a request that users give as text."""

    bad_words: object | None = None  # a BadWords (capabilities/edits/logit_editor.py)
    make_constraint: Callable[[], TokenConstraint] | None = None  # a new one for each answer


NO_RULES = AnswerRules()


class Editor(Protocol):
    """Makes the edits of one request's logits, step by step."""

    constraint: TokenConstraint | None

    def for_another_answer(self) -> "Editor":
        """Return the editor of another answer to the same prompt. Neither answer may have begun."""

    @property
    def needs_all_tokens(self) -> bool:
        """Return True if the host must know all earlier tokens to edit logits, so no step can be planned ahead."""

    def edits(self, token_ids: Sequence[int], *, has_pending: bool, guesses: Sequence[int]) -> LogitEdits | None:
        """Return the edits of a step that samples after the last token and after each draft token, or None if the step
        changes no logits. Hot: once per sequence and step.

        token_ids: all tokens that the host knows. has_pending: True if one more token precedes the draft tokens.
        """

    def forbids_all(self, token_ids: Sequence[int]) -> bool:
        """Return True if no token may follow `token_ids`, which are all tokens of the sequence."""


class NoEdits:
    """The Editor of a request that does not edit logits."""

    constraint: TokenConstraint | None = None
    needs_all_tokens = False

    def for_another_answer(self) -> Editor:
        return self

    def edits(self, token_ids: Sequence[int], *, has_pending: bool, guesses: Sequence[int]) -> LogitEdits | None:
        return None

    def forbids_all(self, token_ids: Sequence[int]) -> bool:
        return False


NO_EDITS = NoEdits()
