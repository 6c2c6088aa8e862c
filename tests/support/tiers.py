"""Two tiers of tests: `make test` runs those not marked `slow` with few examples, `make test-all` everything."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

RUNS_ALL = os.environ.get("NANOVLLM_TEST_TIER") == "all"  # conftest.py sets it

# On a busy machine, an example may take any time. Some need many draws. The examples are the same in every run, so that
# a change is blamed only for what it breaks; NANOVLLM_TEST_RANDOM=1 draws new ones
settings.register_profile(
    "patient",
    parent=settings.default,
    deadline=None,
    derandomize=os.environ.get("NANOVLLM_TEST_RANDOM", "0") == "0",
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
)
settings.load_profile("patient")


def examples(count: int) -> int:
    """Return the number of examples of a property test: `count` in `make test-all`, a twelfth of it in `make test`."""
    return count if RUNS_ALL else max(5, count // 12)


def tiered(values: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """Return parameters of a test: the values in `first` for `make test`, and all of them for `make test-all`."""
    values = list(values)
    assert all(value in values for value in first), "the first tier has some of the values"

    def slow(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

    return [value if value in first else slow(value) for value in values]
