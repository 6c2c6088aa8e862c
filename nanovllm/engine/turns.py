"""Turns: let one thread at a time run a step of the engine. Other threads queue calls for it, or wait for outputs.

A step takes from a millisecond to a second, so no thread holds a lock while one runs. `lock` guards only short
sections: beginning and ending a turn, queueing calls, and delivering outputs. A thread that waits for outputs is woken
after every step, whichever thread ran it. If its own outputs have not arrived, it takes the next turn itself. A thread
that needs a turn of its own, for example to close the engine, goes before those that only wait for outputs.
"""

import threading
from collections import deque
from collections.abc import Callable

from nanovllm.errors import EngineError


class Turns:
    def __init__(self) -> None:
        # Reentrant: any allocation may run the garbage collector, which may close an abandoned stream; closing it
        # aborts its request, which takes this lock
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # `with lock` is safe from Ctrl-C, `with _changed` is not
        self._owner: int | None = None  # the thread whose turn it is
        self._queue: deque[object] = deque()  # tickets of threads that need a turn, first come, first served
        self._calls: deque[Callable[[], None]] = deque()

    def begin(self, unless: Callable[[], bool] | None = None) -> bool:
        """Wait for a turn and take it. Returns False, without a turn, if `unless()` becomes true first.

        Without `unless`, the thread queues for a turn of its own. Call `end` afterwards, whatever this returns or
        raises. Raises EngineError if this thread already has the turn.
        """
        ticket = object()
        with self.lock:
            if self._owner == threading.get_ident():
                raise EngineError(
                    "this thread is already running a step of the engine, perhaps interrupted by a signal handler; "
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
                    self._changed.notify_all()  # wake the next in the queue in case this thread leaves without a turn

    def end(self) -> None:
        """End this thread's turn, if it has one: make the calls queued meanwhile, and wake all waiting threads."""
        with self.lock:
            if self._owner == threading.get_ident():
                self._make_calls()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function`, which changes the engine's state, now or at the end of the turn in progress.

        It runs with the lock held, and perhaps in another thread.
        """
        with self.lock:
            self._calls.append(function)
            if self._owner is None:
                self._owner = threading.get_ident()
                self._make_calls()

    def _make_calls(self) -> None:
        """Make all queued calls, including any that these add, and end the turn, even if one of them raises."""
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._owner = None
            self._changed.notify_all()
