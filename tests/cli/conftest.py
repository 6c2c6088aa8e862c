from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache, for a whole module, because the first engine compiles a kernel there."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory
