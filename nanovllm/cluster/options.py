"""Options of the commands that use a cluster. Importing them does not import Ray."""

import re
from dataclasses import dataclass

from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.utils.options import check_options, option

RAY_ADDRESS_HELP = (
    "host:port of a running Ray cluster, or auto for the one that this machine is part of; by default, Ray is started "
    "on this machine alone and ends with the command"
)
MAX_REPLICAS = 1024
_HOST_AND_PORT = re.compile(r"[^/]+:[0-9]{1,5}")
_JOB, _REPLICAS = "the job", "several engines (needs the extra ray)"  # groups of flags


def check_ray_address(address: str | None) -> None:
    """Raise ConfigError unless the option has the form of an address."""
    if address not in (None, "auto") and not _HOST_AND_PORT.fullmatch(address or ""):
        raise ConfigError(
            f"ray_address={address!r} must be host:port or auto; run the command on a machine of the cluster (ray job "
            "submit does that), not through Ray's client"
        )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The flags of `nanovllm batch` that concern the cluster and the rows. A bad value raises ConfigError."""

    num_engines: int | None = option(
        None,
        help="engines that run at once, each on tensor_parallel_size GPUs; by default, as many as the cluster has GPUs "
        "for, and one on a CPU",
        group=_JOB,
        least=1,
        most=10_000,
    )
    document_column: str | None = option(
        None,
        help="column that names the document that a row asks about; rows of one document meet in one engine, one after "
        "another, and share the document's KV",
        group=_JOB,
    )
    ray_address: str | None = option(None, help=RAY_ADDRESS_HELP, group=_JOB)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.document_column == "":
            raise ConfigError("document_column='' must be the name of a column")
        check_ray_address(self.ray_address)


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The flags of `nanovllm serve` that concern replicas. A bad value raises ConfigError."""

    num_replicas: int | None = option(
        None,
        help="number of engines that answer requests, each on a GPU of its own (or tensor_parallel_size GPUs); by "
        "default, one engine in this process, without Ray",
        group=_REPLICAS,
        least=1,
        most=MAX_REPLICAS,
    )
    max_replicas: int | None = option(
        None,
        help="start more replicas while more than max_num_seqs requests are open for each, up to so many, and end "
        "them again; by default, num_replicas",
        group=_REPLICAS,
        least=1,
        most=MAX_REPLICAS,
    )
    replica_cpus: int = option(
        1, help="CPU cores that each replica reserves, and threads of its work on the CPU", group=_REPLICAS, least=1
    )
    ray_address: str | None = option(None, help=RAY_ADDRESS_HELP, group=_REPLICAS)

    def __post_init__(self) -> None:
        if self.num_replicas is None:
            for name, default in (("max_replicas", None), ("replica_cpus", 1), ("ray_address", None)):
                if getattr(self, name) != default:
                    raise ConfigError(f"{name}={getattr(self, name)!r} needs num_replicas; add num_replicas")
            return
        check_options(self, ConfigError)
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(f"max_replicas={self.max_replicas} must be num_replicas={self.num_replicas} or more")
        check_ray_address(self.ray_address)


def check_engine(config: Config) -> None:
    """Raise ConfigError for options of an engine that replicas cannot have."""
    if ":" in config.device:
        raise ConfigError(f"device={config.device!r} with num_replicas: Ray chooses the GPUs; give device='cuda'")
    if config.enable_cpu_offload and config.cpu_memory_gb is None:
        raise ConfigError(
            "enable_cpu_offload=True with num_replicas needs cpu_memory_gb: Ray reserves it for each replica, which "
            "would otherwise take most of the memory of its machine"
        )
