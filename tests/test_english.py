"""Phrases that make a sentence hard to read become fewer in comments, docstrings, messages and documents.

CONTRIBUTING.md ("How we write English") has the rule: repeat the noun, and use the paper's word.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
DATED = [ROOT / name for name in ("docs/log", "docs/log.md", "docs/benchmarks", "CHANGELOG.md")]  # not rewritten
PHRASES = re.compile(
    r"\b(?:those\s(?:of|that)|that\sof|so\smany|as\sfar\sas|nobody|anybody|likewise|whatever|of\sits\sown|"
    r"takes?\s(?:no\s)?part|gives?\sway|beside|(?<!fall\s)(?<!falls\s)behind)\b",
    re.IGNORECASE,
)
CEILINGS = {
    "benchmarks": 4,
    "nanovllm/text": 1,
}  # a folder that is not named here has no hits


def english_of(path: Path) -> str:
    """Return the text of a document, or the comments of a module and its strings of more than one word."""
    source = path.read_text()
    if path.suffix == ".md":
        return source
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string.lstrip("#") for token in tokens if token.type == tokenize.COMMENT]
    values = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return "\n".join([*comments, *(value for value in values if isinstance(value, str) and " " in value)])


def folder_of(path: Path) -> str:
    """Name the top folder of a file, and inside the package the folder below it."""
    folders = path.relative_to(ROOT).parent.parts
    return "/".join(folders[:2] if folders[:1] == (PACKAGE.name,) else folders[:1]) or "."


def test_no_folder_has_more_hard_phrases_than_its_ceiling() -> None:
    files = [
        *ROOT.glob("*"),
        *(path for name in ("nanovllm", "benchmarks", "docs") for path in ROOT.glob(f"{name}/**/*")),
    ]
    hits = Counter[str]()
    for path in files:
        if path.suffix in (".py", ".md") and not any(path.is_relative_to(dated) for dated in DATED):
            text = re.sub(r"\n\W*", " ", english_of(path))  # a phrase may be broken over two lines
            hits[folder_of(path)] += len(PHRASES.findall(text))
    changed = {name: hits[name] for name in sorted({*hits, *CEILINGS}) if hits[name] != CEILINGS.get(name, 0)}
    assert not changed, f"hits {changed}, ceilings {CEILINGS}: rewrite the sentence, or lower the ceiling to the hits"
