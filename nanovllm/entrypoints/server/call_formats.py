"""The formats in which models write tool calls, and the grammar of each format.

Every text that the grammar admits is parsed to the calls in the text (call_parser.py, test_call_grammars.py).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from nanovllm.errors import RequestError
from nanovllm.sampling_params import TaggedJson, TaggedValue
from nanovllm.text.grammar_writer import text_without
from nanovllm.text.harmony import HARMONY_MARK

# Closing tag of a format with tags -> the tags, one of which follows a tag that closes something
AFTER = {
    "</parameter>": ("<parameter=", "</parameter>", "</function>", "</tool_call>", "<tool_call>", "<function="),
    "</function>": ("</tool_call>", "<tool_call>", "<function="),
    "</tool_call>": ("<tool_call>",),
}
_GOES_ON = r"[ \t\r\n]*[^ \t\r\n<][^<]*"  # after a closing tag that closes nothing
_NOT_IN_CHOICES = re.compile(rf"<parameter=|(?:{'|'.join(AFTER)})[ \t\r\n]*<")


class CallFormat(NamedTuple):
    """The way in which a model writes its tool calls.

    Five formats are known. Qwen (and other models in Hermes' format) writes, once or several times:

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

    Gemma 4 writes, once or several times without a separator, keys without quotes and strings between `<|"|>`:

        <|tool_call>call:weather{city:<|"|>Bern<|"|>,days:3}<tool_call|>

    gpt-oss writes a call as a message to a function (harmony.py), and ends the answer:

        <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>
    """

    opening: str  # precedes a call
    closing: str  # follows a call; may be empty
    separator: str  # stands in for the opening of a second call; may be empty
    is_bare: bool  # True if a call at the start of the answer needs no opening
    argument_keys: tuple[str, ...]
    needs_arguments: bool  # without tags, an object that has only a name is an ordinary answer
    style: Literal["json", "tags", "quoted", "harmony"] = "json"  # "tags" if each argument has a separate tag

    @property
    def is_json(self) -> bool:
        """Return True for calls that are JSON objects between two texts."""
        return self.style == "json"

    def constraint(
        self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, is_required: bool, is_single: bool
    ) -> TaggedJson:
        """Return the form of calls to these tools, each a name and the schema of its arguments.

        is_required: the answer must have a call. is_single: the answer must not have several calls. Raises RequestError
        for names that cannot be written in this format.
        """
        names = tuple(name for name, _ in tools)
        if self.style in _UNWRITABLE:
            return self._named(tools, is_required=is_required, is_single=is_single)
        opening, closing = ("", "") if self.is_bare else (f"{self.opening}\n", f"\n{self.closing}")
        if self.style == "tags":
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

    def _named(
        self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, is_required: bool, is_single: bool
    ) -> TaggedJson:
        """Return the form of calls in which the name and the arguments are not parts of one object."""
        if unwritable := [name for name, _ in tools if _UNWRITABLE[self.style].search(name)]:
            raise RequestError(f"tool {unwritable[0]!r}: the model cannot write this name in a call; use another")
        begin = f"{self.opening}call:" if self.style == "quoted" else ""
        return TaggedJson(
            tags=tuple((f"{begin}{name}", schema, self.closing) for name, schema in tools),
            trigger=self.opening,
            is_required=is_required,
            is_single=is_single,
            names=tuple(name for name, _ in tools),
            quote=QUOTE if self.style == "quoted" else "",
        )


QUOTE = '<|"|>'  # Gemma 4's token on either side of a string
_UNWRITABLE = {"quoted": re.compile(r"[\s{}<>]"), "harmony": re.compile(r"[\s<]")}

HERMES = CallFormat("<tool_call>", "</tool_call>", "", False, ("arguments",), False)
LLAMA = CallFormat("<|python_tag|>", "", ";", True, ("parameters", "arguments"), True)
QWEN_TAGS = CallFormat("<tool_call>", "</tool_call>", "", False, (), False, style="tags")
GEMMA = CallFormat("<|tool_call>", "<tool_call|>", "", False, (), False, style="quoted")
HARMONY = CallFormat("", "", "", False, (), False, style="harmony")

_MARKS = (
    (HARMONY, (HARMONY_MARK,)),
    (GEMMA, (GEMMA.opening,)),
    (QWEN_TAGS, ("<function=",)),  # before the next format, whose tags these templates contain, too
    (HERMES, ("<tool_call>", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")),
    (LLAMA, ("<|python_tag|>", '"parameters": dictionary', "LlamaForCausalLM")),
)


def call_format_of(template_and_architecture: str) -> CallFormat | None:
    """Return the format of a model's calls, found in the chat template or, less reliably, by the architecture.

    Return None for an unknown format. The caller should then refuse requests with tools.
    """
    for call_format, marks in _MARKS:
        if any(mark in template_and_architecture for mark in marks):
            return call_format
    return None


def _list(value: Any) -> list[Any]:
    """Return a part of an unchecked schema as a list."""
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
    """Return the texts that an `enum` or a `const` allows, or () if the schema allows other values, too."""
    if not isinstance(schema, dict):
        return ()
    choices = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if not all(isinstance(choice, str) for choice in choices):
        return ()
    return tuple(choice for choice in choices if not _NOT_IN_CHOICES.search(f"{choice}\n<"))


def _parameters(tool: str, schema: Mapping[str, Any]) -> tuple[TaggedValue, ...]:
    """Return the tags of the arguments. For texts, only `enum` and `const` are enforced."""
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

    In such a text a closing tag is followed by more text, and not by another tag.
    """
    names = {name: None for schema in schemas for name in _list_of_names(schema) if can_be_in_tag(name)}
    return text_without([f"<parameter={name}>" for name in names], "[^<]*", dict.fromkeys(AFTER, _GOES_ON))


def _list_of_names(schema: Mapping[str, Any]) -> list[str]:
    properties = schema.get("properties")
    return list(properties) if isinstance(properties, Mapping) else []


def can_be_in_tag(name: str) -> bool:
    """Return True if a function or a parameter of this name can be written in a tag."""
    return bool(name) and not set(name) & set("<>\r\n")
