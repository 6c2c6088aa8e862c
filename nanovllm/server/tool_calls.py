"""Tool calls in a model's text, found while the text arrives piece by piece.

Two formats are known. Qwen (and other models in Hermes' format) writes, once or several times:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Bern"}}
    </tool_call>

Llama 3 begins the answer with a JSON object, sometimes after a tag. Several objects are separated by semicolons:

    <|python_tag|>{"name": "weather", "parameters": {"city": "Bern"}}; {"name": ...}

A call is returned when it is complete. Whatever turns out not to be a valid call is returned as content, unchanged and
in its place; nothing is lost but the white space on either side of a call. The result does not depend on how the text
was split, and the time is linear in its length.
"""

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

from nanovllm.sampling_params import TaggedJson


class ToolCallDelta(NamedTuple):
    """A tool call of the answer, complete."""

    call_index: int  # 0 for the answer's first call
    call_id: str
    name: str
    arguments: str  # a JSON object


Delta: TypeAlias = str | ToolCallDelta  # a string is content


class CallFormat(NamedTuple):
    """The way in which a model writes its calls."""

    opening: str  # precedes a call
    closing: str  # follows a call; may be empty
    separator: str  # stands in for the opening of a second call; may be empty
    is_bare: bool  # True if a call at the start of the answer needs no opening
    argument_keys: tuple[str, ...]
    needs_arguments: bool  # without tags, an object that has only a name is an ordinary answer

    def constraint(
        self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, is_required: bool, is_single: bool
    ) -> TaggedJson:
        """Return the form of calls to these tools, each a name and the schema of its arguments.

        is_required: the answer is a call. is_single: it has no more than one.
        """
        opening, closing = ("", "") if self.is_bare else (f"{self.opening}\n", f"\n{self.closing}")
        begins = (
            f'{opening}{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.argument_keys[0]}": '
            for name, _ in tools
        )
        return TaggedJson(
            tags=tuple((begin, schema, f"}}{closing}") for begin, (_, schema) in zip(begins, tools, strict=True)),
            trigger="" if self.is_bare else self.opening,
            separator=f"{self.separator} " if self.separator else "\n",
            is_required=is_required,
            is_single=is_single,
        )


HERMES = CallFormat("<tool_call>", "</tool_call>", "", False, ("arguments",), False)
LLAMA = CallFormat("<|python_tag|>", "", ";", True, ("parameters", "arguments"), True)

_OTHER_MARKS = ("<function=",)  # Qwen3-Coder's calls are XML within the same tags
_MARKS = (
    (HERMES, ("<tool_call>", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")),
    (LLAMA, ("<|python_tag|>", '"parameters": dictionary', "LlamaForCausalLM")),
)
_SPACE = " \t\r\n"  # JSON's white space
_NEXT = re.compile(f"[^{_SPACE}]")
_OUTSIDE_STRINGS = frozenset(_SPACE + '{}[]:,"0123456789+-.eEtrufalsn')  # with the letters of true, false and null


def call_format_of(template_and_architecture: str) -> CallFormat | None:
    """Return how a model writes its calls, going by its chat template or, less surely, by its architecture.

    Returns None for a format that is not known. The caller should then refuse requests with tools.
    """
    if any(mark in template_and_architecture for mark in _OTHER_MARKS):
        return None
    for call_format, marks in _MARKS:
        if any(mark in template_and_architecture for mark in marks):
            return call_format
    return None


class _State(Enum):
    CONTENT = auto()  # looking for an opening
    OPENED = auto()  # an object should begin
    OBJECT = auto()  # inside the object
    CLOSING = auto()  # the closing should follow
    SEPARATOR = auto()  # after a call, a separator may follow


class ToolCallParser:
    """Parses one answer: `feed` it the text, then call `finish`. Both return what has become certain."""

    def __init__(self, call_format: CallFormat) -> None:
        self._format = call_format
        self._state = _State.OPENED if call_format.is_bare else _State.CONTENT
        self._text = ""
        self._start = 0  # of what has not been returned yet; between calls of `feed` always 0
        self._opening_end = 0  # outside CONTENT: where the opening ends that may turn out to be content
        self._scan = _ObjectScan(0)
        self._deltas: list[Delta] = []  # to be returned by the next `_take`
        self._num_calls = 0
        self._follows_call = False  # True if the last thing returned was a call

    def feed(self, text: str) -> list[Delta]:
        """Return what is certain now that the answer goes on with `text`."""
        self._text += text
        while self._advance():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """Return the rest, after the last text. A call that is not complete is content."""
        while self._state is not _State.CONTENT:
            self._give_up()
            while self._advance():
                pass
        if not self._follows_call or self._text[self._start :].strip(_SPACE):
            self._return_content(len(self._text))
        return self._take()

    def _advance(self) -> bool:
        """Go on to the next state. Returns False if that takes more text."""
        if self._state is _State.CONTENT:
            return self._find_opening()
        if self._state is _State.OBJECT:
            return self._find_end()
        if self._state is _State.CLOSING:
            return self._find_closing()
        found = _NEXT.search(self._text, self._opening_end)
        if found is None:
            return False
        if self._state is _State.SEPARATOR:
            is_separator = found[0] == self._format.separator
            self._state = _State.OPENED if is_separator else _State.CONTENT
            self._opening_end = found.end() if is_separator else self._start
        elif found[0] == "{":
            self._scan = _ObjectScan(found.start())
            self._state = _State.OBJECT
        else:
            self._give_up()
        return True

    def _find_opening(self) -> bool:
        """Return the content before an opening. The white space before it stays, as it may belong to a call."""
        opening, text = self._format.opening, self._text
        start = text.find(opening, self._start)
        end = start if start >= 0 else max(self._start, len(text) - _num_begun(text, opening))
        content_end = self._start + len(text[self._start : end].rstrip(_SPACE))
        self._return_content(content_end)
        if start < 0:
            return False
        self._state = _State.OPENED
        self._opening_end = start + len(opening)
        return True

    def _find_end(self) -> bool:
        """Follow the object to its end."""
        self._scan.advance(self._text)
        if self._scan.is_invalid:
            self._give_up()
        elif self._scan.is_complete:
            self._state = _State.CLOSING
        return self._scan.is_invalid or self._scan.is_complete

    def _find_closing(self) -> bool:
        """Return the call if its closing follows the object."""
        closing, position = self._format.closing, self._scan.end
        if closing:
            found = _NEXT.search(self._text, position)
            position = found.start() if found else len(self._text)
        follows = self._text[position : position + len(closing)]
        if len(follows) < len(closing) and closing.startswith(follows):
            return False
        call = None if follows != closing else self._read_call(self._text[self._scan.start : self._scan.end])
        if call is None:
            self._give_up()
            return True
        self._deltas.append(call)
        self._num_calls += 1
        self._follows_call = True
        self._start = self._opening_end = position + len(closing)
        self._state = _State.SEPARATOR if self._format.separator else _State.CONTENT
        return True

    def _give_up(self) -> None:
        """No call follows the opening, so it is content. The text after it is looked at once more."""
        self._return_content(self._opening_end)
        self._state = _State.CONTENT

    def _return_content(self, end: int) -> None:
        if end > self._start:
            self._deltas.append(self._text[self._start : end])
            self._start, self._follows_call = end, False

    def _take(self) -> list[Delta]:
        """Return what has been found, adjacent contents joined, and forget the text up to there."""
        joined: list[Delta] = []
        for is_content, adjacent in itertools.groupby(self._deltas, key=lambda delta: isinstance(delta, str)):
            group = list(adjacent)
            joined += ["".join(map(str, group))] if is_content else group
        num_returned, self._start, self._deltas = self._start, 0, []
        self._text = self._text[num_returned:]
        self._opening_end -= num_returned
        self._scan.start -= num_returned
        self._scan.end -= num_returned
        return joined

    def _read_call(self, text: str) -> ToolCallDelta | None:
        """Return the call that a JSON object describes, or None if it is not a call or cannot be passed on as JSON."""
        try:
            call: Any = json.loads(text)
            keys = [key for key in self._format.argument_keys if key in call]
            arguments = call[keys[0]] if keys else {}
            name = call.get("name")
            is_call = isinstance(name, str) and name and isinstance(arguments, dict)
            has_keys = len(keys) == 1 or (not keys and not self._format.needs_arguments)
            if not (is_call and has_keys) or call.keys() - {"name", "type", "id", *keys}:
                return None
            dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            (name + dumped).encode()  # half of a surrogate pair cannot be encoded
        except (ValueError, RecursionError):
            return None
        return ToolCallDelta(self._num_calls, f"call_{secrets.token_hex(12)}", name, dumped)


class _ObjectScan:
    """A search for the end of a JSON object in a text that grows. It reads each character once.

    It follows only strings and brackets, and leaves it to json.loads to check the object. But it notices a character
    that cannot be JSON at once, so that an object that never ends does not swallow the rest of an answer.
    """

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.is_complete = self.is_invalid = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def advance(self, text: str) -> None:
        """Read on from `end`, to the end of the text, of the object, or to a character that is not JSON."""
        while self.end < len(text) and not (self.is_complete or self.is_invalid):
            char = text[self.end]
            self.end += 1
            if self._in_string:
                self.is_invalid = char < " "
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
                continue
            self.is_invalid = char not in _OUTSIDE_STRINGS
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self.is_complete = self._depth == 0


def _num_begun(text: str, tag: str) -> int:
    """The number of characters at the end of `text` that could be the beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
