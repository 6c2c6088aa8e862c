"""Checks of JSON schemas: finds the parts that a grammar cannot express, by keyword and path.

llguidance lacks some keywords of JSON Schema, and compiles endless references. `find_faults` names such keywords and
references, with which a schema that must be matched exactly is refused. From a lenient schema, `remove_faults` removes
such keywords and references. The remaining schema admits every value that the whole schema admits.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

# Keyword that llguidance lacks -> values with which the keyword changes nothing
_LACKING: Mapping[str, tuple[Any, ...]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "else": (True, {}),
    "if": (),
    "maxContains": (),
    "minContains": (),
    "not": (False,),
    "propertyNames": (True, {}),
    "then": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
_NEEDS = {"if": ("then", "else"), "then": ("if",), "else": ("if",), "minContains": ("contains",)}
_NEEDS["maxContains"] = _NEEDS["minContains"]  # minContains and maxContains mean nothing without one of these keywords
_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_ONE = ("additionalItems", "additionalProperties", "items")  # keywords whose value is a schema
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPPINGS = ("$defs", "definitions", "patternProperties", "properties")
_DRAFTS = ("http://json-schema.org/", "https://json-schema.org/")

PatternFault = Callable[[str], str | None]


class Fault(NamedTuple):
    """A part of a schema that a grammar cannot express.

    path: the place of the schema that has the keyword, as a JSON pointer such as #/properties/age.
    """

    path: str
    keyword: str
    reason: str

    def __str__(self) -> str:
        return f"{self.keyword!r} at {self.path} {self.reason}"


class _Node(NamedTuple):
    path: str
    schema: dict[str, Any]


def find_faults(schema: Any, pattern_fault: PatternFault = lambda pattern: None) -> list[Fault]:
    """Return the parts of a schema that a grammar cannot express. The schema consists of plain JSON values.

    pattern_fault: returns the reason why a regular expression cannot be used, or None.
    """
    return [fault for fault, _ in _faults(schema, pattern_fault)]


def remove_faults(schema: Any, pattern_fault: PatternFault) -> list[Fault]:
    """Remove the parts that a grammar cannot express from the schema, and return them."""
    removed = []
    while found := _faults(schema, pattern_fault):  # removing one part may correct other parts
        for fault, node in found:
            node.schema.pop(fault.keyword, None)
            if fault.keyword == "patternProperties":  # additionalProperties alone would forbid these properties
                node.schema.pop("additionalProperties", None)
            removed.append(fault)
        remove_neutral_keywords(schema)
    return removed


def remove_neutral_keywords(schema: Any) -> None:
    """Remove keywords that llguidance lacks and that change nothing, such as uniqueItems: false."""
    for node in [*_nodes(schema)]:
        for keyword in [each for each in node.schema if each in _LACKING and _is_neutral(node.schema, each)]:
            node.schema.pop(keyword)


def remove_pattern_properties(schema: Any) -> list[Fault]:
    """Remove all patternProperties from the schema, and return them. llguidance requires disjoint patterns."""
    removed = []
    for node in [*_nodes(schema)]:
        if node.schema.pop("patternProperties", None) is not None:
            node.schema.pop("additionalProperties", None)
            removed.append(Fault(node.path, "patternProperties", "overlap"))
    return removed


def _is_neutral(schema: Mapping[str, Any], keyword: str) -> bool:
    value = schema[keyword]
    is_alone = keyword in _NEEDS and not any(each in schema for each in _NEEDS[keyword])
    return is_alone or any(value == neutral and type(value) is type(neutral) for neutral in _LACKING[keyword])


def _nodes(schema: Any) -> Iterator[_Node]:
    """Yield the schema and all schemas in it that are objects. Keywords that llguidance lacks are not entered."""
    pending = [("#", schema)]
    while pending:
        path, each = pending.pop()
        if not isinstance(each, dict):
            continue
        yield _Node(path, each)
        pending += [(f"{path}/{keyword}", each.get(keyword)) for keyword in _ONE]
        for keyword in _LISTS:
            if isinstance(each.get(keyword), list):
                pending += [(f"{path}/{keyword}/{i}", option) for i, option in enumerate(each[keyword])]
        for keyword in _MAPPINGS:
            if isinstance(each.get(keyword), dict):
                pending += [(f"{path}/{keyword}/{_escaped(name)}", part) for name, part in each[keyword].items()]


def _faults(schema: Any, pattern_fault: PatternFault) -> list[tuple[Fault, _Node]]:
    nodes = [*_nodes(schema)]
    has_ids = any("$id" in node.schema or "id" in node.schema for node in nodes)
    anchors = {node.schema.get("$anchor") for node in nodes if isinstance(node.schema.get("$anchor"), str)}
    found: list[tuple[Fault, _Node]] = []
    for node in nodes:

        def add(keyword: str, reason: str, node: _Node = node) -> None:
            found.append((Fault(node.path, keyword, reason), node))

        for keyword in node.schema:
            if keyword in _LACKING and not _is_neutral(node.schema, keyword):
                add(keyword, "is not supported")
        for keyword in _uncountable(node.schema):
            add(keyword, "is supported only for an object of which all properties are required")
        kinds = node.schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
        if unknown := [kind for kind in kinds if isinstance(kind, str) and kind not in _TYPES]:
            add("type", f"is {unknown[0]!r}, which is not a type of JSON")
        name = node.schema.get("format")
        if isinstance(name, str) and name not in _FORMATS and (not kinds or "string" in kinds):
            add("format", f"is {name!r}, which is not supported")
        pattern = node.schema.get("pattern")
        if isinstance(pattern, str) and (not kinds or "string" in kinds) and (reason := pattern_fault(pattern)):
            add("pattern", f"cannot be used: {reason}")
        patterns = node.schema.get("patternProperties")
        for pattern in patterns if isinstance(patterns, dict) else ():
            if reason := pattern_fault(pattern):
                add("patternProperties", f"cannot be used: {reason}")
        reference = node.schema.get("$ref")
        if isinstance(reference, str):
            is_here = reference.startswith("#")
            is_pointer = reference == "#" or reference.startswith("#/")
            if not is_here and not has_ids and not reference.startswith(_DRAFTS):
                add("$ref", f"is {reference!r}, which is outside the schema and is not fetched")
            elif (is_pointer and target_of(schema, reference) is None) or (
                is_here and not is_pointer and not has_ids and reference[1:] not in anchors
            ):
                add("$ref", f"is {reference!r}, which does not exist in the schema")
    faulty = {id(node.schema) for _, node in found}
    endless = _endless_references(schema, nodes)
    found += [(Fault(node.path, "$ref", _ENDLESS), node) for node in endless if id(node.schema) not in faulty]
    return found


_ENDLESS = "leads back to itself in every value, so that no answer ends"


def _uncountable(schema: Mapping[str, Any]) -> list[str]:
    """Return the limits of the number of properties, which llguidance supports only if no property is optional."""
    properties, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else []
    limits = {name: schema[name] for name in ("minProperties", "maxProperties") if isinstance(schema.get(name), int)}
    if not limits or not isinstance(properties, dict) or not any(name not in required for name in properties):
        return []
    num_least = max(0, limits.get("minProperties", 0) - len(required))
    num_most = max(0, limits["maxProperties"] - len(required)) if "maxProperties" in limits else None
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    is_obeyed = (num_least == 0 and num_most is None) or (is_closed and num_least <= 1 and num_most in (None, 1))
    return [] if is_obeyed else list(limits)


def target_of(schema: Any, pointer: str) -> Any:
    """Return the part of the schema at a JSON pointer, or None if there is no such part."""
    found = schema
    for part in unquote(pointer.removeprefix("#")).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _endless_references(schema: Any, nodes: list[_Node]) -> list[_Node]:
    """Return the schemas with a reference that no finite value matches.

    A schema has finite values if the parts that every value needs have finite values. The search repeats this rule
    until it finds no further schemas with finite values.
    """
    known = {id(node.schema) for node in nodes}
    needs: dict[int, list[list[int]]] = {}  # schema -> groups; one schema of each group must have finite values
    users: dict[int, list[int]] = {}  # schema -> schemas that need this schema
    for node in nodes:
        groups = [[part] for part in _needed_parts(node.schema)]
        reference = node.schema.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            groups.append([target_of(schema, reference)])
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(options := node.schema.get(keyword), list):
                groups += [[option] for option in options] if keyword == "allOf" else [options] if options else []
        needs[id(node.schema)] = [list(map(id, group)) for group in groups if all(id(part) in known for part in group)]
        for part in [part for group in needs[id(node.schema)] for part in group]:
            users.setdefault(part, []).append(id(node.schema))
    finite: set[int] = set()
    pending = [id(node.schema) for node in nodes]
    while pending:
        each = pending.pop()
        if each not in finite and all(any(part in finite for part in group) for group in needs[each]):
            finite.add(each)
            pending += users.get(each, [])
    return [node for node in nodes if "$ref" in node.schema and id(node.schema) not in finite]


def _needed_parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the parts that every value has: an object's required properties, a list's first items."""
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") == "object":
        for name in required if isinstance(required, list) else ():
            if isinstance(properties, dict) and name in properties:
                yield properties[name]
            elif not schema.get("patternProperties"):
                yield schema.get("additionalProperties")
        has_no_names = not properties and not schema.get("patternProperties")
        if has_no_names and isinstance(num_least := schema.get("minProperties"), int) and num_least > 0:
            yield schema.get("additionalProperties")
    num_items = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(num_items, int) and num_items > 0:
        items, prefix = schema.get("items"), schema.get("prefixItems")
        first = items if isinstance(items, list) else prefix if isinstance(prefix, list) else []
        yield from first[:num_items]
        if num_items > len(first):
            yield schema.get("additionalItems") if isinstance(items, list) else items
