"""The example: each question and its answer are found by the built-in model alone."""

import re

import pytest

from nanovllm.demo.example import LONGEST_TOKENS, SHORTEST_TOKENS, build_example
from nanovllm.demo.retrieval_model import MATCH_TOKENS


@pytest.mark.parametrize("max_request_tokens", [2 * SHORTEST_TOKENS, 16_384, 10**6])
def test_every_passage_of_an_answer_occurs_once(max_request_tokens: int) -> None:
    example = build_example(max_request_tokens)
    assert example is not None and example.text.isascii()
    limit = min(LONGEST_TOKENS, max_request_tokens // 2)
    assert limit - 300 < len(example.text) <= limit
    assert len(example.questions) == 3
    for question in example.questions:
        found = re.search(f"{re.escape(question)}( .*)\n", example.text)
        assert found is not None
        matched = question[-MATCH_TOKENS:] + found[1]
        for start in range(len(matched) - MATCH_TOKENS + 1):
            assert example.text.count(matched[start : start + MATCH_TOKENS]) == 1


def test_too_small_a_server_has_none() -> None:
    assert build_example(2 * SHORTEST_TOKENS - 1) is None
