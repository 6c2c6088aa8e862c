"""Python sources as text that people have: those of installed packages to train on, the standard library to test on.

A token is a byte. A file ends with END_TOKEN_ID.
"""

import importlib.util
import keyword
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_BYTES = 256
END_TOKEN_ID = NUM_BYTES
VOCAB_SIZE = 320  # a multiple of 64, which suits matrix products; the ids above END_TOKEN_ID never occur

PACKAGES = ("torch", "transformers", "sympy")
# Not every machine has the library's tests. The others are tables, and pages of text in one string
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
_WORD = re.compile(rb"[A-Za-z_]\w{3,}")
_FIXED_WORDS = {word.encode() for word in (*keyword.kwlist, "self")}
_MIN_USES = 3  # of a word that is renamed

TokenArray = NDArray[np.int16]


def library_files() -> list[bytes]:
    """The files of the standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    return _contents(path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts))


def package_files(packages: Iterable[str] = PACKAGES) -> list[bytes]:
    """The files of installed packages, in the order of their paths, without copies of the standard library's files."""
    files: list[bytes] = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"package {package!r} is not installed here; leave it out of --packages")
        files += _contents(path for root in spec.submodule_search_locations for path in Path(root).rglob("*.py"))
    held_out = set(library_files())
    return [content for content in dict.fromkeys(files) if content not in held_out]


def _contents(paths: Iterable[Path]) -> list[bytes]:
    """Each content once, without empty files."""
    contents = (path.read_bytes() for path in sorted(paths) if path.is_file())
    return [content for content in dict.fromkeys(contents) if content.strip()]


def join_files(files: Iterable[bytes]) -> TokenArray:
    """The tokens of the files one after another, each with its END_TOKEN_ID."""
    pieces = [part for content in files for part in (file_tokens(content), np.array([END_TOKEN_ID], np.int16))]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int16)


def file_tokens(content: bytes) -> TokenArray:
    return np.frombuffer(content, np.uint8).astype(np.int16)


def line_start(content: bytes, position: int) -> int:
    """The start of the line that `position` is in."""
    return content.rfind(b"\n", 0, position) + 1


def rename_words(rng: random.Random, content: bytes, num_words: int = 4) -> bytes:
    """A copy in which up to `num_words` words that occur several times have new names, made of two of its words."""
    counts = Counter(_WORD.findall(content))
    candidates = sorted(word for word, count in counts.items() if count >= _MIN_USES and word not in _FIXED_WORDS)
    chosen = rng.sample(candidates, min(num_words, len(candidates)))
    names = {word: rng.choice(candidates) + b"_" + word for word in chosen}
    return _WORD.sub(lambda match: names.get(match[0], match[0]), content)
