"""Turns: one thread at a time runs a step of the engine; the others leave it calls, or wait for what it brings.

A step takes from a millisecond to a second, so nobody holds a lock for its length. `lock` guards short sections only:
beginning and ending a turn, the calls left meanwhile, and the outputs that a step delivers. A thread that waits for
outputs is woken after every step, whoever ran it, and takes the next turn itself if its own have not come. A thread
that needs a turn of its own, to close the engine say, gets it before those that only wait for outputs.
"""

import threading
from collections import deque
from collections.abc import Callable

from nanovllm.errors import EngineError


class Turns:
    def __init__(self) -> None:
        # Reentrant: the garbage collector may close an abandoned stream, which aborts its request, at any allocation
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # `with lock` is safe from Ctrl-C, `with _changed` is not
        self._owner: int | None = None  # the thread whose turn it is
        self._queue: deque[object] = deque()  # of threads that need a turn, first come, first served
        self._calls: deque[Callable[[], None]] = deque()

    def begin(self, unless: Callable[[], bool] | None = None) -> bool:
        """Wait for a turn and take it; False when `unless()` comes true before that. None: nothing else will do.

        Whatever it returns or raises, `end` must follow. Raises EngineError in the middle of this thread's own turn.
        """
        ticket = object()
        with self.lock:
            if self._owner == threading.get_ident():
                raise EngineError(
                    "a step of the engine is running in this thread, interrupted by a signal handler perhaps; "
                    "call the engine again after the step"
                )
            if unless is None:
                self._queue.append(ticket)
            try:
                while unless is None or not unless():
                    if self._owner is None and (not self._queue or self._queue[0] is ticket):
                        self._owner = threading.get_ident()
                        return True
                    self._changed.wait()
                return False
            finally:
                if unless is None:
                    self._queue.remove(ticket)
                    self._changed.notify_all()  # the next in the queue, should this one leave without a turn

    def end(self) -> None:
        """End this thread's turn, if it has one: make the calls that were left meanwhile and wake all who wait."""
        with self.lock:
            if self._owner == threading.get_ident():
                self._make_calls()

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
        """Make all calls, those that they add included, and end the turn, also when one of them raises."""
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._owner = None
            self._changed.notify_all()
