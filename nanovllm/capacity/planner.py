"""The planner: decides how many blocks an engine gets on a machine, and so makes its plan (plan.py).

A plan has three uses. The engine does not start if `plan_check.check_start` refuses its plan. With offload, the engine
logs its plan once it has measured the link rate. `nanovllm plan` prints a plan without loading a model. This is
arithmetic only: it loads neither torch nor weights.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace

from nanovllm.capacity.device_memory import device_memory
from nanovllm.capacity.gpus import find_gpu
from nanovllm.capacity.machine import Machine
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.core.kv_spec import KVCacheSpec, StagingSizes, kv_cache_spec
from nanovllm.core.step_limits import max_model_len
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import ceil_div
from nanovllm.utils.options import option

MAX_HOST_SHARE = 0.7  # fraction of the available memory; limits a CPU pool whose size the user left open

SHORT_SEQUENCE_TOKENS = 1024  # prompt and answer of a short sequence, for sizing a CPU pool
_WORK, _MACHINE = "the work", "the machine, if not this one"  # groups
MAX_OPTION = 10**9  # tokens, sequences, GiB, GB/s: beyond any machine; bounds the loop over the chunks of a context


def make_plan(
    config: Config,
    model: ModelConfig,
    machine: Machine,
    *,
    context: int | None = None,
    num_sequences: int = 1,
    num_gpu_blocks: int | None = None,
    staging: StagingSizes = StagingSizes(),
) -> CapacityPlan:
    """The plan of an engine with these options that runs `num_sequences` sequences of `context` tokens together.

    `context` defaults to max_model_len. `num_gpu_blocks` is the number that start-up has chosen, once it has. Raises
    ConfigError if max_model_len exceeds what the model's rope covers, or if the kv heads cannot be split evenly.
    plan_check.py checks everything else.
    """
    limit = max_model_len(config, model)
    if model.num_kv_heads % config.tensor_parallel_size:
        raise ConfigError(
            f"num_kv_heads={model.num_kv_heads} is not divisible by tensor_parallel_size="
            f"{config.tensor_parallel_size}; choose a divisor of {model.num_kv_heads}"
        )
    spec = kv_cache_spec(config, model, config.tensor_parallel_size, staging)
    num_cpu_blocks = _num_cpu_blocks(config, model, machine, spec, limit) if config.enable_cpu_offload else 0
    given = config.num_gpu_blocks if config.enable_cpu_offload else max(config.num_kvcache_blocks, 0)
    num_gpu_blocks = num_gpu_blocks or given or _num_fitting_blocks(config, model, machine, spec, limit, num_cpu_blocks)
    return CapacityPlan(
        config=config,
        model=model,
        machine=machine,
        spec=spec,
        context=context or limit,
        num_sequences=num_sequences,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
    )


def _num_cpu_blocks(config: Config, model: ModelConfig, machine: Machine, spec: KVCacheSpec, limit: int) -> int:
    """Number of blocks in the CPU pool, where a block has the heads of all ranks.

    If the user left the size open, the pool holds two sequences of max_model_len, or one block per slot if that is
    more. Slots beyond what those two sequences and max_num_seqs short ones can use are not counted, because pinning
    memory takes time at start-up.
    """
    if config.num_cpu_blocks is not None:
        return config.num_cpu_blocks
    block_bytes = spec.block_bytes * config.tensor_parallel_size
    if config.cpu_memory_gb is not None:
        return int(config.cpu_memory_gb * 2**30) // block_bytes
    two_long = 2 * ceil_div(limit, config.block_size)
    useful = two_long + config.max_num_seqs * ceil_div(min(limit, SHORT_SEQUENCE_TOKENS), config.block_size)
    num_slots = config.num_gpu_blocks or _num_fitting_blocks(config, model, machine, spec, limit, useful)
    wanted = max(two_long, min(num_slots, useful))
    return min(wanted, int(machine.host_bytes * MAX_HOST_SHARE) // block_bytes)


def least_gpu_blocks(config: Config) -> int:
    """The fewest blocks on the GPU that an engine can start with."""
    return 2 if config.enable_cpu_offload else 1


def _num_fitting_blocks(
    config: Config, model: ModelConfig, machine: Machine, spec: KVCacheSpec, limit: int, num_cpu_blocks: int
) -> int:
    """How many blocks start-up will have room for according to the estimates, and at least the fewest that work."""
    useful = config.max_num_seqs * ceil_div(limit, config.block_size)
    if config.enable_cpu_offload:
        useful = min(useful, num_cpu_blocks)
    if machine.gpu_bytes is None:  # the same rule as ModelRunner.measure_num_gpu_blocks
        room = int(machine.host_bytes * config.gpu_memory_utilization / 2 / config.tensor_parallel_size)
        room -= spec.staging_bytes if config.enable_cpu_offload else 0
        return max(least_gpu_blocks(config), min(room // spec.block_bytes, useful))
    room = int(machine.gpu_bytes * config.gpu_memory_utilization)

    def total_bytes(num_blocks: int) -> int:
        return device_memory(config, model, machine, spec, limit, num_blocks).total_bytes

    return max(least_gpu_blocks(config), bisect_right(range(useful + 1), room, key=total_bytes) - 1)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan for, in addition to the engine's options. An invalid value raises ConfigError."""

    context: int | None = option(None, help="tokens of each sequence; by default, max_model_len", group=_WORK)
    sequences: int = option(1, help="number of sequences that run together", group=_WORK)
    gpu: str | None = option(
        None, help="name of a GPU, such as 'RTX 4090'; by default, the one here or else an H200", group=_MACHINE
    )
    gpu_memory_gb: float | None = option(
        None, help="memory of one GPU in GiB; by default, that of the GPU", group=_MACHINE
    )
    host_memory_gb: float | None = option(
        None, help="available CPU memory in GiB; by default, what is available here", group=_MACHINE
    )
    link_gb_per_s: float | None = option(
        None,
        help="rate from CPU memory to the GPU in GB/s (10^9 bytes); by default, the GPU's, measured or projected",
        group=_MACHINE,
    )

    def __post_init__(self) -> None:
        for name in self.__annotations__:
            value = getattr(self, name)
            if name != "gpu" and value is not None and not 0 < value <= MAX_OPTION:
                raise ConfigError(f"{name}={value} must be above 0 and at most {MAX_OPTION}")
        if self.gpu is not None:
            find_gpu(self.gpu)

    def apply(self, machine: Machine) -> Machine:
        """`machine` with these options applied. Raises ConfigError if the plan is for the CPU and an option describes a
        GPU.
        """
        named = {name: getattr(self, name) for name in ("gpu", "gpu_memory_gb", "link_gb_per_s")}
        if machine.gpu_bytes is None and (given := [name for name, value in named.items() if value is not None]):
            raise ConfigError(f"{', '.join(given)} describe a GPU, but device='cpu' plans for the CPU; give only one")
        if self.gpu is not None:
            machine = Machine.gpu(machine.host_bytes, find_gpu(self.gpu))
        if self.gpu_memory_gb is not None:
            machine = replace(machine, gpu_bytes=int(self.gpu_memory_gb * 2**30))
        if self.host_memory_gb is not None:
            machine = replace(machine, host_bytes=int(self.host_memory_gb * 2**30))
        return machine.with_link(self.link_gb_per_s and self.link_gb_per_s * 1e9, "given")
