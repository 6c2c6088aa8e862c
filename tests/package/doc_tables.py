"""Writes the tables of options and of GPUs in the documents, each between its marker lines: `make docs`.

python tests/package/doc_tables.py FILE...
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from nanovllm.capacity.fit import CONTEXTS, Fit, first_token_s, fits, request_s
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.config import Config
from nanovllm.entrypoints.cluster.resources import BatchOptions, ServiceOptions
from nanovllm.entrypoints.planner import rate_text, seconds_text
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.sampling_params import SamplingParams

DOC_GPUS = ("RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090")  # 8, 12, 16 and 24 GB
DOC_MODELS = ("qwen3-4b", "qwen3-8b", "qwen2.5-7b-1m", "qwen3-30b-a3b")
DOC_HOST_GIB = 64
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
    words = "|".join((r"\w+\.json", *names, "SamplingParams", "None", *map(str, field.metadata.get("choices", ()))))
    meaning = re.sub(rf"\b({words})\b", r"`\1`", field.metadata["help"])
    return f"| `{field.name}` | `{default}` | {meaning} |"


def doc_table(models: Sequence[str]) -> str:
    """Return a table for the documents. For each model on each of DOC_GPUS, the table has the format with the most bits
    that keeps all KV and all experts on the GPU, or else the fastest format. fp8_dynamic was not measured on these
    GPUs.
    """
    lines = ["| GPU | model | " + " | ".join(f"{n:,} tokens" for n in CONTEXTS[:3]) + " |", "|" + "---|" * 5]
    return "\n".join(lines + [row for name in DOC_GPUS for model in models if (row := _doc_row(name, model))])


@cache
def _doc_row(name: str, model: str) -> str:
    gpu = find_gpu(name)
    found = [fit for fit in fits(Machine.gpu(DOC_HOST_GIB * 2**30, gpu), [model]) if fit.format != "fp8_dynamic"]
    cells = [_doc_cell([fit for fit in found if fit.plan.context == n]) for n in CONTEXTS[:3]]
    return f"| {name}, {round(gpu.memory_gib)} GiB | {model} | {' | '.join(cells)} |" if any(cells) else ""


def _doc_cell(found: Sequence[Fit]) -> str:
    if not found:
        return ""
    best = next((fit for fit in found if fit.is_resident), None) or min(found, key=lambda fit: request_s(fit.plan))
    rate, plain, first = best.plan.expected_decode_tok_per_s, best.plan.decode_tok_per_s, first_token_s(best.plan)
    assert rate and plain and first, "all rates of the table of GPUs are known"
    drafted = f" ({rate_text(plain)} without drafts)" if best.plan.num_pages else ""
    head = f", {best.plan.config.quantize_head} head" if best.plan.config.quantize_head else ""
    where = "" if best.is_resident else f", {best.where}"
    return f"{best.format}{head}{where}: {rate_text(rate)} tok/s{drafted}, {seconds_text(first)}"


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
