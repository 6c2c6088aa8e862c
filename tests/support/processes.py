"""Processes of this machine: of ranks, and of a session."""

from pathlib import Path
from typing import Any


def worker_pids_of(executor: Any) -> list[int]:
    """The process ids of ranks 1 and up."""
    return [worker.process.pid for worker in executor._workers]


def is_gone(pid: int) -> bool:
    """True also for a zombie that nobody has waited for."""
    return _state_and_session(pid)[0] == "Z"


def states_of_session(session_id: int | None) -> dict[int, str]:
    """The state of each process of a session: Z for a zombie."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    found = {pid: _state_and_session(pid) for pid in pids}
    return {pid: state for pid, (state, session) in found.items() if session == session_id}


def _state_and_session(pid: int) -> tuple[str, int]:
    """A process that has just ended counts as a zombie of no session."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return "Z", -1
    return state, int(session)
