"""The files test_ray_* need the extra ray. Their tests are marked `ray`, and collected only where that is asked for."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import nanovllm.entrypoints.cluster  # noqa: F401 (before the tests import Ray, as in the commands)

ON_RAY = "test_ray_"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_left_out = find_spec("ray") is None or "not ray" in config.option.markexpr
    return True if is_left_out and collection_path.name.startswith(ON_RAY) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith(ON_RAY):
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.timeout(1800))  # some take a minute and more even on a quiet machine
