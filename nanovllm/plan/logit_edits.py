"""LogitEdits: the edits of one sequence's logits in one step, which are part of the plan. An Editor makes them.

A row of logits is edited in this order, which is vLLM's:

1. Tokens that `allowed` leaves out get -inf: a constraint or bad words forbid them.
2. `biases` are added.
3. `penalties` are applied: the logit of every token in prompt or answer is divided by `repetition` if it is positive,
   and otherwise multiplied by it. Then `frequency` times the number of the token's occurrences in the answer, and
   `presence` if there is an occurrence, are subtracted.

When a step is planned, the host may not know the newest tokens: the one that the last step is still sampling, and
draft tokens. They are among the step's own inputs, so the ranks count them.

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

    The prompt is a mask because it can have as many distinct tokens as the vocabulary.
    """

    repetition: float
    frequency: float
    presence: float
    prompt_mask: TokenMask | None  # or None if repetition is 1
    token_ids: np.ndarray  # int32 [N], the distinct tokens of the answer
    counts: np.ndarray  # int32 [N], the number of occurrences of each


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
    def joined(cls, parts: Sequence["Biases"]) -> "Biases":
        return cls(*map(np.concatenate, zip(NO_BIASES, *parts, strict=True)))


NO_BIASES = Biases.of([], 0.0)


class RowEdits(NamedTuple):
    """The edits of one row that can differ from the edits of the sequence's other rows."""

    biases: Biases = NO_BIASES  # they change seldom, and many rows share them
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

    It belongs to the thread that runs the engine: no two calls may overlap. Preempting a sequence does not change its
    answer, so the constraint stays as it is.
    """

    error: str | None
    """Why the answer cannot go on, such as a limit on the time of a mask, or None. With an error, the request ends with
    finish_reason "error".
    """

    @property
    def is_finished(self) -> bool:
        """True if the answer is complete: it has an end token, or nothing but an end token could follow.

        The request then ends with finish_reason "stop", even with ignore_eos or before min_tokens.
        """

    @property
    def is_ready(self) -> bool:
        """True if the next mask is known or takes little time. Otherwise another thread has begun to compute the mask,
        and the sequence waits for a later step.
        """

    @property
    def is_slow(self) -> bool:
        """True if masks take much time. The sequence then gets no draft tokens, because each needs a mask."""

    def accept(self, token_id: int) -> bool:
        """Advance by the answer's next token.

        Returns False, and changes nothing but perhaps `error`, if the token is not allowed or there is an error. The
        request then ends with finish_reason "error". That happens only if a mask was not applied, or if `masks_for`
        set `error`.
        """

    def masks_for(self, guesses: list[int]) -> list[TokenMask]:
        """Return the masks of the tokens that may follow 0, 1, ..., len(guesses) of the draft tokens.

        Does not advance. From the first draft token on that is not allowed or ends the answer, the rows allow every
        token: what is sampled there does not count, because the draft token is rejected or the request has ended. Rows
        also allow every token if there is an `error`, or after a draft token whose mask cannot be computed. `accept`
        then returns False for what is sampled there.
        """


class AnswerRules(NamedTuple):
    """The parameters of a request that are given as text, as rules on tokens."""

    bad_words: object | None = None  # a BadWords (capabilities/edits/bad_words.py)
    make_constraint: Callable[[], TokenConstraint] | None = None  # a new one for each answer


NO_RULES = AnswerRules()


class Editor(Protocol):
    """Makes the edits of one request's logits, step by step."""

    constraint: TokenConstraint | None

    def for_another_answer(self) -> "Editor":
        """Return the editor of another answer to the same prompt. Neither answer may have begun."""

    @property
    def needs_all_tokens(self) -> bool:
        """True if the host must know all tokens before a sampled one, so that no step can be planned ahead."""

    def edits(self, token_ids: Sequence[int], *, has_pending: bool, guesses: Sequence[int]) -> LogitEdits | None:
        """Return the edits of a step that samples after the last token and after each draft token, or None if the step
        changes no logits. Hot: once per sequence and step.

        token_ids: all tokens that the host knows. has_pending: one more token precedes the draft tokens.
        """

    def forbids_all(self, token_ids: Sequence[int]) -> bool:
        """Return True if no token may follow these, which are all tokens of the sequence."""
