"""Time that passes only when a test says so, and so is exact however busy the machine is."""

import threading
import time
from typing import Any

import pytest


class VirtualClock:
    """Takes the place of time.perf_counter. Each thread has its own time, which only `pass_time` in that thread moves.

    A thread begins at the time of the one that starts it. Whoever joins it has waited until its end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s: dict[threading.Thread, float] = {}
        monkeypatch.setattr(time, "perf_counter", self.now_s)
        start, join = threading.Thread.start, threading.Thread.join

        def start_now(thread: threading.Thread) -> None:
            self._now_s[thread] = self.now_s()
            start(thread)

        def join_at_end(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
            join(thread, *args, **kwargs)
            self._now_s[threading.current_thread()] = max(self.now_s(), self._now_s.get(thread, 0.0))

        monkeypatch.setattr(threading.Thread, "start", start_now)
        monkeypatch.setattr(threading.Thread, "join", join_at_end)

    def now_s(self) -> float:
        return self._now_s.get(threading.current_thread(), 0.0)

    def pass_time(self, seconds: float) -> None:
        self._now_s[threading.current_thread()] = self.now_s() + seconds
