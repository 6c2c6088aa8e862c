"""The ranks of these tests are spawned processes. tests/cluster/test_ray_executor.py runs the same tests with Ray."""

import pytest
from rank_backends import MP, RankBackend


@pytest.fixture(scope="session")
def backend() -> RankBackend:
    return MP
