"""Waiting for what other threads and processes do. Limits only end a hang: a busy machine may delay anything."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

LIMIT_S = 240.0


def wait_until(condition: Callable[[], Value], what: str = "the condition to become true") -> Value:
    """Wait until `condition()` is true, and return its value. Raises AssertionError after LIMIT_S."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"waited too long for {what}"
        time.sleep(0.002)
    return value
