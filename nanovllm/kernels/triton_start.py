"""What Triton does once in every process before its first kernel, done ahead of that in threads.

Triton hashes its own files, half a gigabyte, for the keys of its cache. And it compiles a C module that loads kernels,
unless its cache has it. Each takes half a second or more on a machine that has just started, and neither needs Python's
GIL for most of that time.
"""

import importlib.util
import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger("nanovllm")


class TritonStart:
    """Starts at once. A kernel that is launched before `wait` has returned does the same work again."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
            return
        for task in (_hash_triton, _load_driver):
            self._threads.append(threading.Thread(target=_attempt, args=(task,), name=f"triton{task.__name__}"))
            self._threads[-1].start()

    def wait(self) -> None:
        while self._threads:
            self._threads.pop().join()


def _attempt(task: Callable[[], object]) -> None:
    try:
        task()
    except Exception as error:  # the first launch tries again, and says what is wrong
        logger.debug("Triton is prepared at its first launch: %r", error)


def _hash_triton() -> None:
    from triton.runtime.cache import triton_key

    triton_key()  # is kept


def _load_driver() -> None:
    from triton.runtime import driver

    _ = driver.active.utils  # reading the first attribute makes Triton build the module
