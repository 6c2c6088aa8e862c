"""How often a unit has been tried, and which units may run in an engine together.

An engine that dies takes all its units with it. Which of them was to blame shows when they run again, one at a time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

MAX_TRIES = 3  # of one unit, before it ends the job
_PREFIX = ".tries-"


class UnitTries:
    """A unit's tries so far, as a file with a line for each try. It is there only while the unit has not been run."""

    def __init__(self, output: Path, unit_idx: int) -> None:
        self._path = output / f"{_PREFIX}{unit_idx}"

    def count(self) -> int:
        return len(self._lines())

    def _lines(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []

    def begin(self) -> None:
        self._append("\n")

    def note(self, reason: str) -> None:
        """Why the try that has begun is going to end."""
        lines = self._lines()
        lines[-1] = " ".join(reason.split())
        self._path.write_text("\n".join(lines) + "\n")

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def describe(self) -> str:
        reason = next((line for line in reversed(self._lines()) if line), "the process died, perhaps out of memory")
        return f"{self.count()} engines have failed with these rows; the last reason known is: {reason}"

    def _append(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text)


def clear_tries(output: Path) -> None:
    """Forget the tries of earlier runs of a job."""
    for path in output.glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)


class Turns:
    """Lets units run together, or one of them alone. Belongs to one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_running = 0
        self._num_alone = 0  # that run alone or wait to

    @asynccontextmanager
    async def take(self, *, alone: bool) -> AsyncIterator[None]:
        """`alone`: with no other unit beside it. Later units wait for one that is to run alone."""
        async with self._changed:
            self._num_alone += alone
            await self._changed.wait_for(lambda: not self._num_running if alone else not self._num_alone)
            self._num_running += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_running -= 1
                self._num_alone -= alone
                self._changed.notify_all()
