"""StreamLog: which work of a stream may still be running.

A stream runs its work in order, so once an event is done, everything recorded before it is done too. Code that may have
to wait for some work later remembers the number of its batch. Of several batches only the newest matters. The log keeps
an event only until it is known to be done.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from nanovllm.kvcache.transfer.streams import Event


class StreamLog:
    """The events of one stream, whose work comes in batches. A batch has one event per layer, in the order of layers.

    Batches are numbered from 1. The number 0 stands for no work.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._events: deque[Event] = deque()  # the newest ones, which are not known to be done
        self._num_done = 0

    def __len__(self) -> int:
        return len(self._events)

    @property
    def next_batch(self) -> int:
        """The number of the batch that begins now. The batch before it must have the events of all its layers."""
        num_batches, num_in_last = divmod(self._num_done + len(self._events), self._num_layers)
        assert not num_in_last, f"the last batch has the events of {num_in_last} of {self._num_layers} layers"
        return num_batches + 1

    def add(self, event: Event, num_layers: int = 1) -> None:
        """Add an event that was just recorded. It stands for the next `num_layers` layers of the batch. Hot."""
        self._events.extend([event] * num_layers)

    def find(self, batch: int, layer: int) -> Event | None:
        """The event of a layer of a batch, or None if it is known to be done. Hot."""
        index = (batch - 1) * self._num_layers + layer - self._num_done
        return self._events[index] if index >= 0 else None

    def forget_done(self, is_done: Callable[[Event], bool]) -> None:
        """Drop the events that are done by now. They finish in order, so a binary search finds them in few calls."""
        num_done = bisect_left(self._events, True, key=lambda event: not is_done(event))
        for _ in range(num_done):
            self._events.popleft()
        self._num_done += num_done
