"""The document that the page offers to try with the built-in model: a year's log of a lighthouse, and questions on it.

The model copies what followed the last 6 characters somewhere above. So each question occurs in the document with its
answer behind it, and no other line may contain 6 characters in a row of the question's end and the answer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

from nanovllm.demo.retrieval_model import MATCH_TOKENS

NAME = "The log of Merrow Light, 1887.txt"
TITLE = "The log of Merrow Light, 1887\nKept by the keeper, day by day.\n\n"
LONGEST_TOKENS = 20_000  # a few seconds of reading on a CPU
SHORTEST_TOKENS = 2_000

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
    """Return an example of at most half of what a request may have; None if too little remains. A byte is a token."""
    num_tokens = min(LONGEST_TOKENS, max_request_tokens // 2)
    if num_tokens < SHORTEST_TOKENS:
        return None
    planted = [f"I was asked: {question} {answer}\n" for question, answer in _PLANTED.items()]
    num_left = num_tokens - len(TITLE) - sum(map(len, planted))
    entries = []
    for entry in _entries():
        num_left -= len(entry)
        if num_left < 0:
            break
        entries.append(entry)
    for i, line in enumerate(planted):  # at a sixth, a half and five sixths
        entries.insert(len(entries) * (2 * i + 1) // (2 * len(planted)), line)
    return Example(NAME, TITLE + "".join(entries), tuple(_PLANTED))


def _entries() -> Iterator[str]:
    """Yield lines without end, the same every time."""
    forbidden = {
        tail[start : start + MATCH_TOKENS]
        for question, answer in _PLANTED.items()
        for tail in [f"{question[-MATCH_TOKENS:]} {answer}"]
        for start in range(len(tail) - MATCH_TOKENS + 1)
    }
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
