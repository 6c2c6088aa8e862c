"""SuffixArray: finds the longest suffix of any tokens that occurs in a fixed text.

A suffix of one text that ends at some token of another is a prefix once both are read backwards. So the index reverses
the text and sorts its positions by the MAX_MATCH_TOKENS tokens that follow each. Bisection then leads to the two
neighbours of the reversed tail, and one of them shares the most tokens with it.

The reversed text is kept as big-endian 32-bit numbers, so that comparing slices of bytes compares tokens. With one
32-bit position per token, the index takes 8 bytes a token. Building it takes 56 bytes a token for a while.
"""

import struct
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_MATCH_TOKENS = 64  # a power of two; a longer match would hardly predict better
_TOKEN_BYTES = 4
_KEY_BYTES = MAX_MATCH_TOKENS * _TOKEN_BYTES


class SuffixArray:
    """An index of `token_ids`, which it copies. Numpy builds it and holds the GIL only for moments."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        reversed_ids = np.asarray(token_ids, dtype=np.int64)[::-1]
        assert np.all((reversed_ids >= 0) & (reversed_ids < 2**31)), "a token id does not fit into 31 bits"
        order = _sort_positions(reversed_ids)
        # Position 0 is the end of the text. An occurrence there is of no use, as nothing follows it.
        self._positions = order[order > 0].astype(np.int32).data
        self._text = reversed_ids.astype(">u4").tobytes()
        self._num_tokens = len(reversed_ids)

    def longest_match(self, tail: Sequence[int]) -> tuple[int, int]:
        """The longest suffix of `tail`, up to MAX_MATCH_TOKENS, that occurs in the text with another token after it.

        Returns the number of tokens and the position that follows the occurrence; (0, 0) if there is none. If a match
        of MAX_MATCH_TOKENS occurs several times, the last occurrence is found. A shorter one may be any of them.
        Hot: once per token.
        """
        wanted = tail[-MAX_MATCH_TOKENS:]
        key = struct.pack(f">{len(wanted)}I", *wanted[::-1])
        row = bisect_left(self._positions, key, key=self._key_at)
        longest = end = 0
        for position in self._positions[max(row - 1, 0) : row + 1]:
            num_tokens = _num_common_tokens(key, self._key_at(position))
            if num_tokens > longest:
                longest, end = num_tokens, self._num_tokens - position
        return longest, end

    def _key_at(self, position: int) -> bytes:
        """What the position is sorted by: the tokens from there on in the reversed text."""
        start = position * _TOKEN_BYTES
        return self._text[start : start + _KEY_BYTES]


def _sort_positions(token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """All positions, ordered by the MAX_MATCH_TOKENS tokens from there on; where these are equal, by position.

    Prefix doubling: `ranks` order the positions by the next `width` tokens, and 0 is the end of the text. The ranks of
    a position and of the one `width` further on, in one number, order it by twice as many.
    """
    ranks, width = (token_ids + 1).astype(np.uint64), 1
    while True:
        keys = ranks << np.uint64(32)
        keys[:-width] |= ranks[width:]
        width *= 2
        if width == MAX_MATCH_TOKENS:
            return np.argsort(keys, kind="stable")
        order = np.argsort(keys)  # faster than a stable sort; equal keys get the same rank anyway
        keys = keys[order]
        new_ranks = np.cumsum(np.concatenate(([1], keys[1:] != keys[:-1])), dtype=np.uint64)
        if new_ranks[-1] >= len(keys):
            return order  # no two positions are equal
        ranks[order] = new_ranks


def _num_common_tokens(key: bytes, other: bytes) -> int:
    """How many tokens are equal at the start of both."""
    num_bytes = min(len(key), len(other))
    difference = int.from_bytes(key[:num_bytes], "big") ^ int.from_bytes(other[:num_bytes], "big")
    return (num_bytes * 8 - difference.bit_length()) // (_TOKEN_BYTES * 8)
