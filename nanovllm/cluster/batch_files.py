"""UnitRows: the rows of a unit, whatever the format of their file. What the formats have in common."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from nanovllm.cluster.batch_plan import RowPlace, ScannedRow
from nanovllm.cluster.batch_rows import ALL_ADDED_COLUMNS
from nanovllm.errors import ConfigError, RequestError


class UnitRows(ABC):
    """The rows of one unit, read from the input files. `rows[i]` is a RequestError if the row cannot be read."""

    suffix: ClassVar[str]  # of parts

    rows: Sequence[Mapping[str, Any] | RequestError]

    @abstractmethod
    def __init__(self, paths: Sequence[Path], places: Sequence[RowPlace]) -> None: ...

    @classmethod
    def check_together(cls, paths: Sequence[Path]) -> None:
        """Raise ConfigError for files that cannot be the input of one job."""
        return

    @classmethod
    @abstractmethod
    def scan(
        cls, path: Path, file_idx: int, document_column: str | None, digest: xxhash.xxh3_64
    ) -> Iterator[ScannedRow]:
        """Where the rows of a file are. `digest`: is updated so that it tells whether the file has changed.

        Raises ConfigError for a file that cannot be used.
        """

    @abstractmethod
    def write(self, path: Path, added: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows with their added columns, in order."""


def check_columns(names: Iterator[str] | Sequence[str], where: str) -> None:
    """Raise ConfigError if the input has a column that the output adds."""
    if taken := [name for name in names if name in ALL_ADDED_COLUMNS]:
        raise ConfigError(
            f"{where} has the column {', '.join(map(repr, taken))}, which the output adds to each row; rename it in "
            "the input"
        )


def document_key(document: Any) -> bytes:
    """16 bytes in place of a document's name, which may be its whole text."""
    return xxhash.xxh3_128_digest(repr(document).encode(errors="surrogatepass"))


def replace_file(path: Path, scratch: Path) -> None:
    """Move a finished file to its place in one step, so that a file with its name is always whole."""
    with scratch.open("rb") as file:
        os.fsync(file.fileno())
    scratch.replace(path)
