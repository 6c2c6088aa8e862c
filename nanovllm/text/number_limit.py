"""Limits the length of numbers in JSON that a model writes. Without a limit, some models write digits and never stop.

llguidance has no limit on numbers. So a NumberScan follows the bytes of an answer, and masks the tokens that would make
a number too long. A NumberScan reads only JSON, whose places in the answer are given by `JsonPlaces`.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from nanovllm.plan.logit_edits import TokenMask, token_mask
from nanovllm.sampling_params import ReasoningTags
from nanovllm.text.reasoning import ReasoningSplitter

MAX_DIGITS = 128  # in a row
MAX_EXPONENT_DIGITS = 2  # with MAX_DIGITS, no number overflows
_LONG_EXPONENT = re.compile(rb"(^|[0-9.])[eE][+-]?[0-9]{%d}" % (MAX_EXPONENT_DIGITS + 1))


class JsonPlaces(NamedTuple):
    """The places of JSON in an answer: after a text of `begins`, up to a text of `ends` outside strings.

    at_start: the answer begins with JSON. reasoning: the tags of reasoning that may precede the answer, or None.
    """

    at_start: bool
    reasoning: ReasoningTags | None
    begins: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = ()


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
        self._num_digits = 0  # in a row, at the end of the text so far
        self._in_exponent = False
        self._tail = b""  # the end of the text so far, as long as the longest text of the places
        texts = (*places.begins, *places.ends)
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
            self._in_string = self._is_json and byte == 0x22

    def _look_at_tail(self) -> None:
        if self._tail.endswith(self._places.begins):
            self._is_json = True
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
