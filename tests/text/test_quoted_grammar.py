"""The grammar of Gemma 4's tool calls, with a tokenizer in which the tags are special tokens, as in Gemma's."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_kinds import add_tokens
from transformers import AutoTokenizer

from nanovllm.entrypoints.server.call_formats import GEMMA
from nanovllm.entrypoints.server.call_parser import CallParser, ToolCallDelta
from nanovllm.errors import RequestError
from nanovllm.models.retrieval_model import END_TOKEN_ID, save_tokenizer
from nanovllm.sampling_params import ReasoningTags, StructuredOutputs
from nanovllm.text.structured import GrammarCompiler, TokenMatcher

TOKENS = {"<|tool_call>": 0xF8, "<tool_call|>": 0xF9, '<|"|>': 0xFA, "<|channel>": 0xFB, "<channel|>": 0xFC}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    add_tokens(directory, TOKENS, special=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, additional_special_tokens=[*TOKENS])
    return GrammarCompiler(tokenizer, 258, (END_TOKEN_ID,))


def admits(compiler: GrammarCompiler, outputs: StructuredOutputs, text: str, tags: ReasoningTags | None = None) -> bool:
    """Return True if the text, with strings between ' in place of the token, can be an answer."""
    matcher = TokenMatcher(compiler.compile(outputs, tags), False)
    token_ids = list(text.replace("'", chr(0)).encode())
    for token, token_id in TOKENS.items():
        position = bytes(token_ids).find(token.encode())
        while position >= 0:
            token_ids[position : position + len(token)] = [token_id]
            position = bytes(token_ids).find(token.encode())
    token_ids = [TOKENS['<|"|>'] if token_id == 0 else token_id for token_id in token_ids]
    return all(matcher.accept(token_id) for token_id in [*token_ids, END_TOKEN_ID])


def calls_of(schema: Any, **options: Any) -> StructuredOutputs:
    options = {"is_required": True, "is_single": True} | options
    return StructuredOutputs(tagged_json=GEMMA.constraint([("f", schema)], **options))


def with_value(schema: Any, *, required: bool = True) -> StructuredOutputs:
    return calls_of({"type": "object", "properties": {"v": schema}, "required": ["v"] * required})


def test_values_of_a_schema_are_admitted_in_the_notation(compiler: GrammarCompiler) -> None:
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["v"],
    }
    pair = {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 1}
    for schema, good, bad in (
        ({"type": "string"}, ["'Bern'", "''", "'{a:1},\n\"é'"], ["1", "Bern", "null"]),
        ({"type": "integer", "minimum": 3}, ["3", "12"], ["2", "1.5", "'3'"]),
        ({"type": "number"}, ["-1.5e3", "7"], ["true"]),
        ({"type": ["boolean", "null"]}, ["true", "null"], ["None", "1"]),
        ({"enum": ["a", 3, None, {"k": [True]}]}, ["'a'", "3", "null", "{k:[true]}"], ["'b'", "4"]),
        ({"const": "x"}, ["'x'"], ["'xx'"]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
            ["[1]", "[1,2,3]"],
            ["[]", "[1,2,3,4]"],
        ),
        ({"type": "array", "items": {"type": "string"}}, ["[]", "['a']", "['a','b','c']"], ["['a',]", "[1]"]),
        ({"type": "array", "maxItems": 1}, ["[]", "[{a:[1]}]"], ["[1,2]"]),
        ({"type": "array", "minItems": 2}, ["[1,'a']", "[1,2,3]"], ["[1]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        (pair, ["[1]", "[1,'a']"], ["[]", "['a']", "[1,'a',2]"]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["1", "'a'"], ["true"]),
        ({"allOf": [{"type": "integer"}]}, ["1"], ["'a'"]),
        ({"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ["{a:1}"]),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ["{}", "{a:1,b-2:2}"],
            ["{a:'x'}", "{'a':1}"],
        ),
        ({}, ["1", "'a'", "[{a:null}]", "{a:{b:[]}}"], ["", "a"]),
    ):
        outputs = with_value(schema)
        for text in good:
            assert admits(compiler, outputs, f"<|tool_call>call:f{{v:{text}}}<tool_call|>"), (schema, text)
        for text in bad:
            assert not admits(compiler, outputs, f"<|tool_call>call:f{{v:{text}}}<tool_call|>"), (schema, text)
    outputs = calls_of(node | {"$defs": {"node": node}})
    for text, expected in (("{v:1}", True), ("{next:{next:{v:3},v:2},v:1}", True), ("{next:{},v:1}", False)):
        assert admits(compiler, outputs, f"<|tool_call>call:f{text}<tool_call|>") == expected, text


def test_properties_are_sorted_and_optional_ones_may_be_left_out(compiler: GrammarCompiler) -> None:
    number = {"type": "integer"}
    schema = {"properties": dict.fromkeys(("b", "A", "c", "d", "has:colon"), number), "required": ["c", "more"]}
    for text, expected in (
        ("{c:1,more:'x'}", True),
        ("{A:1,b:1,c:1,d:1,more:[]}", True),
        ("{b:1,c:1,more:1}", True),
        ("{b:1,A:1,c:1,more:1}", False),
        ("{A:1,b:1}", False),
        ("{c:1}", False),
        ("{,c:1,more:1}", False),
        ("{c:1,c:1,more:1}", False),
    ):
        assert admits(compiler, calls_of(schema), f"<|tool_call>call:f{text}<tool_call|>") == expected, text
    optional = {"properties": dict.fromkeys("ab", number)}
    for text, expected in (("{}", True), ("{a:1}", True), ("{b:1}", True), ("{a:1,b:1}", True), ("{b:1,a:1}", False)):
        assert admits(compiler, calls_of(optional), f"<|tool_call>call:f{text}<tool_call|>") == expected, text


def test_calls_follow_the_options_of_the_constraint(compiler: GrammarCompiler) -> None:
    call = "<|tool_call>call:f{v:1}<tool_call|>"
    tags = ReasoningTags("<|channel>thought", "<channel|>")
    schema = {"properties": {"v": {"type": "integer"}}, "required": ["v"]}
    thought = "<|channel>thought\nHm 1<channel|>"
    for options, text, expected in (
        ({}, call, True),
        ({}, call + call, False),
        ({}, "Text." + call, False),
        ({"is_single": False}, call + call, True),
        ({"is_required": False}, "Text.", True),
        ({"is_required": False}, f"Text.{call}", True),
        ({"is_required": False}, f"{call}Text.", False),
        ({"is_required": False, "is_single": False}, f"Text.{call}{call}Text.", True),
        ({"is_required": False, "is_single": False}, "<|tool_call>call:g{}<tool_call|>", False),
    ):
        for before in ("", thought, "<|channel>thought<channel|>"):
            assert admits(compiler, calls_of(schema, **options), before + text, tags) == expected, (
                options,
                before + text,
            )
    form = {"json": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    outputs = StructuredOutputs(tagged_json=calls_of(schema, is_required=False).tagged_json, **form)
    for text, expected in ((call, True), ('{"a": "b"}', True), ("Text.", False)):
        assert admits(compiler, outputs, f"{thought}\n{text}", tags) == expected, text


def test_what_the_notation_cannot_express_is_refused_or_left_out(
    compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    integer = {"type": "integer"}
    for schema, message in (
        ({"type": "object", "properties": {"a": integer}, "additionalProperties": integer}, "together with properties"),
        ({"allOf": [integer, {"minimum": 3}]}, "allOf"),
        ({"type": "object", "patternProperties": {"a": integer}}, "patternProperties"),
        ({"type": "array", "minItems": 5000}, "5000, at most 1000"),
        ({"enum": ['<|"|>']}, "no value that the model can write"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
    ):
        with pytest.raises(RequestError, match=message):
            compiler.compile(with_value(schema))
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            lenient = {"type": "object", "properties": {"v": schema}, "x-guidance": {"lenient": True}}
            assert admits(compiler, calls_of(lenient), "<|tool_call>call:f{}<tool_call|>")
            assert "answers need not match all of the schema of f" in caplog.text, schema
    with pytest.raises(RequestError, match="requires the property 'a:b'"):
        compiler.compile(calls_of({"properties": {"a:b": integer}, "required": ["a:b"]}))
    with pytest.raises(RequestError, match="cannot write this name"):
        GEMMA.constraint([("a b", {})], is_required=True, is_single=True)


def test_tokenizer_without_the_token_of_strings_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    compiler = GrammarCompiler(AutoTokenizer.from_pretrained(tmp_path), 258, (END_TOKEN_ID,))
    with pytest.raises(RequestError, match="is not a token"):
        compiler.compile(with_value({"type": "string"}))


def test_numbers_end_outside_strings_only(compiler: GrammarCompiler) -> None:
    """Digits of a number are limited, and digits of a string are not, also after a quotation mark in the string."""
    for schema, value, expected in (
        ({"type": "number"}, "9" * 129, False),
        ({"type": "number"}, "9" * 128, True),
        ({"type": "number"}, "1e999", False),
        ({"type": "string"}, "'\"" + "9" * 300 + "'", True),
    ):
        text = f"<|tool_call>call:f{{v:{value}}}<tool_call|>"
        assert admits(compiler, with_value(schema), text) == expected, (schema, json.dumps(value)[:20])


def test_drawn_calls_are_parsed_to_arguments_of_the_schema(compiler: GrammarCompiler) -> None:
    """Calls that the masks admit, drawn at random, are parsed to values that the schema allows, and nothing is left."""
    texts = {token_id: token for token, token_id in TOKENS.items()}
    schema = {
        "properties": {
            "text": {"type": "string"},
            "kind": {"enum": ["a", 1, None]},
            "near": {
                "type": "array",
                "items": {"type": "object", "properties": {"km": {"type": "number"}}},
                "maxItems": 2,
            },
            "any": {},
        },
        "required": ["text", "near"],
    }
    num_ended = 0
    for seed in range(12):
        rng, matcher = random.Random(seed), TokenMatcher(compiler.compile(calls_of(schema, is_single=False)), False)
        answer = b""
        for step in range(400):
            choices = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
            if END_TOKEN_ID in choices and (step > 100 or rng.random() < 0.5):
                num_ended += 1
                parser = CallParser(GEMMA, {})
                deltas = parser.feed(answer.decode()) + parser.finish()
                assert len(deltas) == answer.count(b"<|tool_call>call:f{")
                for delta in deltas:
                    assert isinstance(delta, ToolCallDelta) and delta.name == "f"
                    found = json.loads(delta.arguments)
                    assert isinstance(found["text"], str) and found.get("kind", 1) in ("a", 1, None)
                    assert len(found["near"]) <= 2 and found.keys() <= schema["properties"].keys()
                    assert all(isinstance(each.get("km", 0), int | float) for each in found["near"])
                break
            choices = [each for each in choices if each != END_TOKEN_ID]
            ending = [each for each in choices if each in texts or each in b"}],0"]
            chars = [each for each in choices if 32 <= each < 127] or choices
            token_id = rng.choice(ending if ending and (step > 60 or rng.random() < 0.3) else chars)
            answer += texts[token_id].encode() if token_id in texts else bytes([token_id])
            assert matcher.accept(token_id)
    assert num_ended >= 6, num_ended
