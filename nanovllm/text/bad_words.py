"""Bad words as sequences of tokens."""

from collections.abc import Sequence
from typing import Any

from nanovllm.errors import RequestError

MAX_TOKENS = 16_384  # of a request's bad words: they take 15 ms to prepare, and a step at most 0.1 ms
MAX_CHARS = 16 * MAX_TOKENS  # checked before anything is tokenized; few texts have as many characters for each token


def bad_word_token_ids(tokenizer: Any, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences that must not occur in an answer that contains none of the words, as vLLM defines them.

    A word is encoded as the start of a text and as a later word, after a space. The second encoding counts only if it
    begins with another token and is as long as the first; else it is the first one after a token for the space. Other
    ways to spell the word, from smaller tokens, are not found. Raises RequestError for a word that has no tokens, for
    too many of them, and for words that leave no token.
    """
    _check_size("characters", sum(map(len, words)), MAX_CHARS)
    found: list[tuple[int, ...]] = []
    for word in words:
        if any("\ud800" <= char <= "\udfff" for char in word):
            raise RequestError(f"SamplingParams.bad_words has {word!r}, which is not valid Unicode text; leave it out")
        first = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not first or max(first) >= vocab_size:
            raise RequestError(
                f"SamplingParams.bad_words has {word!r}, which has no tokens in the model's vocabulary; leave it out"
            )
        found.append(first)
        later = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if len(later) == len(first) and later[0] != first[0] and max(later) < vocab_size:
            found.append(later)
    _check_size("tokens", sum(map(len, found)), MAX_TOKENS)
    if len({word for word in found if len(word) == 1}) == vocab_size:
        raise RequestError(
            f"SamplingParams.bad_words forbids all {vocab_size} tokens of the model's vocabulary; leave some words out"
        )
    return tuple(found)


def _check_size(unit: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"SamplingParams.bad_words has {count} {unit} in all, at most {limit}; leave some words out")
