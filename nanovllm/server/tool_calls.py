"""Tool calls: the form in which a model writes them, the grammar that holds it to that form, and the parsers that find
calls and reasoning in its text while it arrives piece by piece.

Whatever turns out not to be a valid call is returned as content, unchanged and in its place; nothing is lost but the
white space on either side of a call, and what there is of a closing tag at the end. A call in JSON is returned when it
is complete, unless its arguments are asked for in pieces. Then it is a call as soon as its name is known, even if the
arguments turn out not to be valid, and so are calls between tags. The result does not depend on how the text was split,
and the time is linear in its length.
"""

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

from nanovllm.sampling_params import TaggedJson, TaggedValue


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

        is_required: the answer is a call. is_single: it has no more than one.
        """
        opening, closing = ("", "") if self.is_bare else (f"{self.opening}\n", f"\n{self.closing}")
        if not self.is_json:
            return TaggedJson(
                tags=tuple(
                    (f"{opening}<function={name}>\n", _parameters(schema), f"</function>{closing}")
                    for name, schema in tools
                ),
                trigger=self.opening,
                separator="\n",
                is_required=is_required,
                is_single=is_single,
            )
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
    return tuple(choices) if all(isinstance(choice, str) for choice in choices) else ()


def _parameters(schema: Mapping[str, Any]) -> tuple[TaggedValue, ...]:
    """The tags of the arguments. Of texts only an `enum` and a `const` are enforced."""
    properties, required = schema.get("properties"), _list(schema.get("required"))
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return tuple(
        TaggedValue(
            f"<parameter={name}>\n",
            None if takes_text(each) else {**definitions, **each},
            "\n</parameter>\n",
            name in required,
            _choices(each) if takes_text(each) else (),
        )
        for name, each in (properties.items() if isinstance(properties, Mapping) else ())
    )


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

MAX_HEAD_CHARS = 1000  # limit of a call before its arguments, if they are sent in pieces
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(\w+)"\s*:\s*(?=\{)')
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_IN_FUNCTION = ("<parameter=", "</function>")
_SPACE = " \t\r\n"  # JSON's white space
_NEXT = re.compile(f"[^{_SPACE}]")
_OUTSIDE_STRINGS = frozenset(_SPACE + '{}[]:,"0123456789+-.eEtrufalsn')  # with the letters of true, false and null


def make_parser(call_format: CallFormat, schemas: Schemas, *, in_pieces: bool) -> "ToolCallParser | TaggedCallParser":
    """Make the parser of one answer. in_pieces: return the arguments while they arrive."""
    return ToolCallParser(call_format, in_pieces) if call_format.is_json else TaggedCallParser(schemas)


class _State(Enum):
    CONTENT = auto()  # looking for an opening
    OPENED = auto()  # an object should begin
    OBJECT = auto()  # inside the object
    CLOSING = auto()  # the closing should follow
    SEPARATOR = auto()  # after a call, a separator may follow


class ToolCallParser:
    """Parses one answer: `feed` it the text, then call `finish`. Both return what has become certain."""

    def __init__(self, call_format: CallFormat, in_pieces: bool = False) -> None:
        self._format, self._in_pieces = call_format, in_pieces
        self._has_begun = False  # with pieces: the name of the call has been returned
        self._state = _State.OPENED if call_format.is_bare else _State.CONTENT
        self._text = ""
        self._start = 0  # the first character not returned yet; between calls of `feed` always 0
        self._opening_end = 0  # outside CONTENT: where the opening ends that may turn out to be content
        self._scan = _ObjectScan(0)
        self._deltas: list[CallPart] = []  # to be returned by the next `_take`
        self._num_calls = 0
        self._follows_call = False  # True if the last thing returned was a call

    def feed(self, text: str) -> list[CallPart]:
        """Return what is certain now that the answer goes on with `text`."""
        self._text += text
        while self._advance():
            pass
        return self._take()

    def finish(self) -> list[CallPart]:
        """Return the rest, after the last text. A call that lacks nothing but its closing is one; a call that is not
        complete is content, unless it has begun.
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
            if head is None or head[2] not in self._format.argument_keys or (name := _name(head[1])) is None:
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
        if follows != closing or not self._end_call(position + len(closing)):
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
            is_call = isinstance(name, str) and name and isinstance(arguments, dict)
            has_keys = len(keys) == 1 or (not keys and not self._format.needs_arguments)
            if not (is_call and has_keys) or call.keys() - {"name", "type", "id", *keys}:
                return None
            dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            (name + dumped).encode()  # half of a surrogate pair cannot be encoded
        except (ValueError, RecursionError):
            return None
        return ToolCallDelta(self._num_calls, _new_call_id(), name, dumped)


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


class TaggedCallParser:
    """Parses one answer whose calls are of the format QWEN_TAGS, as ToolCallParser does."""

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._text = ""
        self._advance = self._find_opening
        self._name = ""
        self._num_calls = self._num_parameters = 0
        self._num_searched = 0  # characters without the end of the parameter
        self._follows_call = False
        self._deltas: list[CallPart] = []

    def feed(self, text: str) -> list[CallPart]:
        for start in range(0, len(text), MAX_HEAD_CHARS):  # each step copies what is left of the text
            self._text += text[start : start + MAX_HEAD_CHARS]
            while self._advance():
                pass
        deltas, self._deltas = _joined(self._deltas), []
        return deltas

    def finish(self) -> list[CallPart]:
        """Return the rest. A call without an end stays as it is."""
        is_content = self._text and self._advance in (self._find_function, self._find_opening)
        if is_content and (not self._follows_call or self._text.strip(_SPACE)):
            self._deltas.append(self._text)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _find_opening(self) -> bool:
        start = self._text.find(QWEN_TAGS.opening)
        end = start if start >= 0 else len(self._text) - _num_begun(self._text, QWEN_TAGS.opening)
        end = len(self._text[:end].rstrip(_SPACE))
        if end:
            self._deltas.append(self._text[:end])
            self._follows_call = False
        self._text = self._text[end:]
        if start >= 0:
            self._advance = self._find_function
        return start >= 0

    def _find_function(self) -> bool:
        """Begin the call, or find that the opening is content."""
        opening_end = self._text.index(QWEN_TAGS.opening) + len(QWEN_TAGS.opening)
        found = _FUNCTION.match(self._text, opening_end, opening_end + MAX_HEAD_CHARS)
        if found:
            self._name = found[1]
            self._deltas.append(ToolCallDelta(self._num_calls, _new_call_id(), self._name, "{"))
            self._text, self._advance, self._num_parameters = self._text[found.end() :], self._find_parameter, 0
            return True
        rest = self._text[opening_end:].lstrip(_SPACE)
        is_begun = rest.startswith("<function=") and ">" not in rest and "\n" not in rest
        if (is_begun or "<function=".startswith(rest)) and len(self._text) - opening_end < MAX_HEAD_CHARS:
            return False
        self._deltas.append(self._text[:opening_end])
        self._text, self._advance, self._follows_call = self._text[opening_end:], self._find_opening, False
        return True

    def _find_parameter(self) -> bool:
        """Return a whole parameter, or the end of the arguments."""
        end = self._text.find("</parameter>", max(0, self._num_searched - len("</parameter>")))
        found = _PARAMETER.match(self._text, 0, end) if end >= 0 else None
        if found:
            value = self._text[found.end() : end].removesuffix("\n")
            separator = ", " if self._num_parameters else ""
            name = json.dumps(found[1], ensure_ascii=False)
            piece = f"{separator}{name}: {self._json_value(found[1], value)}"
            self._deltas.append(ToolCallDelta(self._num_calls, "", "", piece))
            self._num_parameters += 1
            self._text, self._num_searched = self._text[end + len("</parameter>") :], 0
            return True
        begun = _NEXT.search(self._text)
        next_tag = self._text[begun.start() : begun.start() + len("<parameter=")] if begun else ""
        if end < 0 and next_tag != "</function>" and any(tag.startswith(next_tag) for tag in _IN_FUNCTION):
            self._num_searched = len(self._text)
            return False
        rest = self._text.lstrip(_SPACE)
        self._deltas.append(ToolCallDelta(self._num_calls, "", "", "}"))
        self._num_calls += 1
        self._num_searched, self._follows_call = 0, True
        self._text, self._advance = rest.removeprefix("</function>"), self._find_closing
        return True

    def _find_closing(self) -> bool:
        rest = self._text.lstrip(_SPACE)
        if QWEN_TAGS.closing.startswith(rest) and rest != QWEN_TAGS.closing:
            return False
        self._text, self._advance = rest.removeprefix(QWEN_TAGS.closing), self._find_opening
        return True

    def _json_value(self, parameter: str, text: str) -> str:
        """Return a value as JSON: as a string, unless the schema allows none, or it does not fit."""
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        if not takes_text(schema):
            with suppress(ValueError, RecursionError):
                return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        return json.dumps(text, ensure_ascii=False)


class ReasoningSplitter:
    """Splits one answer into the reasoning between <think> and </think>, which comes first, and the rest.

    White space on either side of the tags is dropped. Reasoning without an end is all reasoning.
    """

    def __init__(self, has_begun: bool) -> None:
        """has_begun: the prompt has opened the reasoning."""
        self._tag: str | None = "</think>" if has_begun else "<think>"  # looked for; None in the answer
        self._text = ""
        self._is_start = True  # nothing but white space so far

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Return more of the reasoning, and more of the answer."""
        if self._tag is None and not self._is_start:
            return "", text
        self._text += text
        reasoning = ""
        if self._tag == "<think>":
            rest = self._text.lstrip(_SPACE)
            if rest.startswith(self._tag):
                self._tag, self._text = "</think>", rest.removeprefix(self._tag)
            elif self._tag.startswith(rest) and not is_last:
                return "", ""
            else:
                self._tag, self._is_start = None, False
        if self._tag == "</think>":
            reasoning = self._take_reasoning(is_last)
            if self._tag:
                return reasoning, ""
        answer = self._text.lstrip(_SPACE) if self._is_start else self._text
        self._is_start = self._is_start and not answer
        self._text = ""
        return reasoning, answer

    def _take_reasoning(self, is_last: bool) -> str:
        text = self._text.lstrip(_SPACE) if self._is_start else self._text
        found, tag, after = text.partition("</think>")
        if tag:
            self._tag, self._text, self._is_start = None, after, True
            return found.rstrip(_SPACE)
        end = len(text) if is_last else len(text[: len(text) - _num_begun(text, "</think>")].rstrip(_SPACE))
        self._is_start = self._is_start and not end
        self._text = text[end:]
        return text[:end]


def _joined(deltas: list[CallPart]) -> list[CallPart]:
    """Join adjacent contents. Hot."""
    if len(deltas) < 2:
        return deltas
    joined: list[CallPart] = []
    for is_content, adjacent in itertools.groupby(deltas, key=lambda delta: isinstance(delta, str)):
        group = list(adjacent)
        joined += ["".join(map(str, group))] if is_content else group
    return joined


def _name(text: str) -> str | None:
    """Return the name that JSON describes; None if it is empty or cannot be passed on."""
    try:
        name = str(json.loads(text))
        name.encode()  # half of a surrogate pair cannot be encoded
    except ValueError:
        return None
    return name or None


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _num_begun(text: str, tag: str) -> int:
    """The number of characters at the end of `text` that could be the beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(tag[:length])), 0)
