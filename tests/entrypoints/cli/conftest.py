from collections.abc import Iterator
from pathlib import Path

import pytest
from private_cache import use_private_cache


@pytest.fixture(scope="module")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache without the built-in model, for a whole module."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        use_private_cache(patch, directory)
        yield directory
