"""Signals and ends of processes: Ctrl-C interrupts between steps, never inside a step, SIGTERM ends a program in order,
and a child process ends with its parent.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class HeldInterrupts:
    """Holds the SIGINTs that arrived inside a `deferred_interrupt` block."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, FrameType | None]] = []
        self.second_is_due = False

    @contextmanager
    def second_acts_at_once(self) -> Iterator[None]:
        """Let a second Ctrl-C end work that may hang. Further Ctrl-Cs are held, so that cleaning up can finish."""
        self.second_is_due = True
        try:
            yield
        finally:
            self.second_is_due = False


@contextmanager
def deferred_interrupt() -> Iterator[HeldInterrupts]:
    """Hold SIGINT back until the end of the block, then raise KeyboardInterrupt.

    A step that is interrupted halfway would leave copies and counters inconsistent. Only the main thread receives
    signals; in other threads, `deferred_interrupt` does nothing.
    """
    held = HeldInterrupts()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored, or handled outside Python
        yield held
        return

    def hold(signum: int, frame: FrameType | None) -> None:
        held.pending.append((signum, frame))
        if held.second_is_due and len(held.pending) == 2:
            previous(signum, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, previous)
    if held.pending:
        previous(*held.pending[0])


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that the program cleans up and ends with exit status 143."""

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def end_with_parent() -> None:
    """Start a thread that ends this child process as soon as its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child"

    def end() -> NoReturn:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
