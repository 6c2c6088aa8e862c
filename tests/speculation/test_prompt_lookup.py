"""PromptLookup against brute force, and what its background thread may delay or keep."""

import subprocess
import sys
import time
import weakref
from array import array

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from match_reference import longest_matches, texts
from tiers import examples

from nanovllm.core.sequence import TokenIds
from nanovllm.speculation.prompt_lookup import MIN_MATCH_TOKENS, PromptLookup
from nanovllm.speculation.suffix_array import MAX_MATCH_TOKENS


def is_indexed(lookup: PromptLookup) -> bool:
    return lookup._build is None or lookup._build.result() is not None


def wait_for_index(lookup: PromptLookup, timeout_s: float = 60) -> PromptLookup:
    deadline_s = time.perf_counter() + timeout_s
    while not is_indexed(lookup):
        assert time.perf_counter() < deadline_s, "the index is not ready"
        time.sleep(0.0005)
    return lookup


def long_prompt(num_tokens: int = 1_000_000) -> TokenIds:
    """The same random tokens four times over. Building the index of a million takes about 0.3 s."""
    quarter = np.random.default_rng(0).integers(0, 150_000, num_tokens // 4)
    return array("q", np.tile(quarter, 4).tobytes())


def continuation(text: list[int], match_len: int, end: int, max_tokens: int) -> list[int]:
    """What follows `end`. If the match reaches back to `end`, the text is periodic, and so is what follows."""
    text, num_tokens = text.copy(), len(text)
    if match_len >= num_tokens - end:
        for position in range(end, end + max_tokens):
            text.append(text[position])
    return text[end : end + max_tokens]


def check(lookup: PromptLookup, text: list[int], searched_from: int = 0) -> None:
    """`searched_from`: where the text starts that is searched."""
    length, ends = longest_matches(text[searched_from:], text[searched_from:], MAX_MATCH_TOKENS)
    if length < MIN_MATCH_TOKENS:
        length, ends = 0, []
    assert lookup.match_len == length
    for max_tokens in (1, 3, 50):
        possible = [continuation(text, length, searched_from + end, max_tokens) for end in ends]
        assert lookup.propose(max_tokens) in (possible or [[]])


@settings(max_examples=examples(200), deadline=None)
@given(texts(200), texts(60))
@example([], [])
@example([], [1, 2, 1, 2])
@example([3], [3, 3])
@example([1, 2, 3, 1, 2], [])
@example([*range(200)], [*range(10, 100)])
@example([*range(200)], [198, 199, 1, 2, 198, 199])
@example([5] * 200, [5] * 100)
def test_propose_after_each_token_equals_brute_force(prompt: list[int], answer: list[int]) -> None:
    lookup = wait_for_index(PromptLookup(prompt))
    check(lookup, prompt)
    for num_tokens, token_id in enumerate(answer, start=1):
        lookup.append(token_id)
        check(lookup, prompt + answer[:num_tokens])


@settings(max_examples=examples(100), deadline=None)
@given(texts(200), texts(60), st.integers(0, 60))
def test_close_at_any_time_leaves_the_answer_and_the_end_of_the_prompt(
    prompt: list[int], answer: list[int], num_before: int
) -> None:
    lookup = PromptLookup(prompt)
    for token_id in answer[:num_before]:
        lookup.append(token_id)
        lookup.propose(2)
    lookup.close()
    for num_tokens in range(num_before, len(answer)):
        lookup.append(answer[num_tokens])
        check(lookup, prompt + answer[: num_tokens + 1], max(len(prompt) - MAX_MATCH_TOKENS, 0))
    lookup.close()


def test_propose_match_at_the_end_of_the_prompt_goes_on_into_the_answer() -> None:
    lookup = wait_for_index(PromptLookup([*range(1000, 1100), 1, 2, 3]))
    for token_id in (50, 60, 70, 1099, 1, 2):
        lookup.append(token_id)
    assert lookup.match_len == 3
    assert lookup.propose(4) == [3, 50, 60, 70]


def test_propose_match_within_the_prompt_runs_past_its_end() -> None:
    prompt = [1, 2, 3, *range(1000, 1070)]
    lookup = wait_for_index(PromptLookup(prompt))
    lookup.append(2)
    lookup.append(3)
    assert lookup.propose(100) == [*range(1000, 1070), 2, 3]


def test_propose_equally_long_matches_prefers_the_answer() -> None:
    lookup = wait_for_index(PromptLookup([1, 2, 3, *range(1000, 1100)]))
    for token_id in (1, 2, 4, 9, 1, 2):
        lookup.append(token_id)
    assert lookup.propose(2) == [4, 9]


def test_propose_longer_match_in_the_prompt_wins() -> None:
    lookup = wait_for_index(PromptLookup([8, 1, 2, 3, *range(1000, 1100)]))
    for token_id in (1, 2, 4, 8, 1, 2):
        lookup.append(token_id)
    assert lookup.match_len == 3
    assert lookup.propose(2) == [3, 1000]


def test_propose_text_ends_with_a_repeated_pattern_repeats_it() -> None:
    lookup = PromptLookup([7, 1, 2, 3])
    assert lookup.propose(5) == []
    lookup.append(1)
    assert lookup.propose(5) == []  # a single token does not count as a match
    lookup.append(2)
    assert lookup.propose(5) == [3, 1, 2]
    lookup.append(3)
    assert lookup.propose(5) == [1, 2, 3, 1, 2]
    assert lookup.propose(0) == []


def test_prompt_lookup_million_tokens_returns_before_the_index_is_built() -> None:
    prompt = long_prompt()
    expected = prompt[400_000:400_006].tolist()
    elapsed_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        lookup = PromptLookup(prompt)
        elapsed_s.append(time.perf_counter() - start_s)
        assert not is_indexed(lookup)
    assert min(elapsed_s) < 0.01
    for token_id in prompt[399_997:400_000]:
        lookup.append(token_id)
    assert lookup.propose(6) == [] or is_indexed(lookup)
    for token_id in prompt[-3:]:  # the prompt's last tokens are searched at once
        lookup.append(token_id)
    assert lookup.propose(1) == prompt[399_997:399_998].tolist()
    wait_for_index(lookup)
    for token_id in prompt[399_990:400_000]:
        lookup.append(token_id)
    assert lookup.match_len == 10
    assert lookup.propose(6) == expected


def test_prompt_lookup_prompt_changed_later_is_not_noticed() -> None:
    prompt = array("q", range(1000))
    lookup = PromptLookup(prompt)
    prompt.append(1)  # fails if the build reads this very array
    prompt[501] = 7
    wait_for_index(lookup)
    lookup.append(499)
    lookup.append(500)
    assert lookup.propose(2) == [501, 502]


def test_close_while_others_are_built_frees_the_prompt_and_skips_the_build() -> None:
    prompt, short_prompt = long_prompt(), long_prompt(1000)
    ahead = [PromptLookup(prompt) for _ in range(3)]
    aborted = PromptLookup(short_prompt)
    held = [weakref.ref(aborted._prompt), weakref.ref(aborted._build)]
    aborted.close()
    assert not is_indexed(ahead[-1]), "this machine is too fast for the test"
    assert [reference() for reference in held] == [None, None]
    wait_for_index(PromptLookup(short_prompt))  # the builder goes on past the gap
    assert all(is_indexed(lookup) for lookup in ahead)


def test_close_after_the_build_frees_prompt_and_index() -> None:
    lookup = wait_for_index(PromptLookup([1, 2, 3, *range(1000, 1100)]))
    held = [weakref.ref(lookup._prompt), weakref.ref(lookup._build)]
    lookup.append(1)
    lookup.append(2)
    assert lookup.propose(1) == [3]
    lookup.close()
    assert (lookup.match_len, lookup.propose(1)) == (0, [])
    deadline_s = time.perf_counter() + 10
    while any(reference() for reference in held):  # the builder thread may need a moment to let go
        assert time.perf_counter() < deadline_s, "something still refers to the prompt or its index"
        time.sleep(0.001)


def test_propose_build_failed_raises() -> None:
    lookup = PromptLookup([-1, *range(100)])
    wait_for_index(PromptLookup([*range(100)]))  # built after the other, and by a thread that is still alive
    lookup.append(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="prompt of 101 tokens could not be indexed") as raised:
            lookup.propose(4)
        assert isinstance(raised.value.__cause__, AssertionError)
    with pytest.raises(RuntimeError, match="could not be indexed"):
        _ = lookup.match_len
    lookup.close()
    assert lookup.propose(4) == []


def test_process_ends_while_prompts_are_built_does_not_wait_for_them() -> None:
    code = (
        "from array import array; from nanovllm.speculation.prompt_lookup import PromptLookup\n"
        "prompt = array('q', [1, 2, 3, 2] * 250_000)\n"
        "lookups = [PromptLookup(prompt) for _ in range(120)]\n"
        "print('end', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"end\n"
        start_s = time.perf_counter()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert time.perf_counter() - start_s < 5  # the builds would take more than 9 s
