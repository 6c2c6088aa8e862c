"""Reads tool calls in Gemma 4's notation, such as `call:weather{city:<|"|>Bern<|"|>,days:3}`.

text/quoted_grammar.py has the grammar. The reader also accepts what models write without it: white space between the
parts, keys between quotes, strings in JSON's quotation marks or without any, and Python's True, False and None.
"""

import json
import re
from typing import Any

from nanovllm.entrypoints.server.call_formats import GEMMA, QUOTE

MAX_NAME_CHARS = 500
_HEAD = re.compile(r"\s*call:\s*([^\s{}<>]+)\s*(?=\{)")
_HEAD_BEGUN = re.compile(r"\s*(?:c(?:a(?:l(?:l(?::\s*(?:[^\s{}<>]+\s*)?)?)?)?)?)?\Z")
_PART = re.compile("|".join(map(re.escape, (QUOTE, "{", "}", GEMMA.opening, GEMMA.closing))))
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^,{}\[\]:<]*")
_BARE_VALUE = re.compile(r"[^,{}\[\]<]*")
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_DECODER = json.JSONDecoder()
_LONGEST = max(map(len, (QUOTE, GEMMA.opening, GEMMA.closing)))


class QuotedScan:
    """A search for the end of a call in a growing text, which reads each character a few times at most."""

    def __init__(self, begin: int) -> None:
        """begin: the position after the opening tag."""
        self._begin = self._position = begin
        self._depth = 0
        self._is_in_string = False

    def find(self, text: str) -> int | None:
        """Return the end of the call, 0 if there is no call, or None if more text is needed."""
        if self._position == self._begin:
            head = _HEAD.match(text, self._begin)
            if head is None:
                is_begun = len(text) - self._begin < MAX_NAME_CHARS and _HEAD_BEGUN.match(text, self._begin)
                return None if is_begun else 0
            self._position = head.end()
        while found := _PART.search(text, self._position):
            self._position = found.end()
            if found[0] == QUOTE:
                self._is_in_string = not self._is_in_string
            elif self._is_in_string:
                continue
            elif len(found[0]) > 1:  # a call begins or ends within this one
                return 0
            else:
                self._depth += 1 if found[0] == "{" else -1
                if self._depth == 0:
                    return found.end()
        begun = text.rfind("<", max(self._position, len(text) - _LONGEST + 1))
        self._position = len(text) if begun < 0 else begun
        return None


def read_call(text: str, begin: int, end: int) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of the call between two positions, or None if they are not a call."""
    head = _HEAD.match(text, begin)
    assert head is not None, "QuotedScan has found it"
    try:
        arguments, position = _read(text[:end], head.end())
    except (ValueError, RecursionError):
        return None
    return (head[1], arguments) if position == end and isinstance(arguments, dict) else None


def _read(text: str, position: int) -> tuple[Any, int]:
    """Return the value at a position, and its end. Raises ValueError without a value."""
    position = _skip_space(text, position)
    if text.startswith(QUOTE, position):
        return _read_string(text, position)
    if text.startswith('"', position):
        return _DECODER.raw_decode(text, position)
    if text.startswith("{", position):
        return _read_object(text, position + 1)
    if text.startswith("[", position):
        return _read_array(text, position + 1)
    bare = _BARE_VALUE.match(text, position)
    assert bare is not None, "the pattern matches an empty text"
    word = bare[0].strip()
    if not word:
        raise ValueError("no value")
    return _CONSTANTS[word] if word in _CONSTANTS else _number(word), bare.end()


def _number(word: str) -> Any:
    """Return the number, or the word itself if it is none."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def _read_string(text: str, position: int) -> tuple[str, int]:
    start = position + len(QUOTE)
    end = text.index(QUOTE, start)
    return text[start:end], end + len(QUOTE)


def _read_object(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Read the rest of an object after its brace. A comma may follow the last pair."""
    found: dict[str, Any] = {}
    while True:
        position = _skip_space(text, position)
        if text.startswith("}", position):
            return found, position + 1
        if text.startswith(QUOTE, position):
            key, position = _read_string(text, position)
        elif text.startswith('"', position):
            key, position = _DECODER.raw_decode(text, position)
        else:
            bare = _BARE.match(text, position)
            assert bare is not None, "the pattern matches an empty text"
            key, position = bare[0].strip(), bare.end()
        position = _skip_space(text, position)
        if not key or not text.startswith(":", position):
            raise ValueError("no key")
        found[key], position = _read(text, position + 1)
        position = _skip_comma(text, position, "}")


def _read_array(text: str, position: int) -> tuple[list[Any], int]:
    """Read the rest of an array after its bracket. A comma may follow the last item."""
    found: list[Any] = []
    while True:
        position = _skip_space(text, position)
        if text.startswith("]", position):
            return found, position + 1
        item, position = _read(text, position)
        found.append(item)
        position = _skip_comma(text, position, "]")


def _skip_comma(text: str, position: int, end: str) -> int:
    position = _skip_space(text, position)
    if text.startswith(",", position):
        return position + 1
    if not text.startswith(end, position):
        raise ValueError("no comma")
    return position


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space is not None, "the pattern matches an empty text"
    return space.end()
