"""Rows as lines of JSON. A line that cannot be read is a row with an error; an empty line is skipped."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from nanovllm.cluster.batch_files import UnitRows, check_columns, document_key
from nanovllm.cluster.batch_plan import RowPlace, ScannedRow
from nanovllm.cluster.batch_rows import ALL_ADDED_COLUMNS
from nanovllm.errors import RequestError

_ADDED_AS_KEYS = tuple(json.dumps(name).encode() for name in ALL_ADDED_COLUMNS)


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
    """Check the columns of a row, and return the key of its document. A row is parsed only if that may find anything:
    a quotation mark inside a string has a backslash before it.
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
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only write as an escape
        return json.dumps(row).encode() + b"\n"
