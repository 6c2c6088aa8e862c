"""The processes of ranks, and how tests wait for their end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 120.0  # of a wait that only bounds a hang


def worker_pids_of(executor: Any) -> list[int]:
    """The process ids of ranks 1 and up."""
    return [worker.process.pid for worker in executor._workers]


def is_gone(pid: int) -> bool:
    """True also for a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
