"""docs/tour.md names only what exists: files of the package, and the classes, functions and attributes in them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent
TOUR = PACKAGE.parent / "docs" / "tour.md"
OUTSIDE_THE_PACKAGE = {"nanovllm/", "tests/test_tour.py"}  # what the tour's introduction may put in backticks
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Mention(NamedTuple):
    """A name in backticks, and the path before it on its line; "" if either is missing."""

    line: int
    path: str
    name: str


def find_mentions(text: str) -> Iterator[Mention]:
    """Every path and every name in backticks, outside fenced drawings."""
    text = FENCE.sub(lambda fenced: "\n" * fenced[0].count("\n"), text)  # the numbers of the lines stay
    for number, line in enumerate(text.splitlines(), start=1):
        path = ""
        for quoted in re.findall(r"`([^`]+)`", line):
            if quoted in OUTSIDE_THE_PACKAGE:
                continue
            is_path = quoted.endswith(".py")
            path = quoted if is_path else path
            yield Mention(number, path, "" if is_path else quoted)


def find_problems(text: str, package: Path = PACKAGE) -> list[str]:
    """List the names in the text that the package does not have."""
    problems = []
    for line, path, name in find_mentions(text):
        if not path:
            problems.append(f"line {line}: no path stands before {name} on its line")
        elif not (package / path).is_file():
            problems.append(f"line {line}: there is no file {path}")
        elif name and name not in defined_names(package / path):
            problems.append(f"line {line}: {path} does not define {name}")
    return problems


@cache
def defined_names(path: Path) -> frozenset[str]:
    """`function`, `CONSTANT`, `Class`, `Class.method` and `Class.attribute`, with what a method assigns to self."""
    return frozenset(_names_in(ast.parse(path.read_text()).body))


def _names_in(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.ClassDef):
            yield statement.name
            members = [*_names_in(statement.body), *_attributes_of_self(statement)]
            yield from (f"{statement.name}.{member}" for member in members)
        else:
            yield from (target.id for target in _targets(statement) if isinstance(target, ast.Name))


def _attributes_of_self(class_def: ast.ClassDef) -> Iterator[str]:
    methods = [node for node in class_def.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for target in (target for method in methods for node in ast.walk(method) for target in _targets(node)):
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            yield target.attr


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, one by one; none for any other node."""
    if isinstance(node, ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]


def test_tour_names_only_what_exists() -> None:
    assert find_problems(TOUR.read_text()) == []


def test_tour_follows_the_request_through_many_files() -> None:
    """The checks above find nothing wrong with an empty page."""
    mentions = list(find_mentions(TOUR.read_text()))
    assert len({mention.path for mention in mentions}) >= 40
    assert len({(mention.path, mention.name) for mention in mentions if mention.name}) >= 80


def test_tour_draws_only_what_its_steps_name() -> None:
    """The drawings themselves are not checked against the files."""
    text = TOUR.read_text()
    drawn = {name for drawing in FENCE.findall(text) for name in re.findall(r"\b[A-Z]\w+\.\w+", drawing)}
    assert len(drawn) >= 10
    assert drawn - {mention.name for mention in find_mentions(text)} == set()


SOURCE = """
LIMIT = 3
first, second = 1, 2

def plan(): ...

class Engine:
    depth: int = 0

    def __init__(self):
        self.left, self.right = 1, 2
        self.state: str = ""
        local = 3

    def step(self): ...
"""


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("`a/engine.py` `plan`, `LIMIT`, `second`, `Engine`, `Engine.step`", []),
        ("`a/engine.py` `Engine.depth`, `Engine.left`, `Engine.right` and `Engine.state`", []),
        ("`other.py`; `a/engine.py` `plan`", []),
        ("`a/motor.py` `plan`", ["there is no file a/motor.py"] * 2),
        ("`a/engine.py` `Engine.stop`", ["a/engine.py does not define Engine.stop"]),
        ("`a/engine.py` `step`", ["a/engine.py does not define step"]),
        ("`a/engine.py` `Engine.local`", ["a/engine.py does not define Engine.local"]),
        ("`a/engine.py` `plan`; `other.py` `plan`", ["other.py does not define plan"]),
        ("`plan` in `a/engine.py`", ["no path stands before plan on its line"]),
        ("```\n`drawn`\n```\n`a/motor.py`", ["line 4: there is no file a/motor.py"]),
    ],
)
def test_find_problems_reports_wrong_paths_and_names(tmp_path: Path, text: str, problems: list[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "engine.py").write_text(SOURCE)
    (tmp_path / "other.py").write_text("")
    expected = [problem if problem.startswith("line") else f"line 1: {problem}" for problem in problems]
    assert find_problems(text, tmp_path) == expected
