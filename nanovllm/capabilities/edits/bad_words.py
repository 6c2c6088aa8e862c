"""BadWords: masks that forbid the tokens which would complete one of the strings that an answer must not contain.

An answer can spell a string with many sequences of tokens, so the strings are matched against the bytes of the text. An
Automaton reads the bytes. A token is forbidden in a state of the Automaton if reading the token's bytes from that state
completes a string:

- tokens that contain a whole string are forbidden in every state;
- after the first part of a string, tokens that begin with the rest of the string are forbidden.

UTF-8 is self-synchronizing, so a string is in the decoded text exactly where its bytes are in the bytes of the tokens.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nanovllm.plan.logit_edits import TokenMask, packed_mask
from nanovllm.utils.automaton import Automaton

MAX_KEPT_MASKS = 256  # most cached masks for each list of bad words


class TokenTable:
    """The bytes of all tokens, sorted, so that tokens with a common prefix are next to each other."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        order = sorted(range(len(token_bytes)), key=token_bytes.__getitem__)
        self._sorted = [token_bytes[token_id] for token_id in order]
        self._order = np.array(order, np.int64)
        lens = np.array([len(each) for each in token_bytes], np.int64)
        self.max_len = int(lens.max(initial=0))
        self._joined = b"".join(token_bytes)
        self._by_len = np.argsort(-lens, kind="stable")  # token ids, the longest first
        self._starts = (np.cumsum(lens) - lens)[self._by_len]
        self._num_longer = [int(np.count_nonzero(lens > position)) for position in range(self.max_len)]

    def beginning_with(self, prefix: bytes) -> tuple[int, int]:
        """Return the range of the sorted tokens that begin with `prefix`, a non-empty part of UTF-8 text."""
        start = bisect_left(self._sorted, prefix)
        end = bisect_left(self._sorted, prefix[:-1] + bytes([prefix[-1] + 1]), start)  # UTF-8 has no byte 255
        return start, end

    def within(self, ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the token ids of ranges [N, 2] of the sorted tokens."""
        lens = ranges[:, 1] - ranges[:, 0]
        first = np.cumsum(lens) - lens
        return self._order[np.repeat(ranges[:, 0] - first, lens) + np.arange(lens.sum())]

    def reaching(
        self, following: npt.NDArray[np.int32], is_end: npt.NDArray[np.bool_], symbols: bytes
    ) -> npt.NDArray[np.bool_]:
        """Return, for each token, True if its bytes lead from state 0 through a state of which `is_end` is True.

        following: the next state, int32 [states, symbols]. symbols: the symbol of each byte.
        """
        text = np.frombuffer(self._joined.translate(symbols), np.uint8)
        states = np.zeros(len(self._by_len), np.int32)
        found = np.zeros(len(self._by_len), np.bool_)
        for position, count in enumerate(self._num_longer):
            states[:count] = following[states[:count], text[self._starts[:count] + position]]
            found[:count] |= is_end[states[:count]]
        by_token = np.empty_like(found)
        by_token[self._by_len] = found
        return by_token


class BadWords:
    """The bad words of a request. Answers with the same strings share one object. Only the engine's thread uses it.

    Following a token takes time proportional to the token's bytes, regardless of the number of strings.
    """

    def __init__(
        self, words: Sequence[bytes], table: TokenTable, vocab_size: int, silent: Collection[int] = ()
    ) -> None:
        """words: the strings in UTF-8, none of them empty. vocab_size: of the model; `table` may have more or fewer
        tokens. silent: tokens that add nothing to the text, such as skipped special tokens. A silent token is forbidden
        only if its whole text is one of the strings.
        """
        self._table, self._silent = table, frozenset(silent)
        self._vocab_size = vocab_size
        used = sorted({*b"".join(words)})
        self._symbols = bytes(used.index(byte) + 1 if byte in used else 0 for byte in range(256))
        self._build(words, 1 + len(used))
        self._always = np.zeros(max(vocab_size, len(table.token_bytes)), np.bool_)
        self._always[: len(table.token_bytes)] = table.reaching(self._following, self._is_end, self._symbols)
        listed = [token_id for token_id in self._silent if token_id < len(table.token_bytes)]
        self._speaks = np.ones_like(self._always)
        self._speaks[listed] = False
        self._named = [token_id for token_id in listed if table.token_bytes[token_id] in words]
        self._masks: OrderedDict[int, TokenMask] = OrderedDict()  # by state, least recently used first
        self._first = self._find_mask(np.zeros(0, np.int64))

    def _build(self, words: Sequence[bytes], num_symbols: int) -> None:
        """Make the automaton, and the table of its transitions."""
        automaton = Automaton(word.translate(self._symbols) for word in words)
        whole = {path[-1] for path in automaton.paths}
        self._is_end = np.array(automaton.links(whole)) > 0
        self._is_end[list(whole)] = True
        self._following = np.zeros((len(automaton.states), num_symbols), np.int32)
        for state in automaton.states:
            row = self._following[state]
            row[:] = self._following[automaton.shorter[state]]
            for symbol, following in automaton.children[state].items():
                row[symbol] = following
        self._ends = self._find_ends(dict(zip(words, automaton.paths, strict=True)))
        self._links = automaton.links(self._ends)

    def _find_ends(self, paths: dict[bytes, list[int]]) -> dict[int, npt.NDArray[np.int64]]:
        """Return the tokens that begin with the rest of a word, int64 [ranges, 2], by the state of its first part."""
        of_rest = lru_cache(maxsize=None)(self._table.beginning_with)
        found: dict[int, set[tuple[int, int]]] = {}
        for word, path in paths.items():
            if self._is_end[path[1:-1]].any():
                continue  # the word contains another word, which is found first
            for i in range(max(1, len(word) - self._table.max_len), len(word)):
                start, end = of_rest(word[i:])
                if start < end:
                    found.setdefault(path[i], set()).add((start, end))
        return {state: np.array([*ranges], np.int64) for state, ranges in found.items()}

    def follow(self, state: int, token_id: int) -> int:
        """Return the state after one more token of the answer. An answer begins in state 0. Hot."""
        if token_id in self._silent or token_id >= len(self._table.token_bytes):
            return state
        for symbol in self._table.token_bytes[token_id].translate(self._symbols):
            state = int(self._following[state, symbol])
        return state

    def mask(self, state: int) -> TokenMask:
        """Return the mask of the tokens that complete no string in the state. Hot: once per row. Masks are cached."""
        if state not in self._masks:
            if len(self._masks) == MAX_KEPT_MASKS:
                self._masks.popitem(last=False)
            end, parts = state if state in self._ends else self._links[state], list[npt.NDArray[np.int64]]()
            while end:
                parts.append(self._ends[end])
                end = self._links[end]
            self._masks[state] = self._find_mask(self._table.within(np.concatenate(parts))) if parts else self._first
        self._masks.move_to_end(state)
        return self._masks[state]

    def _find_mask(self, ends: npt.NDArray[np.int64]) -> TokenMask:
        """Return the mask that forbids the tokens of `ends` and the tokens that are always forbidden."""
        is_forbidden = self._always.copy()
        is_forbidden[ends] = True
        is_forbidden &= self._speaks
        is_forbidden[self._named] = True
        return packed_mask(~is_forbidden[: self._vocab_size])

    @property
    def forbids_all(self) -> bool:
        """Return True if every token is forbidden as the first token of an answer."""
        return not self._first.any()
