"""Options: dataclass fields that carry their own help and limits.

The help is the text of `--help` and of the tables in docs/options.md. `check_options` checks types, choices and limits.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from functools import cache
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args

Kind = TypeVar("Kind", bound=type)

MAX_INT32 = 2**31 - 1  # positions, lengths and block tables are int32 on the device
MAX_SHOWN_CHARS = 200  # most characters of a value that an error message repeats
_NOUNS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a dict",
    NoneType: "None",
}


def option(
    default: Any = MISSING,
    *,
    help: str,
    group: str,
    choices: tuple[bool | str, ...] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    hash: bool = True,
) -> Any:
    """Return a dataclass field with the arguments in its metadata.

    help: the option's meaning. The text refers to other options by their field names.
    group: the heading under which the option is listed.
    choices: all allowed values, or None if the values are not enumerable.
    least, above, most: limits of a number. `above` is exclusive. By default, an integer is at most MAX_INT32.
    hash: False for an unhashable value, which the hash of the dataclass then ignores.
    """
    entries = {"help": help, "group": group, "choices": choices, "least": least, "above": above, "most": most}
    metadata = {name: entry for name, entry in entries.items() if entry is not None}
    return field(default=default, metadata=metadata, hash=None if hash else False)


def help_of(options: type, name: str) -> str:
    """Return the help of the field `name` of the dataclass `options`."""
    return next(each.metadata["help"] for each in fields(options) if each.name == name)


def documented(options: type | None = None) -> Callable[[Kind], Kind]:
    """Return a class decorator that adds the fields of the dataclass `options`, by default the class itself, to the
    class's docstring with types, defaults and meanings, and to its signature in place of **arguments. So help() and
    notebooks show them.
    """

    def decorate(kind: Kind) -> Kind:
        kind.__doc__ = f"{inspect.cleandoc(kind.__doc__ or '')}\n\nOptions:\n\n{_descriptions(options or kind)}"
        if options is None:
            return kind
        make: Any = kind.__init__  # type: ignore[misc]
        given = list(inspect.signature(make).parameters.values())
        if given[-1].kind is Parameter.VAR_KEYWORD:
            known = {parameter.name for parameter in given}
            added = [_parameter(each) for each in fields(options) if each.name not in known]
            make.__signature__ = inspect.Signature([*given[:-1], *added])
        return kind

    return decorate


def _parameter(each: Field[Any]) -> Parameter:
    default = Parameter.empty if each.default is MISSING else each.default
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=each.type)


def _descriptions(options: type) -> str:
    lines = []
    for each in fields(options):
        default = "" if each.default is MISSING else f" = {each.default!r}"
        lines.append(f"    {each.name}: {inspect.formatannotation(each.type)}{default}")
        lines.append(textwrap.fill(each.metadata["help"], 110, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines)


class _Rule(NamedTuple):
    """The allowed values of a field. `kinds` is empty if the class itself checks the type."""

    name: str
    kinds: tuple[type, ...]
    choices: tuple[bool | str, ...] | None
    least: float | None
    above: float | None
    most: float | None

    def limits(self) -> str:
        """Describe the limits, such as "between 0 and 1", "above 0 and at most 1" or "1 or more"."""
        least, most = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.least, self.most))
        if self.above is not None:
            return f"above {self.above}" if self.most is None else f"above {self.above} and at most {most}"
        if self.least is None or self.most is None:
            return f"at most {most}" if self.least is None else f"{least} or more"
        return f"{least} or more, at most {most}" if self.most == MAX_INT32 else f"between {least} and {most}"

    def is_within(self, value: Any) -> bool:
        is_enough = (self.above is None or value > self.above) and (self.least is None or value >= self.least)
        return bool(is_enough and (self.most is None or value <= self.most))


@cache
def _rules(options: type) -> tuple[_Rule, ...]:
    rules = []
    for each in fields(options):
        kinds: tuple[Any, ...] = get_args(each.type) if isinstance(each.type, UnionType) else (each.type,)
        kinds = kinds if all(kind in _NOUNS for kind in kinds) else ()
        choices, least, above, most = (each.metadata.get(key) for key in ("choices", "least", "above", "most"))
        most = MAX_INT32 if most is None and int in kinds else most
        rules.append(_Rule(each.name, kinds, choices, least, above, most))
    return tuple(rules)


def check_options(options: object, error: type[Exception], owner: str = "") -> None:
    """Raise `error` for the first field with a wrong type, an unknown choice, or a number outside its limits.

    A type is checked if it is a union of some of bool, int, float, str, dict and None; the class itself checks fields
    of other types. An integer is accepted as a float, a boolean is not accepted as a number, and NaN is outside all
    limits.

    owner: prefix of the field's name in the message, such as "SamplingParams.".
    """
    kind: Any = type(options)
    for rule in _rules(kind):
        value = getattr(options, rule.name)
        problem = ""
        if rule.kinds and not _is_a(value, rule.kinds):
            problem = f"must be {' or '.join(_NOUNS[kind] for kind in rule.kinds)}"
        elif rule.choices and value is not None and value not in rule.choices:
            problem = f"is unknown; choose one of {', '.join(map(str, rule.choices))}"
        elif value is not None and not rule.is_within(value):
            problem = f"must be {rule.limits()}"
        if problem:
            raise error(f"{owner}{rule.name}={shown(value)} {problem}")


def _is_a(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def shown(value: object) -> str:
    """Return the text of `value` for an error message, truncated to MAX_SHOWN_CHARS."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        text = "(an integer of thousands of digits)"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
