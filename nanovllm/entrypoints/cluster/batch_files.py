"""The files of a job: the input, as JSON lines or Parquet, and the output folder with a part for each unit.

_job.json in the output folder describes the job, so that only the same job is resumed in the folder.
"""

import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from nanovllm.entrypoints.cluster.batch_rows import ALL_ADDED_COLUMNS, RowPlace, ScannedRow
from nanovllm.errors import ConfigError, RequestError

_ADDED_AS_KEYS = tuple(json.dumps(name).encode() for name in ALL_ADDED_COLUMNS)
NAME = "_job.json"  # readers of a folder of Parquet files skip names that begin with an underscore
# Options of the engine on which answers depend; all other options change only the place and the speed of computing
ANSWER_OPTIONS = ("dtype", "load_format", "hf_overrides", "generation_config", "seed", "max_model_len")


class UnitRows(ABC):
    """The rows of one unit, read from the input files. `rows[i]` is a RequestError if the row cannot be read."""

    suffix: ClassVar[str]  # the suffix of the parts' file names

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
        """Yield the places of a file's rows, and update `digest` with the file's content.

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
    """Return a hash (16 bytes) of the value of the document column, which may be a whole text."""
    return xxhash.xxh3_128_digest(repr(document).encode(errors="surrogatepass"))


def replace_file(path: Path, scratch: Path) -> None:
    """Rename a finished file to `path` in one step, so that a file at `path` is always whole."""
    with scratch.open("rb") as file:
        os.fsync(file.fileno())
    scratch.replace(path)


# -- JSON lines ----------------------------------------------------------------------------------------------------


class JsonLinesRows(UnitRows):
    suffix = ".jsonl"

    def __init__(self, paths: Sequence[Path], places: Sequence[RowPlace]) -> None:
        self.rows = [None] * len(places)  # type: ignore[list-item]
        for file_idx in {place.file_idx for place in places}:
            with paths[file_idx].open("rb") as file:
                for i, place in enumerate(places):
                    if place.file_idx == file_idx:
                        file.seek(place.offset)
                        self.rows[i] = _parse(file.readline(), f"line {place.line + 1} of {paths[file_idx].name}")

    @classmethod
    def scan(
        cls, path: Path, file_idx: int, document_column: str | None, digest: xxhash.xxh3_64
    ) -> Iterator[ScannedRow]:
        offset = 0
        with path.open("rb") as file:
            for line_idx, line in enumerate(file):
                digest.update(line)
                if line.strip():
                    key = _look_into(line, f"line {line_idx + 1} of {path}", document_column)
                    yield ScannedRow(file_idx, line_idx, offset, len(line), key)
                offset += len(line)

    def write(self, path: Path, added: Sequence[Mapping[str, Any]]) -> None:
        with path.open("wb") as file:
            for row, columns in zip(self.rows, added, strict=True):
                file.write(_dump(dict(columns) if isinstance(row, RequestError) else {**row, **columns}))


def _parse(line: bytes, where: str) -> dict[str, Any] | RequestError:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RequestError(f"{where} is not JSON: {error}")
    return row if isinstance(row, dict) else RequestError(f"{where} is not a JSON object")


def _look_into(line: bytes, where: str, document_column: str | None) -> bytes | None:
    """Check the columns of a row, and return the key of its document.

    A row that does not contain the bytes of an added column's key is not parsed. The same bytes inside a string would
    have a backslash before the quotation mark.
    """
    if document_column is None and not any(key in line for key in _ADDED_AS_KEYS):
        return None
    row = _parse(line, where)
    if isinstance(row, RequestError):
        return None
    check_columns(list(row), where)
    document = row.get(document_column) if document_column is not None else None
    return None if document is None else document_key(document)


def _dump(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only write as an escape
        return json.dumps(row).encode() + b"\n"


# -- the output folder ---------------------------------------------------------------------------------------------


def open_output(output: Path, manifest: Mapping[str, Any]) -> None:
    """Make the folder of a new job, or check that the folder belongs to this job. Raises ConfigError if it does not."""
    path = output / NAME
    if path.is_file():
        _check_same(path, manifest)
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output {str(output)!r} is not empty and has no {NAME}; give a new or an empty folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{NAME}.new")
        scratch.write_text(json.dumps(manifest, indent=2) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"output {str(output)!r} cannot be written: {error.strerror}; give another folder") from error


@contextmanager
def held_alone(output: Path) -> Iterator[None]:
    """Lock the folder while this process runs. Raises ConfigError if another command has locked the folder."""
    with (output / NAME).open() as manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"output {str(output)!r} is in use by another command; wait for its end") from error
        except OSError:
            pass  # the folder's file system has no locks
        yield


def _check_same(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); give a new folder") from error
    now = json.loads(json.dumps(manifest))
    if different := [key for key in (now | found) if now.get(key) != found.get(key)]:
        changes = "; ".join(f"{key} was {_shown(found.get(key))}, now {_shown(now.get(key))}" for key in different)
        raise ConfigError(
            f"{path.parent} holds the parts of another job: {changes}. Repeat the same command to resume that job, or "
            "give another output folder"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
