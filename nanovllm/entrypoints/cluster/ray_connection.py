"""The connection of a command to Ray: to a running cluster, or to one that ends with the command."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from nanovllm.entrypoints.cluster.resources import Node
from nanovllm.errors import ConfigError, EngineError

CONNECT_S = 10.0


@contextmanager
def connected(address: str | None, object_store_bytes: int) -> Iterator[None]:
    """Connect to the cluster at `address`, or start Ray on this machine, which ends with the block.

    object_store_bytes: size of Ray's object store, if it is started here. Raises ConfigError if no
    cluster answers there, EngineError if Ray does not start here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # warns of its default
    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {"address": "local", "include_dashboard": False, "object_store_memory": object_store_bytes}
    elif address != "auto":
        _check_answers(address)
    try:
        ray.init(logging_level=logging.WARNING, **options)
    except (ConnectionError, RuntimeError) as error:
        if address is None:
            raise EngineError(f"Ray has not started on this machine: {error}") from error
        raise ConfigError(
            f"ray_address={address!r} cannot be used: {error}; if this machine is not one of its nodes, run "
            "'ray start --address=HOST:PORT' here"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def nodes_of_cluster() -> list[Node]:
    """The machines that are alive."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(each.get("CPU", 0), each.get("GPU", 0), each.get("memory", 0)) for each in resources]


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes, and then end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: labels of a host name
        raise ConfigError(
            f"ray_address={address!r} cannot be reached: {error}; give the address that 'ray start --head' has printed"
        ) from error
