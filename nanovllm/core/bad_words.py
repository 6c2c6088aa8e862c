"""BadWords: which tokens would complete a bad word. Made once for all answers that have the same bad words."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from nanovllm.core.logit_edits import NO_BIASES, Biases

_FORBID = float("-inf")


class BadWords:
    """Words as sequences of tokens. A look-up takes as long for one word as for thousands of the same length."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self.words = tuple(words)
        self.num_needed = max((len(word) - 1 for word in self.words), default=0)  # newest tokens that `ends` looks at
        self._lengths = sorted({len(word) - 1 for word in self.words})
        self._ends: dict[tuple[int, ...], list[int]] = {}  # all tokens of a word but the last -> last tokens
        self._pairs: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # all but the last two -> those two
        for *begin, end in self.words:
            self._ends.setdefault(tuple(begin), []).append(end)
            if begin:
                self._pairs.setdefault(tuple(begin[:-1]), []).append((begin[-1], end))
        self._always = Biases.of(self._ends.get((), []), _FORBID)
        self._after_unknown = _biases_of(self._pairs.get((), []))  # of the words of two tokens

    def ends(self, tail: Seq[int | None]) -> Biases:
        """Forbid the last token of each word whose other tokens are the end of `tail`: the answer's newest tokens, at
        least `num_needed` of them or all. The very last one may be None, which is a token that is not known yet.
        """
        biases = self._always
        for length in self._lengths:
            if 0 < length <= len(tail):
                biases += self._ends_after(tail[len(tail) - length :])
        return biases

    def _ends_after(self, begin: Seq[int | None]) -> Biases:
        *known, last = begin
        assert None not in known, "two tokens before a bad word's end are unknown"
        if last is not None:
            ends = self._ends.get(tuple(t for t in begin if t is not None))
            return NO_BIASES if ends is None else Biases.of(ends, _FORBID)
        if not known:
            return self._after_unknown
        return _biases_of(self._pairs.get(tuple(t for t in known if t is not None), []))


def _biases_of(pairs: list[tuple[int, int]]) -> Biases:
    """Forbid the second token of each pair after the first."""
    if not pairs:
        return NO_BIASES
    after, ends = zip(*pairs, strict=True)
    return Biases.of(list(ends), _FORBID, list(after))
