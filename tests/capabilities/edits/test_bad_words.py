"""Bad words: the tokens that are allowed are those after which a plain search of the text finds none of the words."""

import random

import numpy as np
import pytest

from nanovllm.capabilities.edits.logit_editor import BadWords, TokenTable

PIECES = ("", "a", "b", "ab", " a", "ba", "\n", "é", "aé", " ", "abab", "日", "b日a", "aa", "a a")
PARTS = [*(piece.encode() for piece in PIECES), b"\xc3", b"\xa9", b"\xa9a", b"a\xc3", b"\xe6\x97", b"\xa5", b"\xff"]


def allowed(bad_words: BadWords, state: int, num_tokens: int) -> list[bool]:
    bits = np.unpackbits(bad_words.mask(state).view(np.uint8), bitorder="little")
    assert not bits[num_tokens:].any()
    return (bits[:num_tokens] == 1).tolist()


def test_allowed_tokens_are_those_of_a_plain_search() -> None:
    """Regression: bad words were sequences of tokens, so " landmarks" was still possible where "landmarks" was not."""
    for seed in range(150):
        rng = random.Random(seed)
        vocabulary = rng.sample(PARTS, len(PARTS))
        silent = set(rng.sample(range(len(PARTS)), rng.choice((0, 3))))
        words = ["".join(rng.choices(["a", "b", " ", "é", "日", "\n"], k=rng.randint(1, 5))) for _ in range(6)]
        words = words[: rng.randint(1, 6)]
        bad_words, state = BadWords([word.encode() for word in words], TokenTable(vocabulary), len(PARTS), silent), 0
        data = b""
        for _ in range(40):
            expected = []
            for token_id, each in enumerate(vocabulary):
                text = (data + each).decode(errors="replace")
                is_named = each.decode(errors="replace") in words
                expected.append(not is_named if token_id in silent else not any(word in text for word in words))
            assert allowed(bad_words, state, len(PARTS)) == expected, (words, data)
            if not any(expected):
                break
            token_id = rng.choice([token_id for token_id, each in enumerate(expected) if each])
            data += b"" if token_id in silent else vocabulary[token_id]
            state = bad_words.follow(state, token_id)


@pytest.mark.parametrize("vocab_size", [1, 7, 31, 33, 64])
def test_vocabulary_larger_or_smaller_than_the_tokenizers(vocab_size: int) -> None:
    tokens = [bytes([97 + i % 26]) for i in range(32)]
    bad_words = BadWords([b"b", b"ca"], TokenTable(tokens), vocab_size)
    forbidden = [token_id for token_id in range(vocab_size) if token_id < 32 and token_id % 26 == 1]
    assert [t for t, is_allowed in enumerate(allowed(bad_words, 0, vocab_size)) if not is_allowed] == forbidden
    after_c = bad_words.follow(0, 2)
    also = [token_id for token_id in range(vocab_size) if token_id < 32 and token_id % 26 in (0, 1)]
    assert [t for t, is_allowed in enumerate(allowed(bad_words, after_c, vocab_size)) if not is_allowed] == also
    assert bad_words.follow(after_c, 40) == after_c  # a token without text
    assert not bad_words.forbids_all
    assert BadWords([b"a"], TokenTable([b"a", b"xa"]), 2).forbids_all


def test_mask_of_many_overlapping_words_is_made_of_few_parts() -> None:
    """Regression: a step looked at each length of word, and one of 1,198 lengths took 80 ms, for all requests."""
    tokens = [b"a" * length for length in range(1, 17)] + [bytes([byte]) for byte in range(256)]
    table = TokenTable(tokens)
    nested = BadWords([b"a" * length for length in range(2, 180)], table, len(tokens))
    assert len(nested._ends) == 1
    apart = BadWords([b"a" * length + bytes([length]) for length in range(1, 180) if length < 97], table, len(tokens))
    state = 0
    for _ in range(300):
        state = apart.follow(state, 0)
    assert not allowed(apart, state, len(tokens))[16 + 96] and allowed(apart, state, len(tokens))[0]
    assert apart.mask(state) is apart.mask(state)
    assert sum(map(len, apart._ends.values())) <= 17 * 96
