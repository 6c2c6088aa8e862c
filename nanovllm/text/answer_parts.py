"""The reasoning and the content of a chat's answer, which a model writes into one text.

The chat template tells how a model marks its reasoning, and the end of the prompt tells whether the reasoning has begun
(`answer_tags`). AnswerParts divides the text while it grows. Tool calls are part of the content here; the server, which
takes tools, has parsers for them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.sampling_params import AnswerTags, HarmonyTags, ReasoningTags, SamplingParams
from nanovllm.text.answer_scan import ReasoningSplitter
from nanovllm.text.harmony import HARMONY_MARK, BodyJoiner, HarmonyScanner, begun_message, is_reasoning

if TYPE_CHECKING:  # the modules of the command line load this one and must not load torch
    from nanovllm.text.frontend import TextFrontend

MAX_BEGUN_TOKENS = 64  # of the tag or the message that a prompt ends with
_TAG_PAIRS = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"))  # the second pair is Gemma 4's
_TAG = re.compile("<[^<>]*>")


def answer_tags(text: "TextFrontend", token_ids: Sequence[int]) -> AnswerTags | None:
    """Return the tags of the reasoning in the answer to a prompt, or None if the model's template has no reasoning."""
    template, prompt = text.chat_template(), text.decode(token_ids[-MAX_BEGUN_TOKENS:])
    if HARMONY_MARK in template:
        return HarmonyTags(begun_message(prompt))
    for begin, end in _TAG_PAIRS:
        if end in template:
            return ReasoningTags(begin, end, prompt.rstrip().endswith(begin))
    return None


def needs_special_tokens(text: "TextFrontend", tags: AnswerTags | None, marks: Iterable[str] = ()) -> bool:
    """Return True if the tags, or other marks of the answer's parts, have special tokens, which decoders skip."""
    if isinstance(tags, HarmonyTags):
        return True
    marks = (*marks, *(() if tags is None else (tags.begin, tags.end)))
    return any(tag in text.special_tokens for mark in marks for tag in _TAG.findall(mark))


def with_reasoning_tags(text: "TextFrontend", params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
    """Return the parameters of a chat with this prompt, so that the answer's text can be divided."""
    tags = answer_tags(text, token_ids)
    is_skipped = params.skip_special_tokens and not needs_special_tokens(text, tags)
    return replace(params, reasoning_tags=tags, skip_special_tokens=is_skipped)


class AnswerPart(NamedTuple):
    """Text of an answer without tags."""

    text: str
    is_reasoning: bool


class AnswerParts:
    """Divides the growing text of one answer. The division does not depend on how the text arrives."""

    def __init__(self, tags: AnswerTags | None) -> None:
        """tags: how the answer marks its reasoning, or None if the whole text is content."""
        self._splitter: HarmonyScanner | ReasoningSplitter
        if isinstance(tags, HarmonyTags):
            self._splitter, self._joiner = HarmonyScanner(tags.begun), BodyJoiner()
        else:
            self._splitter = ReasoningSplitter(tags)

    def feed(self, text: str, is_last: bool = False) -> list[AnswerPart]:
        """Add a piece of the text, and return the parts that have become certain."""
        if isinstance(self._splitter, ReasoningSplitter):
            split = self._splitter.split(text, is_last)
            parts = AnswerPart(split.reasoning, True), AnswerPart(split.answer, False)
            return [part for part in parts if part.text]
        found = []
        for part in self._splitter.feed(text, is_last):
            if part.kind == "body":
                found.append(AnswerPart(self._joiner.join(part), is_reasoning(part)))
            else:
                self._joiner.begin()
        return found


def split_answer(text: str, tags: AnswerTags | None) -> tuple[str, str]:
    """Return the reasoning and the content of a whole answer."""
    parts = AnswerParts(tags).feed(text, is_last=True)
    reasoning, content = ("".join(part.text for part in parts if part.is_reasoning is kind) for kind in (True, False))
    return reasoning, content
