"""Where guesses come from: looking up the text against brute force, and the drafts of the model itself."""

import random
from array import array

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples

from nanovllm.capabilities.speculation.drafters import (
    MAX_MATCH_TOKENS,
    MAX_PLACES,
    MIN_MATCH_TOKENS,
    NUM_FEW_PLACES,
    QUOTE_TOKENS,
    ModelDrafter,
    PromptLookupDrafter,
    longest_match,
)
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.seams import DRAFTED, NO_GUESSES, Guesses


def sequence(prompt: list[int], seq_id: int = 0) -> Sequence:
    return Sequence(seq_id, prompt, SamplingParams(max_tokens=100), seed=0)


def looked_up(prompt: list[int], answer: list[int] | tuple[int, ...] = (), max_guesses: int = 50) -> tuple[int, ...]:
    """The guesses after a prompt and an answer."""
    seq = sequence(prompt)
    seq.token_ids.extend(answer)
    return PromptLookupDrafter().guess(seq, max_guesses).token_ids


# -- against brute force ---------------------------------------------------------------------------------------------


def tokens(max_size: int) -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that most of what occurs occurs again."""
    return st.builds(
        lambda data, vocab: [byte % vocab for byte in data], st.binary(max_size=max_size), st.sampled_from([1, 2, 3, 9])
    )


def texts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Any tokens, or a pattern that repeats up to a different end. At most about `max_size` tokens."""
    pattern = st.builds(
        lambda part, num_repeats, end: part * num_repeats + end,
        tokens(max_size // 8),
        st.integers(1, 6),
        tokens(max_size // 8),
    )
    return st.one_of(tokens(max_size), pattern)


def best_guesses(text: list[int], max_guesses: int) -> list[list[int]]:
    """What followed each of the longest matches. A match that reaches back to its own end goes on repeating.

    Regression: in 30 equal tokens, another one and 30 of them again, this knew an older and longer match than counts.
    """

    def length_at(end: int) -> int:
        limit = min(end, MAX_MATCH_TOKENS)
        return next((n for n in range(limit) if text[end - 1 - n] != text[-1 - n]), limit)

    lengths = {end: length_at(end) for end in range(1, len(text))}
    places, found = [end for end, length in lengths.items() if length >= MIN_MATCH_TOKENS], []
    length = MIN_MATCH_TOKENS
    while (
        len(places := places[-max(NUM_FEW_PLACES, MAX_PLACES >> length) :]) > NUM_FEW_PLACES
    ):  # the oldest do not count
        longer = [end for end in places if lengths[end] > length]
        places, length = longer or places[-1:], length + 1
    longest = max((lengths[end] for end in places), default=0)
    for end in places:
        if lengths[end] == longest:
            longer = text.copy()
            if longest >= len(text) - end:
                for position in range(end, end + max_guesses):
                    longer.append(longer[position])
            found.append(longer[end : end + max_guesses])
    return found or [[]]


@settings(max_examples=examples(150))
@given(texts(200), texts(60), st.integers(1, 20))
@example([], [], 1)
@example([1, 2], [1, 2, 1, 2], 1)
@example([3], [3, 3], 1)
@example([5] * 200, [5] * 100, 7)
@example([*range(200)], [*range(10, 100)], 3)
@example([*range(200)], [198, 199, 1, 2, 198, 199], 1)
@example([1] * 30 + [0], [1] * 30, 1)
def test_look_up_as_the_answer_grows_equals_brute_force(prompt: list[int], answer: list[int], num_new: int) -> None:
    """The answer grows by up to `num_new` tokens at a time, as with guesses that prove right."""
    drafter, seq = PromptLookupDrafter(), sequence(prompt)
    for start in range(0, len(answer) + 1, num_new):
        text = prompt + answer[:start]
        seq.token_ids = array("q", text)
        for max_guesses in (1, 3, 50):
            expected = best_guesses(text, max_guesses)
            assert list(drafter.guess(seq, max_guesses).token_ids) in expected
            assert drafter.can_guess(seq) == (expected != [[]])


def test_look_up_of_several_matches_takes_the_longest_then_the_newest() -> None:
    far = [*range(1000, 1100)]
    assert looked_up([8, 1, 2, 3, *far], [1, 2, 4, 8, 1, 2], 2) == (3, 1000)
    assert looked_up([1, 2, 3, *far], [1, 2, 4, 9, 1, 2], 2) == (4, 9)
    assert looked_up([*far, 1, 2, 3], [50, 60, 70, 1099, 1, 2], 4) == (3, 50, 60, 70)
    assert looked_up([1, 2, 3, *far], [2, 3], 200) == (*far, 2, 3)


def test_look_up_of_a_pattern_that_repeats_goes_on_with_it() -> None:
    assert looked_up([7, 1, 2, 3]) == looked_up([7, 1, 2, 3], [1]) == ()  # a single token does not count
    assert looked_up([7, 1, 2, 3], [1, 2], 5) == (3, 1, 2)
    assert looked_up([7, 1, 2, 3], [1, 2, 3], 5) == (1, 2, 3, 1, 2)
    assert looked_up([7, 1, 2, 3], [1, 2, 3], 0) == ()


def test_look_up_in_a_text_of_few_tokens_finds_the_one_place_that_matches() -> None:
    """Its end occurs in thousands of places."""
    text = random.Random(0).choices(range(3), k=60_000)
    text += text[100:140]
    assert longest_match(array("q", text))[1:] == (40, 140)
    assert longest_match(array("q", [1] * 100_000))[1:] == (MAX_MATCH_TOKENS, 99_999)


def test_a_match_is_a_quote_from_a_certain_length_on() -> None:
    drafter, seq = PromptLookupDrafter(), sequence([*range(100)])
    for length in range(1, QUOTE_TOKENS + 3):
        seq.token_ids.append(10 + length)
        assert drafter.kind(seq) == ("quote" if length >= QUOTE_TOKENS else "prompt_lookup")


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_a_short_prompt_behind_answers_about_a_long_one_is_looked_up_at_once() -> None:
    """Regression: a thread indexed each answer's prompt, one after another, and until then nothing was found."""
    drafter = PromptLookupDrafter()
    long, short = [*range(200_000), 5, 6], [*range(1000), 5, 6]
    sequences = [*(sequence(long, i) for i in range(8)), sequence(short, 8)]
    assert [drafter.guess(seq, 2).token_ids for seq in reversed(sequences)] == [(7, 8)] * 9


def test_requests_that_have_ended_take_no_memory() -> None:
    drafter, sequences = PromptLookupDrafter(), [sequence([*range(20)], i) for i in range(3)]
    for seq in sequences:
        drafter.guess(seq, 1)
        drafter.forget(seq)
    assert not drafter._matches


# -- drafts and guesses ----------------------------------------------------------------------------------------------


def test_drafter_of_resident_keys_needs_missing_ones() -> None:
    misses: list[int] = []
    drafter = ModelDrafter("resident", lambda seq: seq.seq_id in misses)
    seq = sequence([1], 3)
    assert not drafter.can_guess(seq) and drafter.guess(seq, 3) == NO_GUESSES
    misses.append(3)
    assert drafter.can_guess(seq) and drafter.guess(seq, 3) == Guesses((DRAFTED,) * 3, 3)


def test_guesses_up_to_the_first_draft() -> None:
    assert Guesses((3, DRAFTED, 4), 3).without_drafts() == Guesses((3,))
    assert Guesses((3, 4), 2).without_drafts() == Guesses((3, 4))
    assert Guesses((DRAFTED,) * 4, 4).first(2) == Guesses((DRAFTED,) * 2, 2)
