"""A small Ray cluster on this machine, which is gone at the end, whatever happens in between."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

HEAD = {"num_cpus": 16, "object_store_memory": 100_000_000, "include_dashboard": False}


@contextmanager
def temporary_ray() -> Iterator[Path]:
    """Ray keeps its files in a short directory of its own. No script finds another Ray of this machine."""
    directory = Path(tempfile.mkdtemp(prefix="nvr", dir="/tmp"))  # the names of sockets have at most 107 bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(directory))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # otherwise one process for each CPU that is claimed
        patch.delenv("RAY_ADDRESS", raising=False)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def small_cluster(num_gpus: int = 0) -> Iterator[Cluster]:
    """One node, to which this process is connected, as are scripts that it starts. The GPUs need not exist."""
    with temporary_ray(), pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(initialize_head=True, head_node_args=HEAD | {"num_gpus": num_gpus})
        try:
            patch.setenv("RAY_ADDRESS", cluster.address)
            ray.init(address=cluster.address)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
