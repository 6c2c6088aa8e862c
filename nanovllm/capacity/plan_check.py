"""Checks of a plan: the reasons why it cannot work, and the options to change. Arithmetic only.

A reason names up to three options on which the failed part depends, the fastest first. The named options have not been
planned, except for quantize_head, so one option alone may not be enough. But no option is named with which the weights
alone would not fit.
"""

from dataclasses import replace
from math import ceil

from nanovllm.capacity.costs import head_problem, order_problem, packing_problem, weight_bytes
from nanovllm.capacity.machine import Machine
from nanovllm.capacity.make_plan import MAX_HOST_SHARE, heads_problem, least_gpu_blocks, make_plan
from nanovllm.capacity.plan import HOST_RESERVE_BYTES, CapacityPlan, experts_summary
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import (
    FP8_CAPABILITIES,
    HEAD_QUANTIZATIONS,
    QUANTIZATIONS,
    Quantization,
    can_multiply_fp8,
)
from nanovllm.checkpoint.rope import rope_extension
from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import dtype_name, num_blocks_for, num_watermark_blocks
from nanovllm.plan.step_limits import max_model_len
from nanovllm.utils.arithmetic import ceil_div, format_bytes

MAX_REMEDIES = 3
HIGH_UTILIZATION = 0.95
SMALL_STEP_TOKENS = 1024
HEAD_FORMAT = next(iter(HEAD_QUANTIZATIONS))  # the format of quantize_head that is named
_DYNAMIC = "quantization=fp8_dynamic"
_NOT_DYNAMIC = "or use quantization=fp8, which quantizes weights alone"
FEWEST_BITS, FEWEST_BITS_FORMAT = min(QUANTIZATIONS.items(), key=lambda each: each[1].bits)


def check_start(plan: CapacityPlan) -> None:
    """Raise ConfigError if the engine cannot start. The message has the numbers, and options to change.

    Only exact sizes count here: the CPU pool, and on the GPU the weights, the KV blocks, the staging groups and the
    graphs' logits. An engine that is too large only by estimate may still work; start-up finds out by running the
    largest step.
    """
    problem = _format_problem(plan) or _pool_problem(plan) or _gpu_problem(plan, with_estimates=False)
    if problem := problem or _cpu_problem(plan):
        raise ConfigError(problem)


def check_plan(plan: CapacityPlan) -> None:
    """Raise ConfigError like `check_start`, and also if the engine cannot run the plan's sequences together.

    Estimates count here, too: every plan whose table has a mark (!) is refused.
    """
    problem = _format_problem(plan) or _packing_problem(plan) or _length_problem(plan)
    problem = problem or _pool_problem(plan) or _gpu_problem(plan, with_estimates=True)
    if problem := problem or _sequences_problem(plan) or _cpu_problem(plan):
        raise ConfigError(problem)


def can_work(plan: CapacityPlan) -> bool:
    """Return True if `check_plan` accepts the plan, without the work of naming options to change."""
    if not plan.fits_gpu or plan.capacity(plan.context).num_sequences < plan.num_sequences:
        return False
    problem = _format_problem(plan) or _packing_problem(plan) or _length_problem(plan)
    return (problem or _pool_problem(plan) or _cpu_problem(plan)) is None


def _pool_problem(plan: CapacityPlan) -> str | None:
    """Check the CPU memory: the embedding table and the experts in it, and the CPU pool."""
    config, table_bytes, expert_bytes = plan.config, plan.host_table_bytes, plan.host_expert_bytes
    if expert_bytes and plan.host_weight_bytes > plan.machine.host_bytes:
        return _experts_problem(plan)
    if table_bytes > plan.machine.host_bytes:
        return (
            f"the embedding table needs {format_bytes(table_bytes)} of CPU memory, but only "
            f"{format_bytes(plan.machine.host_bytes)} is available; use embedding_on_cpu=False"
        )
    available = plan.machine.host_bytes - plan.host_weight_bytes
    if not config.enable_cpu_offload:
        return None
    if plan.num_cpu_blocks < 1:
        block = format_bytes(_pool_block_bytes(plan))
        if config.cpu_memory_gb is not None:
            raised = _set_pool(plan, _needed_blocks(plan))
            return f"cpu_memory_gb={config.cpu_memory_gb} is less than one block of {block}; {raised}"
        room = f"{MAX_HOST_SHARE:.0%} of the {format_bytes(available)} of memory available"
        return f"{room} is less than one block of {block}; {_either(_smaller_blocks(plan))}"
    if not plan.fits_host:
        states = f" and states for later prompts {format_bytes(plan.snapshot_bytes)}" if plan.snapshot_bytes else ""
        beside = f" besides the embedding table's {format_bytes(table_bytes)}" if table_bytes else ""
        if expert_bytes:
            beside = f" besides the {format_bytes(plan.host_weight_bytes)} that {_host_weights(plan)} need"
        num_fitting = max(1, int(available * MAX_HOST_SHARE) // _pool_block_bytes(plan))
        return (
            f"a CPU pool of {plan.num_cpu_blocks} blocks needs {format_bytes(plan.cpu_pool_bytes)}{states}, "
            f"but only {format_bytes(available)} of memory is available{beside}; {_set_pool(plan, num_fitting)}"
        )
    return None


def _experts_problem(plan: CapacityPlan) -> str:
    return (
        f"{_host_weights(plan)} need {format_bytes(plan.host_weight_bytes)} of CPU memory, but only "
        f"{format_bytes(plan.machine.host_bytes)} is available; {_either(_more_gpu_experts(plan), _fewer_bits(plan))}"
    )


def _host_weights(plan: CapacityPlan) -> str:
    """List what takes CPU memory with experts in it, except for the CPU pool."""
    table = f", the embedding table ({format_bytes(plan.host_table_bytes)})" if plan.host_table_bytes else ""
    return f"the experts ({experts_summary(plan)}){table} and the process ({format_bytes(HOST_RESERVE_BYTES)})"


def _gpu_problem(plan: CapacityPlan, with_estimates: bool) -> str | None:
    limit, memory = plan.gpu_limit_bytes, plan.memory
    if limit is None or (memory.total_bytes if with_estimates else memory.exact_bytes) <= limit:
        return None
    parts = {
        "the weights": memory.weight_bytes,
        f"{_blocks_option(plan)}={plan.num_gpu_blocks}": memory.kv_bytes,
        "the shadow": memory.shadow_bytes,
        "the states": memory.state_bytes,
        "K and V of the draft head": memory.draft_bytes,
        "staging": memory.staging_bytes + memory.expert_staging_bytes,
        "the logits": memory.logits_bytes,
    }
    listed = [f"{name} ({format_bytes(num_bytes)})" for name, num_bytes in parts.items() if num_bytes]
    exact, exact_bytes = f"{', '.join(listed[:-1])} and {listed[-1]}", format_bytes(memory.exact_bytes)
    more = (
        f"more than the {format_bytes(limit)} that gpu_memory_utilization={plan.config.gpu_memory_utilization} "
        f"allows of {format_bytes(plan.machine.gpu_bytes or 0)}"
    )
    remedies = _either(
        _fewer_gpu_blocks(plan),
        _set(plan, "speculation", "prompt_lookup") if memory.draft_bytes else None,
        _embedding_on_cpu(plan),
        _fewer_gpu_experts(plan),
        _fewer_bits(plan),
        _experts_on_cpu(plan),
        _more_room(plan, of_estimates=memory.exact_bytes <= limit) if memory.weight_bytes < limit else None,
        _more_ranks(plan),
        _quantized_head(plan),
    )
    if memory.exact_bytes > limit:
        return f"{exact} need {exact_bytes} of GPU memory, {more}; {remedies}"
    return (
        f"about {format_bytes(memory.total_bytes)} of GPU memory is needed, {more}: {exact} take {exact_bytes}, and "
        f"activations, graphs, their inputs, workspaces and CUDA itself an estimated "
        f"{format_bytes(memory.estimated_bytes)}; {remedies}"
    )


def _blocks_option(plan: CapacityPlan) -> str:
    return "num_gpu_blocks" if plan.config.enable_cpu_offload else "num_kvcache_blocks"


def _cpu_problem(plan: CapacityPlan) -> str | None:
    """Check the host's memory, which on a CPU the model, its cache and the CPU pool share.

    A size that the user left open counts with the smallest value that works, because start-up chooses a size that fits.
    """
    config, available = plan.config, plan.machine.host_bytes
    if plan.machine.gpu_bytes is not None:
        return None
    name, least = _blocks_option(plan), least_gpu_blocks(config)
    num_blocks = _given_gpu_blocks(plan) or least
    pool_bytes, fixed_bytes, block_bytes = _given_pool_bytes(plan), _fixed_cpu_bytes(plan), _pool_block_bytes(plan)
    if fixed_bytes + num_blocks * block_bytes <= available:
        return None
    most = _num_fitting_gpu_blocks(plan)
    remedy = f"lower {name} to {most} or less" if most >= least else "use a smaller model, pool or block size"
    remedy = remedy if most >= least else _experts_on_cpu(plan) or remedy
    others = "weights and staging" if config.enable_cpu_offload else "weights"
    others = "weights, staging and CPU pool" if pool_bytes else others
    others = f"{others}, with the experts of {experts_summary(plan)}," if plan.host_expert_bytes else others
    return (
        f"{name}={num_blocks} blocks of {format_bytes(block_bytes)} need {format_bytes(num_blocks * block_bytes)} and "
        f"{others} {format_bytes(fixed_bytes)}, more than the {format_bytes(available)} of memory available; {remedy}"
    )


def _format_problem(plan: CapacityPlan) -> str | None:
    """Check that the GPU can quantize the output head and sort columns by group (desc_act), and that it multiplies in
    fp8 if the user has asked for it. A CPU can do all of this.
    """
    quantization = plan.model.quantization
    if plan.machine.gpu_bytes is None:
        return None
    if (problem := head_problem(plan.model)) or quantization is None:
        return problem
    if not quantization.needs_fp8_products:
        return order_problem(plan.config, plan.model)
    if problem := fp8_problem(plan.machine, quantization):
        return problem
    if (dtype := dtype_name(plan.config, plan.model)) != "bfloat16":
        return f"{_DYNAMIC} multiplies in bfloat16 on a GPU, and dtype is {dtype}; use dtype=bfloat16, {_NOT_DYNAMIC}"
    return None


def fp8_problem(machine: Machine, quantization: Quantization) -> str | None:
    """Return the reason why the GPU cannot multiply in fp8 as the user has asked, or None if it can."""
    capability = machine.capability
    if not quantization.needs_fp8_products or capability is None or can_multiply_fp8(capability):
        return None
    major, minor = capability
    return (
        f"{_DYNAMIC} needs a GPU that multiplies in fp8, with compute capability {FP8_CAPABILITIES}, and "
        f"{machine.name} has {major}.{minor}; use another GPU, {_NOT_DYNAMIC}"
    )


def _packing_problem(plan: CapacityPlan) -> str | None:
    """Check the layers that config.json quantizes. The checkpoint's files may leave more layers unquantized."""
    return None if plan.machine.gpu_bytes is None else packing_problem(plan.config, plan.model)


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
        "the state slots": "the room for states of sequences allows",
    }[capacity.limit]
    num_blocks = ceil_div(plan.context, plan.spec.block_size)
    each = f"{num_blocks} block{'s' * (num_blocks > 1)} each"
    pool = {"the CPU pool": plan.num_cpu_blocks, "the KV cache": plan.num_gpu_blocks}.get(capacity.limit, 0)
    if plan.num_sequences > 1 and (num_free := num_watermark_blocks(pool)):
        each += f", and {num_free} that stay free for running sequences to grow"
    problem = f"{plan.num_sequences} x {plan.context} tokens ({each}) do not fit: {reason} {capacity.num_sequences}"
    return f"{problem}; {_sequences_remedies(plan, capacity.limit)}"


# -- options to change -----------------------------------------------------------------------------------------------


def _sequences_remedies(plan: CapacityPlan, limit: str) -> str:
    """Name the options that the limit of CapacityPlan.capacity depends on."""
    num_sequences, blocks_name = plan.num_sequences, _blocks_option(plan)
    if limit == "max_num_seqs":
        return _set(plan, "max_num_seqs", num_sequences)
    if limit == "the CPU pool":
        needed = _needed_blocks(plan)
        others = plan.snapshot_bytes + plan.host_weight_bytes
        fits = needed * _pool_block_bytes(plan) + others <= plan.machine.host_bytes
        return _set_pool(plan, needed) if fits else _either()
    needed = num_sequences if limit == "the slots" else _needed_blocks(plan)
    given, is_on_cpu = _given_gpu_blocks(plan), plan.machine.gpu_bytes is None
    # On a CPU, start-up takes only half of the memory unless the number is given
    if (given or is_on_cpu) and limit != "the state slots" and needed <= _num_fitting_gpu_blocks(plan):
        return _set(plan, blocks_name, needed)
    return _either(
        f"leave {blocks_name} unset" if given and limit == "the state slots" else None,
        _embedding_on_cpu(plan),
        _fewer_gpu_experts(plan),
        _fewer_bits(plan),
        _experts_on_cpu(plan),
        _more_room(plan),
        None if plan.config.enable_cpu_offload or is_on_cpu else "use enable_cpu_offload",
        _more_ranks(plan),
        _quantized_head(plan),
    )


def _either(*options: str | None) -> str:
    """Name the first options that can be changed, or suggest another model if no option can be changed."""
    possible = [option for option in options if option is not None]
    return ", or ".join(possible[:MAX_REMEDIES]) or "use a smaller model, a shorter context or more memory"


def _set(plan: CapacityPlan, name: str, value: str | float) -> str:
    old = getattr(plan.config, name)
    if isinstance(value, str):
        return f"use {name}={value}"
    verb = "set" if old in (None, -1) else "raise" if value > old else "lower"
    return f"{verb} {name} to {value}"


def _more_room(plan: CapacityPlan, *, of_estimates: bool = True) -> str | None:
    """Leave more of the GPU's memory for blocks, at the same speed of decode. `of_estimates`: also by smaller steps,
    which take less of what is only estimated.
    """
    if plan.machine.gpu_bytes is None:
        return None
    changes = []
    if plan.config.gpu_memory_utilization < HIGH_UTILIZATION:
        changes.append(_set(plan, "gpu_memory_utilization", HIGH_UTILIZATION))
    if of_estimates and plan.config.max_num_batched_tokens > SMALL_STEP_TOKENS:
        changes.append(_set(plan, "max_num_batched_tokens", SMALL_STEP_TOKENS))
    return " and ".join(changes) or None


def _embedding_on_cpu(plan: CapacityPlan) -> str | None:
    """Let the embedding table be in CPU memory, if the user has forbidden it."""
    if plan.machine.gpu_bytes is None or plan.config.embedding_on_cpu is not False or not plan.model.has_own_head:
        return None
    return _set(plan, "embedding_on_cpu", "True")


def _experts_on_cpu(plan: CapacityPlan) -> str | None:
    """Let experts be in CPU memory, if the weights then fit."""
    if plan.model.experts is None or plan.config.enable_expert_offload:
        return None
    config = replace(plan.config, enable_expert_offload=True)
    try:
        other = make_plan(config, plan.model, plan.machine, context=plan.context, num_sequences=plan.num_sequences)
    except ConfigError:  # the CPU's kernels cannot read the experts
        return None
    fits = other.model.has_cpu_experts and other.fits_host and other.fits_exactly and not _cpu_problem(other)
    return "use enable_expert_offload" if fits else None


def _fewer_gpu_experts(plan: CapacityPlan) -> str | None:
    """Leave fewer experts on the GPU than the user asks for."""
    other = _with_default_experts(plan)
    if other is None or other.num_gpu_expert_layers >= plan.num_gpu_expert_layers:
        return None
    return _limit_gpu_experts(plan, other)


def _more_gpu_experts(plan: CapacityPlan) -> str | None:
    """Keep more experts on the GPU than the user asks for, if they fit there."""
    other = _with_default_experts(plan)
    if other is None or not other.fits_host or other.num_gpu_expert_layers <= plan.num_gpu_expert_layers:
        return None
    return _limit_gpu_experts(plan, other)


def _limit_gpu_experts(plan: CapacityPlan, other: CapacityPlan) -> str:
    """Name the option with which as many layers of experts are on the GPU as in the other plan."""
    if plan.config.num_gpu_expert_layers is None:
        return "leave gpu_expert_memory_gb unset"
    return _set(plan, "num_gpu_expert_layers", other.num_gpu_expert_layers)


def _with_default_experts(plan: CapacityPlan) -> CapacityPlan | None:
    """Return the plan with the number of layers on the GPU that is the default, or None if that is so already."""
    config = plan.config
    if plan.machine.gpu_bytes is None or (config.num_gpu_expert_layers, config.gpu_expert_memory_gb) == (None, None):
        return None
    config = replace(config, num_gpu_expert_layers=None, gpu_expert_memory_gb=None)
    other = make_plan(config, plan.model, plan.machine, context=plan.context, num_sequences=plan.num_sequences)
    return other if other.fits_gpu else None


def _quantized_head(plan: CapacityPlan) -> str | None:
    """Quantize the output head if the checkpoint has it in 16 or 32 bits. The option changes results, so it is named
    only if the plan then works.
    """
    model = plan.model
    if plan.machine.gpu_bytes is None or model.head_quantization is not None or model.gguf_head_type is not None:
        return None
    quantized = model.quantized(None, HEAD_FORMAT)
    if head_problem(quantized):
        return None
    other = make_plan(plan.config, quantized, plan.machine, context=plan.context, num_sequences=plan.num_sequences)
    if not other.fits_gpu or other.capacity(plan.context).num_sequences < plan.num_sequences:
        return None
    return _set(plan, "quantize_head", HEAD_FORMAT)


def _fewer_bits(plan: CapacityPlan) -> str | None:
    """Quantize the weights to the fewest bits, if the packed weights fit on the GPU."""
    num_ranks = plan.config.tensor_parallel_size
    quantized = _with_fewest_bits(plan, num_ranks)
    if quantized is None or not _weights_fit(plan, quantized, num_ranks):
        return None
    return _set(plan, "quantization", FEWEST_BITS)


def _with_fewest_bits(plan: CapacityPlan, num_ranks: int) -> ModelConfig | None:
    """Return the model quantized to the fewest bits for this number of ranks, or None if it has no more bits now."""
    now = plan.model.quantization
    if plan.machine.gpu_bytes is None or (
        now is not None and (not now.is_online or now.bits <= FEWEST_BITS_FORMAT.bits)
    ):
        return None
    return replace(plan.model, quantization=replace(FEWEST_BITS_FORMAT, num_ranks=num_ranks))


def _weights_fit(plan: CapacityPlan, model: ModelConfig, num_ranks: int) -> bool:
    limit, config = plan.gpu_limit_bytes, replace(plan.config, tensor_parallel_size=num_ranks)
    return limit is None or weight_bytes(config, model, is_packed=True) < limit


def _more_ranks(plan: CapacityPlan) -> str | None:
    """Use the next number of ranks that can share the model and have room for its weights, if necessary packed."""
    if plan.machine.gpu_bytes is None:
        return None
    prefix = f"{_set(plan, 'quantization', FEWEST_BITS)} and "
    for is_quantized in (False, True):
        for num_ranks in (2, 4, 8):
            model = _with_fewest_bits(plan, num_ranks) if is_quantized else _on_ranks(plan.model, num_ranks)
            if model is None or num_ranks <= plan.config.tensor_parallel_size:
                continue
            config = replace(plan.config, tensor_parallel_size=num_ranks)
            can_share = not heads_problem(config, model) and not packing_problem(config, model)
            if can_share and _weights_fit(plan, model, num_ranks):
                return (prefix if is_quantized else "") + _set(plan, "tensor_parallel_size", num_ranks)
    return None


def _on_ranks(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return the model with the types of blocks that `num_ranks` ranks can share."""
    return (
        model
        if model.quantization is None
        else replace(model, quantization=replace(model.quantization, num_ranks=num_ranks))
    )


def _smaller_blocks(plan: CapacityPlan) -> str | None:
    return _set(plan, "kvcache_block_size", BLOCK_SIZE_STEP) if plan.spec.block_size > BLOCK_SIZE_STEP else None


def _given_gpu_blocks(plan: CapacityPlan) -> int:
    """Return the number of blocks on the GPU that the user asks for, or 0 if start-up chooses the number."""
    return max(getattr(plan.config, _blocks_option(plan)) or 0, 0)


def _num_fitting_gpu_blocks(plan: CapacityPlan) -> int:
    """Return the number of blocks that fit on the GPU, or in the memory of a CPU, together with all other parts of the
    plan.
    """
    limit, memory = plan.gpu_limit_bytes, plan.memory
    if limit is None:
        return (plan.machine.host_bytes - _fixed_cpu_bytes(plan)) // _pool_block_bytes(plan)
    return (limit - (memory.total_bytes - memory.kv_bytes)) // plan.spec.block_bytes


def _given_pool_bytes(plan: CapacityPlan) -> int:
    """Size of the CPU pool, or 0 if start-up chooses it."""
    return plan.cpu_pool_bytes if plan.config.num_cpu_blocks or plan.config.cpu_memory_gb else 0


def _fixed_cpu_bytes(plan: CapacityPlan) -> int:
    """On a CPU, what all ranks take of its memory besides their blocks."""
    memory = plan.memory
    num_bytes = (memory.weight_bytes + memory.staging_bytes) * plan.config.tensor_parallel_size
    return num_bytes + plan.host_weight_bytes + _given_pool_bytes(plan)


def _fewer_gpu_blocks(plan: CapacityPlan) -> str | None:
    """Lower the number of blocks that the user asks for, if the fewest blocks that work fit."""
    num_fitting = _num_fitting_gpu_blocks(plan)
    if not _given_gpu_blocks(plan) or num_fitting < least_gpu_blocks(plan.config):
        return None
    return _set(plan, _blocks_option(plan), num_fitting)


def _needed_blocks(plan: CapacityPlan) -> int:
    """Return the smallest pool, in blocks, that runs the plan's sequences together."""
    return num_blocks_for(plan.num_sequences, ceil_div(plan.context, plan.spec.block_size))


def _pool_block_bytes(plan: CapacityPlan) -> int:
    """Return the size of a block in the CPU pools of all ranks together."""
    return plan.spec.block_bytes * plan.config.tensor_parallel_size


def _set_pool(plan: CapacityPlan, num_blocks: int) -> str:
    """Give the CPU pool this many blocks, in the user's unit."""
    if plan.config.cpu_memory_gb is None:
        return _set(plan, "num_cpu_blocks", num_blocks)
    return _set(plan, "cpu_memory_gb", ceil(100 * num_blocks * _pool_block_bytes(plan) / 2**30) / 100)
