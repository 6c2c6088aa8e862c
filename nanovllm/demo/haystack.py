"""Long prompts with a passkey hidden in them: source code of Python's standard library around one planted line.

The prompt ends with the first words of the planted line, so the answer is the rest of that line. The retrieval model
finds each character of the answer by the 6 characters before it. Library lines that contain one of these passages are
left out.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from nanovllm.demo.retrieval_model import MATCH_TOKENS
from nanovllm.errors import RequestError

LEAD_IN = "The passkey is "  # the answer is the passkey and a full stop
QUESTION = f"\nWhat is the passkey? {LEAD_IN}"


def build_haystack(num_tokens: int, depth: float, passkey: str) -> str:
    """A prompt of exactly `num_tokens` ASCII characters, each a token of the demo's tokenizer.

    `depth` is the position of the line with the passkey, from 0 (first line) to 1 (last line before the question).
    The text is the same on every machine with the same version of Python. Raises RequestError if the depth is outside
    0..1, if there are too few tokens, or if the passkey is not printable ASCII or would make the same 6 characters
    occur twice.
    """
    needle = f"{LEAD_IN}{passkey}.\n"
    num_text_tokens = num_tokens - len(needle) - len(QUESTION)
    if not 0 <= depth <= 1:
        raise RequestError(f"depth={depth} must be between 0 (the start of the prompt) and 1 (its end)")
    if num_text_tokens < 1:
        raise RequestError(f"num_tokens={num_tokens} is too few; this passkey needs {num_tokens + 1 - num_text_tokens}")
    if not (passkey and passkey.isascii() and passkey.isprintable()):
        raise RequestError(f"passkey={passkey!r} must be printable ASCII; use letters and digits")
    matched = _passages(needle[len(LEAD_IN) - MATCH_TOKENS : -1])
    present = _passages(needle + QUESTION[:-1])
    for passage in matched:
        if present.count(passage) > 1:
            raise RequestError(
                f"passkey={passkey!r} makes {passage!r} occur twice in the prompt; use a less regular one"
            )
    text = library_text(num_text_tokens, matched)
    start = text.rfind("\n", 0, round(depth * len(text))) + 1
    return text[:start] + needle + text[start:] + QUESTION


def _passages(text: str) -> list[str]:
    """All substrings of MATCH_TOKENS characters."""
    return [text[start : start + MATCH_TOKENS] for start in range(len(text) - MATCH_TOKENS + 1)]


def library_text(num_characters: int, forbidden: Sequence[str] = ()) -> str:
    """Source code of Python's standard library, in whole lines without any of the `forbidden` passages.

    The last line is cut so that the length is exact.
    """
    lines: list[str] = []
    num_missing = num_characters
    for line in _library_lines():
        if any(passage in line for passage in forbidden):
            continue
        lines.append(line[: num_missing - 1].rstrip("\n") + "\n")
        num_missing -= len(lines[-1])
        if num_missing == 0:
            break
    return "".join(lines)


def _library_lines() -> Iterator[str]:
    """Yield the ASCII lines of the standard library's modules, in the order of their names, again and again."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if not modules:
        raise FileNotFoundError(f"no Python sources in {sysconfig.get_paths()['stdlib']}; they are the haystack's text")
    for module in cycle(modules):
        for line in module.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            if line.isascii():
                yield line
