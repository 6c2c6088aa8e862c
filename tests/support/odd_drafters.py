"""Drafters for tests: some know the answer and err at random, some do whatever could confuse an engine."""

import random
from collections.abc import Callable
from typing import ClassVar

from nanovllm.plan.sequence import Sequence
from nanovllm.schedule.seams import DRAFTED, Guesses

KINDS = ("right", "random", "wrong", "wrong at the last", "end tokens", "too many", "outside", "drafts", "mixed")


class OddDrafter:
    """Guesses by `kind`. `next_tokens(seq, n)`: the tokens that really follow, or as many as are known."""

    name: ClassVar[str] = "odd"
    costs_drafts: ClassVar[bool] = False

    def __init__(
        self, kind: str, next_tokens: Callable[[Sequence, int], list[int]], vocab_size: int, seed: int = 0
    ) -> None:
        assert kind in KINDS
        self._kind, self._next_tokens, self._vocab_size = kind, next_tokens, vocab_size
        self._rng = random.Random(seed)

    def forget(self, seq: Sequence) -> None:
        pass

    def can_guess(self, seq: Sequence) -> bool:
        return self._kind != "random" or self._rng.random() < 0.7

    def kind(self, seq: Sequence) -> str:
        return self.name

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        right = self._next_tokens(seq, max_guesses)
        right += [0] * (max_guesses - len(right))
        wrong = [(token_id + 1) % self._vocab_size for token_id in right]
        if self._kind == "random":
            num_guesses = self._rng.randint(0, max_guesses)
            return Guesses(tuple(self._rng.choice(pair) for pair in zip(right, wrong, strict=True))[:num_guesses])
        if self._kind in ("drafts", "mixed"):
            is_drafted = [self._kind == "drafts" or self._rng.random() < 0.5 for _ in right]
            ids = [DRAFTED if drafted else token_id for token_id, drafted in zip(right, is_drafted, strict=True)]
            return Guesses(tuple(ids), max_guesses)
        guesses = {
            "right": right,
            "wrong": wrong,
            "wrong at the last": right[:-1] + wrong[-1:],
            "end tokens": right[:1] + [0] * (max_guesses - 1),
            "too many": right + [1] * 5,
            "outside": [*right[:1], self._vocab_size, -1],
        }[self._kind]
        return Guesses(tuple(guesses))


def drafter_of(kind: str, prompts: list[list[int]], answers: list[list[int]]) -> OddDrafter:
    """Make a drafter that knows the answer to each prompt, for tiny models."""
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]

    def next_tokens(seq: Sequence, count: int) -> list[int]:
        known = seq.token_ids.tolist()
        return next((text[len(known) : len(known) + count] for text in whole if text[: len(known)] == known), [])

    return OddDrafter(kind, next_tokens, vocab_size=320)
