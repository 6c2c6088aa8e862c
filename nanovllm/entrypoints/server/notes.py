"""Notes of the servers of this user, by which `nanovllm ps` finds them: one small file for each, while it serves.

A note can outlive a server that was killed, so its reader asks the server before it believes the note.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from nanovllm.utils import user_cache


class Note(NamedTuple):
    """A server that has served at some time. started_s: seconds since the epoch."""

    pid: int
    url: str
    models: list[str]
    started_s: float
    path: Path


def _folder() -> Path:
    return user_cache() / "servers"


@contextmanager
def noted(url: str, models: Sequence[str]) -> Iterator[None]:
    """Keep a note of this process during the block. Without a folder that can be written, there is none."""
    path = _folder() / f"{os.getpid()}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"url": url, "models": list(models), "started_s": time.time()}))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def read_notes() -> list[Note]:
    """Return the notes of processes that are alive, oldest first. The other notes are removed."""
    found = []
    for path in _folder().glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            pid = int(path.stem)
            if not Path(f"/proc/{pid}").exists():
                path.unlink()
                continue
            about = json.loads(path.read_text())
            found.append(Note(pid, about["url"], about["models"], about["started_s"], path))
    return sorted(found, key=lambda note: note.started_s)
