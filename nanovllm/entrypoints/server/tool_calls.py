"""Tool calls: the form in which a model writes them, the grammar that holds it to that form, and the parsers that find
calls and reasoning in its text while it arrives piece by piece.

Every text that the grammar admits is parsed to the calls that it has (test_call_grammars.py). Parsers also
take what models write without a grammar, such as calls without closing tags.

Text that turns out not to be a valid call is returned as content, unchanged and in its place. Only the white space on
either side of a call is lost, and what there is of a closing tag at the end. A call in JSON is returned when it is
complete, unless its arguments are asked for in pieces. Then it is a call as soon as its name is known, even if the
arguments turn out not to be valid. So are calls between tags, whose arguments come one by one. The result does not
depend on how the text was split, and the time is linear in its length.
"""

import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

from nanovllm.errors import RequestError
from nanovllm.sampling_params import TaggedJson, TaggedValue
from nanovllm.text.grammar_writer import text_without
from nanovllm.text.reasoning import num_begun


class CallFormat(NamedTuple):
    """The way in which a model writes its tool calls.

    Three formats are known. Qwen (and other models in Hermes' format) writes, once or several times:

        <tool_call>
        {"name": "weather", "arguments": {"city": "Bern"}}
        </tool_call>

    Qwen3-Coder and its successors write values between tags, strings without quotes:

        <tool_call>
        <function=weather>
        <parameter=city>
        Bern
        </parameter>
        </function>
        </tool_call>

    Llama 3 begins the answer with a JSON object, sometimes after a tag. Several objects are separated by semicolons:

        <|python_tag|>{"name": "weather", "parameters": {"city": "Bern"}}; {"name": ...}
    """

    opening: str  # precedes a call
    closing: str  # follows a call; may be empty
    separator: str  # stands in for the opening of a second call; may be empty
    is_bare: bool  # True if a call at the start of the answer needs no opening
    argument_keys: tuple[str, ...]
    needs_arguments: bool  # without tags, an object that has only a name is an ordinary answer
    is_json: bool = True  # else each argument has a tag of its own

    def constraint(
        self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, is_required: bool, is_single: bool
    ) -> TaggedJson:
        """Return the form of calls to these tools, each a name and the schema of its arguments.

        is_required: the answer is a call. is_single: it has no more than one. Raises RequestError for names that cannot
        be written in this format.
        """
        names = tuple(name for name, _ in tools)
        opening, closing = ("", "") if self.is_bare else (f"{self.opening}\n", f"\n{self.closing}")
        if not self.is_json:
            if unwritable := [name for name in names if not can_be_in_tag(name)]:
                raise RequestError(f"tool {unwritable[0]!r}: the model cannot write this name in a tag; use another")
            return TaggedJson(
                tags=tuple(
                    (f"{opening}<function={name}>\n", _parameters(name, schema), f"</function>{closing}")
                    for name, schema in tools
                ),
                trigger=self.opening,
                separator="\n",
                is_required=is_required,
                is_single=is_single,
                names=names,
                text_pattern=text_without([f"<function={name}>" for name in names]),
                value_pattern=_value_pattern([schema for _, schema in tools]),
            )
        begins = (
            f'{opening}{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.argument_keys[0]}": ' for name in names
        )
        return TaggedJson(
            tags=tuple((begin, schema, f"}}{closing}") for begin, (_, schema) in zip(begins, tools, strict=True)),
            trigger="" if self.is_bare else self.opening,
            separator=f"{self.separator} " if self.separator else "\n",
            is_required=is_required,
            is_single=is_single,
            names=names,
            text_pattern=text_without([self.opening], r"(?:[ \t\r\n]*(?:[^ \t\r\n{<][^<]*)?)") if self.is_bare else "",
        )


HERMES = CallFormat("<tool_call>", "</tool_call>", "", False, ("arguments",), False)
LLAMA = CallFormat("<|python_tag|>", "", ";", True, ("parameters", "arguments"), True)
QWEN_TAGS = CallFormat("<tool_call>", "</tool_call>", "", False, (), False, is_json=False)

_MARKS = (
    (QWEN_TAGS, ("<function=",)),  # within the tags of the next
    (HERMES, ("<tool_call>", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")),
    (LLAMA, ("<|python_tag|>", '"parameters": dictionary', "LlamaForCausalLM")),
)


def call_format_of(template_and_architecture: str) -> CallFormat | None:
    """Return how a model writes its calls, going by its chat template or, less surely, by its architecture.

    Returns None for a format that is not known. The caller should then refuse requests with tools.
    """
    for call_format, marks in _MARKS:
        if any(mark in template_and_architecture for mark in marks):
            return call_format
    return None


def _list(value: Any) -> list[Any]:
    """Return a part of a schema that nobody has checked, as a list."""
    return value if isinstance(value, list) else []


def takes_text(schema: Any) -> bool:
    """Return True if a parameter with this schema is written as text, and not as JSON."""
    if not isinstance(schema, dict):
        return True
    options = [schema, *(each for each in _list(schema.get("anyOf")) if isinstance(each, dict))]
    kinds = str([each["type"] for each in options if "type" in each])
    if kinds == "[]":
        are_texts = all(isinstance(choice, str) for choice in _list(schema.get("enum")))
        return are_texts and not schema.keys() & {"$ref", "allOf", "oneOf", "const"}
    return "'string'" in kinds


def _choices(schema: Any) -> tuple[str, ...]:
    """The texts that an `enum` or a `const` allows; none if it allows anything else, too."""
    if not isinstance(schema, dict):
        return ()
    choices = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if not all(isinstance(choice, str) for choice in choices):
        return ()
    return tuple(choice for choice in choices if not _NOT_IN_CHOICES.search(f"{choice}\n<"))


def _parameters(tool: str, schema: Mapping[str, Any]) -> tuple[TaggedValue, ...]:
    """The tags of the arguments. Of texts only an `enum` and a `const` are enforced."""
    properties, required = schema.get("properties"), _list(schema.get("required"))
    properties = properties if isinstance(properties, Mapping) else {}
    kept = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
    if unwritable := [name for name in properties if name in required and not can_be_in_tag(name)]:
        raise RequestError(
            f"tool {tool!r}: the model cannot write the name of its parameter {unwritable[0]!r} in a tag; use another"
        )
    return tuple(
        TaggedValue(
            f"<parameter={name}>\n",
            None if takes_text(properties[name]) else {**kept, **properties[name]},
            "\n</parameter>\n",
            name in required,
            _choices(properties[name]) if takes_text(properties[name]) else (),
        )
        for name in properties
        if can_be_in_tag(name)
    )


def _value_pattern(schemas: Iterable[Mapping[str, Any]]) -> str:
    """Return a regular expression of texts in which the parser of calls to these tools finds no end of the value.

    A closing tag is followed by more of its line or of the text, and not by another tag.
    """
    names = {name: None for schema in schemas for name in _list_of_names(schema) if can_be_in_tag(name)}
    return text_without([f"<parameter={name}>" for name in names], "[^<]*", dict.fromkeys(_AFTER, _GOES_ON))


def _list_of_names(schema: Mapping[str, Any]) -> list[str]:
    properties = schema.get("properties")
    return list(properties) if isinstance(properties, Mapping) else []


def can_be_in_tag(name: str) -> bool:
    """Return True if a function or a parameter of this name can be written in a tag."""
    return bool(name) and not set(name) & set("<>\r\n")


class ReasoningDelta(NamedTuple):
    """More of the reasoning before the answer."""

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

MAX_INDENT_CHARS = 100  # before a tag, where the tool's parameters are not known
MAX_HEAD_CHARS = 1000  # limit of a call before its arguments, if they are sent in pieces
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(\w+)"\s*:\s*(?=\{)')
_FUNCTION = re.compile(r"[ \t\r\n]*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_HEAD_END = re.compile(r"[>\n]")  # of the tag of a function or a parameter
_IN_FUNCTION = ("<parameter=", "</parameter>", "</function>")
# Closing tag of a format with tags -> the tags of which one follows, if it closes anything
_AFTER = {
    "</parameter>": ("<parameter=", "</parameter>", "</function>", "</tool_call>", "<tool_call>", "<function="),
    "</function>": ("</tool_call>", "<tool_call>", "<function="),
    "</tool_call>": ("<tool_call>",),
}
_GOES_ON = r"[ \t\r\n]*[^ \t\r\n<][^<]*"  # after a closing tag that closes nothing
_NOT_IN_CHOICES = re.compile(rf"<parameter=|(?:{'|'.join(_AFTER)})[ \t\r\n]*<")
_CLOSINGS = re.compile("|".join(_AFTER))
_TEXT_PART = re.compile(f"<parameter=|{_CLOSINGS.pattern}")
_JSON_PART = re.compile(rf'["\\]|{_TEXT_PART.pattern}')
_STRING = re.compile(r'(?:[^"\\\n]|\\[^\n])*')  # the rest of a JSON string, without the quote
_LINE_AFTER_TAG = re.compile(r"\A[ \t]*\n")
_LINE_BEFORE_TAG = re.compile(r"\n[ \t]*\Z")
_PYTHON_VALUES = {"True": "true", "False": "false", "None": "null"}
_SPACE = " \t\r\n"  # JSON's white space
_NEXT = re.compile(f"[^{_SPACE}]")
_OUTSIDE_STRINGS = frozenset(_SPACE + '{}[]:,"0123456789+-.eEtrufalsn')  # with the letters of true, false and null


def make_parser(
    call_format: CallFormat, schemas: Schemas, *, in_pieces: bool, is_alternative: bool = False
) -> "ToolCallParser | TaggedCallParser":
    """Make the parser of one answer.

    in_pieces: return arguments in JSON while they arrive. is_alternative: the answer is either calls of these tools or
    a text without calls, so one that does not begin with a call has none.
    """
    if call_format.is_json:
        return ToolCallParser(call_format, in_pieces, frozenset(schemas) if is_alternative else None)
    return TaggedCallParser(schemas, is_alternative=is_alternative)


class _State(Enum):
    CONTENT = auto()  # looking for an opening
    OPENED = auto()  # an object should begin
    OBJECT = auto()  # inside the object
    CLOSING = auto()  # the closing should follow
    SEPARATOR = auto()  # after a call, a separator may follow


class ToolCallParser:
    """Parses one answer: `feed` it the text, then call `finish`. Both return what has become certain."""

    def __init__(self, call_format: CallFormat, in_pieces: bool = False, names: Collection[str] | None = None) -> None:
        """`names`: of the tools, if the answer is either calls of them or a text without calls."""
        self._format, self._in_pieces, self._names = call_format, in_pieces, names
        self._has_begun = False  # with pieces: the name of the call has been returned
        self._state = _State.OPENED if call_format.is_bare else _State.CONTENT
        self._text = ""
        self._start = 0  # the first character not returned yet; between calls of `feed` always 0
        self._opening_end = 0  # outside CONTENT: where the opening ends that may turn out to be content
        self._scan = _ObjectScan(0)
        self._deltas: list[CallPart] = []  # to be returned by the next `_take`
        self._num_calls = 0
        self._follows_call = False  # True if the last thing returned was a call
        self._is_text = False  # True if the answer turned out to be a text without calls

    def feed(self, text: str) -> list[CallPart]:
        """Return what is certain now that the answer goes on with `text`."""
        self._text += text
        while self._advance():
            pass
        return self._take()

    def finish(self, is_cut: bool = False) -> list[CallPart]:
        """Return the rest, after the last text. A call that is not complete is content, unless it has begun.

        is_cut: the answer did not end by itself, which makes no difference here.
        """
        if self._has_begun:
            return []
        while self._state is not _State.CONTENT:
            if self._state is not _State.CLOSING or not self._end_call(len(self._text)):
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
        if self._is_text:
            self._return_content(len(text))
            return False
        start = text.find(opening, self._start)
        if self._names is not None and not self._num_calls and text[self._start : start].strip(_SPACE):
            start = -1
        end = start if start >= 0 else max(self._start, len(text) - num_begun(text, opening))
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
        if self._in_pieces:
            self._return_arguments()
        if self._scan.is_invalid:
            self._give_up()
        elif self._scan.is_complete:
            self._state = _State.CLOSING
        return self._scan.is_invalid or self._scan.is_complete

    def _return_arguments(self) -> None:
        """Begin the call once its name is known, and return what there is of its arguments."""
        end = self._scan.end - self._scan.is_invalid  # without the character that is not JSON
        if not self._has_begun:
            head = _HEAD.match(self._text, self._scan.start, min(end, self._scan.start + MAX_HEAD_CHARS))
            if head is None or head[2] not in self._format.argument_keys or not (name := self._name(head[1])):
                return
            self._has_begun = True
            self._deltas.append(ToolCallDelta(self._num_calls, _new_call_id(), name, ""))
            self._start = head.end()
        end = end if self._scan.inner_end is None else self._scan.inner_end
        if end > self._start:
            self._deltas.append(ToolCallDelta(self._num_calls, "", "", self._text[self._start : end]))
            self._start = end
        self._opening_end = self._start

    def _find_closing(self) -> bool:
        """Return the call if its closing follows the object."""
        closing, position = self._format.closing, self._scan.end
        if closing:
            found = _NEXT.search(self._text, position)
            position = found.start() if found else len(self._text)
        follows = self._text[position : position + len(closing)]
        if len(follows) < len(closing) and closing.startswith(follows):
            return False
        if not self._end_call(position + len(closing) if follows == closing else self._scan.end):
            self._give_up()
        return True

    def _end_call(self, end: int) -> bool:
        """Return the call whose object is complete, or the end of one that has begun, if it is a call up to `end`."""
        if self._has_begun:
            is_call = self._text[self._start : self._scan.end].strip(_SPACE) == "}"
        else:
            call = self._read_call(self._text[self._scan.start : self._scan.end])
            is_call = call is not None
            self._deltas += [call] if call else []
        if is_call:
            self._num_calls += 1
            self._has_begun = False
            self._follows_call = True
            self._start = self._opening_end = end
            self._state = _State.SEPARATOR if self._format.separator else _State.CONTENT
        return is_call

    def _give_up(self) -> None:
        """No call follows the opening, so it is content. The text after it is looked at once more."""
        self._return_content(self._opening_end)
        self._num_calls += self._has_begun
        self._has_begun = False
        self._state = _State.CONTENT

    def _return_content(self, end: int) -> None:
        if end > self._start:
            self._deltas.append(self._text[self._start : end])
            is_space = self._text[self._start : end].isspace()
            self._is_text = self._is_text or (self._names is not None and not self._num_calls and not is_space)
            self._start, self._follows_call = end, False

    def _take(self) -> list[CallPart]:
        """Return what has been found, adjacent contents joined, and forget the text up to there."""
        joined = _joined(self._deltas)
        num_returned, self._start, self._deltas = self._start, 0, []
        self._text = self._text[num_returned:]
        self._opening_end -= num_returned
        self._scan.start -= num_returned
        self._scan.end -= num_returned
        if self._scan.inner_end is not None:
            self._scan.inner_end -= num_returned
        return joined

    def _read_call(self, text: str) -> ToolCallDelta | None:
        """Return the call that a JSON object describes, or None if it is not a call or cannot be passed on as JSON."""
        try:
            call: Any = json.loads(text)
            keys = [key for key in self._format.argument_keys if key in call]
            arguments = call[keys[0]] if keys else {}
            name = call.get("name")
            is_call = isinstance(name, str) and self._is_known(name) and isinstance(arguments, dict)
            has_keys = len(keys) == 1 or (not keys and not self._format.needs_arguments)
            if not (is_call and has_keys) or call.keys() - {"name", "type", "id", *keys}:
                return None
            dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            (name + dumped).encode()  # half of a surrogate pair cannot be encoded
        except (ValueError, RecursionError):
            return None
        return ToolCallDelta(self._num_calls, _new_call_id(), name, dumped)

    def _name(self, text: str) -> str:
        """Return the name that JSON describes; "" if it is not a tool's or cannot be passed on."""
        try:
            name = str(json.loads(text))
            name.encode()  # half of a surrogate pair cannot be encoded
        except ValueError:
            return ""
        return name if self._is_known(name) else ""

    def _is_known(self, name: str) -> bool:
        """Return True for the name of a tool, or for any name if the parser was not given the tools' names."""
        return bool(name) if self._names is None else name in self._names


class _ObjectScan:
    """A search for the end of a JSON object in a text that grows. It reads each character once.

    It follows only strings and brackets, and leaves it to json.loads to check the object. But it notices a character
    that cannot be JSON at once, so that an object that never ends does not swallow the rest of an answer.
    """

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.inner_end: int | None = None  # the end of the first object or list inside the object
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
            if self._depth == 1 and char in "}]" and self.inner_end is None:
                self.inner_end = self.end


class _ValueScan:
    """A search for the end of a value between tags in a text that grows. It reads each character a few times at most.

    A tag ends the value only if what follows is a tag of the call, too, so that a value can contain tags: a closing tag
    before another tag or at the end of the answer, or the tag of another parameter of the tool, before which the model
    has left out a closing tag. In JSON, tags inside strings do not count.
    """

    def __init__(self, names: Collection[str], is_json: bool) -> None:
        """`names`: the tool's parameters; empty if they are not known."""
        self._names, self._is_json = names, is_json
        self._position = 0  # the value does not end before
        self._string_end = 0  # of the string that begins at `_position`; 0 outside strings
        self._no_string_before = 0  # quotes up to here do not begin a string

    def find(self, text: str, is_last: bool) -> int | None:
        """Return where the value ends; None if it goes on, or if that takes more text. is_last: there is none."""
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
        """Go on after the string. Returns False if that takes more text."""
        rest = _STRING.match(text, self._string_end or self._position + 1)
        assert rest is not None, "the pattern matches an empty text"
        self._string_end = rest.end()
        end = text[self._string_end : self._string_end + 2]
        if end in ("", "\\") and not is_last:
            return False
        if end.startswith('"'):
            self._position = self._string_end + 1
        else:  # strings in JSON have one line
            self._no_string_before = self._string_end
            self._position += 1
        self._string_end = 0
        return True

    def _is_end(self, text: str, tag: re.Match[str], is_last: bool) -> bool | None:
        """Return True if the value ends at this tag; None if that takes more text."""
        if tag[0] == "<parameter=":
            head = _PARAMETER.match(text, tag.start(), tag.start() + MAX_HEAD_CHARS)
            if head is None:
                may_go_on = len(text) - tag.start() < MAX_HEAD_CHARS and not _HEAD_END.search(text, tag.start())
                return None if may_go_on and not is_last else False
            return head[1] in self._names if self._names else _starts_line(text, tag.start())
        found = _NEXT.search(text, tag.end())
        if found is None:
            return True if is_last else None
        following = text[found.start() : found.start() + len(max(_AFTER[tag[0]], key=len))]
        if following.startswith(_AFTER[tag[0]]):
            return True
        if found.start() + len(following) == len(text) and any(t.startswith(following) for t in _AFTER[tag[0]]):
            return True if is_last else None
        return False


def _starts_line(text: str, position: int) -> bool:
    """Return True if only spaces precede a position in its line."""
    start = max(0, position - MAX_INDENT_CHARS)
    _, line_end, indent = text[start:position].rpartition("\n")
    return (bool(line_end) or not start) and not indent.strip(_SPACE)


class TaggedCallParser:
    """Parses one answer whose calls are of the format QWEN_TAGS, as ToolCallParser does.

    The arguments of a call come one by one, each as a whole. Models leave tags out: the closing tags of a parameter, a
    function or a call, and <tool_call> before the function of a known tool.
    """

    def __init__(self, schemas: Schemas, *, is_alternative: bool = False) -> None:
        """is_alternative: an answer that does not begin with a call has none."""
        self._schemas, self._is_alternative = schemas, is_alternative
        names = () if is_alternative else filter(can_be_in_tag, schemas)
        self._openings = (QWEN_TAGS.opening, *(f"<function={name}>" for name in names))
        self._longest = max(map(len, self._openings))
        self._opening = re.compile("|".join(map(re.escape, self._openings)))
        self._text = ""
        self._advance = self._find_opening
        self._is_last = self._is_cut = False
        self._name = self._parameter = ""
        self._num_calls = self._num_parameters = 0
        self._scan = _ValueScan((), False)
        self._follows_call = False
        self._deltas: list[CallPart] = []

    def feed(self, text: str) -> list[CallPart]:
        for start in range(0, len(text), MAX_HEAD_CHARS):  # each step copies what is left of the text
            self._text += text[start : start + MAX_HEAD_CHARS]
            while self._advance():
                pass
        deltas, self._deltas = _joined(self._deltas), []
        return deltas

    def finish(self, is_cut: bool = False) -> list[CallPart]:
        """Return the rest. A call without an end is complete, unless the answer was cut off: then it stays as it is."""
        self._is_last, self._is_cut = True, is_cut
        while self._advance():
            pass
        is_content = self._text and self._advance in (self._find_function, self._find_opening)
        if is_content and (not self._follows_call or self._text.strip(_SPACE)):
            self._deltas.append(self._text)
        deltas, self._deltas = _joined(self._deltas), []
        return deltas

    def _find_opening(self) -> bool:
        found = self._opening.search(self._text)
        if found and self._is_alternative and not self._num_calls and self._text[: found.start()].strip(_SPACE):
            found = None
        end = found.start() if found else self._text.rfind("<", max(0, len(self._text) - self._longest))
        if not found and (end < 0 or not any(opening.startswith(self._text[end:]) for opening in self._openings)):
            end = len(self._text)
        end = len(self._text[:end].rstrip(_SPACE))
        if end:
            self._deltas.append(self._text[:end])
            self._follows_call = False
            if self._is_alternative and not self._num_calls:
                self._advance = self._pass_content
        self._text = self._text[end:]
        if found:
            self._advance = self._find_function
        return bool(found)

    def _pass_content(self) -> bool:
        self._deltas += [self._text] if self._text else []
        self._text = ""
        return False

    def _find_function(self) -> bool:
        """Begin the call, or find that the opening is content."""
        text = self._text.lstrip(_SPACE)
        rest = text.removeprefix(QWEN_TAGS.opening)
        found = _FUNCTION.match(rest, 0, MAX_HEAD_CHARS)
        if found:
            self._name = found[1]
            self._deltas.append(ToolCallDelta(self._num_calls, _new_call_id(), self._name, "{"))
            self._text, self._advance, self._num_parameters = rest[found.end() :], self._find_parameter, 0
            return True
        begun = rest.lstrip(_SPACE)
        is_begun = begun.startswith("<function=") and not _HEAD_END.search(begun)
        if (is_begun or "<function=".startswith(begun)) and len(rest) < MAX_HEAD_CHARS:
            return False
        opening_end = len(self._text) - len(rest)
        self._deltas.append(self._text[:opening_end])
        self._text, self._advance, self._follows_call = rest, self._find_opening, False
        return True

    def _find_parameter(self) -> bool:
        """Begin a parameter, or return the end of the arguments."""
        text = self._text.lstrip(_SPACE)
        found = _PARAMETER.match(text, 0, MAX_HEAD_CHARS)
        if found:
            self._parameter = found[1]
            self._scan = _ValueScan(self._properties().keys(), not takes_text(self._properties().get(found[1])))
            self._text, self._advance = text[found.end() :], self._find_value
            return True
        if text.startswith("</parameter>"):  # once too often
            self._text = text.removeprefix("</parameter>")
            return True
        is_begun = text.startswith("<parameter=") and len(text) < MAX_HEAD_CHARS and not _HEAD_END.search(text)
        if is_begun or any(tag.startswith(text) for tag in _IN_FUNCTION):
            if not self._is_last or self._is_cut:
                return False
            text = ""
        self._deltas.append(ToolCallDelta(self._num_calls, "", "", "}"))
        self._num_calls += 1
        self._follows_call = True
        self._text, self._advance = text.removeprefix("</function>"), self._find_closing
        return True

    def _find_value(self) -> bool:
        """Return a parameter and its value."""
        end = self._scan.find(self._text, self._is_last)
        if end is None and self._is_last and not self._is_cut:
            loose = _CLOSINGS.search(self._text)
            end = loose.start() if loose else len(self._text)
        if end is None:
            return False
        value = _LINE_BEFORE_TAG.sub("", _LINE_AFTER_TAG.sub("", self._text[:end]))
        separator = ", " if self._num_parameters else ""
        name = json.dumps(self._parameter, ensure_ascii=False)
        piece = f"{separator}{name}: {self._json_value(self._parameter, value)}"
        self._deltas.append(ToolCallDelta(self._num_calls, "", "", piece))
        self._num_parameters += 1
        self._text, self._advance = self._text[end:].removeprefix("</parameter>"), self._find_parameter
        return True

    def _find_closing(self) -> bool:
        """Find what follows a function: the end of the call, or another function in the same call."""
        rest = self._text.lstrip(_SPACE)
        if rest.startswith("<function=") and _FUNCTION.match(rest, 0, MAX_HEAD_CHARS):
            self._text, self._advance = rest, self._find_function
            return True
        is_begun = rest.startswith("<function=") and len(rest) < MAX_HEAD_CHARS and not _HEAD_END.search(rest)
        is_open = is_begun or any(tag.startswith(rest) and rest != tag for tag in (QWEN_TAGS.closing, "<function="))
        if is_open and not self._is_last:
            return False
        if is_open and not is_begun:  # what there is of a closing tag
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
        """Return a value as JSON: as a string, unless the schema allows none, or it does not fit."""
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


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
