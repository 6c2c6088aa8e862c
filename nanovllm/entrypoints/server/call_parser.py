"""CallParser: finds the tool calls and the reasoning in a model's text while the text arrives piece by piece.

The parser accepts every text that the grammar of the format (call_formats.py) admits, and also what models write
without a grammar, such as calls without closing tags.

A call in JSON is returned when it is complete. A call between tags is returned as soon as its name is known, and its
arguments follow one by one. Text that turns out not to be a call is returned as content, unchanged and in its place.
Only the white space on either side of a call is lost, and a closing tag that is truncated at the end. The result does
not depend on the division of the text into pieces, and the time is linear in the length of the text.
"""

import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from nanovllm.entrypoints.server.call_formats import AFTER, QWEN_TAGS, CallFormat, can_be_in_tag, takes_text
from nanovllm.entrypoints.server.quoted_calls import QuotedScan, read_call


class ReasoningDelta(NamedTuple):
    """The next piece of the reasoning before the answer."""

    text: str


class ToolCallDelta(NamedTuple):
    """A tool call of the answer, or more of its arguments. Only the first delta of a call has its id and its name."""

    call_index: int  # 0 for the answer's first call
    call_id: str
    name: str
    arguments: str  # a piece of a JSON object


CallPart: TypeAlias = str | ToolCallDelta
Delta: TypeAlias = CallPart | ReasoningDelta  # a string is content
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]  # a tool's name -> the JSON Schema of its arguments

WINDOW_CHARS = 1000  # characters that are read at once, and the longest tag of a function or a parameter
MAX_INDENT_CHARS = 100  # before a tag of a tool whose parameters are not known
_FUNCTION = re.compile(r"[ \t\r\n]*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_HEAD_END = re.compile(r"[>\n]")  # ends the tag of a function or a parameter
_IN_FUNCTION = ("<parameter=", "</parameter>", "</function>")
_CLOSINGS = re.compile("|".join(AFTER))
_TEXT_PART = re.compile(f"<parameter=|{_CLOSINGS.pattern}")
_JSON_PART = re.compile(rf'["\\]|{_TEXT_PART.pattern}')
_IN_STRING = re.compile(r'(?:[^"\\\n]|\\[^\n])*')  # the rest of a JSON string, without the quote
_OUTSIDE_STRINGS = re.compile(r"[ \t\r\n{}\[\]:,0-9+.eEtrufalsn-]*")  # JSON, with the letters of true, false and null
_LINEAFTER_TAG = re.compile(r"\A[ \t]*\n")
_LINE_BEFORE_TAG = re.compile(r"\n[ \t]*\Z")
_PYTHON_VALUES = {"True": "true", "False": "false", "None": "null"}
_SPACE = " \t\r\n"  # JSON's white space
_NEXT = re.compile(f"[^{_SPACE}]")
_DECODER = json.JSONDecoder()


class _ValueScan:
    """A search for the end of a value between tags in a growing text, which reads each character a few times at most.

    A value may contain tags. So a tag ends the value only in one of two cases: a closing tag is followed by another tag
    of the call or by the end of the answer, or the tag begins another parameter of the tool, because the model has left
    out the closing tag. In JSON, tags inside strings do not count.
    """

    def __init__(self, names: Collection[str], is_json: bool) -> None:
        """names: the names of the tool's parameters, empty if the parameters are not known."""
        self._names, self._is_json = names, is_json
        self._position = 0  # the value does not end before this position
        self._string_end = 0  # end of the string that begins at `_position`; 0 outside strings
        self._no_string_before = 0  # quotes before this position do not begin a string

    def find(self, text: str, is_last: bool) -> int | None:
        """Return the end of the value, or None if more text is needed. is_last: no text follows."""
        part = _JSON_PART if self._is_json else _TEXT_PART
        while found := part.search(text, self._position):
            self._position = found.start()
            if found[0] == "\\":
                self._position += 2
            elif found[0] == '"':
                if self._position < self._no_string_before:
                    self._position += 1
                elif not self._skip_string(text, is_last):
                    return None
            elif (is_end := self._is_end(text, found, is_last)) is None:
                return None
            elif is_end:
                return self._position
            else:
                self._position += 1
        self._position = max(self._position, len(text) - len("</parameter>"))
        return None

    def _skip_string(self, text: str, is_last: bool) -> bool:
        """Move the position after the string. Return False if more text is needed."""
        rest = _IN_STRING.match(text, self._string_end or self._position + 1)
        assert rest is not None, "the pattern matches an empty text"
        self._string_end = rest.end()
        end = text[self._string_end : self._string_end + 2]
        if end in ("", "\\") and not is_last:
            return False
        if end.startswith('"'):
            self._position = self._string_end + 1
        else:  # a string in JSON has no line break
            self._no_string_before = self._string_end
            self._position += 1
        self._string_end = 0
        return True

    def _is_end(self, text: str, tag: re.Match[str], is_last: bool) -> bool | None:
        """Return True if the value ends at this tag, or None if more text is needed."""
        if tag[0] == "<parameter=":
            head = _PARAMETER.match(text, tag.start(), tag.start() + WINDOW_CHARS)
            if head is None:
                may_go_on = len(text) - tag.start() < WINDOW_CHARS and not _HEAD_END.search(text, tag.start())
                return None if may_go_on and not is_last else False
            return head[1] in self._names if self._names else _starts_line(text, tag.start())
        found = _NEXT.search(text, tag.end())
        if found is None:
            return True if is_last else None
        following = text[found.start() : found.start() + len(max(AFTER[tag[0]], key=len))]
        if following.startswith(AFTER[tag[0]]):
            return True
        if found.start() + len(following) == len(text) and any(t.startswith(following) for t in AFTER[tag[0]]):
            return True if is_last else None
        return False


def _starts_line(text: str, position: int) -> bool:
    """Return True if only spaces precede a position in its line."""
    start = max(0, position - MAX_INDENT_CHARS)
    _, line_end, indent = text[start:position].rpartition("\n")
    return (bool(line_end) or not start) and not indent.strip(_SPACE)


def _is_open_tag(text: str, begin: str) -> bool:
    """Return True if the text is a tag that begins so, and more text may complete its name."""
    return text.startswith(begin) and len(text) < WINDOW_CHARS and not _HEAD_END.search(text)


class CallParser:
    """Parses one answer. Call `feed` with each piece of the text, then `finish`; both return what has become certain.

    One scanner finds the opening of a call. The rest depends on the format. A JSON object is buffered until the first
    character that JSON cannot have outside strings, and then decoded at once. Between tags, the arguments are returned
    one by one, each whole. Models leave out tags: the closing tags of a parameter, a function or a call, and
    <tool_call> before the function of a known tool.
    """

    def __init__(self, call_format: CallFormat, schemas: Schemas, *, is_alternative: bool = False) -> None:
        """is_alternative: the answer consists either of calls of these tools or of text without calls.

        With is_alternative, an answer that does not begin with a call has no calls.
        """
        self._format, self._schemas, self._is_alternative = call_format, schemas, is_alternative
        names = filter(can_be_in_tag, schemas) if call_format.style == "tags" and not is_alternative else ()
        self._openings = (call_format.opening, *(f"<function={name}>" for name in names))
        self._longest = max(map(len, self._openings))
        self._opening = re.compile("|".join(map(re.escape, self._openings)))
        self._text = ""
        self._unread: list[str] = []  # pieces of the text after `_text`, in reverse order
        self._advance = self._find_object if call_format.is_bare else self._find_opening
        self._has_ended = self._is_cut = False
        self._object_begin = self._object_end = 0  # in `_text`: end of the opening, and start of the rest of the search
        self._is_in_string = False  # at `_object_end`
        self._name = self._parameter = ""
        self._num_calls = self._num_parameters = 0
        self._scan = _ValueScan((), False)
        self._quoted_scan = QuotedScan(0)
        self._follows_call = False
        self._deltas: list[CallPart] = []

    def feed(self, text: str) -> list[CallPart]:
        """Add `text`, and return what has become certain."""
        self._put_back(text)
        return self._take()

    def finish(self, is_cut: bool = False) -> list[CallPart]:
        """Return the rest, after the last text. A call between tags needs no end, unless the answer was truncated."""
        self._has_ended, self._is_cut = True, is_cut
        deltas = self._take()
        is_content = self._advance in (self._find_function, self._find_opening, self._pass_content)
        if is_content and self._text and (not self._follows_call or self._text.strip(_SPACE)):
            deltas.append(self._text)
        return _joined(deltas)

    @property
    def _is_last(self) -> bool:
        """True if no text follows `_text`."""
        return self._has_ended and not self._unread

    def _take(self) -> list[CallPart]:
        """Parse the text so far, and return the parts that were found."""
        while self._advance():
            pass
        while self._unread:
            self._text += self._unread.pop()
            while self._advance():
                pass
        deltas, self._deltas = _joined(self._deltas), []
        return deltas

    def _go_on(self, position: int, advance: Callable[[], bool]) -> None:
        """Continue with another state at this position of the text.

        Each state copies the rest of the text. So most of a long rest is moved back to the unread text.
        """
        rest = self._text[position:]
        self._text, self._advance = rest[:WINDOW_CHARS], advance
        self._put_back(rest[WINDOW_CHARS:])

    def _put_back(self, text: str) -> None:
        starts = range(0, len(text), WINDOW_CHARS)
        self._unread += [text[start : start + WINDOW_CHARS] for start in reversed(starts)]

    def _return_content(self, end: int, advance: Callable[[], bool]) -> None:
        """Return the text up to `end` as content. With is_alternative, the rest of the answer is content, too."""
        content = self._text[:end]
        if content:
            self._deltas.append(content)
            self._follows_call = False
        is_text = self._is_alternative and not self._num_calls and content.strip(_SPACE)
        self._go_on(end, self._pass_content if is_text else advance)

    def _pass_content(self) -> bool:
        """Return everything as content, because the answer has turned out to be a text without calls."""
        self._return_content(len(self._text), self._pass_content)
        return False

    def _find_opening(self) -> bool:
        """Return the content before an opening, without the white space before the opening, which may be a call's."""
        found = self._opening.search(self._text)
        if found and self._is_alternative and not self._num_calls and self._text[: found.start()].strip(_SPACE):
            found = None
        end = found.start() if found else self._text.rfind("<", max(0, len(self._text) - self._longest))
        if not found and (end < 0 or not any(opening.startswith(self._text[end:]) for opening in self._openings)):
            end = len(self._text)
        end = len(self._text[:end].rstrip(_SPACE))
        if not found:
            if end:
                self._return_content(end, self._find_opening)
            return False
        opening_end = found.end() - end
        self._return_content(end, self._find_function)
        if self._format.is_json:
            self._expect_object(opening_end)
        elif self._format.style == "quoted":
            self._object_begin, self._quoted_scan, self._advance = (
                opening_end,
                QuotedScan(opening_end),
                self._find_quoted,
            )
        return True

    # -- an object in JSON ---------------------------------------------------------------------------------------------

    def _expect_object(self, opening_end: int) -> None:
        self._object_begin, self._object_end, self._is_in_string = opening_end, 0, False
        self._advance = self._find_object

    def _find_object(self) -> bool:
        """Find the object after the opening. Return the object as a call, or the opening as content."""
        found = _NEXT.search(self._text, self._object_begin)
        begin = found.start() if found and found[0] == "{" else None
        is_open = found is None or (begin is not None and not self._reach_end(begin))
        if is_open and not self._is_last:
            return False
        call, end = (None, 0) if begin is None else self._read_call(begin)
        if call is None:
            self._return_content(self._object_begin, self._find_opening)
        else:
            self._deltas.append(call)
            self._num_calls += 1
            self._follows_call = True
            self._go_on(end, self._find_closing)
        return True

    def _reach_end(self, begin: int) -> bool:
        """Return True if the object is followed by a character that JSON cannot have outside strings.

        The search follows only quotes, and reads each character once.
        """
        text, end = self._text, max(begin, self._object_end)
        while True:
            part = (_IN_STRING if self._is_in_string else _OUTSIDE_STRINGS).match(text, end)
            assert part is not None, "both patterns match an empty text"
            end = self._object_end = part.end()
            following = text[end : end + 2]
            if not following or (following == "\\" and self._is_in_string):
                return False
            if following[0] != '"':
                return True
            self._is_in_string = not self._is_in_string
            end += 1

    def _read_call(self, begin: int) -> tuple[ToolCallDelta | None, int]:
        """Return the call that the object at `begin` describes, and the end of the object.

        The call is None if there is no object, or the object is not a call or cannot be encoded as JSON.
        """
        try:
            call, end = _DECODER.raw_decode(self._text, begin)
            keys = [key for key in self._format.argument_keys if key in call]
            arguments = call[keys[0]] if keys else {}
            name = call.get("name")
            has_keys = len(keys) == 1 or (not keys and not self._format.needs_arguments)
            is_call = isinstance(name, str) and has_keys and isinstance(arguments, dict)
            if not is_call or call.keys() - {"name", "type", "id", *keys}:
                return None, begin
        except (ValueError, RecursionError):
            return None, begin
        return self._new_call(name, arguments), end

    def _new_call(self, name: str, arguments: dict[str, Any]) -> ToolCallDelta | None:
        """Return the call, or None if the name is not allowed or the call cannot be encoded as JSON."""
        if not name or (self._is_alternative and name not in self._schemas):
            return None
        try:
            dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            (name + dumped).encode()  # a lone surrogate cannot be encoded
        except (ValueError, RecursionError):
            return None
        return ToolCallDelta(self._num_calls, new_call_id(), name, dumped)

    def _find_closing(self) -> bool:
        """Find the closing tag of the call, or the separator before the next one."""
        tag = self._format.closing or self._format.separator
        rest = self._text.lstrip(_SPACE)
        end = len(self._text) - len(rest) + len(tag)
        if rest.startswith(tag) and self._format.separator:
            self._expect_object(end)
        elif rest.startswith(tag):
            self._go_on(end, self._find_opening)
        elif not tag.startswith(rest):
            self._go_on(0, self._find_opening)
        elif self._is_last:
            self._go_on(len(self._text), self._find_opening)
        else:
            return False
        return True

    # -- a name and an object in Gemma 4's notation --------------------------------------------------------------------

    def _find_quoted(self) -> bool:
        """Find the call after the opening. Return the call, or the opening as content."""
        end = self._quoted_scan.find(self._text)
        if end is None and not self._is_last:
            return False
        call = read_call(self._text, self._object_begin, end) if end else None
        delta = None if call is None else self._new_call(*call)
        if delta is None:
            self._return_content(self._object_begin, self._find_opening)
        else:
            self._deltas.append(delta)
            self._num_calls += 1
            self._follows_call = True
            self._go_on(end or 0, self._find_closing)
        return True

    # -- arguments between tags ----------------------------------------------------------------------------------------

    def _find_function(self) -> bool:
        """Begin the call, or return the opening as content if no function follows."""
        text = self._text.lstrip(_SPACE)
        rest = text.removeprefix(QWEN_TAGS.opening)
        found = _FUNCTION.match(rest, 0, WINDOW_CHARS)
        if found:
            self._name = found[1]
            self._deltas.append(ToolCallDelta(self._num_calls, new_call_id(), self._name, "{"))
            self._num_parameters = 0
            self._go_on(len(self._text) - len(rest) + found.end(), self._find_parameter)
            return True
        begun = rest.lstrip(_SPACE)
        is_begun = _is_open_tag(begun, "<function=") or "<function=".startswith(begun)
        if is_begun and len(rest) < WINDOW_CHARS:
            return False
        self._return_content(len(self._text) - len(rest), self._find_opening)
        return True

    def _find_parameter(self) -> bool:
        """Begin a parameter, or return the end of the arguments."""
        text = self._text.lstrip(_SPACE)
        found = _PARAMETER.match(text, 0, WINDOW_CHARS)
        if found:
            self._parameter = found[1]
            self._scan = _ValueScan(self._properties().keys(), not takes_text(self._properties().get(found[1])))
            self._go_on(len(self._text) - len(text) + found.end(), self._find_value)
            return True
        if text.startswith("</parameter>"):  # a superfluous closing tag
            self._text = text.removeprefix("</parameter>")
            return True
        if _is_open_tag(text, "<parameter=") or any(tag.startswith(text) for tag in _IN_FUNCTION):
            if not self._is_last or self._is_cut:
                return False
            text = ""
        self._deltas.append(ToolCallDelta(self._num_calls, "", "", "}"))
        self._num_calls += 1
        self._follows_call = True
        self._text, self._advance = text.removeprefix("</function>"), self._find_next_function
        return True

    def _find_value(self) -> bool:
        """Return a parameter and its value."""
        end = self._scan.find(self._text, self._is_last)
        if end is None and self._is_last and not self._is_cut:
            loose = _CLOSINGS.search(self._text)
            end = loose.start() if loose else len(self._text)
        if end is None:
            return False
        value = _LINE_BEFORE_TAG.sub("", _LINEAFTER_TAG.sub("", self._text[:end]))
        separator = ", " if self._num_parameters else ""
        name = json.dumps(self._parameter, ensure_ascii=False)
        piece = f"{separator}{name}: {self._json_value(self._parameter, value)}"
        self._deltas.append(ToolCallDelta(self._num_calls, "", "", piece))
        self._num_parameters += 1
        self._go_on(end + len("</parameter>") * self._text.startswith("</parameter>", end), self._find_parameter)
        return True

    def _find_next_function(self) -> bool:
        """Find what follows a function: the end of the call, or another function in the same call."""
        rest = self._text.lstrip(_SPACE)
        if rest.startswith("<function=") and _FUNCTION.match(rest, 0, WINDOW_CHARS):
            self._text, self._advance = rest, self._find_function
            return True
        is_begun = _is_open_tag(rest, "<function=")
        is_open = is_begun or any(tag.startswith(rest) and rest != tag for tag in (QWEN_TAGS.closing, "<function="))
        if is_open and not self._is_last:
            return False
        if is_open and not is_begun:  # a truncated closing tag
            rest = ""
        elif not rest.startswith(QWEN_TAGS.closing):
            rest = self._text
        self._text, self._advance = rest.removeprefix(QWEN_TAGS.closing), self._find_opening
        return True

    def _properties(self) -> Mapping[str, Any]:
        """Return the schemas of the parameters of the tool that is called."""
        properties = self._schemas.get(self._name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _json_value(self, parameter: str, text: str) -> str:
        """Return a value as JSON: as a string, unless the schema allows no string or the value does not match."""
        if not takes_text(self._properties().get(parameter)):
            text = _PYTHON_VALUES.get(text.strip(_SPACE), text)
            with suppress(ValueError, RecursionError):
                return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        return json.dumps(text, ensure_ascii=False)


def _joined(deltas: list[CallPart]) -> list[CallPart]:
    """Join adjacent contents. Hot."""
    if len(deltas) < 2:
        return deltas
    joined: list[CallPart] = []
    for is_content, adjacent in itertools.groupby(deltas, key=lambda delta: isinstance(delta, str)):
        group = list(adjacent)
        joined += ["".join(map(str, group))] if is_content else group
    return joined


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
