"""The option `ray_address` of both commands that use a cluster. Importing this does not import Ray."""

import re

from nanovllm.errors import ConfigError

RAY_ADDRESS_HELP = (
    "host:port of a running Ray cluster, or auto for the one that this machine is part of; by default, Ray is started "
    "on this machine alone and ends with the command"
)

_HOST_AND_PORT = re.compile(r"[^/]+:[0-9]{1,5}")


def check_ray_address(address: str | None) -> None:
    """Raise ConfigError unless the option has the form of an address."""
    if address not in (None, "auto") and not _HOST_AND_PORT.fullmatch(address or ""):
        raise ConfigError(
            f"ray_address={address!r} must be host:port or auto; run the command on a machine of the cluster (ray job "
            "submit does that), not through Ray's client"
        )
