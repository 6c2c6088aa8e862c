"""Drafters: sources of draft tokens. The interface, and the two drafters that need no second model."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from nanovllm.plan.sequence import Sequence, TokenIds
from nanovllm.schedule.seams import DRAFTED, NO_GUESSES, Guesses
from nanovllm.utils.arithmetic import ceil_div

MIN_MATCH_TOKENS = 2  # a single token says too little about the next one
MAX_MATCH_TOKENS = 64  # a longer match would hardly predict better
QUOTE_TOKENS = 16  # from this length on, a match of the text with itself counts as a quote
MAX_PLACES = 2**18  # places searched for a match, halved for every token that is known to match
NUM_FEW_PLACES = 16  # up to this many places are compared one by one, which is faster than together


class Drafter(Protocol):
    """Proposes the next tokens of sequences."""

    name: str
    costs_drafts: ClassVar[bool]  # its draft tokens are computed on the GPU, which takes time

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of a request that has ended."""

    def can_guess(self, seq: Sequence) -> bool:
        """Return True if `guess` is likely to return something. The newest token may still be pending."""
        ...

    def kind(self, seq: Sequence) -> str:
        """Name the kind of the next draft tokens, because acceptance differs between kinds. Each kind
        has its own pace.
        """
        ...

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        """Return up to `max_guesses` tokens that may follow. All tokens of the sequence are known."""
        ...


class Match(NamedTuple):
    """The longest suffix of a text that occurs earlier in it."""

    num_tokens: int  # length of the text
    length: int = 0  # up to MAX_MATCH_TOKENS; 0 if it is below MIN_MATCH_TOKENS
    end: int = 0  # the position after the earlier occurrence


def longest_match(token_ids: TokenIds) -> Match:
    """Look up the end of a text in the text itself. Among equally long matches, the most recent wins.

    There is no index: the text is searched for its last two tokens, which takes 0.4 to 0.8 ns per token, and the places
    found are narrowed down token by token. Hot: once per sequence and step.
    """
    num_tokens = len(token_ids)
    if num_tokens <= MIN_MATCH_TOKENS:
        return Match(num_tokens)
    text = np.frombuffer(token_ids, dtype=np.int64)
    length = MIN_MATCH_TOKENS
    ends = length + np.flatnonzero((text[:-2] == text[-2]) & (text[1:-1] == text[-1]))
    # In a text of one repeated token every place matches, so the oldest places are dropped to save time. Many places
    # are kept while few tokens are known to match, because the longest match may be among them.
    while len(ends := ends[-max(NUM_FEW_PLACES, MAX_PLACES >> length) :]) > NUM_FEW_PLACES:
        has_more = ends[int(ends[0] == length) :]  # drop a match at the start of the text, which has no earlier token
        longer = has_more[text[has_more - length - 1] == text[-length - 1]]
        if not len(longer):
            ends = ends[-1:]  # all matches are equally long
            break
        ends, length = longer, length + 1
    best = Match(num_tokens)
    for end in reversed(ends.tolist()):
        its_length = _length_of_match(token_ids, end, length)
        if its_length > best.length:
            best = Match(num_tokens, its_length, end)
    return best


def _length_of_match(token_ids: TokenIds, end: int, known: int) -> int:
    """Count the tokens before `end` that equal the last tokens, up to MAX_MATCH_TOKENS. `known` of them are equal."""
    length, limit = known, min(end, MAX_MATCH_TOKENS)
    while length < limit and token_ids[end - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length


class PromptLookupDrafter:
    """Proposes the tokens that followed an earlier occurrence of the longest suffix of prompt and answer."""

    name = "prompt_lookup"
    costs_drafts: ClassVar[bool] = False

    def __init__(self) -> None:
        self._matches: dict[int, Match] = {}  # by seq_id: the newest match

    def forget(self, seq: Sequence) -> None:
        self._matches.pop(seq.seq_id, None)

    def can_guess(self, seq: Sequence) -> bool:
        return self._match(seq).length > 0

    def kind(self, seq: Sequence) -> str:
        """Distinguish quotes: a long match is almost certainly a quote, regardless of how short matches fared."""
        return "quote" if self._match(seq).length >= QUOTE_TOKENS else self.name

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        """Return the tokens after the match. If the text ends with a repeated pattern, continue the pattern."""
        num_tokens, length, end = self._match(seq)
        if not length:
            return NO_GUESSES
        guesses, period = seq.token_ids[end : end + max_guesses], num_tokens - end
        if length >= period:  # the text ends with the same `period` tokens twice
            guesses = (guesses * ceil_div(max_guesses, period))[:max_guesses]
        return Guesses(tuple(guesses))

    def _match(self, seq: Sequence) -> Match:
        token_ids, match = seq.token_ids, self._matches.get(seq.seq_id, Match(0))
        if num_new := len(token_ids) - match.num_tokens:
            if match.length and token_ids[match.end : match.end + num_new] == token_ids[match.num_tokens :]:
                # The text has continued like its earlier occurrence, so the longest match has grown.
                match = Match(len(token_ids), min(match.length + num_new, MAX_MATCH_TOKENS), match.end + num_new)
            else:
                match = longest_match(token_ids)
            self._matches[seq.seq_id] = match
        return match


class ModelDrafter:
    """Leaves drafting to the ranks. They draft with the model itself, which attends only to keys on the GPU: a part of
    the keys (resident), or a copy of all keys in a few bits (shadow). Or they draft with the checkpoint's draft head
    (mtp).

    Drafts are sampled with the noise of the request, so draft tokens differ from the model's own tokens only where the
    logits differ enough.
    """

    costs_drafts: ClassVar[bool] = True

    def __init__(self, name: str, can_guess: Callable[[Sequence], bool]) -> None:
        """`can_guess`: returns True if a draft of a running sequence is cheaper than the token itself."""
        self.name, self._can_guess = name, can_guess

    def forget(self, seq: Sequence) -> None:
        """Do nothing: the drafter has no memory of requests."""

    def can_guess(self, seq: Sequence) -> bool:
        return self._can_guess(seq)

    def kind(self, seq: Sequence) -> str:
        return self.name

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        if not self._can_guess(seq):
            return NO_GUESSES
        return Guesses((DRAFTED,) * max_guesses, max_guesses)
