"""The tables of options in docs/options.md, made from the fields of the classes of options.

`python -m nanovllm.cli.options_table docs/options.md` (or `make docs`) writes them between the two marker lines.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from nanovllm.cluster.options import BatchOptions, ServiceOptions
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.options import ServerOptions

BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"
_TYPES = (Config, SamplingParams, ServerOptions, BatchOptions, ServiceOptions)
_NAMES = [field.name for options in _TYPES for field in fields(options) if "_" in field.name]
_CODE = (r"\w+\.json", *(rf"{name}(?:=\w+)?" for name in _NAMES), "SamplingParams", "None")  # patterns of code


def options_tables() -> str:
    """The tables in Markdown, with the markers around them."""
    tables = (
        f"The fields of `Config`, which are keyword arguments of `LLM`:\n\n{_table(Config)}",
        f"The fields of `SamplingParams`:\n\n{_table(SamplingParams)}",
        f"The fields of `ServerOptions`, which are flags of `nanovllm serve`:\n\n{_table(ServerOptions)}",
        f"The fields of `BatchOptions`, which are flags of `nanovllm batch`:\n\n{_table(BatchOptions)}",
        f"The fields of `ServiceOptions`, which are flags of `nanovllm serve`, too:\n\n{_table(ServiceOptions)}",
    )
    return "\n\n".join((BEGIN, *tables, END))


def _table(options: type) -> str:
    """One row for every field that has a default. If there are several groups, each begins with a heading."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    optional = [field for field in fields(options) if field.default is not MISSING]
    has_groups = len({field.metadata["group"] for field in optional}) > 1
    for title, members in groupby(optional, key=lambda field: field.metadata["group"]):
        lines += [f"| **{title}** | | |"] if has_groups else []
        lines += [_row(field) for field in members]
    return "\n".join(lines)


def _row(field: Field[Any]) -> str:
    default = repr(field.default).replace("'", '"')
    words = "|".join((*_CODE, *field.metadata.get("choices", ())))
    meaning = re.sub(rf"\b({words})\b", r"`\1`", field.metadata["help"])
    return f"| `{field.name}` | `{default}` | {meaning} |"


def write_tables(text: str) -> str:
    """`text` with the tables in place of what is between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the text has no lines {BEGIN} and {END} to put the tables between"
    return before + options_tables() + after


def main(argv: Sequence[str]) -> None:
    for name in argv:
        path = Path(name)
        path.write_text(write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
