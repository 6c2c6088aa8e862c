"""Two tiers of tests: `make test` runs those not marked `slow` with few examples, `make test-all` everything."""

import os

RUNS_ALL = os.environ.get("NANOVLLM_TEST_TIER") == "all"  # conftest.py sets it


def examples(count: int) -> int:
    """Return the number of examples of a property test: `count` in `make test-all`, a twelfth of it in `make test`."""
    return count if RUNS_ALL else max(5, count // 12)
