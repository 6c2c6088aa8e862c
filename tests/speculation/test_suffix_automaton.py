"""SuffixAutomaton against brute force."""

import time

import pytest
from hypothesis import example, given, settings
from match_reference import longest_matches, texts
from tiers import examples

from nanovllm.speculation.suffix_automaton import SuffixAutomaton


@settings(max_examples=examples(300), deadline=None)
@given(texts(60))
@example([])
@example([1])
@example([1, 1])
@example([1, 2, 1])
@example([4] * 100)
@example([1, 2, 3] * 30)
def test_longest_match_after_each_token_equals_brute_force(token_ids: list[int]) -> None:
    automaton = SuffixAutomaton()
    assert automaton.longest_match() == (0, 0)
    for num_tokens, token_id in enumerate(token_ids, start=1):
        automaton.append(token_id)
        text = token_ids[:num_tokens]
        length, ends = longest_matches(text, text, limit=num_tokens)
        assert automaton.longest_match() == (length, ends[0] if ends else 0)
        assert automaton.token_ids == text and len(automaton) == num_tokens


def test_longest_match_repeated_pattern_overlaps_itself() -> None:
    assert SuffixAutomaton([1, 2, 3] * 4).longest_match() == (9, 9)


@pytest.mark.parametrize("token_ids", [[0] * 20_000, [0, 1] * 10_000, [*range(100)] * 200, [*range(20_000)]])
def test_append_degenerate_text_takes_linear_time(token_ids: list[int]) -> None:
    """Quadratic time would take minutes."""
    start_s = time.perf_counter()
    SuffixAutomaton(token_ids)
    assert time.perf_counter() - start_s < 2
