"""Haystacks: exact lengths, the needle where it was asked for, and nothing else that looks like it."""

import pytest

from nanovllm.demo.haystack import LEAD_IN, QUESTION, build_haystack
from nanovllm.demo.retrieval_model import MATCH_TOKENS
from nanovllm.errors import RequestError

FEWEST_TOKENS = len(f"{LEAD_IN}48151.\n{QUESTION}") + 1


@pytest.mark.parametrize("num_tokens", [FEWEST_TOKENS, FEWEST_TOKENS + 1, 100, 255, 256, 257, 4096, 131072])
@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_haystack_any_size_has_exact_length(num_tokens: int, depth: float) -> None:
    prompt = build_haystack(num_tokens, depth, "48151")
    assert len(prompt.encode()) == num_tokens
    assert prompt.count(f"{LEAD_IN}48151.\n") == 1
    assert prompt.endswith(QUESTION)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_haystack_needle_is_a_line_at_its_depth(depth: float) -> None:
    prompt = build_haystack(20_000, depth, "48151")
    start = prompt.index(f"{LEAD_IN}48151.\n")
    assert start == 0 or prompt[start - 1] == "\n"
    assert abs(start / 20_000 - depth) < 0.02


@pytest.mark.parametrize("passkey", ["48151", "return", "import os", "x" * 5])
def test_haystack_every_matched_passage_is_unique(passkey: str) -> None:
    """A passkey of words that the library is full of is still found only in the needle."""
    prompt = build_haystack(300_000, 0.5, passkey)
    answered = f"{LEAD_IN}{passkey}"
    for end in range(len(LEAD_IN), len(answered) + 1):
        passage = answered[end - MATCH_TOKENS : end]
        assert prompt.removesuffix(LEAD_IN).count(passage) == 1, passage


def test_haystack_same_arguments_same_prompt() -> None:
    assert build_haystack(5000, 0.3, "48151") == build_haystack(5000, 0.3, "48151")


@pytest.mark.parametrize(
    ("num_tokens", "depth", "passkey", "message"),
    [
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
    ],
)
def test_haystack_bad_argument_raises(num_tokens: int, depth: float, passkey: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build_haystack(num_tokens, depth, passkey)
