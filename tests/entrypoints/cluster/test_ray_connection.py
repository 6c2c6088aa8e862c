"""The connection of a command to Ray, and docs/cluster.yaml, a file that `ray up` takes."""

from pathlib import Path

import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.exceptions import RaySystemError
from ray_cluster import temporary_ray

from nanovllm.entrypoints.cluster.resources import connected
from nanovllm.errors import ConfigError

CLUSTER = Path(__file__).parents[3] / "docs" / "cluster.yaml"


def test_address_that_nobody_answers_is_refused() -> None:
    for address in ("127.0.0.1:1", "10..0.1:6379", "x" * 70 + ":6379", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="cannot be reached"), connected(address, object_store_bytes=2**27):
            pass


def test_after_the_connection_no_call_starts_ray_again() -> None:
    """Threads of Ray Data may outlive the block, and the next job could not connect."""
    with temporary_ray():
        with connected(None, object_store_bytes=80 * 2**20):
            ray.put(0)
        with pytest.raises(RaySystemError):
            ray.put(0)
        assert not ray.is_initialized()


def test_cluster_file_is_valid() -> None:
    config = yaml.safe_load(CLUSTER.read_text())
    validate_config(prepare_config(config))
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
