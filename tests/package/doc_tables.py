"""Writes the tables of options and of GPUs in the documents, each between its marker lines: `make docs`.

python tests/package/doc_tables.py FILE...
"""

import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.entrypoints.cluster.resources import BatchOptions, ServiceOptions
from nanovllm.entrypoints.planner import DOC_MODELS, doc_table
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.sampling_params import SamplingParams

DOCUMENTED: dict[type, str] = {
    Config: "The fields of `Config`, which are keyword arguments of `LLM`",
    SamplingParams: "The fields of `SamplingParams`",
    ServerOptions: "The fields of `ServerOptions`, which are flags of `nanovllm serve`",
    BatchOptions: "The fields of `BatchOptions`, which are flags of `nanovllm batch`",
    ServiceOptions: "The fields of `ServiceOptions`, which are flags of `nanovllm serve`, too",
}


def options_tables() -> str:
    """Return the tables of options in Markdown."""
    return "\n\n".join(f"{title}:\n\n{_table(options)}" for options, title in DOCUMENTED.items())


def _table(options: type) -> str:
    """Return one row for every field that has a default. If there are several groups, each begins with a heading."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    optional = [field for field in fields(options) if field.default is not MISSING]
    has_groups = len({field.metadata["group"] for field in optional}) > 1
    for title, members in groupby(optional, key=lambda field: field.metadata["group"]):
        lines += [f"| **{title}** | | |"] if has_groups else []
        lines += [_row(field) for field in members]
    return "\n".join(lines)


def _row(field: Field[Any]) -> str:
    default = repr(field.default).replace("'", '"')
    names = (rf"{each.name}(?:=\w+)?" for options in DOCUMENTED for each in fields(options) if "_" in each.name)
    words = "|".join((r"\w+\.json", *names, "SamplingParams", "None", *field.metadata.get("choices", ())))
    meaning = re.sub(rf"\b({words})\b", r"`\1`", field.metadata["help"])
    return f"| `{field.name}` | `{default}` | {meaning} |"


TABLES: dict[str, Callable[[], str]] = {
    "options": options_tables,
    "fits": partial(doc_table, DOC_MODELS[-2:]),
    "all fits": partial(doc_table, DOC_MODELS),
}


def write_tables(text: str) -> str:
    """Return `text` with its tables written anew, each between two marker lines that have its name in TABLES."""
    begins = {name: f"<!-- {name}: begin -->" for name in TABLES if f"<!-- {name}: begin -->" in text}
    assert begins, f"the text has no lines that mark one of these tables: {', '.join(TABLES)}"
    for name, begin in begins.items():
        before, rest = text.split(begin)
        _, after = rest.split(end := f"<!-- {name}: end -->")
        text = f"{before}{begin}\n\n{TABLES[name]()}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(write_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
