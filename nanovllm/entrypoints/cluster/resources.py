"""The GPUs, CPUs and memory that Ray is asked for: of the engines of a job, and of the replicas of a service.

Arithmetic only; nothing here asks Ray. Engines that share a machine share its CPUs and its memory evenly. By default an
engine would take most of the memory that is available when it starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nanovllm.capacity.machine import Machine
from nanovllm.capacity.plan import make_plan
from nanovllm.capacity.plan_check import check_start
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.entrypoints.cluster.options import ServiceOptions
from nanovllm.entrypoints.cluster.routing import MAX_QUEUE_GAP
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import format_bytes

ROUTER = "nanovllm.entrypoints.cluster.service.PrefixRouter"
HEALTH_PERIOD_S = 2.0  # Serve replaces a replica after three bad answers
HEALTH_TIMEOUT_S = 30.0
DRAIN_CHECK_S = 0.5  # interval at which a replica that is being replaced checks for open answers
MAX_STARTS = 3  # attempts to start a replica
MAX_SMALL_REQUESTS = 64  # open in one replica, besides those in its queue and its engine


class Node(NamedTuple):
    """A machine of the cluster, as Ray counts it."""

    cpus: float
    gpus: float
    memory_bytes: float


@dataclass(frozen=True)
class EngineNeeds:
    """The resources of one engine."""

    gpus: int
    cpus: int
    memory_bytes: int = 0
    engines_per_node: int = 1  # on the machine that has most of them

    def num_fitting(self, node: Node) -> int:
        """Return how many such engines a machine has room for."""
        room = [(node.cpus, self.cpus), (node.gpus, self.gpus), (node.memory_bytes, self.memory_bytes)]
        return min(int(available // needed) for available, needed in room if needed)

    def describe(self) -> str:
        gpus = f"{self.gpus} GPUs, " if self.gpus else ""
        memory = f" and {format_bytes(self.memory_bytes)} of memory" if self.memory_bytes else ""
        return f"{gpus}{self.cpus} CPUs{memory}"


def default_num_engines(nodes: Sequence[Node], tensor_parallel_size: int, device: str) -> int:
    """Return how many engines there are GPUs for, and at least one, so that the check can say what is missing."""
    if device == "cpu":
        return 1
    return max(1, sum(int(node.gpus) // tensor_parallel_size for node in nodes))


def choose_device(given: str, nodes: Sequence[Node]) -> str:
    """Return cpu or cuda: as given, or cuda if the cluster has GPUs. Raises ConfigError for a particular GPU."""
    if given == "auto":
        return "cuda" if any(node.gpus for node in nodes) else "cpu"
    if ":" in given:
        raise ConfigError(f"device={given!r} names one GPU, but Ray gives each engine its GPUs; use device='cuda'")
    return given


def plan_placement(nodes: Sequence[Node], num_engines: int, tensor_parallel_size: int, device: str) -> EngineNeeds:
    """Plan the resources of each engine. Raises ConfigError if the cluster can never run all engines at once.

    On GPUs, an engine has a CPU for itself and one for each rank. Without GPUs, the engines share all CPUs evenly,
    because Ray lets an engine compute with as many threads as it has CPUs. The memory is the largest even share of the
    machines with which all engines have room.
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
    """Raise ConfigError if the cluster can never run as many engines at once as the option wants."""
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
    model = ModelConfig.without_weights(config.model, config.hf_overrides).quantized(config.quantization)
    plan = make_plan(config, model, replace(machine, host_bytes=min(machine.host_bytes, memory_bytes)))
    check_start(plan)
    sizes: dict[str, Any] = {}
    if config.enable_cpu_offload:
        sizes = {"num_cpu_blocks": plan.num_cpu_blocks, "cpu_memory_gb": None}
    if machine.gpu_bytes is None:  # the weights and all blocks are in the same memory, which fills up with use
        name = "num_gpu_blocks" if config.enable_cpu_offload else "num_kvcache_blocks"
        sizes |= {name: plan.num_gpu_blocks, "kvcache_block_size": config.block_size}
    return sizes


# -- replicas ------------------------------------------------------------------------------------------------------


def replica_needs(config: Config, service: ServiceOptions, nodes: Sequence[Node]) -> EngineNeeds:
    """The resources of one replica."""
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
    """The options of the Serve deployment.

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
