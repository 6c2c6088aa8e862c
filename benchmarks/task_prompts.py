"""Prompts of tasks that people have, made of the standard library's files, which the small model has never seen.

    continue   a file, which is cut off
    rewrite    a file once more with a few words renamed: the prompt has the file and then the beginning of the copy
    quote      a passage from the second half of the prompt, which ends with the passage's beginning
    far        a passage from the prompt's second eighth, so that most of the prompt lies in between

A prompt has an exact number of tokens, and depends only on the files, that number and a seed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.python_sources import END_TOKEN_ID, TokenArray, file_tokens, join_files, line_start, rename_words

CUE_TOKENS = 128  # of a passage that is to be quoted; they occur only once before
MIN_TOKENS = 4096  # of a prompt, so that every task has room
MAX_ANSWER_TOKENS = 512  # the files and passages have at least so many more
_MAX_TRIALS = 1000


@dataclass(frozen=True)
class TaskPrompt:
    token_ids: list[int]
    expected: list[int]  # how the file or passage goes on; no model can know a name that is new in a rewritten file

    def num_right(self, answer: list[int]) -> int:
        """The number of tokens before the first one that is not as expected."""
        pairs = zip(answer, self.expected, strict=False)
        return next((i for i, (given, expected) in enumerate(pairs) if given != expected), len(answer))


def make_prompts(
    task: str, files: Sequence[bytes], num_tokens: int, count: int, num_expected: int, seed: int
) -> list[TaskPrompt]:
    """`count` prompts of `num_tokens` tokens, each with the next `num_expected` tokens."""
    if num_tokens < MIN_TOKENS or num_expected > MAX_ANSWER_TOKENS:
        raise ValueError(
            f"tasks need prompts of at least {MIN_TOKENS} tokens and answers of at most {MAX_ANSWER_TOKENS}, "
            f"not {num_tokens} and {num_expected}"
        )
    prompts = []
    for i in range(count):
        rng = random.Random(f"{task} {num_tokens} {seed} {i}")
        prompt, expected = TASKS[task](rng, files, num_tokens)
        assert len(prompt) == num_tokens and len(expected) >= num_expected, (task, len(prompt), len(expected))
        prompts.append(TaskPrompt(prompt.tolist(), expected[:num_expected].tolist()))
    return prompts


def _continue(rng: random.Random, files: Sequence[bytes], num_tokens: int) -> tuple[TokenArray, TokenArray]:
    content = rng.choice([content for content in files if len(content) >= 8 * MAX_ANSWER_TOKENS])
    cut = line_start(content, rng.randrange(len(content) // 2, len(content) - 2 * MAX_ANSWER_TOKENS))
    return _after_other_files(rng, files, [content], content[:cut], num_tokens), file_tokens(content[cut:])


def _rewrite(rng: random.Random, files: Sequence[bytes], num_tokens: int) -> tuple[TokenArray, TokenArray]:
    """The file takes up to three eighths of the prompt. At least a quarter of the copy has been written."""
    fewest = max(num_tokens // 8, 2 * MAX_ANSWER_TOKENS)
    candidates = [content for content in files if fewest <= len(content) <= num_tokens * 3 // 8]
    for _ in range(_MAX_TRIALS):
        content = rng.choice(candidates)
        changed = rename_words(rng, content)
        cut = line_start(changed, rng.randrange(len(changed) // 4, len(changed) // 2))
        shown = content + changed[:cut]
        if changed != content and len(shown) < num_tokens - 2 and len(changed) - cut >= MAX_ANSWER_TOKENS:
            break
    else:
        raise ValueError(f"no file suits a prompt of {num_tokens} tokens")
    before = _after_other_files(rng, files, [content], content, num_tokens - cut - 1)
    return _join(before, file_tokens(changed[:cut])), file_tokens(changed[cut:])


def _quote(rng: random.Random, files: Sequence[bytes], num_tokens: int) -> tuple[TokenArray, TokenArray]:
    return _passage(rng, files, num_tokens, num_tokens // 2, num_tokens * 7 // 8)


def _far(rng: random.Random, files: Sequence[bytes], num_tokens: int) -> tuple[TokenArray, TokenArray]:
    """Not from the first eighth, which may be in the first block, and so on the GPU."""
    return _passage(rng, files, num_tokens, num_tokens // 8, num_tokens // 4)


def _passage(
    rng: random.Random, files: Sequence[bytes], num_tokens: int, first: int, last: int
) -> tuple[TokenArray, TokenArray]:
    """Quote a passage that begins with a line between `first` and `last`."""
    for _ in range(_MAX_TRIALS):
        text = _filler(rng, files, num_tokens - CUE_TOKENS - 1)
        start = first + int(rng.choice(np.flatnonzero(text[first:last] == ord("\n")))) + 1
        passage = text[start : start + CUE_TOKENS + MAX_ANSWER_TOKENS]
        is_unique = text.tobytes().count(passage[:CUE_TOKENS].tobytes()) == 1
        if is_unique and len(passage) == CUE_TOKENS + MAX_ANSWER_TOKENS and END_TOKEN_ID not in passage:
            return _join(text, passage[:CUE_TOKENS]), passage[CUE_TOKENS:]
    raise ValueError(f"no passage between tokens {first} and {last} is in one file and begins in a way of its own")


def _filler(rng: random.Random, files: Sequence[bytes], num_tokens: int) -> TokenArray:
    """Files in random order, up to `num_tokens` tokens."""
    chosen: list[bytes] = []
    missing = num_tokens
    for content in rng.sample(files, len(files)):
        if missing <= 0:
            break
        chosen.append(content)
        missing -= len(content) + 1
    else:
        raise ValueError(f"the files have too few tokens for a prompt of {num_tokens}")
    return join_files(chosen)[:num_tokens]


def _after_other_files(
    rng: random.Random, files: Sequence[bytes], left_out: list[bytes], shown: bytes, num_tokens: int
) -> TokenArray:
    """`shown` after so many tokens of other files that both together have `num_tokens`."""
    tokens = file_tokens(shown)[-num_tokens:]
    if len(tokens) >= num_tokens - 1:
        return np.concatenate([np.full(num_tokens - len(tokens), END_TOKEN_ID, np.int16), tokens])
    others = [content for content in files if content not in left_out]
    return _join(_filler(rng, others, num_tokens - len(tokens) - 1), tokens)


def _join(before: TokenArray, after: TokenArray) -> TokenArray:
    return np.concatenate([before, np.array([END_TOKEN_ID], np.int16), after])


Task = Callable[[random.Random, Sequence[bytes], int], tuple[TokenArray, TokenArray]]
TASKS: dict[str, Task] = {"continue": _continue, "rewrite": _rewrite, "quote": _quote, "far": _far}
