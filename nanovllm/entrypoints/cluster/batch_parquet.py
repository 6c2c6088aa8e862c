"""Rows of Parquet files, which must all have the same columns. The output has the input's columns with their types."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from nanovllm.entrypoints.cluster.batch_files import UnitRows, check_columns, document_key
from nanovllm.entrypoints.cluster.batch_rows import ADDED_FOR, PROMPT_COLUMNS, SAMPLING_COLUMNS, RowPlace, ScannedRow
from nanovllm.errors import ConfigError

READ_ROWS = 1024  # rows decoded at a time, so that a row group of a million rows is never in memory as a whole
FOOTER_BYTES = 2**20  # end of a file, hashed to detect changes, because it has the file's metadata

_ANSWER = {"text": pa.string(), "token_ids": pa.list_(pa.int64()), "finish_reason": pa.string()}
_POSITION = pa.list_(
    pa.struct({"token_id": pa.int64(), "logprob": pa.float64(), "rank": pa.int64(), "text": pa.string()})
)
_ADDED_TYPES = {
    **_ANSWER,
    "reasoning_content": pa.string(),
    "num_cached_tokens": pa.int64(),
    "error": pa.string(),
    "outputs": pa.list_(pa.struct({**_ANSWER, "reasoning_content": pa.string()})),
    "token_logprobs": pa.list_(_POSITION),
    "prompt_token_logprobs": pa.list_(_POSITION),
}


class ParquetRows(UnitRows):
    suffix = ".parquet"

    def __init__(self, paths: Sequence[Path], places: Sequence[RowPlace]) -> None:
        tables, order = [], []
        for file_idx in sorted({place.file_idx for place in places}):
            wanted = sorted((place.line, i) for i, place in enumerate(places) if place.file_idx == file_idx)
            tables.append(_read_lines(paths[file_idx], [line for line, _ in wanted]))
            order += [i for _, i in wanted]
        row_of = {i: row for row, i in enumerate(order)}
        self._table = pa.concat_tables(tables).take([row_of[i] for i in range(len(places))])
        read = [name for name in self._table.column_names if name in (*PROMPT_COLUMNS, *SAMPLING_COLUMNS)]
        self.rows = self._table.select(read).to_pylist() if read else [{} for _ in places]

    @classmethod
    def check_together(cls, paths: Sequence[Path]) -> None:
        """Raise ConfigError for files with different columns, because one part can have rows of several files."""
        first = _open(paths[0]).schema_arrow
        for path in paths[1:]:
            if not _open(path).schema_arrow.equals(first):
                raise ConfigError(f"{paths[0]} and {path} have different columns or types; run a job for each of them")

    @classmethod
    def scan(
        cls, path: Path, file_idx: int, document_column: str | None, digest: xxhash.xxh3_64
    ) -> Iterator[ScannedRow]:
        with path.open("rb") as content:
            num_bytes = content.seek(0, 2)
            content.seek(max(0, num_bytes - FOOTER_BYTES))
            digest.update(num_bytes.to_bytes(8, "little") + content.read())
        file = _open(path)
        check_columns(file.schema_arrow.names, str(path))
        if document_column is not None and document_column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise ConfigError(f"{path} has no column document_column={document_column!r}; its columns are {names}")
        line = 0
        for row_group in range(file.num_row_groups):
            metadata = file.metadata.row_group(row_group)
            row_bytes = metadata.total_byte_size // max(1, metadata.num_rows)
            for key in _document_keys(file, row_group, document_column):
                yield ScannedRow(file_idx, line, 0, row_bytes, key)
                line += 1

    def write(self, path: Path, added: Sequence[Mapping[str, Any]]) -> None:
        table = self._table
        given = table.column_names
        for name, kind in _ADDED_TYPES.items():
            if name not in ADDED_FOR or ADDED_FOR[name] in given:
                table = table.append_column(name, pa.array([columns.get(name) for columns in added], kind))
        pq.write_table(table, path)


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"input {str(path)!r} is not a Parquet file: {error}") from error


def _document_keys(file: Any, row_group: int, document_column: str | None) -> Iterator[bytes | None]:
    if document_column is None:
        yield from (None for _ in range(file.metadata.row_group(row_group).num_rows))
        return
    for batch in file.iter_batches(READ_ROWS, row_groups=[row_group], columns=[document_column]):
        for document in batch.column(0).to_pylist():
            yield None if document is None else document_key(document)


def _read_lines(path: Path, lines: Sequence[int]) -> Any:
    """Read these rows as a table. lines: in ascending order."""
    file = _open(path)
    taken, first = [], 0
    remaining = list(reversed(lines))
    for row_group in range(file.num_row_groups):
        end = first + file.metadata.row_group(row_group).num_rows
        if remaining and remaining[-1] < end:
            for batch in file.iter_batches(READ_ROWS, row_groups=[row_group]):
                here = []
                while remaining and remaining[-1] < first + batch.num_rows:
                    here.append(remaining.pop() - first)
                taken += [batch.take(pa.array(here, pa.int64()))] if here else []
                first += batch.num_rows
                if not remaining or remaining[-1] >= end:
                    break
        first = end
    return pa.Table.from_batches(taken, file.schema_arrow)
