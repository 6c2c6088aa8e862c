"""The metadata of a release: what pyproject.toml says agrees with the package, CI and the documents."""

import re
from pathlib import Path
from typing import Any

import pytest

from nanovllm import __version__
from nanovllm.errors import install_command

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_version_is_in_the_changelog_and_in_the_guide() -> None:
    assert re.search(rf"^## \[{re.escape(__version__)}\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"nanovllm-{__version__}-py3-none-any.whl[server]" in (ROOT / "docs/install.md").read_text()


def test_classifiers_name_the_pythons_that_ci_runs(project: dict[str, Any]) -> None:
    named = {each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+$", each)}
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    matrix = re.search(r"python-version: \[(.*)\]", workflow)
    assert matrix is not None and set(re.findall(r'"([\d.]+)"', matrix[1])) <= named
    assert project["requires-python"] == f">={min(named, key=lambda each: int(each.partition('.')[2]))}"
    assert not [each for each in project["classifiers"] if each.startswith("License ::")], "license is an expression"
    assert project["license"] == "MIT" and len(project["description"]) < 512


def test_no_message_or_document_says_that_a_registry_has_the_package(project: dict[str, Any]) -> None:
    """Every extra that a message names exists."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("nanovllm/**/*.py")]
    texts = {path: path.read_text() for path in files}
    wrong = [
        path.name
        for path, text in texts.items()
        if re.search(r"pip install [^\n]*?(?<![/\w-])nanovllm(?=[\s\[`]|$)", text)
    ]
    assert not wrong
    named = {extra for text in texts.values() for extra in re.findall(r"install_command\(['\"](\w+)['\"]\)", text)}
    named |= {extra for text in texts.values() for extra in re.findall(r'check_packages\([^)]*\), "(\w+)"\)', text)}
    assert named >= {"server", "structured", "ray"} and named <= set(project["optional-dependencies"])
    assert "'.[server]'" in install_command("server") and "'WHEEL[server]'" in install_command("server")
