"""The comparison of `make eval`: which differences count. The evaluation itself is not part of these tests."""

import pytest

from benchmarks.lm_eval_check import TOLERANCE, Answers, compare_answers, parts_at_tie

LOGITS = [1.0, 5.0, 5.0 + TOLERANCE / 2, 5.0 + 3 * TOLERANCE]


@pytest.mark.parametrize(
    ("expected", "given", "is_tie"),
    [
        ([7, 1, 3], [7, 2, 0], True),
        ([7, 1, 3], [7, 3, 3], False),
        ([7, 1, 3], [7, 0, 3], False),
        ([7, 1, 3], [7, 1], False),
        ([7, 1, 3], [7, 1, 3], False),
    ],
)
def test_texts_part_at_a_tie_only_if_both_tokens_are_equally_likely(
    expected: list[int], given: list[int], is_tie: bool
) -> None:
    asked: list[list[int]] = []

    def logits_after(token_ids: list[int]) -> list[float]:
        asked.append(token_ids)
        return LOGITS

    assert parts_at_tie(logits_after, expected, given) == is_tie
    assert all(token_ids == [7] for token_ids in asked)


def test_texts_that_differ_count_unless_they_are_tied() -> None:
    def samples(*texts: str) -> dict[str, object]:
        asked = [{"doc_id": i, "arguments": [(f"{i}: ", {})], "resps": [[text]]} for i, text in enumerate(texts)]
        return {"samples": {"quote": asked}}

    def is_tied(expected: str, given: str) -> bool:
        return (expected, given) == ("1: b", "1: x")

    found = compare_answers("m", samples("a", "b", "c"), samples("a", "x", "y"), len, is_tied)
    assert list(found) == [Answers("m", "quote", 3, None, num_different=1, num_tied=1)]


def test_log_likelihoods_differ_by_the_token() -> None:
    def samples(*likelihoods: float) -> dict[str, object]:
        asked = [
            {"doc_id": i, "arguments": [("a", "bc")], "resps": [[(value, True)]]} for i, value in enumerate(likelihoods)
        ]
        return {"samples": {"choice": asked}}

    shifted = samples(-1.0 + TOLERANCE, -2.0 + 4 * TOLERANCE)
    (answers,) = compare_answers("m", samples(-1.0, -2.0), shifted, len, lambda *texts: False)
    assert answers.max_error_per_token == pytest.approx(2 * TOLERANCE)
    assert (answers.num_answers, answers.num_different) == (2, 1)
