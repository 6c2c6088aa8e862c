"""Tests that run on an event loop of their own."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from waiting import LIMIT_S

T = TypeVar("T")
P = ParamSpec("P")


def run(test: Awaitable[T]) -> T:
    """Run on a new loop. Also fails if a callback of the loop fails, which asyncio only logs."""
    failures: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        result = await asyncio.wait_for(test, LIMIT_S)
        await asyncio.sleep(0.01)
        return result

    result = asyncio.run(watched())
    assert not failures
    return result


def on_a_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test. Tasks that it leaves are cancelled."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return run_test


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the condition as long as the test may run."""
    while not condition():
        await asyncio.sleep(0.002)
