"""The recipes of docs/install.md: what `plan` prints for them today, and commands that it was asked about."""

import argparse
import re
import shlex

import pytest
from recipes import INSTALL, RECIPE, write_outputs

from nanovllm.config import Config
from nanovllm.entrypoints.cli.flags import given_fields
from nanovllm.entrypoints.cli.main import _parser

TEXT = INSTALL.read_text(encoding="utf-8")
SERVE = re.compile(r"^\$ nanovllm (serve (?:.*\\\n)*.*\n)", re.MULTILINE)


def parsed(command: str) -> argparse.Namespace:
    return _parser().parse_args(shlex.split(command.replace("\\\n", " ")))


@pytest.mark.slow
def test_recipes_show_what_plan_prints() -> None:
    assert write_outputs(TEXT) == TEXT, "run make docs"


def test_recipes_serve_the_model_that_was_planned_with_the_same_options() -> None:
    plans, serves = [parsed(found[1]) for found in RECIPE.finditer(TEXT)], [*map(parsed, SERVE.findall(TEXT))]
    assert len(plans) == len(serves) >= 5
    for plan, serve in zip(plans, serves, strict=True):
        assert re.sub("-(instruct|it)\\b", "", serve.model.partition("/")[2].lower()) == plan.model
        assert given_fields(plan, Config) == given_fields(serve, Config)


def test_recipes_are_for_cards_of_8_12_16_and_24_gib() -> None:
    assert re.findall(r"^### (\d+) GiB", TEXT, re.MULTILINE) == ["8", "12", "16", "24"]
