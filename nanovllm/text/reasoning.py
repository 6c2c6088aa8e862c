"""ReasoningSplitter: divides a growing text into the reasoning, which may come first, and the answer after it."""

from copy import copy
from typing import NamedTuple

from nanovllm.sampling_params import ReasoningTags

_SPACE = " \t\r\n"


class SplitText(NamedTuple):
    """A part of the text. Joined, the fields give the text that was read.

    opening: the tag before the reasoning, and white space. closing: white space, the tag after the reasoning, and white
    space.
    """

    opening: str = ""
    reasoning: str = ""
    closing: str = ""
    answer: str = ""


class ReasoningSplitter:
    """Holds back text that may belong to a tag or to the white space around a tag.

    Without a closing tag, the whole text after the opening tag is reasoning.
    """

    def __init__(self, tags: ReasoningTags | None) -> None:
        """tags: the tags of the reasoning, or None if the text has no reasoning."""
        self._tags = tags
        self._is_inside = tags is not None and tags.has_begun
        self._has_reasoning = False  # some reasoning has been returned
        self._has_ended = False  # the reasoning has ended
        self._held: list[str] = []
        self.is_in_answer = tags is None  # the answer has begun

    def copy(self) -> "ReasoningSplitter":
        other = copy(self)
        other._held = self._held.copy()
        return other

    def split(self, piece: str, is_last: bool = False) -> SplitText:
        """Return the text that the next piece decides. Hot."""
        if self.is_in_answer:
            return SplitText(answer=piece)
        self._held.append(piece)
        if not piece.strip(_SPACE) and not is_last:  # joining white space each time would be quadratic
            return SplitText()
        assert self._tags is not None, "without tags, the answer begins at once"
        text, self._held, opening, reasoning, closing = "".join(self._held), [], "", "", ""
        if not self._is_inside and not self._has_ended:
            begun = text.lstrip(_SPACE)
            if begun != self._tags.begin and self._tags.begin.startswith(begun) and not is_last:
                self._held = [text]
                return SplitText()
            if not begun.startswith(self._tags.begin):
                self.is_in_answer = True
                return SplitText(answer=text)
            self._is_inside = True
            opening, text = _cut(text, len(text) - len(begun) + len(self._tags.begin))
        if self._is_inside:
            if not self._has_reasoning:
                space, text = _cut(text, len(text) - len(text.lstrip(_SPACE)))
                opening += space
            reasoning, tag, text = text.partition(self._tags.end)
            if not (tag or is_last):
                end = len(reasoning) - num_begun(reasoning, self._tags.end)
                reasoning, held = _cut(reasoning, len(reasoning[:end].rstrip(_SPACE)))
                self._held = [held]
            self._has_reasoning |= bool(reasoning)
            if not tag:
                return SplitText(opening, reasoning)
            reasoning, space = _cut(reasoning, len(reasoning.rstrip(_SPACE)))
            closing, self._is_inside, self._has_ended = space + tag, False, True
        answer = text.lstrip(_SPACE)
        self.is_in_answer = bool(answer)
        return SplitText(opening, reasoning, closing + text[: len(text) - len(answer)], answer)


def _cut(text: str, end: int) -> tuple[str, str]:
    return text[:end], text[end:]


def num_begun(text: str, tag: str) -> int:
    """Return the number of characters at the end of `text` that could be the beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
