"""SuffixArray against brute force."""

from array import array

import numpy as np
import pytest
from hypothesis import example, given, settings
from match_reference import longest_matches, texts
from tiers import examples

from nanovllm.speculation.suffix_array import MAX_MATCH_TOKENS, SuffixArray


def check(text: list[int], tail: list[int]) -> None:
    num_tokens, ends = longest_matches(text, tail, MAX_MATCH_TOKENS)
    found, end = SuffixArray(text).longest_match(tail)
    assert found == num_tokens
    assert end in ends if ends else end == 0
    if found == MAX_MATCH_TOKENS:
        assert end == ends[-1]


@settings(max_examples=examples(300), deadline=None)
@given(texts(300), texts(150))
@example([], [])
@example([], [1])
@example([1], [])
@example([1], [1])
@example([1, 1], [1])
@example([1, 2], [2])
@example([7] * 200, [7] * 100)
@example([*range(70), 5], [*range(70)])
def test_longest_match_any_text_equals_brute_force(text: list[int], tail: list[int]) -> None:
    check(text, tail)


@settings(max_examples=examples(200), deadline=None)
@given(texts(300))
def test_longest_match_tail_of_the_text_finds_another_occurrence(text: list[int]) -> None:
    """The text ends with the tail, but nothing follows there."""
    check(text, text)
    check(text, text[-5:])
    check(text, text[: len(text) // 2])


@pytest.mark.parametrize("num_common", [1, 31, 32, 33, 63, 64, 65, 100])
@pytest.mark.parametrize("num_before", [0, 1])
def test_longest_match_lengths_around_the_limit_are_exact(num_common: int, num_before: int) -> None:
    common = list(range(100, 100 + num_common))
    text = [7] * num_before + common + [3]
    assert SuffixArray(text).longest_match([8, *common]) == (min(num_common, MAX_MATCH_TOKENS), len(text) - 1)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 63, 64, 65, 127, 128, 129])
def test_longest_match_all_tokens_equal_leaves_one_to_follow(num_tokens: int) -> None:
    expected = min(max(num_tokens - 1, 0), MAX_MATCH_TOKENS)
    assert SuffixArray([5] * num_tokens).longest_match([5] * 200)[0] == expected


def test_longest_match_largest_ids_are_told_apart() -> None:
    largest = 2**31 - 1
    index = SuffixArray(array("q", [largest, 256, 1, largest - 1, 256, 2]))
    assert index.longest_match([largest, 256]) == (2, 2)
    assert index.longest_match(array("q", [largest - 1, 256])) == (2, 5)
    assert index.longest_match([65536, 256])[0] == 1


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_suffix_array_id_beyond_31_bits_asserts(token_id: int) -> None:
    with pytest.raises(AssertionError, match="31 bits"):
        SuffixArray([1, token_id, 2])


@pytest.mark.parametrize("vocab", [1, 2, 50, 150_000])
def test_longest_match_long_text_finds_what_it_contains(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    text = np.resize(generator.integers(0, vocab, 20_000), 50_000)
    index, token_ids = SuffixArray(text), text.tolist()  # type: ignore[arg-type]
    for end in generator.integers(MAX_MATCH_TOKENS, len(token_ids), 200).tolist():
        tail = token_ids[end - MAX_MATCH_TOKENS : end]
        num_tokens, found = index.longest_match(tail)
        assert num_tokens == MAX_MATCH_TOKENS
        assert token_ids[found - MAX_MATCH_TOKENS : found] == tail
