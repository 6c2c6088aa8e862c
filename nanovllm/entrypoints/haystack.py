"""Long texts for the built-in model that contain planted lines: haystacks around a passkey, and the page's example.

A haystack is source code of Python's standard library around the planted line. The haystack ends with the first words
of the planted line, so the answer is the rest of the planted line. The example is a year's log of a lighthouse, in
which each planted line is a question followed by its answer. The model finds each character of an answer by the 6
characters before it, so no other line may contain one of these passages of 6 characters.
"""

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import cycle
from pathlib import Path

from nanovllm.errors import RequestError
from nanovllm.models.retrieval_model import MATCH_TOKENS

LEAD_IN = "The passkey is "  # the answer is the passkey and a full stop
QUESTION = f"\nWhat is the passkey? {LEAD_IN}"


def build_haystack(num_tokens: int, depth: float, passkey: str) -> str:
    """Return a prompt of exactly `num_tokens` ASCII characters, each a token of the demo's tokenizer.

    depth: the position of the line with the passkey, from 0 (first line) to 1 (last line before the question).
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
    """Return all substrings of MATCH_TOKENS characters."""
    return [text[start : start + MATCH_TOKENS] for start in range(len(text) - MATCH_TOKENS + 1)]


def library_text(num_characters: int, forbidden: Sequence[str] = ()) -> str:
    """Return source code of Python's standard library, in whole lines without any of the `forbidden` passages.

    The last line is truncated so that the length is exact.
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


# -- the example that the page offers to try ---------------------------------------------------------------------------

_LOG_NAME = "The log of Merrow Light, 1887.txt"
_LOG_TITLE = "The log of Merrow Light, 1887\nKept by the keeper, day by day.\n\n"
LONGEST_EXAMPLE_TOKENS = 20_000  # a few seconds of reading on a CPU
SHORTEST_EXAMPLE_TOKENS = 2_000

_PLANTED = {  # question: answer, in the order in which the document has them
    "Where did the old keeper hide the spare key?": "Beneath a loose flagstone, wrapped in oilcloth.",
    "Which ship did the lifeboat save in the great gale?": "The barque Halcyon of Bergen, with all nineteen hands.",
    "How many steps does the tower have?": "Exactly 268; I counted them twice.",
}
_WINDS = "a calm;a light breeze;a fresh breeze;a strong wind;half a gale;a full gale".split(";")
_QUARTERS = "north;north-east;east;south-east;south;south-west;west;north-west".split(";")
_WEATHER = "Clear air;Thin haze;Low cloud;Fog until noon;Rain in the evening;Sleet;A bright night".split(";")
_VESSELS = "A brig;A schooner;Two luggers;A collier;A mail steamer;A ketch;Five herring boats".split(";")
_COURSES = "bound for Leith;running for shelter;standing out to sea;in tow;under bare poles;low in the water".split(";")
_WORK = (
    "Trimmed the wicks and cleaned the lens;Drew forty gallons of oil;Painted the gallery rail;Wound the clockwork"
    ";Swept the flue and blacked the stove;Mended the boat's thwart;Wrote to the Commissioners;Salted two barrels"
).split(";")


@dataclass(frozen=True)
class Example:
    name: str
    text: str
    questions: tuple[str, ...]


def build_example(max_request_tokens: int) -> Example | None:
    """Return an example of at most `max_request_tokens` / 2 bytes (= tokens), or None if that is too short."""
    num_tokens = min(LONGEST_EXAMPLE_TOKENS, max_request_tokens // 2)
    if num_tokens < SHORTEST_EXAMPLE_TOKENS:
        return None
    planted = [f"I was asked: {question} {answer}\n" for question, answer in _PLANTED.items()]
    num_left = num_tokens - len(_LOG_TITLE) - sum(map(len, planted))
    entries = []
    for entry in _entries():
        num_left -= len(entry)
        if num_left < 0:
            break
        entries.append(entry)
    for i, line in enumerate(planted):  # at a sixth, a half and five sixths
        entries.insert(len(entries) * (2 * i + 1) // (2 * len(planted)), line)
    return Example(_LOG_NAME, _LOG_TITLE + "".join(entries), tuple(_PLANTED))


def _entries() -> Iterator[str]:
    """Yield lines without end, always the same lines."""
    tails = [f"{question[-MATCH_TOKENS:]} {answer}" for question, answer in _PLANTED.items()]
    forbidden = {passage for tail in tails for passage in _passages(tail)}
    draw, day = random.Random(1887), date(1887, 1, 1)
    while True:
        wind = f"{draw.choice(_WINDS)} from the {draw.choice(_QUARTERS)}"
        glass = f"Glass at {draw.randrange(2870, 3060) / 100} inches"
        entry = (
            f"{day:%A} {day.day} {day:%B}. {draw.choice(_WEATHER)}, {wind}. {glass}. "
            f"{draw.choice(_VESSELS)} passed {draw.choice(_COURSES)}. {draw.choice(_WORK)}.\n"
        )
        if not any(passage in entry for passage in forbidden):
            yield entry
        day += timedelta(days=1)
