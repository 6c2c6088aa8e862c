"""Scanners that follow an answer while it grows: ReasoningSplitter, and NumberScan, which limits numbers in JSON.

Without a limit, some models write digits and never stop. llguidance has no limit on numbers, so a NumberScan follows
the bytes of an answer, and masks the tokens that would make a number too long. A NumberScan reads only JSON, whose
places in the answer are given by `JsonPlaces`.
"""

import re
from collections.abc import Iterable
from copy import copy
from typing import NamedTuple

from nanovllm.plan.logit_edits import TokenMask, token_mask
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
            if is_last and ">" in begun and self._tags.begin.startswith(begun):
                return SplitText(opening=text)  # the answer was cut after the first of the tag's tokens
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

    def parts(self, piece: str, is_last: bool = False) -> list[tuple[str, bool]]:
        """Return the parts of the text that the next piece decides, each with True if it belongs to the answer."""
        *before, answer = self.split(piece, is_last)
        return [("".join(before), False), (answer, True)]


def _cut(text: str, end: int) -> tuple[str, str]:
    return text[:end], text[end:]


def num_begun(text: str, tag: str) -> int:
    """Return the number of characters at the end of `text` that could be the beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)


# -- the length of numbers in JSON -------------------------------------------------------------------------------------


MAX_DIGITS = 128  # in a row
MAX_EXPONENT_DIGITS = 2  # with MAX_DIGITS, no number overflows
_LONG_EXPONENT = re.compile(rb"(^|[0-9.])[eE][+-]?[0-9]{%d}" % (MAX_EXPONENT_DIGITS + 1))


class JsonPlaces(NamedTuple):
    """The places of JSON in an answer: after a text of `begins`, up to a text of `ends` outside strings.

    at_start: the answer begins with JSON. reasoning: the tags of reasoning that may precede the answer, or None. quote:
    what stands on either side of a string after `begins`, if it is not JSON's quotation mark.
    """

    at_start: bool
    reasoning: ReasoningTags | None
    begins: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = ()
    quote: bytes = b""


class NumberMasks:
    """Masks of the tokens that can make a number too long."""

    def __init__(self, texts: Iterable[bytes], vocab_size: int) -> None:
        """texts: the text of each token of the model's vocabulary."""
        num_leading: list[int] = []  # digits at the start of each token
        is_long: list[bool] = []
        num_after_sign: list[int] = []
        for text in texts:
            num_leading.append(len(text) - len(text.lstrip(b"0123456789")))
            unsigned = text[1:] if text[:1] in (b"+", b"-") else b""
            num_after_sign.append(len(unsigned) - len(unsigned.lstrip(b"0123456789")))
            is_long.append(_LONG_EXPONENT.search(text) is not None)

        def mask(chosen: Iterable[bool]) -> TokenMask:
            return token_mask([token_id for token_id, is_chosen in enumerate(chosen) if is_chosen], vocab_size)

        self.exponents = mask(is_long) if any(is_long) else None  # tokens with a number that overflows
        self.digits = mask(count > 0 for count in num_leading)
        self.after_exponent = [  # by the number of the exponent's digits so far
            mask(
                count > MAX_EXPONENT_DIGITS - num_digits or (num_digits == 0 and signed > MAX_EXPONENT_DIGITS)
                for count, signed in zip(num_leading, num_after_sign, strict=True)
            )
            for num_digits in range(MAX_EXPONENT_DIGITS + 1)
        ]


class NumberScan:
    """Follows the bytes of an answer. Hot: once per token."""

    def __init__(self, places: JsonPlaces) -> None:
        self._places, self._reasoning = places, ReasoningSplitter(places.reasoning)
        self._is_json, self._in_string, self._is_escaped = places.at_start, False, False
        self._quote = b""  # on either side of a string, if it is not JSON's quotation mark
        self._num_digits = 0  # in a row, at the end of the text so far
        self._in_exponent = False
        self._tail = b""  # the end of the text so far, as long as the longest text of the places
        texts = (*places.begins, *places.ends, *([places.quote] if places.quote else []))
        self._num_tail_bytes = max(map(len, texts), default=0)
        self._last_bytes = frozenset(text[-1] for text in texts)

    def copy(self) -> "NumberScan":
        other = object.__new__(NumberScan)
        other.__dict__.update(self.__dict__)
        other._reasoning = self._reasoning.copy()
        return other

    def follow(self, text: bytes) -> None:
        """Read the text of the next token."""
        if not self._reasoning.is_in_answer:
            text = self._reasoning.split(text.decode("latin-1")).answer.encode("latin-1")
        for byte in text:
            if self._num_tail_bytes:
                self._tail = (self._tail + bytes((byte,)))[-self._num_tail_bytes :]
            if self._in_string and self._quote:
                self._in_string = not self._tail.endswith(self._quote)
                continue
            if self._in_string:
                self._in_string = (self._is_escaped or byte != 0x22) and byte != 0x0A  # strings in JSON have one line
                self._is_escaped = byte == 0x5C and not self._is_escaped
                continue
            if 0x30 <= byte <= 0x39:
                self._num_digits += 1
                continue
            is_sign = byte in b"+-" and self._in_exponent and not self._num_digits
            self._in_exponent = is_sign or (byte in b"eE" and self._num_digits > 0)
            self._num_digits = 0
            if byte in self._last_bytes:
                self._look_at_tail()
            begins_string = self._tail.endswith(self._quote) if self._quote else byte == 0x22
            self._in_string = self._is_json and begins_string

    def _look_at_tail(self) -> None:
        if self._tail.endswith(self._places.begins):
            self._is_json, self._quote = True, self._places.quote
        elif self._tail.endswith(self._places.ends):
            self._is_json = False

    def forbidden(self, masks: NumberMasks) -> TokenMask | None:
        """Return the tokens that would make a number too long, or None if any token may follow."""
        if not self._is_json or self._in_string or not self._reasoning.is_in_answer:
            return None
        if self._in_exponent:
            return masks.after_exponent[min(self._num_digits, MAX_EXPONENT_DIGITS)]
        if self._num_digits < MAX_DIGITS:
            return masks.exponents
        return masks.digits if masks.exponents is None else masks.digits | masks.exponents
