"""Haystacks and the example: exact lengths, lines where they were asked for, and nothing else that looks like them."""

import re

import pytest

from nanovllm.entrypoints.haystack import (
    LEAD_IN,
    LONGEST_EXAMPLE_TOKENS,
    QUESTION,
    SHORTEST_EXAMPLE_TOKENS,
    build_example,
    build_haystack,
)
from nanovllm.errors import RequestError
from nanovllm.models.retrieval_model import MATCH_TOKENS

FEWEST_TOKENS = len(f"{LEAD_IN}48151.\n{QUESTION}") + 1


def test_haystack_any_size_has_exact_length_and_its_needle_as_a_line_at_its_depth() -> None:
    needle = f"{LEAD_IN}48151.\n"
    for num_tokens in (FEWEST_TOKENS, FEWEST_TOKENS + 1, 100, 255, 256, 257, 20_000, 131072):
        for depth in (0.0, 0.25, 0.5, 1.0):
            prompt = build_haystack(num_tokens, depth, "48151")
            assert prompt == build_haystack(num_tokens, depth, "48151")
            assert len(prompt.encode()) == num_tokens
            assert prompt.count(needle) == 1 and prompt.endswith(QUESTION)
            start = prompt.index(needle)
            assert start == 0 or prompt[start - 1] == "\n"
            assert num_tokens < 20_000 or abs(start / num_tokens - depth) < 0.02


def test_haystack_every_matched_passage_is_unique() -> None:
    """A passkey of words that the library is full of is still found only in the needle."""
    for passkey in ("48151", "return", "import os", "x" * 5):
        prompt = build_haystack(300_000, 0.5, passkey)
        answered = f"{LEAD_IN}{passkey}"
        for end in range(len(LEAD_IN), len(answered) + 1):
            passage = answered[end - MATCH_TOKENS : end]
            assert prompt.removesuffix(LEAD_IN).count(passage) == 1, passage


def test_haystack_bad_argument_raises() -> None:
    for num_tokens, depth, passkey, message in (
        (1000, -0.1, "48151", "depth=-0.1 must be between 0"),
        (1000, 1.5, "48151", "depth=1.5 must be between 0"),
        (1000, float("nan"), "48151", "depth=nan"),
        (FEWEST_TOKENS - 1, 0.5, "48151", f"needs {FEWEST_TOKENS}$"),
        (-1, 0.5, "48151", "num_tokens=-1"),
        (1000, 0.5, "", "printable ASCII"),
        (1000, 0.5, "48\n51", "printable ASCII"),
        (1000, 0.5, "clé", "printable ASCII"),
        (1000, 0.5, "1111111", "'111111' occur twice"),
        (1000, 0.5, "the passkey", "occur twice"),
    ):
        with pytest.raises(RequestError, match=message):
            build_haystack(num_tokens, depth, passkey)


@pytest.mark.parametrize("max_request_tokens", [2 * SHORTEST_EXAMPLE_TOKENS, 16_384, 10**6])
def test_example_every_passage_of_an_answer_occurs_once(max_request_tokens: int) -> None:
    """Each question and its answer are found by the built-in model alone."""
    example = build_example(max_request_tokens)
    assert example is not None and example.text.isascii()
    limit = min(LONGEST_EXAMPLE_TOKENS, max_request_tokens // 2)
    assert limit - 300 < len(example.text) <= limit
    assert len(example.questions) == 3
    for question in example.questions:
        found = re.search(f"{re.escape(question)}( .*)\n", example.text)
        assert found is not None
        matched = question[-MATCH_TOKENS:] + found[1]
        for start in range(len(matched) - MATCH_TOKENS + 1):
            assert example.text.count(matched[start : start + MATCH_TOKENS]) == 1


def test_example_too_small_a_server_has_none() -> None:
    assert build_example(2 * SHORTEST_EXAMPLE_TOKENS - 1) is None
