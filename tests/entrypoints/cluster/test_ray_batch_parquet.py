"""Rows of Parquet files: read where they are, written with their types."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from nanovllm.entrypoints.cluster.batch_job import format_of
from nanovllm.entrypoints.cluster.batch_parquet import READ_ROWS, ParquetRows
from nanovllm.entrypoints.cluster.batch_rows import RowDefaults, RowPlace, ScannedRow, error_columns, make_request
from nanovllm.errors import ConfigError

NUM_ROWS = 3 * READ_ROWS + 5
ANSWER = {"text": "t", "token_ids": [1, 2], "finish_reason": "stop", "num_cached_tokens": 0, "error": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three row groups, whose edges are not those of the batches that are read."""
    table = pa.table(
        {
            "prompt": [f"prompt {i}" for i in range(NUM_ROWS)],
            "when": pa.array(range(NUM_ROWS), pa.timestamp("ms")),
            "seed": pa.array([i if i % 2 else None for i in range(NUM_ROWS)], pa.int32()),
            "document": [f"d{i % 7}" if i % 3 else None for i in range(NUM_ROWS)],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=READ_ROWS + 100)
    return tmp_path / "in.parquet"


def scan(path: Path, column: str | None = None) -> list[ScannedRow]:
    return list(ParquetRows.scan(path, 0, column, xxhash.xxh3_64()))


def test_scan_finds_every_row_and_its_document(path: Path) -> None:
    rows = scan(path, "document")
    assert [row.line for row in rows] == list(range(NUM_ROWS)) and rows[0].num_bytes > 0
    assert rows[3].document_key is None and rows[1].document_key == rows[8].document_key != rows[2].document_key


@pytest.mark.parametrize(
    "lines",
    [[0], [NUM_ROWS - 1], list(range(500, 756)), [READ_ROWS + 100, 5, 2 * READ_ROWS + 200, READ_ROWS + 99, READ_ROWS]],
)
def test_rows_are_read_and_written_in_the_order_asked_for(path: Path, tmp_path: Path, lines: list[int]) -> None:
    rows = ParquetRows([path], [RowPlace(0, line, 0) for line in lines])
    assert [row["prompt"] for row in rows.rows] == [f"prompt {line}" for line in lines]
    rows.write(tmp_path / "out.parquet", [ANSWER] * (len(lines) - 1) + [error_columns("bad")])
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.schema.names == ["prompt", "when", "seed", "document", *ANSWER]
    assert written.schema.field("when").type == pa.timestamp("ms") and written.schema.field("seed").type == pa.int32()
    assert written.column("prompt").to_pylist() == [f"prompt {line}" for line in lines]
    assert written.column("error").to_pylist() == [None] * (len(lines) - 1) + ["bad"]
    assert written.column("token_ids").to_pylist()[-1] is None


def test_rows_of_several_files_keep_their_order(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(pq.read_table(path).slice(10, 3), other)
    ParquetRows.check_together([path, other])
    places = [RowPlace(1, 2, 0), RowPlace(0, 7, 0), RowPlace(1, 0, 0)]
    assert [row["prompt"] for row in ParquetRows([path, other], places).rows] == ["prompt 12", "prompt 7", "prompt 10"]


def test_sampling_columns_ask_for_columns_of_fixed_types(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    messages = [[{"role": "user", "content": "x", "name": None}]] * 2
    biases = pa.array([[(5, 1.0)], None], pa.map_(pa.int32(), pa.float32()))
    table = pa.table({"messages": messages, "logit_bias": biases, "n": [2, None], "logprobs": [None, 1]})
    pq.write_table(table, path)
    rows = ParquetRows([path], [RowPlace(0, 0, 0), RowPlace(0, 1, 0)])
    requests = [make_request(row, RowPlace(0, 0, 0), RowDefaults({}, {}, 0)) for row in rows.rows]
    assert requests[0].params.logit_bias == {5: 1.0} and requests[0].params.n == 2 and requests[1].params.logprobs == 1
    assert requests[0].messages == [{"role": "user", "content": "x"}]
    answer = {"text": "t", "token_ids": [1], "finish_reason": "stop", "reasoning_content": "r"}
    entry: list[Any] = [{"token_id": 1, "logprob": -0.5, "rank": 1, "text": None}]
    added = {"token_logprobs": [entry], "reasoning_content": "r"}
    rows.write(tmp_path / "out.parquet", [ANSWER | {"outputs": [answer] * 2}, ANSWER | added])
    written = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert written[0]["outputs"] == [answer] * 2 and written[1]["outputs"] is None
    assert [row["reasoning_content"] for row in written] == [None, "r"]
    assert written[1]["token_logprobs"] == [entry] and "prompt_token_logprobs" not in written[0]
    json.dumps(written)


def test_bad_files_are_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"prompt": ["x"], "error": ["y"]}), other)
    with pytest.raises(ConfigError, match="column 'error'"):
        scan(other)
    with pytest.raises(ConfigError, match="different columns"):
        ParquetRows.check_together([path, other])
    with pytest.raises(ConfigError, match="no column document_column='book'; its columns are prompt, when"):
        scan(path, "book")
    other.write_text("x")
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        scan(other)
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).touch()
    for paths, message in (
        ([path, tmp_path / "a.jsonl"], "give one kind"),
        ([tmp_path / "a.csv"], r"a\.csv' must be a file of JSON lines"),
        ([tmp_path / "missing.jsonl"], "is not a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            format_of(paths)
