"""docs/cluster.yaml is a file that `ray up` takes."""

from pathlib import Path

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER = Path(__file__).parent.parent.parent / "docs" / "cluster.yaml"


def test_cluster_file_is_valid() -> None:
    config = yaml.safe_load(CLUSTER.read_text())
    validate_config(prepare_config(config))
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
