"""Options of the commands that use a cluster. Importing them does not import Ray."""

import re
from dataclasses import dataclass, fields

from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.utils.options import check_options, option

RAY_ADDRESS_HELP = (
    "host:port of a running Ray cluster, or auto for the one that this machine is part of; by default, Ray is started "
    "on this machine alone and ends with the command"
)
MAX_ENGINES = 10_000
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
    """Flags of `nanovllm batch` that concern the cluster and the rows. A bad value raises ConfigError."""

    num_engines: int | None = option(
        None,
        help="engines that run at once, each on tensor_parallel_size GPUs; by default, as many as the cluster has GPUs "
        "for, and one on a CPU",
        group=_JOB,
        least=1,
        most=MAX_ENGINES,
    )
    document_column: str | None = option(
        None,
        help="column that names the document that a row asks about; one engine answers all rows of a document, one "
        "after another, so that they share the document's KV",
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
    """Flags of `nanovllm serve` that concern replicas. A bad value raises ConfigError."""

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
        help="start up to this many replicas while more than max_num_seqs requests are open for each, and end them "
        "again; by default, num_replicas",
        group=_REPLICAS,
        least=1,
        most=MAX_REPLICAS,
    )
    replica_cpus: int = option(
        1, help="CPU cores that each replica reserves, and threads of its work on the CPU", group=_REPLICAS, least=1
    )
    ray_address: str | None = option(None, help=RAY_ADDRESS_HELP, group=_REPLICAS)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.num_replicas is None:
            for each in fields(self):
                if (value := getattr(self, each.name)) != each.default:
                    raise ConfigError(f"{each.name}={value!r} needs num_replicas; add num_replicas")
        elif self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(
                f"max_replicas={self.max_replicas} must be between num_replicas={self.num_replicas} and {MAX_REPLICAS}"
            )
        check_ray_address(self.ray_address)


def check_engine(config: Config) -> None:
    """Raise ConfigError for an option that an engine in a replica cannot have."""
    if ":" in config.device:
        raise ConfigError(f"device={config.device!r} with num_replicas: Ray chooses the GPUs; give device='cuda'")
    if config.enable_cpu_offload and config.cpu_memory_gb is None:
        raise ConfigError(
            "enable_cpu_offload=True with num_replicas needs cpu_memory_gb: Ray reserves it for each replica, which "
            "would otherwise take most of the memory of its machine"
        )
