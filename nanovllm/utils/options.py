"""Dataclass fields that carry their own documentation: the text of `--help` and of the tables in docs/options.md."""

from dataclasses import field, fields
from typing import Any


def option(default: Any, *, help: str, group: str, choices: tuple[str, ...] | None = None, hash: bool = True) -> Any:
    """A field with these entries in its metadata.

    help: what the option means. It names other options by their fields.
    group: the heading that the option is listed under.
    choices: all values that the option can have, if they are few.
    hash: False for a field whose value cannot be hashed, which the hash of its dataclass then leaves out.
    """
    metadata = {"help": help, "group": group} | ({} if choices is None else {"choices": choices})
    return field(default=default, metadata=metadata, hash=None if hash else False)


def help_of(options: type, name: str) -> str:
    """The help of the field `name` of the dataclass `options`."""
    return next(each.metadata["help"] for each in fields(options) if each.name == name)
