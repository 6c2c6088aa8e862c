"""A small Ray cluster on this machine, which is gone at the end, whatever happens in between."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from rank_backends import RankBackend
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


def ray_backend(cluster: Cluster) -> RankBackend:
    (raylet,) = cluster.head_node.all_processes["raylet"]
    unexpected = "rank 1 died unexpectedly. Ray says: The actor died"
    return RankBackend(
        name="ray",
        killed=unexpected,
        exited_with_3=unexpected,
        log_lines=r".*(INFO|WARNING) \w+\.py:\d+ -- |$",
        worker_pids=lambda: _rank_actors(raylet.process.pid),
    )


def _rank_actors(raylet_pid: int) -> set[int]:
    """The processes of rank actors that a raylet has started."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_text()
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == raylet_pid and command.startswith("ray::_RankActor"):
            found.add(int(name))
    return found
