"""The processes of ranks."""

from pathlib import Path
from typing import Any


def worker_pids_of(executor: Any) -> list[int]:
    """The process ids of ranks 1 and up."""
    return [worker.process.pid for worker in executor._workers]


def is_gone(pid: int) -> bool:
    """True also for a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
