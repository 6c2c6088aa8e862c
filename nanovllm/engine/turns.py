"""Turns: one thread at a time runs a step of the engine; the others leave it calls, or wait for what it brings.

A step takes from a millisecond to a second, so nobody holds a lock for its length. `lock` guards short sections only:
beginning and ending a turn, the calls left meanwhile, and the outputs that a step delivers. A thread that waits for
outputs is woken after every step, whoever ran it, and takes the next turn itself if its own have not come.
"""

import threading
from collections import deque
from collections.abc import Callable


class Turns:
    def __init__(self) -> None:
        # Reentrant: the garbage collector may close an abandoned stream, which aborts its request, at any allocation
        self.lock = threading.Condition(threading.RLock())
        self._owner: int | None = None  # the thread whose turn it is
        self._calls: deque[Callable[[], None]] = deque()

    @property
    def has_calls(self) -> bool:
        """Whether calls wait for the end of the running step."""
        return bool(self._calls)

    def begin(self, unless: Callable[[], bool]) -> bool:
        """Wait for a turn and take it; False when `unless()` comes true before that. Pair it with `end`."""
        with self.lock:
            while not unless():
                if self._owner is None:
                    self._owner = threading.get_ident()
                    return True
                self.lock.wait()
            return False

    def end(self) -> None:
        """End this thread's turn, if it has one: make the calls that were left meanwhile and wake all who wait."""
        with self.lock:
            if self._owner == threading.get_ident():
                self._make_calls()
                self.lock.notify_all()

    def call(self, function: Callable[[], None]) -> None:
        """Make a call that changes the engine's state: now, or at the end of the turn in progress.

        `function` runs with the lock held, perhaps in another thread.
        """
        with self.lock:
            self._calls.append(function)
            if self._owner is None:
                self._owner = threading.get_ident()
                self._make_calls()

    def _make_calls(self) -> None:
        """Make all calls, those that they add included, and end the turn."""
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._owner = None
