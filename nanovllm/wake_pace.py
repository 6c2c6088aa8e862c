"""WakePace: how long an event loop rests between waking the readers of results."""

import time
from collections.abc import Callable

MAX_SHARE = 0.25  # of the event loop's time, at most, goes into passing on results
MAX_REST_S = 0.1  # between two dispatches; a reader that takes longer than that share is not made up for
MAX_SAVED_S = 0.02  # of that share, which was not used; enough for some hundred readers


class WakePace:
    """Keeps the time that is spent on passing on results below a share of all time.

    What was not used is saved, up to a limit. So after a long step, during which nobody got a token, all readers get
    theirs at once.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._saved_s = 0.0  # negative: more than the share was spent
        self._last_s = now_s()

    def rest_s(self, spent_s: float) -> float:
        """How long to rest after `spent_s` of passing on results."""
        now_s = self._now_s()
        self._saved_s = min(self._saved_s + (now_s - self._last_s) * MAX_SHARE, MAX_SAVED_S) - spent_s
        self._last_s = now_s
        self._saved_s = max(self._saved_s, -MAX_REST_S * MAX_SHARE)
        return max(0.0, -self._saved_s / MAX_SHARE)
