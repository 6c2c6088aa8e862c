"""How the lines of the server's log look: text with the time and the level, or one JSON object per line."""

import json
import logging
import sys
from datetime import datetime, timezone

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
FIELDS = "fields"  # the attribute of a log record with further entries of a line in JSON


def set_up_log(level: str, form: str) -> None:
    """Log this process to stderr from now on. level: one of LEVELS. form: one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if form == "json" else _TextLines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("nanovllm").setLevel(level.upper())


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, timezone.utc).astimezone().isoformat(timespec="milliseconds")


class _TextLines(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time_of(record)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entries = {"time": _time_of(record), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            entries["exception"] = record.exc_text
        return json.dumps(entries | getattr(record, FIELDS, {}))
