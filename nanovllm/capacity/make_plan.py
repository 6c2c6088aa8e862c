"""make_plan: the plan of an engine on a machine, with the sizes that the user left open.

This module is arithmetic only and loads neither torch nor weights.
"""

from bisect import bisect_right
from dataclasses import replace
from functools import partial

from nanovllm.capacity.device_memory import device_memory, step_bytes
from nanovllm.capacity.division import NO_SHADOW, auto_shadows, divide_memory, kept_blocks, wants_shadow
from nanovllm.capacity.machine import Machine
from nanovllm.capacity.placement import place_weights
from nanovllm.capacity.plan import CapacityPlan, host_weight_bytes
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import GPU_RESERVE_BYTES, Config
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import (
    SNAPSHOT_TOKENS,
    KVCacheSizes,
    KVCacheSpec,
    StagingSizes,
    dtype_name,
    kv_cache_spec,
    kv_heads_of_rank,
    max_useful_blocks,
    num_blocks_for,
    with_watermark,
)
from nanovllm.plan.shadow_spec import MAX_SHADOW_HEAD_DIM
from nanovllm.plan.step_limits import max_model_len, max_sampled_rows
from nanovllm.utils.arithmetic import ceil_div

MAX_HOST_SHARE = 0.7  # fraction of the available memory; limits a CPU pool whose size the user left open
MAX_SNAPSHOT_SHARE = 0.85  # fraction of the available memory; limits the CPU pool and snapshots of states together
MAX_SNAPSHOT_BYTES = 4 * 2**30  # per rank; pinning them takes a second
NUM_KEPT_PROMPTS = 64
SHORT_SEQUENCE_TOKENS = 1024  # prompt and answer of a short sequence, for sizing a CPU pool
AUTO_SHARE = 4  # with "auto" and offload, K and V of a draft head take at most 1/AUTO_SHARE of the room for KV
MIN_SHADOW_GAIN = 1.5  # in the expected rate, which counts only the memory that a draft reads and no other cost
MAX_SHADOW_LOSS = 1.05  # in the expected rate, for a shadow that holds more sequences or has more bits


def make_plan(
    config: Config,
    model: ModelConfig,
    machine: Machine,
    *,
    context: int | None = None,
    num_sequences: int = 1,
    sizes: KVCacheSizes | None = None,
    staging: StagingSizes = StagingSizes(),
) -> CapacityPlan:
    """Plan an engine with these options that runs `num_sequences` sequences of `context` tokens together.

    `context` defaults to max_model_len. sizes: the sizes that start-up has chosen, or None before start-up has chosen;
    with sizes, the embedding table and the experts are where `model` has them. With speculation="auto" the plan's
    `model` may lack the draft head. Raises ConfigError if max_model_len exceeds the length that the model's rope
    covers, if the heads cannot be split evenly, and if the embedding table or the experts cannot be in CPU memory.
    plan_check.py checks everything else.
    """
    plan_of = partial(_make_plan, config, context=context, num_sequences=num_sequences, sizes=sizes, staging=staging)
    if sizes is not None:
        return plan_of(model, machine)
    return place_weights(config, model, machine, plan_of)


def _make_plan(
    config: Config,
    model: ModelConfig,
    machine: Machine,
    *,
    context: int | None,
    num_sequences: int,
    sizes: KVCacheSizes | None,
    staging: StagingSizes,
) -> CapacityPlan:
    """Make the plan with the embedding table and the experts where `model` has them."""
    limit = max_model_len(config, model)
    if problem := heads_problem(config, model):
        raise ConfigError(problem)
    if dtype_name(config, model) == "float16" and model.exceeds_float16:
        raise ConfigError(
            f"dtype='float16' holds numbers up to 65504, and activations of {config.model} are larger; use "
            "dtype='bfloat16' or 'float32'"
        )
    if config.speculation_method == "mtp" and not model.has_mtp:
        raise ConfigError(
            f"speculation='mtp' drafts with the head for multi-token prediction, which {config.model} does not have; "
            "use another speculation"
        )
    if config.speculation_method == "shadow" and model.head_dim > MAX_SHADOW_HEAD_DIM:
        raise ConfigError(
            f"speculation='shadow' has kernels for head dims up to {MAX_SHADOW_HEAD_DIM}, and {config.model} has "
            f"{model.head_dim}; use another speculation"
        )
    left_bytes = max(0, machine.host_bytes - host_weight_bytes(config, model))
    machine, whole = replace(machine, host_bytes=left_bytes), machine
    spec, num_cpu_blocks = _spec_and_pool(config, model, machine, limit, staging)
    unused_draft_bytes = 0
    if config.speculation_method == "auto" and (draft_bytes := spec.draft_bytes(num_cpu_blocks)):
        given, _, room_bytes = _room(config, model, machine, spec, limit, num_cpu_blocks)
        if draft_bytes > (room_bytes - given * spec.block_bytes) // AUTO_SHARE:
            model, unused_draft_bytes = replace(model, has_mtp=False), draft_bytes
            spec, num_cpu_blocks = _spec_and_pool(config, model, machine, limit, staging)
    for name in ("shadow_bits", "shadow_memory_gb"):
        if getattr(config, name) is None:
            continue
        if spec.has_draft_head:
            raise ConfigError(
                f"{name} has no effect: with speculation='auto' the draft head of {config.model} replaces the "
                "shadow; leave it out, or use speculation='shadow'"
            )
        if spec.head_dim > MAX_SHADOW_HEAD_DIM:
            raise ConfigError(
                f"{name} has no effect: a shadow has head dims up to {MAX_SHADOW_HEAD_DIM}, and {config.model} has "
                f"{spec.head_dim}; leave it out"
            )
    sizes = sizes or _sizes(config, model, machine, spec, limit, num_cpu_blocks)
    return CapacityPlan(
        config=config,
        model=model,
        machine=whole,
        spec=spec,
        context=context or limit,
        num_sequences=num_sequences,
        num_gpu_blocks=sizes.num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        num_pages=sizes.num_pages,
        shadow_bits=sizes.shadow_bits,
        num_state_slots=sizes.num_state_slots,
        num_snapshots=_num_snapshots(config, machine, spec, num_cpu_blocks or sizes.num_gpu_blocks),
        unused_draft_bytes=unused_draft_bytes,
    )


def _spec_and_pool(
    config: Config, model: ModelConfig, machine: Machine, limit: int, staging: StagingSizes
) -> tuple[KVCacheSpec, int]:
    """Return the shape of the KV cache, and the number of blocks in the CPU pool."""
    spec = kv_cache_spec(config, model, config.tensor_parallel_size, staging)
    return spec, _num_cpu_blocks(config, model, machine, spec, limit) if config.enable_cpu_offload else 0


def heads_problem(config: Config, model: ModelConfig) -> str | None:
    """Return the reason why the ranks cannot share the heads evenly, or None if they can."""
    tp, recurrent = config.tensor_parallel_size, model.recurrent
    if model.num_heads % tp:
        divisor = f"choose a divisor of {model.num_heads}"
        return f"num_attention_heads={model.num_heads} is not divisible by tensor_parallel_size={tp}; {divisor}"
    try:
        for num_kv_heads in (model.num_kv_heads, *([] if model.window is None else [model.window.num_kv_heads])):
            kv_heads_of_rank(num_kv_heads, tp)
    except ConfigError as error:
        return str(error)
    if recurrent is not None and (recurrent.num_key_heads % tp or recurrent.num_value_heads % tp):
        return (
            f"the {recurrent.num_key_heads} key heads and {recurrent.num_value_heads} value heads of recurrent layers "
            f"are not divisible by tensor_parallel_size={tp}; choose a divisor of both"
        )
    return None


def _num_snapshots(config: Config, machine: Machine, spec: KVCacheSpec, num_blocks: int) -> int:
    """Return the number of states in CPU memory: one for every SNAPSHOT_TOKENS tokens of a cache of `num_blocks`, and
    one for the end of each of NUM_KEPT_PROMPTS prompts, within the memory that the CPU pool leaves. Together the states
    take at most the larger of MAX_SNAPSHOT_BYTES and an eighth of the CPU pool. With a disk the number is at least two,
    because one state may be in use while another state is read.
    """
    if not spec.has_states or not config.enable_prefix_caching:
        return 0
    pool_bytes = num_blocks * spec.block_bytes if config.enable_cpu_offload else 0
    host_bytes = int(machine.host_bytes * MAX_SNAPSHOT_SHARE) // config.tensor_parallel_size - pool_bytes
    most = min(max(MAX_SNAPSHOT_BYTES, pool_bytes // 8), host_bytes) // spec.states.snapshot_bytes
    least = 1 if config.kv_disk_path is None else 2
    return max(least, min(num_blocks * spec.block_size // SNAPSHOT_TOKENS + NUM_KEPT_PROMPTS, most))


def _num_cpu_blocks(config: Config, model: ModelConfig, machine: Machine, spec: KVCacheSpec, limit: int) -> int:
    """Return the number of blocks in the CPU pool, where a block has the heads of all ranks.

    If the user left the size open, the pool has room for two sequences of max_model_len, or one block per slot if there
    are more slots. Slots that neither the two long sequences nor max_num_seqs short sequences can use are not counted,
    because pinning memory takes time at start-up.
    """
    if config.num_cpu_blocks is not None:
        return config.num_cpu_blocks
    block_bytes = spec.block_bytes * config.tensor_parallel_size
    if config.cpu_memory_gb is not None:
        return int(config.cpu_memory_gb * 2**30) // block_bytes
    each, short = ceil_div(limit, config.block_size), min(limit, SHORT_SEQUENCE_TOKENS)
    two_long = num_blocks_for(2, each)
    useful = with_watermark(2 * each + config.max_num_seqs * ceil_div(short, config.block_size))
    num_slots = _sizes(config, model, machine, spec, limit, useful).num_gpu_blocks
    wanted = max(two_long, min(num_slots, useful))
    return min(wanted, int(machine.host_bytes * MAX_HOST_SHARE) // block_bytes)


def least_gpu_blocks(config: Config) -> int:
    """Return the fewest blocks on the GPU with which an engine can start."""
    return 2 if config.enable_cpu_offload else 1


def _sizes(
    config: Config, model: ModelConfig, machine: Machine, spec: KVCacheSpec, limit: int, num_cpu_blocks: int
) -> KVCacheSizes:
    """Return the numbers of blocks and pages that the user asks for, or an estimate of the numbers that start-up will
    have room for, but at least the fewest blocks that work. With speculation="auto" and offload, choose a shadow or
    none by the expected rate of decode at max_model_len; if the machine's rates are unknown, the shadow takes at most
    1/AUTO_SHARE of the slots.
    """
    given, useful, room = _room(config, model, machine, spec, limit, num_cpu_blocks)
    kept = kept_blocks(config, model, limit)
    divide = partial(
        divide_memory, config, spec, room, given=given, useful=useful, num_cpu_blocks=num_cpu_blocks, kept=kept
    )

    def at_least_usable(sizes: KVCacheSizes) -> KVCacheSizes:
        return replace(sizes, num_gpu_blocks=max(least_gpu_blocks(config), sizes.num_gpu_blocks))

    if config.speculation_method != "auto" or not wants_shadow(config, spec):
        return at_least_usable(divide())

    def plan_of(sizes: KVCacheSizes) -> CapacityPlan:
        return CapacityPlan(
            config=config,
            model=model,
            machine=machine,
            spec=spec,
            context=limit,
            num_sequences=1,
            num_gpu_blocks=sizes.num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            num_pages=sizes.num_pages,
            shadow_bits=sizes.shadow_bits,
        )

    without = at_least_usable(divide(shadow=NO_SHADOW))
    if not plan_of(without).num_missing_blocks:
        return without
    room -= without.num_state_slots * spec.states.slot_bytes
    shadows = auto_shadows(config, spec, room, given=given, num_cpu_blocks=num_cpu_blocks, max_model_len=limit)
    choices = [at_least_usable(divide(shadow=shadow)) for shadow in shadows]
    if not (machine.memory_byte_per_s and machine.link_byte_per_s):
        least = without.num_gpu_blocks - without.num_gpu_blocks // AUTO_SHARE
        return next((sizes for sizes in choices if given or sizes.num_gpu_blocks >= least), without)
    rates = {sizes: plan_of(sizes).expected_decode_tok_per_s or 0.0 for sizes in choices}
    best = max(rates.values(), default=0.0)
    if best < MIN_SHADOW_GAIN * (plan_of(without).expected_decode_tok_per_s or 0.0):
        return without
    return next(sizes for sizes, rate in rates.items() if rate * MAX_SHADOW_LOSS >= best)


def _room(
    config: Config, model: ModelConfig, machine: Machine, spec: KVCacheSpec, limit: int, num_cpu_blocks: int
) -> tuple[int, int, int]:
    """Return the number of blocks on the GPU that the user asks for, the largest number that can be used, and an
    estimate of the bytes that start-up will have for blocks, states and drafts.
    """
    given = (config.num_gpu_blocks or 0) if config.enable_cpu_offload else max(config.num_kvcache_blocks, 0)
    useful = max_useful_blocks(config, limit)
    if config.enable_cpu_offload:
        useful = min(useful, num_cpu_blocks)
    usable = machine.usable_gpu_bytes(config.gpu_memory_utilization)
    if usable is None:  # the same rule as runner/measure.py measure_kv_room
        room = int(machine.host_bytes * config.gpu_memory_utilization / 2 / config.tensor_parallel_size)
        return given, useful, room - (spec.staging_bytes if config.enable_cpu_offload else 0)

    room, block_bytes = usable - GPU_RESERVE_BYTES, spec.block_bytes
    most = max_sampled_rows(config, useful)  # the other needs grow with the number of blocks up to this number
    with_most = device_memory(config, model, machine, spec, limit, most)

    def of_step(num_blocks: int) -> int:
        return sum(step_bytes(config, model, machine, spec, limit, num_blocks).values())

    fixed_bytes = with_most.total_bytes - with_most.kv_bytes - of_step(most)

    def other_bytes(num_blocks: int) -> int:
        return fixed_bytes + of_step(num_blocks)

    num_fitting = min(useful, (room - other_bytes(most)) // block_bytes)
    if num_fitting < most:
        num_fitting = bisect_right(range(most), room, key=lambda n: other_bytes(n) + n * block_bytes) - 1
    return given, useful, room - other_bytes(given or max(0, num_fitting))
