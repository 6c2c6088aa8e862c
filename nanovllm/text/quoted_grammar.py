"""QuotedGrammar: the grammar of values in the notation of Gemma 4's tool calls, made from a JSON schema.

    {city:<|"|>Bern<|"|>,days:3,near:[{km:1.5}],exact:null}

The notation is like JSON without white space, but keys have no quotes, and a token that occurs nowhere else stands on
either side of a string, which has no escapes. The keys of an object are sorted, as in the calls that Gemma 4's template
prints. Numbers, booleans and null are JSON.

An object has either the properties of its schema, or any if the schema names none. For strings, only `enum` and `const`
are enforced, and `allOf` only with a single schema.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.text.json_schema import Fault, target_of

MAX_INLINE_CHARS = 40  # of a rule that occurs several times
MAX_ITEMS = 1000  # limit of minItems and maxItems
_KEY = r"[^\s:,{}\[\]<>\"]+"
_BARE_KEY = re.compile(r"[^\s:,{}\[\]<>\"]([^:,{}\[\]<>\"\n]*[^\s:,{}\[\]<>\"])?")
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_UNABLE = ("patternProperties", "minProperties", "maxProperties")
_KINDS = ("string", "number", "boolean", "null", "array", "object")


def can_be_key(name: str) -> bool:
    """Return True if a key of this name can be written without quotes."""
    return _BARE_KEY.fullmatch(name) is not None


class QuotedGrammar:
    """Writes the rules of one schema."""

    def __init__(
        self,
        rules: dict[str, str],
        number: str,
        quote: str,
        literal: Callable[[str], str],
        text: str,
    ) -> None:
        """rules: of the whole grammar, to which the rules are added. number: a part of the names of these rules. quote:
        the token around strings. literal: returns the rule of a text. text: the terminal of the text of a string.
        """
        self._rules, self._number, self._quote, self._literal, self._text = rules, number, quote, literal, text
        self._names: dict[str, str] = {}  # of rules, by what they stand for
        self.faults: list[Fault] = []  # parts of the schema that the rules do not express
        self._root: Any = None

    def write(self, schema: Any) -> str:
        """Return the rule of an object that matches the schema. Raises RequestError for names that cannot be keys."""
        self._root = schema
        try:
            return self._object("#", schema if isinstance(schema, dict) else {})
        except RecursionError as error:
            raise RequestError("structured_outputs.json is nested too deeply; make it smaller") from error

    def _rule(self, key: str, make: Callable[[], str]) -> str:
        """Return the name of the rule `key`, which is made at the first use and may refer to itself."""
        if key not in self._names:
            self._names[key] = name = f"quoted_{self._number}_{len(self._names)}"
            self._rules[name] = make()
        return f"{self._names[key]} "

    def _named(self, rule: str) -> str:
        """Return a name of `rule`, which may occur several times without making the grammar longer each time."""
        return self._rule(f"named {len(self._names)}", lambda: rule) if len(rule) > MAX_INLINE_CHARS else rule

    def _value(self, path: str, schema: Any) -> str:
        """Return the rule of a value that matches the schema. path: the place of the schema, for faults."""
        if not isinstance(schema, dict):
            if schema is False:
                self.faults.append(Fault(path, "false", "allows no value"))
            return self._any()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = target_of(self._root, reference) if reference.startswith("#") else None
            if target is None:
                self.faults.append(Fault(path, "$ref", f"is {reference!r}, which is not found"))
                return self._any()
            return self._rule(f"$ref {reference}", lambda: self._value(reference, target))
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._choice([self._literal(text) for each in values if (text := self._written(each)) is not None])
        for keyword in ("anyOf", "oneOf", "allOf"):
            options = schema.get(keyword)
            if isinstance(options, list) and options:
                if keyword == "allOf" and len(options) > 1:
                    self.faults.append(Fault(path, keyword, "is supported for a single schema in calls of this model"))
                    return self._any()
                return self._choice([self._value(f"{path}/{keyword}/{i}", each) for i, each in enumerate(options)])
        return self._choice([self._kind(path, kind, schema) for kind in _kinds(schema)])

    def _kind(self, path: str, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            quote = self._literal(self._quote)
            return f"{quote}{self._text} {quote}"
        if kind == "array":
            return self._array(path, schema)
        if kind == "object":
            return self._object(path, schema)
        limits = {name: schema[name] for name in _NUMBER_KEYWORDS if name in schema and kind in ("number", "integer")}
        text = json.dumps({"type": kind, **limits})
        return self._rule(text, lambda: f"%json {text}")

    def _any(self) -> str:
        return self._rule("any", lambda: self._choice([self._kind("#", kind, {}) for kind in _KINDS]))

    def _array(self, path: str, schema: Mapping[str, Any]) -> str:
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        items = schema.get("items", True)
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        least, most = (schema.get(keyword) for keyword in ("minItems", "maxItems"))
        for keyword, limit in (("minItems", least), ("maxItems", most)):
            if isinstance(limit, int) and limit > MAX_ITEMS:
                self.faults.append(Fault(path, keyword, f"is {limit}, at most {MAX_ITEMS} in calls of this model"))
        least = min(least, MAX_ITEMS) if isinstance(least, int) else 0
        most = most if isinstance(most, int) and most <= MAX_ITEMS else None
        rules = [self._value(f"{path}/prefixItems/{i}", each) for i, each in enumerate(first)][:most]
        item = "" if items is False else self._named(self._value(f"{path}/items", items))
        if not rules and item and most != 0:
            rules = [item]  # the first item, which follows no comma
        num_more = None if most is None else most - len(rules)
        rest = _repeat(f'"," {item}', max(0, least - len(rules)), num_more) if item and rules else ""
        for i, rule in reversed([*enumerate(rules)]):
            rest = f'"," {rule}{rest}' if i else f"{rule}{rest}"
            rest = rest if i < least else f"({rest})? "
        return f'"[" {rest}"]" '

    def _object(self, path: str, schema: Mapping[str, Any]) -> str:
        self.faults += [
            Fault(path, each, "is not supported in calls of this model") for each in _UNABLE if each in schema
        ]
        properties, required = schema.get("properties"), schema.get("required")
        required = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        properties = dict.fromkeys(required, True) | (properties if isinstance(properties, dict) else {})
        if unwritable := sorted(name for name in required if not can_be_key(name)):
            raise RequestError(
                f"structured_outputs.json requires the property {unwritable[0]!r}, a name that the model cannot write "
                "in a call; use another"
            )
        names = sorted(filter(can_be_key, properties), key=lambda name: (name.lower(), name))
        more = schema.get("additionalProperties", True)
        if not properties and more is not False:
            pair = self._named(f'QUOTED_KEY ":" {self._value(f"{path}/additionalProperties", more)}')
            self._rules["QUOTED_KEY"] = f"/{_KEY}/"
            return f'"{{" ({pair}("," {pair})*)? "}}" '
        if isinstance(more, dict) and more:
            self.faults.append(
                Fault(path, "additionalProperties", "is not supported together with properties in calls of this model")
            )
        values = {name: self._value(f"{path}/properties/{name}", properties[name]) for name in names}
        pairs = [self._named(f"{self._literal(f'{name}:')}{value}") for name, value in values.items()]
        after = self._tails(pairs, [name in required for name in names])
        # Before the first property that is written, no comma
        starts = []
        for i, name in enumerate(names):
            starts.append(f"{pairs[i]}{after[i + 1]}")
            if name in required:
                break
        if not required:
            starts.append('""')
        return f'"{{" {self._choice(starts)}"}}" '

    def _tails(self, pairs: list[str], are_required: list[bool]) -> list[str]:
        """Return, for each position, the rule of the pairs from there on, each after a comma."""
        tails = [""]
        for pair, is_required in zip(reversed(pairs), reversed(are_required), strict=True):
            key = f"tail {len(self._names)}"
            tail = f'"," {pair}{tails[-1]}' if is_required else f'("," {pair})? {tails[-1]}'
            tails.append(self._rule(key, lambda tail=tail: tail))  # type: ignore[misc]
        return tails[::-1]

    def _written(self, value: Any) -> str | None:
        """Return a value in this notation, or None if it cannot be written."""
        if isinstance(value, str):
            return None if self._quote in value else f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            texts = [self._written(each) for each in value]
            return None if None in texts else f"[{','.join(map(str, texts))}]"
        if isinstance(value, dict):
            pairs = {key: self._written(each) for key, each in sorted(value.items())}
            if None in pairs.values() or not all(map(can_be_key, pairs)):
                return None
            return f"{{{','.join(f'{key}:{each}' for key, each in pairs.items())}}}"
        return json.dumps(value)

    def _choice(self, rules: Iterable[str]) -> str:
        """Return the rule of one of several values. Without any, it matches nothing."""
        several = list(dict.fromkeys(rules))
        if not several:
            self.faults.append(Fault("#", "enum", "has no value that the model can write in a call"))
            return self._any()
        return several[0] if len(several) == 1 else f"({' | '.join(several)}) "


def _repeat(rule: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f"({rule})* " if (least, most) == (0, None) else f"({rule}){{{least},{'' if most is None else most}}} "


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema allows."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    known = [kind for kind in kinds if kind in (*_KINDS, "integer")]
    if known:
        return known
    if schema.keys() & {"properties", "required", "additionalProperties"}:
        return ["object"]
    return ["array"] if schema.keys() & {"items", "prefixItems"} else list(_KINDS)
