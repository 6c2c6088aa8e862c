"""Times the phases of a longer piece of work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by phase, in the order in which the phases first began. A phase can occur several times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start_s

    def __str__(self) -> str:
        """Return the phases, such as `model 1.2 s, kernels 3.4 s`."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
