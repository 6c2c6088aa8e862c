"""Drafters: where guesses come from. The interface, and the two that need no second model."""

import logging
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

from nanovllm.core.sequence import Sequence
from nanovllm.speculation.prompt_lookup import PromptLookup

logger = logging.getLogger("nanovllm")

QUOTE_TOKENS = 16  # from this length on a match of the text with itself counts as a quote
DRAFTED = -1  # in place of a guess: the ranks draft it


class Guesses(NamedTuple):
    """What a sequence may continue with."""

    token_ids: tuple[int, ...] = ()
    num_drafts: int = 0  # tokens that the ranks draft, of which those in the places of DRAFTED become guesses

    def first(self, num_guesses: int) -> "Guesses":
        if not self.token_ids:
            return self
        return Guesses(self.token_ids[:num_guesses], min(self.num_drafts, num_guesses))

    def without_drafts(self) -> "Guesses":
        """Those before the first one that would have to be drafted."""
        known = self.token_ids
        return Guesses(known[: known.index(DRAFTED)] if DRAFTED in known else known)


NO_GUESSES = Guesses()


class Drafter(Protocol):
    """Guesses how sequences go on. A sequence is added once, and forgotten when it ends."""

    name: ClassVar[str]
    costs_drafts: ClassVar[bool]  # whether its guesses are drafted on the GPU, which takes time

    def add(self, seq: Sequence) -> None:
        """A new request. Must return at once."""

    def forget(self, seq: Sequence) -> None:
        """The request has ended."""

    def can_guess(self, seq: Sequence) -> bool:
        """Whether `guess` is likely to return something. The sequence's newest token may still be pending."""
        ...

    def kind(self, seq: Sequence) -> str:
        """What the sequence's next guesses are, where some are more often right than others. Each kind has a pace."""
        ...

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        """Up to `max_guesses` tokens that may follow the sequence's tokens, all of which are known."""
        ...


class PromptLookupDrafter:
    """What followed the longest suffix of the text so far where it occurred before."""

    name: ClassVar[str] = "prompt_lookup"
    costs_drafts: ClassVar[bool] = False

    def __init__(self) -> None:
        self._lookups: dict[int, PromptLookup] = {}  # by seq_id
        self._num_tokens: dict[int, int] = {}  # of each sequence that its lookup knows

    def add(self, seq: Sequence) -> None:
        self._lookups[seq.seq_id] = PromptLookup(seq.token_ids)
        self._num_tokens[seq.seq_id] = len(seq.token_ids)

    def forget(self, seq: Sequence) -> None:
        self._lookups.pop(seq.seq_id).close()
        del self._num_tokens[seq.seq_id]

    def can_guess(self, seq: Sequence) -> bool:
        return self._up_to_date(seq).match_len > 0

    def kind(self, seq: Sequence) -> str:
        """A long match is almost certainly a quote, whatever became of guesses by short ones."""
        return "quote" if self._up_to_date(seq).match_len >= QUOTE_TOKENS else self.name

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        return Guesses(tuple(self._up_to_date(seq).propose(max_guesses)))

    def _up_to_date(self, seq: Sequence) -> PromptLookup:
        lookup = self._lookups[seq.seq_id]
        for token_id in seq.token_ids[self._num_tokens[seq.seq_id] :]:
            lookup.append(token_id)
        self._num_tokens[seq.seq_id] = len(seq.token_ids)
        try:
            _ = lookup.match_len
        except RuntimeError as error:  # guesses only save time, so the request goes on without this source of them
            logger.warning("request %d gets no guesses from its prompt: %s (%s)", seq.seq_id, error, error.__cause__)
            lookup.close()
        return lookup


class ResidentDrafter:
    """The model itself, attending only to the keys that are on the GPU. Sampled with the noise of the request, so that
    a draft differs from the model's own token only where the missing keys matter.
    """

    name: ClassVar[str] = "resident"
    costs_drafts: ClassVar[bool] = True

    def __init__(self, misses_keys: Callable[[Sequence], bool]) -> None:
        """`misses_keys`: whether some keys of a running sequence are not on the GPU. With all keys there, a draft would
        cost as much as the token itself.
        """
        self._misses_keys = misses_keys

    def add(self, seq: Sequence) -> None:
        """Nothing to prepare."""

    def forget(self, seq: Sequence) -> None:
        """Nothing to forget."""

    def can_guess(self, seq: Sequence) -> bool:
        return self._misses_keys(seq)

    def kind(self, seq: Sequence) -> str:
        return self.name

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        if not self._misses_keys(seq):
            return NO_GUESSES
        return Guesses((DRAFTED,) * max_guesses, max_guesses)
