"""Checks whether a plan can work. If it cannot, remedies.py finds out which options would help. Arithmetic only."""

from nanovllm.capacity.device_memory import DeviceMemory
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.capacity.planner import MAX_HOST_SHARE
from nanovllm.capacity.remedies import remedies
from nanovllm.checkpoint.rope_extension import rope_extension
from nanovllm.core.step_limits import max_model_len
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import ceil_div
from nanovllm.utils.memory import format_bytes


def check_start(plan: CapacityPlan) -> None:
    """Raise ConfigError if the engine cannot start. The message has the numbers, and remedies that work.

    Only exact sizes count here: the CPU pool, and on the GPU the weights, the KV blocks, the staging groups and the
    graphs' logits. An engine that is too large only by estimate may still work; start-up runs the largest step to find
    out.
    """
    problem = _pool_problem(plan) or _exact_problem(plan)
    if problem:
        raise ConfigError(f"{problem}; {remedies(plan, memory_problem)}")
    problem = _cpu_problem(plan)
    if problem:
        raise ConfigError(problem)


def check_plan(plan: CapacityPlan) -> None:
    """Raise such a ConfigError if the engine cannot start, or cannot run the plan's sequences together.

    Estimates count here too: everything that the plan's table marks with (!) is refused.
    """
    problem = _length_problem(plan)
    if problem:
        raise ConfigError(problem)
    problem = any_problem(plan)
    if problem:
        raise ConfigError(f"{problem}; {remedies(plan, any_problem)}")
    problem = _cpu_problem(plan)
    if problem:
        raise ConfigError(problem)


def any_problem(plan: CapacityPlan) -> str | None:
    return memory_problem(plan) or _sequences_problem(plan)


def memory_problem(plan: CapacityPlan) -> str | None:
    return _pool_problem(plan) or _exact_problem(plan) or _estimate_problem(plan)


def _pool_problem(plan: CapacityPlan) -> str | None:
    config, available = plan.config, plan.machine.host_bytes
    if not config.enable_cpu_offload:
        return None
    if plan.num_cpu_blocks < 1:
        block = format_bytes(plan.spec.block_bytes * config.tensor_parallel_size)
        if config.cpu_memory_gb is not None:
            return f"cpu_memory_gb={config.cpu_memory_gb} is less than one block of {block}"
        room = f"{MAX_HOST_SHARE:.0%} of the {format_bytes(available)} of memory available"
        return f"{room} is less than one block of {block}"
    if not plan.fits_host:
        return (
            f"a CPU pool of {plan.num_cpu_blocks} blocks needs {format_bytes(plan.cpu_pool_bytes)}, "
            f"but only {format_bytes(available)} of memory is available"
        )
    return None


def _exact_problem(plan: CapacityPlan) -> str | None:
    limit, memory = plan.gpu_limit_bytes, plan.memory
    if limit is None or memory.exact_bytes <= limit:
        return None
    return f"{_exact_parts(plan, memory)} need {format_bytes(memory.exact_bytes)} of GPU memory{_more_than(plan)}"


def _cpu_problem(plan: CapacityPlan) -> str | None:
    """On a CPU the model, its cache and the CPU pool share the host's memory.

    A size that the user left open counts with the smallest value that works, because start-up will make it fit.
    """
    config, available = plan.config, plan.machine.host_bytes
    if plan.machine.gpu_bytes is not None:
        return None
    offload = config.enable_cpu_offload
    name, least = ("num_gpu_blocks", 2) if offload else ("num_kvcache_blocks", 1)
    given = config.num_gpu_blocks if offload else config.num_kvcache_blocks
    num_blocks = given if given is not None and given > 0 else least
    pool_bytes = plan.cpu_pool_bytes if config.num_cpu_blocks or config.cpu_memory_gb else 0
    block_bytes = plan.spec.block_bytes * config.tensor_parallel_size
    memory = plan.memory
    fixed_bytes = (memory.weight_bytes + memory.staging_bytes) * config.tensor_parallel_size + pool_bytes
    if fixed_bytes + num_blocks * block_bytes <= available:
        return None
    most = (available - fixed_bytes) // block_bytes
    remedy = f"lower {name} to {most} or less" if most >= least else "use a smaller model, pool or block size"
    others = "weights" if not offload else "weights, staging and CPU pool" if pool_bytes else "weights and staging"
    return (
        f"{name}={num_blocks} blocks of {format_bytes(block_bytes)} need {format_bytes(num_blocks * block_bytes)} and "
        f"{others} {format_bytes(fixed_bytes)}, more than the {format_bytes(available)} of memory available; {remedy}"
    )


def _estimate_problem(plan: CapacityPlan) -> str | None:
    if plan.fits_gpu:
        return None
    memory = plan.memory
    return (
        f"about {format_bytes(memory.total_bytes)} of GPU memory is needed{_more_than(plan)}: "
        f"{_exact_parts(plan, memory)} take {format_bytes(memory.exact_bytes)}, and activations, graphs, their inputs, "
        f"workspaces and CUDA itself an estimated {format_bytes(memory.estimated_bytes)}"
    )


def _exact_parts(plan: CapacityPlan, memory: DeviceMemory) -> str:
    name = "num_gpu_blocks" if plan.config.enable_cpu_offload else "num_kvcache_blocks"
    parts = {
        "the weights": memory.weight_bytes,
        f"{name}={plan.num_gpu_blocks}": memory.kv_bytes,
        "staging": memory.staging_bytes,
        "the logits": memory.logits_bytes,
    }
    listed = [f"{name} ({format_bytes(num_bytes)})" for name, num_bytes in parts.items() if num_bytes]
    return f"{', '.join(listed[:-1])} and {listed[-1]}"


def _more_than(plan: CapacityPlan) -> str:
    assert plan.gpu_limit_bytes is not None and plan.machine.gpu_bytes is not None, (
        "there is a memory limit only with a GPU"
    )
    return (
        f", more than the {format_bytes(plan.gpu_limit_bytes)} that gpu_memory_utilization="
        f"{plan.config.gpu_memory_utilization} allows of {format_bytes(plan.machine.gpu_bytes)}"
    )


def _length_problem(plan: CapacityPlan) -> str | None:
    limit, longest = max_model_len(plan.config, plan.model), plan.model.max_model_len_limit
    if plan.context <= limit:
        return None
    remedy = "raise max_model_len" if plan.context <= longest else rope_extension(plan.model, plan.context)
    return f"context={plan.context} exceeds max_model_len={limit}; shorten it, or {remedy}"


def _sequences_problem(plan: CapacityPlan) -> str | None:
    capacity = plan.capacity(plan.context)
    if plan.num_sequences <= capacity.num_sequences:
        return None
    reason = {
        "max_num_seqs": f"max_num_seqs={plan.config.max_num_seqs} allows",
        "the slots": f"each needs a slot, and the {plan.num_gpu_blocks} slots allow",
        "the CPU pool": f"the CPU pool's {plan.num_cpu_blocks} blocks allow",
        "the KV cache": f"the {plan.num_gpu_blocks} blocks on the GPU allow",
    }[capacity.limit]
    num_blocks = ceil_div(plan.context, plan.spec.block_size)
    each = f"{num_blocks} block{'s' * (num_blocks > 1)} each"
    return f"{plan.num_sequences} x {plan.context} tokens ({each}) do not fit: {reason} {capacity.num_sequences}"
