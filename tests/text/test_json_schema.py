"""Parts of schemas that a grammar cannot express are named in strict schemas, and left out of lenient ones."""

import json
import logging
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from nanovllm.errors import RequestError
from nanovllm.models.retrieval_model import END_TOKEN_ID
from nanovllm.sampling_params import StructuredOutputs, TaggedJson
from nanovllm.text.json_schema import find_faults, remove_faults, remove_neutral_keywords
from nanovllm.text.structured import GrammarCompiler, TokenMatcher

TEXT = {"type": "string"}
# Schema -> the fault, and a value that the schema allows
FAULTY: list[tuple[dict[str, Any], str, Any]] = [
    ({"propertyNames": {"pattern": "^a"}}, "'propertyNames' at # is not supported", {"a": 1}),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' at #/properties/a", {"a": [1, 2]}),
    ({"properties": {"a": {"not": {"type": "string"}}}}, "'not' at #/properties/a", {"a": 1}),
    ({"properties": {"a/b": {"type": "string", "format": "int64"}}}, "'format' at #/properties/a~1b is 'int64'", {}),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "'if' at #", {}),
    ({"if": {}, "else": {"required": ["b"]}}, "'else' at #", {}),
    ({"properties": {"a": {"$ref": "https://example.com/a"}}}, "'$ref' at #/properties/a is 'https", {"a": 1}),
    ({"properties": {"a": {"$ref": "#/properties/b"}}}, "which does not exist", {"a": 1}),
    ({"properties": {"a": {"$ref": "#anchor"}}}, "which does not exist", {"a": 1}),
    ({"$defs": {"d": {"contains": TEXT}}, "properties": {"a": {"$ref": "#/$defs/d"}}}, "'contains' at #/$defs/d", {}),
    ({"anyOf": [{"required": ["a"]}, {"dependentRequired": {"a": ["b"]}}]}, "at #/anyOf/1 is not", {"a": 1}),
    ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "'pattern' at #/properties/a", {"a": "b"}),
    ({"patternProperties": {"(?=a)": {}}, "additionalProperties": False}, "'patternProperties' at #", {"a": 1}),
    ({"patternProperties": {"^a": TEXT, "b$": {}}, "additionalProperties": False}, "not disjoint", {"ab": "x"}),
    ({"properties": {"a": {"oneOf": [TEXT, {"type": "string", "minLength": 1}]}}}, "oneOf", {"a": ""}),
    ({"properties": {"a": TEXT}, "minProperties": 1}, "'minProperties' at #", {"a": ""}),
    ({"properties": {"a": {"type": "file"}}}, "'type' at #/properties/a is 'file'", {"a": 1}),
    # llguidance compiles these, and an answer would go on for ever
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "'$ref' at #/properties/a leads back", {"a": {"a": 1}}),
    (
        {
            "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
            "properties": {"a": {"$ref": "#/$defs/n"}},
        },
        "leads back to itself",
        {},
    ),
    ({"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/a"}, "minItems": 1}}}, "leads back", {}),
]


@pytest.fixture(scope="module")
def compiler(demo_tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer, 258, (END_TOKEN_ID,))


def admits(compiler: GrammarCompiler, outputs: StructuredOutputs, text: str) -> bool:
    matcher = TokenMatcher(compiler.compile(outputs), False)
    return all(map(matcher.accept, text.encode())) and matcher.accept(END_TOKEN_ID)


def call_of(schema: dict[str, Any]) -> StructuredOutputs:
    tagged = TaggedJson(tags=(("<call>", schema, "</call>"),), is_required=True, names=("f",))
    return StructuredOutputs(tagged_json=tagged)


def test_part_that_no_grammar_expresses_is_named_or_left_out(
    compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: one such part in one tool, and an answer that must be a call was refused. A schema that leads
    back to itself was accepted, and the answer never ended.
    """
    for part, fault, value in FAULTY:
        schema = {"type": "object"} | part
        for outputs in (StructuredOutputs(json=schema), call_of(schema)):
            with pytest.raises(RequestError, match=fault.replace("$", r"\$").replace("(", r"\(")):
                compiler.compile(outputs)
        text = f"<call>{json.dumps(value)}</call>"
        relaxed = call_of(schema | {"x-guidance": {"lenient": True}})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert admits(compiler, relaxed, text), part
            assert admits(compiler, relaxed, text)
        assert len(caplog.records) == 1 and "schema of f: " in caplog.text, "logged once"


def test_what_is_in_order_stays_when_a_part_is_left_out(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "b": TEXT},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"lenient": True},
    }
    for text, is_right in (('{"a": [1, 1], "b": ""}', True), ('{"a": [3], "b": ""}', False), ('{"a": [1]}', False)):
        assert admits(compiler, call_of(schema), f"<call>{text}</call>") == is_right


def test_keywords_that_change_nothing_are_no_faults(compiler: GrammarCompiler) -> None:
    for part in (
        {"uniqueItems": False},
        {"not": False},
        {"if": {"type": "string"}},
        {"then": {}},
        {"minContains": 2},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"propertyNames": {}},
        {"description": "not", "title": "uniqueItems", "default": {"not": 1}, "examples": [{"if": 1, "then": 2}]},
        {"properties": {"not": TEXT, "if": TEXT, "then": TEXT, "format": {"type": "integer", "format": "int64"}}},
        {"enum": [{"not": 1}]},
        {"const": {"uniqueItems": True}},
    ):
        compiler.compile(StructuredOutputs(json=part))


def test_references_that_can_end_are_no_faults() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "value": TEXT}, "required": ["value"]}
    lists = {"type": "array", "items": {"$ref": "#"}}
    choice = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]}
    linked = {
        "$defs": {"n": {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}},
        "$ref": "#/$defs/n",
    }
    elsewhere = {"$ref": "#/x/y", "x": {"y": {"type": "string"}}}
    for schema in (tree, lists, choice, linked, elsewhere):
        assert not find_faults(schema)


def test_long_chains_of_references_are_read_once() -> None:
    names = [f"d{i}" for i in range(3000)]
    random.Random(1).shuffle(names)
    definitions: dict[str, Any] = {name: {"$ref": f"#/$defs/{then}"} for name, then in pairwise(names)}
    schema = {"$defs": definitions | {names[-1]: TEXT}, "$ref": f"#/$defs/{names[0]}"}
    assert not find_faults(schema)
    schema["$defs"][names[-1]] = {"$ref": "#"}  # type: ignore[index]
    assert len(find_faults(schema)) == len(names) + 1
    assert remove_faults(schema, lambda pattern: None) and not find_faults(schema)


def test_schemas_of_any_form_are_read() -> None:
    rng = random.Random(3)
    keywords = ["type", "properties", "items", "$ref", "anyOf", "required", "not", "minItems", "$defs", "if", "enum"]

    def anything(depth: int) -> Any:
        kind = rng.randrange(8) if depth else rng.randrange(5)
        if kind < 5:
            return rng.choice([None, True, False, 3, -1.5, "object", "#", "#/properties/a", "array"])
        if kind == 5:
            return [anything(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice([*keywords, "a"]): anything(depth - 1) for _ in range(rng.randrange(4))}

    for _ in range(2000):
        schema = json.loads(json.dumps(anything(5)))
        remove_neutral_keywords(schema)
        remove_faults(schema, lambda pattern: None)
        assert not find_faults(schema)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_numbers_cannot_go_on_for_ever(compiler: GrammarCompiler) -> None:
    """Regression: an answer could be digits up to its limit of tokens."""
    for schema, begin in (
        ({"type": "integer"}, ""),
        ({"type": "number"}, "0."),
        ({}, '{"a": ["7777", -1.5e3, '),
        ({"type": "number", "minimum": 0, "maximum": 10}, "1."),
    ):
        matcher = TokenMatcher(compiler.compile(StructuredOutputs(json=schema)), False)
        assert all(map(matcher.accept, begin.encode()))
        num_digits = 0
        while matcher.accept(ord("1")):
            num_digits += 1
        assert num_digits == 128, schema
        rows = TokenMatcher(compiler.compile(StructuredOutputs(json=schema)), False)
        assert all(map(rows.accept, begin.encode()))
        *_, last = rows.masks_for([ord("1")] * 128)
        assert np.array_equal(last, matcher.mask()), "the same for draft tokens"


def test_numbers_do_not_overflow(compiler: GrammarCompiler) -> None:
    """Regression: 1e999 is JSON, but Python reads it as infinity, so a call with it was no call."""
    for text, is_right in (("1e99", True), ("-1.5E-42", True), ("1e999", False), ("1e+100", False)):
        assert admits(compiler, StructuredOutputs(json={"type": "number"}), text) == is_right


def test_digits_in_texts_are_not_limited(compiler: GrammarCompiler) -> None:
    digits = "1" * 300
    text = json.dumps({"a": f'"{digits}', digits: "\\" + digits})
    assert admits(compiler, StructuredOutputs(json_object=True), text)
    tagged = TaggedJson(tags=(("<call>", {"type": "integer"}, "</call>"),), trigger="<call>")
    outputs = StructuredOutputs(tagged_json=tagged)
    assert admits(compiler, outputs, f'{digits} "{digits}<call>5</call>{digits}')
    assert not admits(compiler, outputs, f"<call>{digits}</call>")
    assert admits(compiler, StructuredOutputs(regex="[0-9]+"), digits)
    assert admits(compiler, StructuredOutputs(json={"type": "integer", "minimum": 10**17}), "1" * 18)
