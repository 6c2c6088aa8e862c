"""The flags of several engines, the resources of each engine, and the connection to Ray.

Engines on one machine share the machine's CPUs and memory evenly. Without a share, an engine would take most of the
memory that is available at its start. Only `connected` and `nodes_of_cluster` import Ray.
"""

import logging
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from nanovllm.capacity.machine import Machine
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan_check import check_start
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.errors import ConfigError, EngineError
from nanovllm.utils.arithmetic import format_bytes
from nanovllm.utils.options import check_options, option

RAY_ADDRESS_HELP = (
    "host:port of a running Ray cluster, or auto for the cluster of this machine; by default, a Ray that is needed is "
    "started on this machine alone and ends with the command"
)
MAX_ENGINES = 10_000
MAX_REPLICAS = 1024
_HOST_AND_PORT = re.compile(r"[^/]+:[0-9]{1,5}")
_JOB, _REPLICAS = "the job", "several engines (needs the extra ray)"  # groups of flags
CONNECT_S = 10.0
MAX_QUEUE_GAP = 16  # a replica with a cached prefix is not chosen if its queue exceeds the shortest by more than this
ROUTER = "nanovllm.entrypoints.cluster.service.PrefixRouter"
HEALTH_PERIOD_S = 2.0  # Serve replaces a replica after three bad answers
HEALTH_TIMEOUT_S = 30.0
DRAIN_CHECK_S = 0.5  # interval between a replaced replica's checks for open answers
MAX_STARTS = 3  # attempts to start a replica
MAX_SMALL_REQUESTS = 64  # open in one replica, besides those in its queue and its engine


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
        help="number of concurrent engines, each on tensor_parallel_size GPUs; by default, engines on all GPUs of the "
        "machine or cluster, or one engine on a CPU. One engine on this machine needs no Ray",
        group=_JOB,
        least=1,
        most=MAX_ENGINES,
    )
    document_column: str | None = option(
        None,
        help="column that names the document of a row; one engine answers all rows of a document, so that the rows "
        "share the document's KV",
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
        help="number of engines that answer requests, each on one GPU (or on tensor_parallel_size GPUs); by default, "
        "one engine in this process, without Ray",
        group=_REPLICAS,
        least=1,
        most=MAX_REPLICAS,
    )
    max_replicas: int | None = option(
        None,
        help="start up to this many replicas while more than max_num_seqs requests are open per replica, and end "
        "idle replicas; by default, num_replicas",
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


def needs_ray(options: BatchOptions, config: Config, num_gpus: int) -> str:
    """Return what makes a job need Ray, for a message, or "" if one engine on this machine runs the job.

    num_gpus: on this machine.
    """
    if options.ray_address is not None:
        return f"ray_address={options.ray_address!r}"
    if options.num_engines is not None:
        return f"num_engines={options.num_engines}" if options.num_engines > 1 else ""
    num_engines = num_gpus // config.tensor_parallel_size if config.device in ("auto", "cuda") else 1
    if num_engines <= 1:
        return ""
    return f"num_engines={num_engines}, the default on {num_gpus} GPUs (num_engines=1 does not need Ray),"


def check_engine(config: Config) -> None:
    """Raise ConfigError for an option that an engine in a replica cannot have."""
    if ":" in config.device:
        raise ConfigError(f"device={config.device!r} with num_replicas: Ray chooses the GPUs; give device='cuda'")
    if config.enable_cpu_offload and config.cpu_memory_gb is None:
        raise ConfigError(
            "enable_cpu_offload=True with num_replicas needs cpu_memory_gb: Ray reserves it for each replica, which "
            "would otherwise take most of the memory of its machine"
        )


# -- the connection to Ray ------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A machine of the cluster, as Ray counts it."""

    cpus: float
    gpus: float
    memory_bytes: float


@contextmanager
def connected(address: str | None, object_store_bytes: int) -> Iterator[None]:
    """Connect to the cluster at `address`, or start Ray on this machine, which is stopped at the end of the block.

    object_store_bytes: size of Ray's object store, if Ray is started on this machine. Raises ConfigError if no cluster
    answers at the address, and EngineError if Ray does not start on this machine.
    """
    import ray

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
    """Return the machines that are alive."""
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(each.get("CPU", 0), each.get("GPU", 0), each.get("memory", 0)) for each in resources]


def _check_answers(address: str) -> None:
    """Raise ConfigError if nothing listens at the address. Ray would try for minutes, and then end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: labels of a host name
        raise ConfigError(
            f"ray_address={address!r} cannot be reached: {error}; give the address that 'ray start --head' has printed"
        ) from error


# -- the resources of an engine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineNeeds:
    """The resources of one engine."""

    gpus: int
    cpus: int
    memory_bytes: int = 0
    engines_per_node: int = 1  # on the machine with the most engines

    def num_fitting(self, node: Node) -> int:
        """Return the number of engines with these needs for which a machine has room."""
        room = [(node.cpus, self.cpus), (node.gpus, self.gpus), (node.memory_bytes, self.memory_bytes)]
        return min(int(available // needed) for available, needed in room if needed)

    def describe(self) -> str:
        gpus = f"{self.gpus} GPUs, " if self.gpus else ""
        memory = f" and {format_bytes(self.memory_bytes)} of memory" if self.memory_bytes else ""
        return f"{gpus}{self.cpus} CPUs{memory}"


def default_num_engines(nodes: Sequence[Node], tensor_parallel_size: int, device: str) -> int:
    """Return the number of engines for which there are GPUs, or 1, so that `check_room` reports missing GPUs."""
    if device == "cpu":
        return 1
    return max(1, sum(int(node.gpus) // tensor_parallel_size for node in nodes))


def choose_device(given: str, nodes: Sequence[Node]) -> str:
    """Return the given device, or by default cuda if the cluster has GPUs and cpu otherwise. Raises ConfigError for a
    particular GPU.
    """
    if given == "auto":
        return "cuda" if any(node.gpus for node in nodes) else "cpu"
    if ":" in given:
        raise ConfigError(f"device={given!r} names one GPU, but Ray gives each engine its GPUs; use device='cuda'")
    return given


def plan_placement(nodes: Sequence[Node], num_engines: int, tensor_parallel_size: int, device: str) -> EngineNeeds:
    """Plan the resources of each engine. Raises ConfigError if the cluster can never run all engines at once.

    On GPUs, an engine has one CPU and another CPU for each rank. Without GPUs, the engines share all CPUs evenly,
    because Ray lets an engine compute with as many threads as it has CPUs. The memory is the largest even share of the
    machines' memory with which all engines have room.
    """
    if device == "cuda":
        needs = EngineNeeds(gpus=tensor_parallel_size, cpus=1 + tensor_parallel_size)
    else:
        needs = EngineNeeds(gpus=0, cpus=tensor_parallel_size)
        most = int(max((node.cpus for node in nodes), default=0))
        for cpus in range(most, tensor_parallel_size, -1):
            if _num_fitting(replace(needs, cpus=cpus), nodes) >= num_engines:
                needs = replace(needs, cpus=cpus)
                break
    check_room(needs, nodes, num_engines)
    shares = {int(node.memory_bytes / k) for node in nodes for k in range(1, needs.num_fitting(node) + 1)}
    options = (replace(needs, memory_bytes=share) for share in sorted(shares, reverse=True))
    needs = next(option for option in options if _num_fitting(option, nodes) >= num_engines)
    return replace(needs, engines_per_node=min(num_engines, max(map(needs.num_fitting, nodes))))


def check_room(needs: EngineNeeds, nodes: Sequence[Node], wanted: int, option: str = "num_engines") -> None:
    """Raise ConfigError if the cluster can never run `wanted` engines at once. option: the flag with this number."""
    fitting = _num_fitting(needs, nodes)
    if fitting < wanted:
        have = "; ".join(f"{n.cpus:g} CPUs, {n.gpus:g} GPUs, {format_bytes(n.memory_bytes)}" for n in nodes)
        lower = f"lower {option} to {fitting}" if fitting else "lower tensor_parallel_size or cpu_memory_gb"
        raise ConfigError(
            f"there is room for {fitting} of {option}={wanted}: each needs {needs.describe()}, and the "
            f"machines of the cluster have: {have or 'nothing'}; {lower}, or add machines"
        )


def _num_fitting(needs: EngineNeeds, nodes: Sequence[Node]) -> int:
    return sum(map(needs.num_fitting, nodes))


def sizes_within(memory_bytes: int, config: Config, machine: Machine) -> dict[str, Any]:
    """Return the options that keep an engine on `machine` within its share of the machine's memory.

    Raises ConfigError if the engine cannot start with its share, and CheckpointError if the model cannot be read.
    """
    model = config_without_weights(config.model, config.hf_overrides)
    model = model.quantized(config.quantization, config.quantize_head, config.tensor_parallel_size)
    plan = make_plan(config, model, replace(machine, host_bytes=min(machine.host_bytes, memory_bytes)))
    check_start(plan)
    sizes: dict[str, Any] = {}
    if config.enable_cpu_offload:
        sizes = {"num_cpu_blocks": plan.num_cpu_blocks, "cpu_memory_gb": None}
    if machine.gpu_bytes is not None:  # the plan has counted the table in the engine's share
        sizes["embedding_on_cpu"] = plan.model.embedding_on_cpu
    if machine.gpu_bytes is None:  # weights and blocks share CPU memory, and the blocks' pages fill up with use
        name = "num_gpu_blocks" if config.enable_cpu_offload else "num_kvcache_blocks"
        sizes |= {name: plan.num_gpu_blocks, "kvcache_block_size": config.block_size}
    return sizes


# -- replicas ------------------------------------------------------------------------------------------------------


def replica_needs(config: Config, service: ServiceOptions, nodes: Sequence[Node]) -> EngineNeeds:
    """Return the resources of one replica."""
    on_gpu = choose_device(config.device, nodes) == "cuda"
    memory_gb = config.cpu_memory_gb if config.enable_cpu_offload else None
    return EngineNeeds(
        gpus=config.tensor_parallel_size if on_gpu else 0,
        cpus=service.replica_cpus,
        memory_bytes=int((memory_gb or 0) * 2**30),
    )


def deployment_options(
    config: Config, options: ServerOptions, service: ServiceOptions, needs: EngineNeeds
) -> dict[str, Any]:
    """Return the options of the Serve deployment.

    Ray shows a replica only its own GPUs. The queue of each replica (AdmissionQueue), and not Serve, limits how many
    requests wait.
    """
    number: dict[str, Any] = {"num_replicas": service.num_replicas}
    if service.max_replicas not in (None, service.num_replicas):
        scaling = {"min_replicas": service.num_replicas, "max_replicas": service.max_replicas}
        number = {"autoscaling_config": scaling | {"target_ongoing_requests": config.max_num_seqs}}
    return {
        **number,
        "ray_actor_options": {
            "num_cpus": needs.cpus,
            "num_gpus": needs.gpus,
            **({"memory": needs.memory_bytes} if needs.memory_bytes else {}),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(needs.cpus)}},
        },
        "max_ongoing_requests": options.max_queue + config.max_num_seqs + MAX_SMALL_REQUESTS,
        "max_queued_requests": options.max_queue,
        "graceful_shutdown_timeout_s": options.drain_s,
        "graceful_shutdown_wait_loop_s": DRAIN_CHECK_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": MAX_STARTS,
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
        "request_router_config": {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"max_queue_gap": min(MAX_QUEUE_GAP, config.max_num_seqs)},
        },
    }
