"""StreamLog: which work of a stream may still be running.

A stream runs its work in order, so once an event is done, all that were recorded before it are done too. The log
numbers a stream's events and lets go of those that are known to be done. Whoever may have to wait for one later keeps
its number, for which no CUDA event has to stay alive.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from nanovllm.kvcache.streams import Event


class StreamLog:
    """Events of one stream, in the order in which they were recorded, numbered from 1. Number 0 stands for no event."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()  # those not known to be done
        self._num_done = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> int:
        """The number of an event that was just recorded. Hot."""
        self._events.append(event)
        return self._num_done + len(self._events)

    def find(self, number: int) -> Event | None:
        """The event to wait for; None when it is known to be done. Hot."""
        return self._events[number - self._num_done - 1] if number > self._num_done else None

    def forget_done(self, is_done: Callable[[Event], bool]) -> None:
        """Let go of the events that are done by now, which takes the logarithm of their number in calls."""
        num_done = bisect_left(self._events, True, key=lambda event: not is_done(event))
        for _ in range(num_done):
            self._events.popleft()
        self._num_done += num_done
