"""Bad words are found as a plain search finds them, whether or not the newest token is known."""

import random

import numpy as np

from nanovllm.core.logit_editor import ALWAYS, BadWords


def plain_ends(words: list[tuple[int, ...]], tail: list[int | None]) -> set[tuple[int, int]]:
    """Token and the token that it must follow, for all words whose other tokens end `tail`."""
    found = set()
    for *begin, end in words:
        newest = tail[len(tail) - len(begin) :]
        if len(tail) >= len(begin) and all(t in (None, b) for t, b in zip(newest, begin, strict=True)):
            found.add((end, begin[-1] if begin and newest[-1] is None else ALWAYS))
    return found


def test_ends_are_those_of_a_plain_search() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        words = [tuple(rng.choices(range(3), k=rng.randint(1, 6))) for _ in range(rng.randint(0, 12))]
        bad_words, state = BadWords(words), 0
        answer: list[int] = []
        for token_id in rng.choices(range(3), k=30):
            for has_pending in (False, True):
                biases = bad_words.ends(state, has_pending=has_pending)
                newest = [*answer, *([None] if has_pending else [])]
                assert np.all(np.isneginf(biases.values))
                found = set(zip(biases.token_ids.tolist(), biases.after.tolist(), strict=True))
                assert found == plain_ends(words, newest)
            answer.append(token_id)
            state = bad_words.follow(state, token_id)


def test_token_takes_as_long_after_many_words_as_after_few() -> None:
    """Regression: a step looked at each length of word, and one of 1,198 lengths took 80 ms, for all requests.

    The automaton's steps are counted, not timed: over a text there are at most twice as many as tokens.
    """
    looked_at: list[int] = []

    class Noting(dict[int, int]):
        def __contains__(self, token_id: object) -> bool:
            looked_at.append(1)
            return super().__contains__(token_id)

    bad_words = BadWords([(1,) * length for length in range(1, 100)] + [(i, i + 1, i + 2) for i in range(10_000)])
    automaton = bad_words._automaton
    automaton._children = [Noting(each) for each in automaton._children]
    text = [*([1] * 98 + [2]) * 20]
    states = [0]
    for token_id in text:
        states.append(bad_words.follow(states[-1], token_id))
    assert len(looked_at) <= 2 * len(text)
    assert bad_words.ends(states[98], has_pending=False).token_ids.tolist() == [1] * 99
