"""Writes what an answer must match as a Lark grammar, which is the language that llguidance compiles.

Requests come from people who may mean harm. What they ask for is checked here as far as llguidance does not: the size
of the text, and the depth to which references in a schema can nest.
"""

import json
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputs

MAX_CHARS = 200_000  # of a schema, a regex, or all choices together
# llguidance follows references by recursion. Each reference is followed at most once on the way down, through no more
# levels than the schema has, so the product of the two bounds the depth. See STACK_BYTES in grammar.py.
MAX_REFERENCE_DEPTH = 6000
MAX_WHITESPACE = 64  # between two parts of JSON; without a limit, some models emit whitespace and never stop

# With forcing, a token that only one text can follow is replaced by the tokenizer's own split of that text. llguidance
# would write out the whole text first: gigabytes for ((a{1000}){1000}){1000}. Without, masks hold every allowed token.
_HEADER = '%llguidance {"no_forcing": true}\nstart: '
_WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"


def kind_of(outputs: StructuredOutputs) -> str:
    """The name of the field that is given."""
    return next(
        name for name in ("json", "json_object", "regex", "choice") if getattr(outputs, name) not in (None, False)
    )


def grammar_text(outputs: StructuredOutputs) -> str:
    """The Lark grammar. Raises RequestError for what can be refused without compiling it."""
    if outputs.json_object:
        return _schema_grammar({"type": "object"})
    if outputs.json is not None:
        return _schema_grammar(_parse_schema(outputs.json))
    if outputs.regex is not None:
        _check_size("regex", len(outputs.regex))
        return _regex_grammar(outputs.regex)
    assert outputs.choice is not None, "StructuredOutputs has one of its fields"
    _check_size("choice", sum(map(len, outputs.choice)))
    return f"{_HEADER}CHOICE\nCHOICE: {' | '.join(map(json.dumps, outputs.choice))}"


def _check_size(kind: str, num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise RequestError(
            f"structured_outputs.{kind} has {num_chars} characters, at most {MAX_CHARS}; make it smaller"
        )


def _regex_grammar(regex: str) -> str:
    from llguidance import regex_to_lark

    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # regex_to_lark would drop it
        raise RequestError("structured_outputs.regex cannot be used: incomplete escape at its end; correct it")
    try:
        return f"{_HEADER}/{regex_to_lark(regex, 'd')}/"  # \d is 0 to 9 only, whatever the reader's Unicode
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs.regex is not valid Unicode text; remove {error.object[error.start]!r}"
        ) from error


def _parse_schema(schema: Any) -> Any:
    """The schema as plain JSON values, whether it was given as text or as a dict."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(dict(schema))
        parsed = json.loads(text) if len(text) <= MAX_CHARS else None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not a JSON schema: {error}; correct it") from error
    _check_size("json", len(text))
    height, num_references = _measure(parsed)
    if (1 + num_references) * height > MAX_REFERENCE_DEPTH:
        raise RequestError(
            f"structured_outputs.json has {num_references} references in {height} levels, which can nest "
            f"{(1 + num_references) * height} deep, at most {MAX_REFERENCE_DEPTH}; make it smaller"
        )
    return parsed


def _measure(schema: Any) -> tuple[int, int]:
    """The number of levels of a schema, and its number of references."""
    height = num_references = 0
    pending = [(schema, 1)]
    while pending:
        value, level = pending.pop()
        height = max(height, level)
        if isinstance(value, dict):
            num_references += "$ref" in value
            value = value.values()
        elif not isinstance(value, list):
            continue
        pending.extend((child, level + 1) for child in value)
    return height, num_references


def _schema_grammar(schema: Any) -> str:
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if isinstance(options, dict):
            schema = schema | {"x-guidance": {"whitespace_pattern": _WHITESPACE} | options}
    return f"{_HEADER}%json {json.dumps(schema)}"
