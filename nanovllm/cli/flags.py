"""Makes command-line flags from the fields of dataclasses, and puts the flags' names into messages."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from itertools import groupby
from typing import Any, get_args

from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.options import help_of

RENAMED: dict[tuple[type, str], str] = {(SamplingParams, "seed"): "sampling_seed"}  # Config has the plain name


def add_flags(
    parser: argparse.ArgumentParser,
    options: type,
    *,
    without: Sequence[str] = (),
    defaults: Mapping[str, str] | None = None,
    about: str | None = None,
) -> None:
    """Add a flag for every field of the dataclass `options`, with the group and the help from the field's metadata.

    A flag that is not given leaves the field's default in place. without: fields that get no flag. defaults: field ->
    what the help says about its default, if the command sets its own. about: what the help says about each group.
    """
    shown = (field for field in fields(options) if field.name not in without)
    for title, members in groupby(shown, key=lambda field: field.metadata["group"]):
        group = parser.add_argument_group(title, about)
        for field in members:
            settings = _flag_settings(field, options, (defaults or {}).get(field.name, field.default))
            group.add_argument(flag_name(options, field.name), **settings)


def flag_name(options: type, name: str) -> str:
    return "--" + RENAMED.get((options, name), name).replace("_", "-")


def flag_help(options: type, name: str) -> str:
    """The help of a field, with the flags in place of the options that it mentions."""
    return name_flags(help_of(options, name), (options, Config)).replace("%", "%%")  # argparse formats it


def given_fields(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """The fields of `options` whose flags were given."""
    by_dest = {RENAMED.get((options, field.name), field.name): field.name for field in fields(options)}
    return {name: getattr(args, dest) for dest, name in by_dest.items() if name != "model" and hasattr(args, dest)}


def name_flags(message: str, option_types: Sequence[type]) -> str:
    """`message` with flags in place of the fields of `option_types`.

    "add enable_cpu_offload=True" becomes "add --enable-cpu-offload", and "lower max_model_len" becomes "lower
    --max-model-len". A name of one word, such as "model" or "seed", is also an ordinary word, so it is replaced only
    before "=".
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


def _flag_settings(field: Field[Any], options: type, default: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for a field, from its type and help. default: the default that the help shows."""
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": flag_help(options, field.name)}
    if field.type is bool:
        return settings | {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    kind = _scalar_type(field.type)
    settings |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT", _json_object: "JSON"}[kind]}
    if isinstance(field.default, tuple):
        return settings | {"action": "extend", "nargs": "+"}
    if default is not None:
        settings["help"] += f" (default: {default})"
    return settings


def _scalar_type(annotation: Any) -> Any:
    """int, float, str or a JSON parser. For `int | None` or `tuple[int, ...] | list[int]` it is int."""
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
