"""Command-line flags made from the fields of dataclasses, and error messages that name flags instead of fields."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, get_args

from nanovllm.sampling_params import SamplingParams

RENAMED: dict[tuple[type, str], str] = {(SamplingParams, "seed"): "sampling_seed"}  # Config has the plain name
HelpGroups = Mapping[str, Mapping[str, str]]  # title -> field -> a line of meaning


def add_flags(parser: argparse.ArgumentParser, options: type, groups: HelpGroups, without: Sequence[str] = ()) -> None:
    """A flag for every field of the dataclass `options`. A flag that is not given leaves its field's default alone."""
    by_name = {field.name: field for field in fields(options) if field.name not in without}
    explained = [name for meanings in groups.values() for name in meanings]
    assert sorted(explained) == sorted(by_name), f"fields and help lines differ: {set(explained) ^ set(by_name)}"
    for title, meanings in groups.items():
        group = parser.add_argument_group(title)
        for name, meaning in meanings.items():
            group.add_argument(flag_name(options, name), **_flag_settings(by_name[name], meaning))


def flag_name(options: type, name: str) -> str:
    return "--" + RENAMED.get((options, name), name).replace("_", "-")


def given_fields(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """The fields of `options` whose flags were given."""
    by_dest = {RENAMED.get((options, field.name), field.name): field.name for field in fields(options)}
    return {name: getattr(args, dest) for dest, name in by_dest.items() if name != "model" and hasattr(args, dest)}


def name_flags(message: str, option_types: Sequence[type]) -> str:
    """`message` with flags in place of the fields of `option_types`.

    "add enable_cpu_offload=True" becomes "add --enable-cpu-offload", "lower max_model_len" "lower --max-model-len". A
    name of a single word, such as "model" or "seed", is an ordinary word as well, so it counts only before "=".
    """
    for options in option_types:
        for field in fields(options):
            flag = flag_name(options, field.name)
            end = r"(?![\w/-]|\.\w)" if "_" in field.name else "(?==)"
            name = rf"(?<![\w./'\"-])(?:{options.__name__}\.)?{field.name}"
            if field.type is bool:
                message = re.sub(f"{name}=True", flag, message)
                message = re.sub(f"{name}=False", f"--no-{flag[2:]}", message)
            message = re.sub(name + end, flag, message)
    return message


def _flag_settings(field: Field[Any], meaning: str) -> dict[str, Any]:
    """Arguments of `add_argument` for a field, from its type and default."""
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": meaning}
    if field.type is bool:
        return settings | {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    kind = _scalar_type(field.type)
    settings |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT", _json_object: "JSON"}[kind]}
    if isinstance(field.default, tuple):
        return settings | {"action": "extend", "nargs": "+"}
    if field.default is not None and "(default: " not in meaning:
        settings["help"] = f"{meaning} (default: {field.default})"
    return settings


def _scalar_type(annotation: Any) -> Any:
    """int, float, str or a parser of JSON, also out of `int | None` or `tuple[int, ...] | list[int]`."""
    if annotation in (int, float, str):
        return annotation
    if annotation is dict:
        return _json_object
    return next(kind for member in get_args(annotation) if (kind := _scalar_type(member)))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value
