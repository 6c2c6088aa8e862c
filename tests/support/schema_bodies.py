"""Hypothesis strategies for the bodies of requests: from an OpenAPI schema, and with a few values broken."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeAlias

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Json: TypeAlias = Any
HUGE = 10**30
TEXTS = st.sampled_from(
    [
        *(
            "",
            "a",
            "The passkey is 4711.\nThe passkey",
            "\n",
            "\x00",
            "\ud800",
            "\udfff\ud800",
            "\u2028",
            "🦜",
            "é" * 40,
        ),
        *(
            "<|endoftext|>",
            "<tool_call>",
            '{"a": 1}',
            "{",
            "[a-c]{2}",
            "(",
            "(?=a)",
            "a{1,99999}",
            "\\",
            "text",
            "tiny",
        ),
        *('{"type": "object"}', '{"$ref": "#"}', '{"type": "string", "pattern": "("}', "x" * 5000, "7", "-1"),
    ]
) | st.text(max_size=6)
INTEGERS = st.sampled_from([0, 1, 2, 3, 20, 21, 256, 257, 258, -1, -2, 2**31 - 1, 2**31, 2**63, -(2**63), HUGE])
NUMBERS = st.sampled_from([0, 1, 0.5, 2, -2, 1e-10, 1e-11, -0.0, 1e300, -1e300, 100.5]) | INTEGERS
NOT_JSON = st.sampled_from([float("nan"), float("inf"), -float("inf")])  # Python's json writes and reads them
SCALARS = st.none() | st.booleans() | INTEGERS | NUMBERS | NOT_JSON | TEXTS
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)
SCHEMAS = st.sampled_from(
    [
        *({}, {"type": "object"}, {"type": "array", "items": {"enum": ["a", 1, None]}}, {"const": "b"}, {"enum": []}),
        *({"type": "nothing"}, {"$ref": "#/missing"}, {"anyOf": []}, {"type": "integer", "minimum": 3, "maximum": 1}),
        *({"type": "string", "pattern": "^a+$"}, {"type": "string", "maxLength": -1}, {"not": {}}, {"allOf": [{}, 3]}),
    ]
)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LIKELY: dict[str, SearchStrategy[Json]] = {  # values that the server takes, since few of those above are such
    "model": st.sampled_from(["tiny", None]),
    "prompt": st.sampled_from(
        ["The passkey is 4711.\nThe passkey", ["a", "<|endoftext|>"], [65, 66], [[65], [66, 10]]]
    ),
    "messages": st.just([{"role": "user", "content": "It is 4711.\nIt is"}]),
    "tokens": st.lists(st.integers(0, 257), max_size=4),
    "stream_options": st.sampled_from(
        [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
    ),
    "stop": st.sampled_from(["1", ["47", "is"], None, []]),
    "stop_token_ids": st.lists(st.integers(0, 257), max_size=3),
    "bad_words": st.lists(st.sampled_from(["4", " is", "é", "<|endoftext|>"]), max_size=2),
    "logit_bias": st.dictionaries(st.integers(0, 257).map(str), st.sampled_from([-100, 100, 0, 2.5]), max_size=3),
    "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}]),
    "structured_outputs": st.sampled_from([{"regex": "[a-c]{2}"}, {"choice": ["a", "bc"]}, {"json": {"type": "null"}}]),
    "guided_regex": st.sampled_from(["(a|b)+", "é?", ".*"]),
    "guided_json": st.sampled_from([{}, {"type": "object"}, '{"enum": [1, "a"]}']),
    "tools": st.sampled_from([[], None, [TOOL], [TOOL, TOOL]]),
    "tool_choice": st.sampled_from(["none", "auto", None]),
    "tool_calls": st.just([{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]),
    "content": st.sampled_from(["It is 4711.\nIt is", [{"type": "text", "text": "<tool_call>"}]]),
    "chat_template_kwargs": st.sampled_from([{}, {"enable_thinking": False}, None]),
    **dict.fromkeys(("n", "best_of"), st.integers(1, 3)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), st.integers(0, 9)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), st.floats(0, 1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), st.floats(-2, 2)),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "top_k", "min_tokens"), st.integers(0, 5)),
}


def bodies(schema: Mapping[str, Any], components: Mapping[str, Any]) -> SearchStrategy[Json]:
    """Bodies that the schema allows, the same with up to three values changed, and now and then something else."""
    valid = from_schema(schema, components)
    changes = st.lists(st.tuples(st.integers(0, 40), ANYTHING), min_size=1, max_size=3)
    return valid | valid | st.builds(_mutated, valid.map(deepcopy), changes) | ANYTHING


def from_schema(schema: Mapping[str, Any], components: Mapping[str, Any]) -> SearchStrategy[Json]:
    """Values that the schema allows, as far as its limits are those that a body's fields have."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: from_schema(components[name], components))
    if choices := schema.get("anyOf", schema.get("oneOf")):
        return st.one_of([from_schema(each, components) for each in choices])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "type" not in schema:
        return ANYTHING
    kind = schema["type"]
    if kind == "array":
        return st.lists(from_schema(schema["items"], components), min_size=schema.get("minItems", 0), max_size=3)
    if kind == "object":
        return _objects(schema, components)
    scalars = {"string": TEXTS, "integer": INTEGERS, "number": NUMBERS, "boolean": st.booleans(), "null": st.none()}
    return scalars[kind]


def _objects(schema: Mapping[str, Any], components: Mapping[str, Any]) -> SearchStrategy[Json]:
    fields = {name: _field(name, each, components) for name, each in schema.get("properties", {}).items()}
    if not fields:
        values = schema.get("additionalProperties")
        inner = from_schema(values, components) if isinstance(values, dict) else ANYTHING
        return SCHEMAS | st.dictionaries(TEXTS, inner, max_size=3)
    required = {name: fields[name] for name in schema.get("required", ())}
    optional = {name: each for name, each in fields.items() if name not in required}
    names = st.lists(st.sampled_from(sorted(optional)), max_size=5, unique=True) if optional else st.just([])
    return names.flatmap(lambda chosen: st.fixed_dictionaries(required | {name: optional[name] for name in chosen}))


def _field(name: str, schema: Mapping[str, Any], components: Mapping[str, Any]) -> SearchStrategy[Json]:
    """Mostly a likely value, if one is known."""
    allowed = from_schema(schema, components)
    if name not in LIKELY:
        return allowed
    return st.integers(0, 5).flatmap(lambda number: LIKELY[name] if number else allowed)


def _mutated(body: Json, changes: list[tuple[int, Json]]) -> Json:
    """Replace values at the places that the numbers choose, or remove them where the value is None."""
    for number, value in changes:
        places = _places(body)
        if not places:
            return value
        container, key = places[number % len(places)]
        if value is None and isinstance(container, dict):
            del container[key]
        else:
            container[key] = value
    return body


def _places(value: Json) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]
