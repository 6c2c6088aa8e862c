"""CallFormat: the way a model writes its tool calls, and the grammar that holds it to that form.

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

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanovllm.sampling_params import TaggedJson, TaggedValue


class CallFormat(NamedTuple):
    """The way in which a model writes its calls."""

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
