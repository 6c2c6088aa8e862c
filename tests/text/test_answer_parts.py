"""AnswerParts: reasoning and content, for every division of a text into pieces."""

from chat_formats import ANALYSIS, FINAL

from nanovllm.sampling_params import AnswerTags, HarmonyTags, ReasoningTags
from nanovllm.text.answer_parts import AnswerParts, split_answer

THINK = ReasoningTags("<think>", "</think>")
NEXT = "<|end|><|start|>assistant"
CASES: list[tuple[AnswerTags | None, str, tuple[str, str]]] = [
    (None, "<think>x</think>", ("", "<think>x</think>")),
    (THINK, "\n<think>\nHm.\n</think>\n\nYes.\n", ("Hm.", "Yes.\n")),
    (THINK, "Yes. <think>", ("", "Yes. <think>")),
    (THINK, "<think>Hm", ("Hm", "")),
    (THINK._replace(has_begun=True), "Hm.</think>Yes.", ("Hm.", "Yes.")),
    (HarmonyTags(), f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.<|return|>", ("Hm.", "Yes.")),
    (HarmonyTags(), f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{FINAL}x", ("One.\n\nTwo.", "x")),
    (HarmonyTags(), f"<|channel|>commentary<|message|>One.{NEXT}{FINAL}Two.", ("", "One.\n\nTwo.")),
    (HarmonyTags(), f"{ANALYSIS}Hm", ("Hm", "")),
    (HarmonyTags(), "", ("", "")),
]


def test_answer_parts_do_not_depend_on_the_pieces() -> None:
    for tags, text, expected in CASES:
        assert split_answer(text, tags) == expected, text
        for cut in range(len(text)):
            parts = AnswerParts(tags)
            found = [*parts.feed(text[:cut]), *parts.feed(text[cut:], is_last=True)]
            joined = ["".join(part.text for part in found if part.is_reasoning is kind) for kind in (True, False)]
            assert tuple(joined) == expected, (text, cut)
