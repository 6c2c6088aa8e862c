"""The formats of a job: a class for each scans files, reads rows, and writes them with what was added."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.cluster.batch_files import UnitRows
from nanovllm.cluster.batch_jsonl import JsonLinesRows
from nanovllm.errors import ConfigError


def format_of(paths: Sequence[Path]) -> type[UnitRows]:
    """The format of the input. Raises ConfigError for a file of another kind, or if there are both."""
    formats: dict[str, Any] = {".jsonl": JsonLinesRows, ".ndjson": JsonLinesRows}
    if any(path.suffix == ".parquet" for path in paths):  # pyarrow takes a while to import
        from nanovllm.cluster.batch_parquet import ParquetRows

        formats[".parquet"] = ParquetRows
    for path in paths:
        if path.suffix not in (*formats, ".parquet"):
            raise ConfigError(
                f"input {str(path)!r} must be a file of JSON lines (.jsonl, .ndjson) or Parquet (.parquet)"
            )
        if not path.is_file():
            raise ConfigError(f"input {str(path)!r} is not a file; check the path")
    found = {formats[path.suffix] for path in paths}
    if len(found) != 1:
        raise ConfigError("the input has files of JSON lines and of Parquet; give one kind, or run two jobs")
    chosen: type[UnitRows] = found.pop()
    return chosen
