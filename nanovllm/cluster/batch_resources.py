"""What each engine of a job takes of a cluster: GPUs, CPUs and memory. Arithmetic only; nothing here asks Ray.

Engines that share a machine share its CPUs and its memory evenly. By default an engine would take most of the memory
that is available when it starts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nanovllm.capacity.machine import Machine
from nanovllm.capacity.plan import make_plan
from nanovllm.capacity.plan_check import check_start
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import format_bytes

RANK_BYTES = 2**30  # of a rank's process, besides pools and weights; a rank on the CPU took 0.4 GiB


class Node(NamedTuple):
    """A machine of the cluster, as Ray counts it."""

    cpus: float
    gpus: float
    memory_bytes: float


@dataclass(frozen=True)
class EngineNeeds:
    """The resources of one engine, and the options that make it keep to them."""

    gpus: int
    cpus: int
    memory_bytes: int = 0
    engines_per_node: int = 1  # on the machine that has most of them
    options: Mapping[str, Any] = field(default_factory=dict)

    def num_fitting(self, node: Node) -> int:
        """How many such engines a machine has room for."""
        room = [(node.cpus, self.cpus), (node.gpus, self.gpus), (node.memory_bytes, self.memory_bytes)]
        return min(int(available // needed) for available, needed in room if needed)

    def describe(self) -> str:
        gpus = f"{self.gpus} GPUs, " if self.gpus else ""
        memory = f" and {format_bytes(self.memory_bytes)} of memory" if self.memory_bytes else ""
        return f"{gpus}{self.cpus} CPUs{memory}"


def default_num_engines(nodes: Sequence[Node], tensor_parallel_size: int, device: str) -> int:
    """As many as there are GPUs for. At least one, so that the check can say what is missing."""
    if device == "cpu":
        return 1
    return max(1, sum(int(node.gpus) // tensor_parallel_size for node in nodes))


def choose_device(given: str, nodes: Sequence[Node]) -> str:
    """cpu or cuda: what was given, or the GPUs if the cluster has any. Raises ConfigError for a particular GPU."""
    if given == "auto":
        return "cuda" if any(node.gpus for node in nodes) else "cpu"
    if ":" in given:
        raise ConfigError(f"device={given!r} names one GPU, but Ray gives each engine its GPUs; use device='cuda'")
    return given


def plan_placement(nodes: Sequence[Node], num_engines: int, tensor_parallel_size: int, device: str) -> EngineNeeds:
    """The GPUs and CPUs of each engine. Raises ConfigError if the cluster can never run all of them at once.

    On GPUs, an engine has a CPU for itself and one for each rank. On CPUs it has as many as there are for each engine,
    because Ray lets it compute with that many threads.
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
    return replace(needs, engines_per_node=min(num_engines, max(map(needs.num_fitting, nodes))))


def check_room(needs: EngineNeeds, nodes: Sequence[Node], num_engines: int) -> None:
    """Raise ConfigError if the cluster can never run so many engines at once."""
    fitting = _num_fitting(needs, nodes)
    if fitting < num_engines:
        have = "; ".join(f"{n.cpus:g} CPUs, {n.gpus:g} GPUs, {format_bytes(n.memory_bytes)}" for n in nodes)
        lower = f"lower num_engines to {fitting}" if fitting else "lower tensor_parallel_size or cpu_memory_gb"
        raise ConfigError(
            f"there is room for {fitting} of num_engines={num_engines}: each needs {needs.describe()}, and the "
            f"machines of the cluster have: {have or 'nothing'}; {lower}, or add machines"
        )


def _num_fitting(needs: EngineNeeds, nodes: Sequence[Node]) -> int:
    return sum(map(needs.num_fitting, nodes))


def plan_memory(
    needs: EngineNeeds, config: Config, memory_bytes: float, find_machine: Callable[[Config], Machine]
) -> EngineNeeds:
    """The same needs with memory, and with the sizes that keep each engine to its share of a machine's memory.

    Called on a machine of the kind that engines will run on. `memory_bytes`: what Ray may give away there. Raises
    ConfigError if an engine cannot start with its share, and CheckpointError if the model cannot be read.
    """
    model = ModelConfig.without_weights(config.model, config.hf_overrides)
    machine = find_machine(config)
    share = int(min(machine.host_bytes, memory_bytes) / needs.engines_per_node)
    plan = make_plan(config, model, replace(machine, host_bytes=share))
    check_start(plan)
    options: dict[str, Any] = {}
    num_bytes = plan.cpu_pool_bytes + RANK_BYTES * config.tensor_parallel_size
    if config.enable_cpu_offload:
        options = {"num_cpu_blocks": plan.num_cpu_blocks, "cpu_memory_gb": None}
    if machine.gpu_bytes is None:  # the weights and all blocks are in the same memory, which fills up with use
        name = "num_gpu_blocks" if config.enable_cpu_offload else "num_kvcache_blocks"
        options |= {name: plan.num_gpu_blocks, "kvcache_block_size": config.block_size}
        num_bytes += (plan.memory.weight_bytes + plan.memory.kv_bytes) * config.tensor_parallel_size
    return replace(needs, memory_bytes=min(num_bytes, share), options=options)
