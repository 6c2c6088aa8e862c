"""Functions run side by side, each in a thread of its own."""

import threading
from collections.abc import Callable

from waiting import LIMIT_S


def in_threads(*work: Callable[[], object]) -> None:
    """Run all; raises what one of them raised, and fails if one does not end."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
