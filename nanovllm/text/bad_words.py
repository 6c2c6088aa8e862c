"""Bad words as sequences of tokens."""

from collections.abc import Iterable
from typing import Any

from nanovllm.errors import RequestError


def bad_word_token_ids(tokenizer: Any, words: Iterable[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences that must not occur in an answer that contains none of the words, as vLLM defines them.

    A word is encoded as the start of a text and as a later word, after a space. The second encoding counts only if it
    begins with another token and is as long as the first; else it is the first one after a token for the space. Other
    ways to spell the word, from smaller tokens, are not found. Raises RequestError for a word that has no tokens.
    """
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
    return tuple(found)
