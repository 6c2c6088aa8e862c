"""What the tests of several ranks need to know about the way in which the ranks are started.

These tests are written once, against a fixture `backend`. tests/executor gives them MP, and tests/cluster runs them
again with a small Ray cluster (ray_cluster.py).
"""

import multiprocessing
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.engine.startup import make_workers
from nanovllm.executor.workers import Workers


@dataclass(frozen=True)
class RankBackend:
    name: str  # distributed_executor_backend
    killed: str  # how rank 0 reports that rank 1 was killed, as a pattern
    exited_with_3: str
    log_lines: str  # what may stand in stderr when all is well, as a pattern of a line
    worker_pids: Callable[[], set[int]]  # the workers that run now

    def make_workers(self) -> Workers:
        return make_workers(self.name)

    def unexpected_lines(self, errors: str) -> list[str]:
        return [line for line in errors.splitlines() if not re.match(self.log_lines, line)]


MP = RankBackend(
    name="mp",
    killed="rank 1 died with signal SIGKILL",
    exited_with_3="rank 1 died with exit code 3",
    log_lines="$^",
    worker_pids=lambda: {child.pid for child in multiprocessing.active_children() if child.pid is not None},
)


def worker_pids_of(llm: Any) -> list[int]:
    """The process ids of an engine's ranks 1 and up."""
    return [worker.process.pid for worker in llm.engine.executor._group._workers.members]


def is_gone(pid: int) -> bool:
    """True also for a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
