"""Which weights leave the GPU if not everything fits: the embedding table, and the experts of some layers."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from nanovllm.capacity import costs
from nanovllm.capacity.machine import Machine
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.checkpoint.model_config import ExpertsConfig, ModelConfig
from nanovllm.config import GPU_RESERVE_BYTES, Config
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import max_stateful_seqs, num_spare_state_slots
from nanovllm.plan.step_limits import max_model_len
from nanovllm.utils.arithmetic import ceil_div

# With experts in CPU memory: left free on the GPU for what the estimates miss, so that the KV that the plan has room
# for fits
PLACEMENT_RESERVE_BYTES = 256 * 2**20
NUM_PLACED_SEQS = 8  # sequences whose states take precedence over experts on the GPU

PlanOf: TypeAlias = Callable[[ModelConfig, Machine], CapacityPlan]  # a plan with all weights where the model has them


def place_weights(config: Config, model: ModelConfig, machine: Machine, plan_of: PlanOf) -> CapacityPlan:
    """Choose what leaves the GPU if not everything fits: first the embedding table, which costs no time there, then the
    experts of as many layers as necessary, of which a token reads few, and last KV, all of which a token reads.
    """
    experts = model.experts
    if experts is None or not experts.layers:
        if config.enable_expert_offload:
            raise ConfigError(
                f"enable_expert_offload=True is for mixtures of experts, and {config.model} has no experts; leave it "
                "out"
            )
        return _place_embedding(config, model, machine, plan_of)
    all_on_gpu = replace(model, experts=experts.on_gpu(len(experts.layers)))
    if config.enable_expert_offload:
        num_layers = _num_gpu_expert_layers(config, model, experts)
        if num_layers is None and machine.gpu_bytes is None:
            num_layers = 0
        if num_layers is not None:
            return _place_embedding(config, replace(model, experts=experts.on_gpu(num_layers)), machine, plan_of)
    plan = _place_embedding(config, all_on_gpu, machine, plan_of)
    is_forbidden = config.enable_expert_offload is False or machine.gpu_bytes is None
    if is_forbidden or not _is_short_of_memory(plan):
        return plan
    try:
        other = _place_experts(config, model, experts, machine, plan_of, plan)
    except ConfigError:  # the CPU's kernels cannot read the experts
        if config.enable_expert_offload:
            raise
        return plan
    if config.enable_expert_offload:
        return other
    more_kv = other.memory.kv_bytes + other.shadow_bytes > plan.memory.kv_bytes + plan.shadow_bytes
    is_better = more_kv if plan.fits_gpu else other.fits_exactly
    return other if is_better and other.fits_host else plan


def _num_gpu_expert_layers(config: Config, model: ModelConfig, experts: ExpertsConfig) -> int | None:
    """Return the number of layers whose experts the user wants on the GPU, or None if the user left it open."""
    total, given, memory_gb = len(experts.layers), config.num_gpu_expert_layers, config.gpu_expert_memory_gb
    if given is not None and given > total:
        raise ConfigError(
            f"num_gpu_expert_layers={given} is more than the {total} layers of {config.model} that have experts; "
            f"lower it to {total} or less"
        )
    return given if memory_gb is None else _num_fitting_layers(config, model, experts, int(memory_gb * 2**30))


def _place_experts(
    config: Config,
    model: ModelConfig,
    experts: ExpertsConfig,
    machine: Machine,
    plan_of: PlanOf,
    all_on_gpu: CapacityPlan,
) -> CapacityPlan:
    """Return the plan with the most layers of experts on the GPU that take no room from the KV of one sequence of
    max_model_len and from the states of NUM_PLACED_SEQS sequences. all_on_gpu: the plan with all layers on the GPU.
    """
    model = replace(model, embedding_on_cpu=model.has_own_head and config.embedding_on_cpu is not False)

    def plan_with(num_layers: int) -> CapacityPlan:
        return plan_of(replace(model, experts=experts.on_gpu(num_layers)), machine)

    def room(plan: CapacityPlan) -> tuple[int, int]:
        num_seqs = max_stateful_seqs(config, plan.spec.states, plan.num_state_slots) if plan.spec.has_states else 0
        long_blocks = ceil_div(max_model_len(config, model), config.block_size)
        return min(plan.num_gpu_blocks, long_blocks), min(num_seqs, NUM_PLACED_SEQS)

    all_on_cpu = plan_with(0)
    num_blocks, num_seqs = most = room(all_on_cpu)
    if all_on_gpu.fits_gpu and room(all_on_gpu) == most:  # the user has set the number of blocks
        return all_on_gpu
    num_slots = all_on_cpu.num_state_slots and num_spare_state_slots(config, all_on_cpu.spec.states) + num_seqs
    needed = replace(all_on_cpu, num_gpu_blocks=num_blocks, num_state_slots=num_slots, num_pages=0).memory.total_bytes
    free_bytes = (all_on_cpu.gpu_limit_bytes or 0) - GPU_RESERVE_BYTES - PLACEMENT_RESERVE_BYTES - needed
    num_layers = _num_fitting_layers(config, model, experts, free_bytes)

    def is_short(num_layers: int) -> bool:
        plan = plan_with(num_layers)
        return not plan.fits_gpu or room(plan) != most

    if num_layers and is_short(num_layers):  # a shadow needs room, too
        num_layers = bisect_left(range(1, num_layers), True, key=is_short)
    return plan_with(num_layers)


def _num_fitting_layers(config: Config, model: ModelConfig, experts: ExpertsConfig, num_bytes: int) -> int:
    """Return the most layers whose experts take at most `num_bytes` on each GPU, or 0 if none fits."""
    of_layers = dict(zip(experts.layers, costs.expert_layer_bytes(config, model), strict=True))
    total = sum(of_layers.values())

    def bytes_on_gpu(num_layers: int) -> int:
        return total - sum(of_layers[layer] for layer in experts.on_gpu(num_layers).cpu_layers)

    return max(0, bisect_right(range(len(of_layers) + 1), num_bytes, key=bytes_on_gpu) - 1)


def _place_embedding(config: Config, model: ModelConfig, machine: Machine, plan_of: PlanOf) -> CapacityPlan:
    """Choose the place of the embedding table. The experts are where `model` has them."""
    model, on_cpu = replace(model, embedding_on_cpu=False), replace(model, embedding_on_cpu=True)
    if machine.gpu_bytes is None:
        return plan_of(model, machine)
    if config.embedding_on_cpu is True:
        if not model.has_own_head:
            remedy = "; leave it out"
            if model.gguf_head_type is None:
                remedy += ", or add quantize_head='int8', which gives the head a table"
            raise ConfigError(
                f"embedding_on_cpu=True is not possible with {config.model}: its output head uses the embedding table, "
                f"and all of the head is read in each step{remedy}"
            )
        return plan_of(on_cpu, machine)
    plan = plan_of(model, machine)
    if config.embedding_on_cpu is False or not model.has_own_head or not _is_short_of_memory(plan):
        return plan
    return other if _gives_more(other := plan_of(on_cpu, machine), plan) else plan


def _is_short_of_memory(plan: CapacityPlan) -> bool:
    """Return True if the GPU has no room for all weights and the KV of a sequence of max_model_len."""
    limit = max_model_len(plan.config, plan.model)
    return not plan.fits_gpu or plan.num_gpu_blocks < ceil_div(limit, plan.spec.block_size)


def _gives_more(on_cpu: CapacityPlan, on_gpu: CapacityPlan) -> bool:
    """Return True if more of the KV is on the GPU with the embedding table in CPU memory. CPU memory must have room for
    the table and for as many long sequences as without it.
    """
    limit = max_model_len(on_gpu.config, on_gpu.model)
    if not on_cpu.fits_host or on_cpu.capacity(limit).num_sequences < on_gpu.capacity(limit).num_sequences:
        return False
    more = on_cpu.memory.kv_bytes + on_cpu.shadow_bytes > on_gpu.memory.kv_bytes + on_gpu.shadow_bytes
    return more or not on_gpu.fits_gpu or not _is_short_of_memory(on_cpu)
