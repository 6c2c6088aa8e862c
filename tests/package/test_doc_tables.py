"""The tables of options and of GPUs in the documents, which `make docs` writes."""

from dataclasses import fields
from pathlib import Path

import pytest
from doc_tables import DOCUMENTED, options_tables, write_tables

ROOT = Path(__file__).parents[2]


def test_options_page_has_every_field_and_default() -> None:
    text = (ROOT / "docs/options.md").read_text()
    assert options_tables() in text and write_tables(text) == text
    rows = [line.split("|")[1:3] for line in options_tables().splitlines() if line.startswith("| `")]
    table = [(name.strip(" `"), default.strip(" `")) for name, default in rows]
    optional = [field for options in DOCUMENTED for field in fields(options) if field.name != "model"]
    assert table == [(field.name, repr(field.default).replace("'", '"')) for field in optional]
    for words in (
        "by default 256, or 4096 if `num_gpu_blocks` is given",
        "`none`: `SamplingParams` |",
        "the model's `generation_config.json`",
    ):
        assert words in options_tables()


@pytest.mark.slow
def test_tables_of_gpus_are_what_plan_computes() -> None:
    for name in ("README.md", "docs/planning.md"):
        text = (ROOT / name).read_text()
        assert "RTX 4060" in text and write_tables(text) == text, name
