"""Reasoning and answer are told apart, wherever the text is cut into pieces."""

import random

from nanovllm.sampling_params import ReasoningTags
from nanovllm.text.answer_scan import ReasoningSplitter

FRAGMENTS = ("<think>", "</think>", " ", "\n", "a", "b <", "<", "</", "think>", "</th", "ink>", "<thi", "nk>", " x ")


def split(pieces: list[str], has_begun: bool) -> list[str]:
    """Return the joined fields of SplitText."""
    splitter = ReasoningSplitter(ReasoningTags("<think>", "</think>", has_begun))
    parts = [splitter.split(piece) for piece in pieces] + [splitter.split("", is_last=True)]
    assert "".join("".join(part) for part in parts) == "".join(pieces)
    return ["".join(fields) for fields in zip(*parts, strict=True)]


def test_reasoning_is_split_from_the_answer() -> None:
    for text, has_begun, expected in (
        ("<think>\nHm. \n</think>\n\nYes.\n", False, ["<think>\n", "Hm.", " \n</think>\n\n", "Yes.\n"]),
        ("Hm.\n</think>Yes.", True, ["", "Hm.", "\n</think>", "Yes."]),
        ("<think></think>Yes.", False, ["<think>", "", "</think>", "Yes."]),
        ("<think>Hm </thin", False, ["<think>", "Hm </thin", "", ""]),
        ("\nYes <think>no</think>", False, ["", "", "", "\nYes <think>no</think>"]),
        ("<thin", False, ["", "", "", "<thin"]),
        ("", True, ["", "", "", ""]),
    ):
        assert split([text], has_begun) == split(list(text), has_begun) == expected, text


def test_cuts_of_the_text_do_not_change_the_parts() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        pieces = rng.choices(FRAGMENTS, k=rng.randint(1, 9))
        for has_begun in (False, True):
            assert split(pieces, has_begun) == split(["".join(pieces)], has_begun), pieces
