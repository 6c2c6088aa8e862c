"""Longest matches by brute force, and texts in which there are many."""

from collections.abc import Sequence

from hypothesis import strategies as st


def num_matching(text: Sequence[int], end: int, tail: Sequence[int]) -> int:
    """How many tokens before `end` equal the last ones of `tail`."""
    limit = min(end, len(tail))
    return next((n for n in range(limit) if text[end - 1 - n] != tail[len(tail) - 1 - n]), limit)


def longest_matches(text: Sequence[int], tail: Sequence[int], limit: int) -> tuple[int, list[int]]:
    """Length, up to `limit`, and ends of all longest matches of `tail` that another token of the text follows."""
    lengths = {end: min(num_matching(text, end, tail), limit) for end in range(1, len(text))}
    longest = max(lengths.values(), default=0)
    return longest, [end for end, length in lengths.items() if length == longest > 0]


def _tokens(max_size: int) -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that most of what occurs occurs again."""
    return st.builds(
        lambda data, vocab: [byte % vocab for byte in data], st.binary(max_size=max_size), st.sampled_from([1, 2, 3, 9])
    )


def _mostly_periodic(pattern: list[int], num_repeats: int, end: list[int]) -> list[int]:
    return pattern * num_repeats + end


def texts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Any tokens, or a pattern that repeats up to a different end. At most about `max_size` tokens."""
    pattern = st.builds(_mostly_periodic, _tokens(max_size // 8), st.integers(1, 6), _tokens(max_size // 8))
    return st.one_of(_tokens(max_size), pattern)
