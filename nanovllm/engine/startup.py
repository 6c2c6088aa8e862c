"""start_engine: make a running engine from a checked setup. Loads the model, then sizes and allocates the KV cache."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from nanovllm.capabilities.cpu_attention.cpu_split import CpuSplit, FollowingSplit
from nanovllm.capabilities.cpu_attention.rates import make_cpu_attention, measure_split
from nanovllm.capabilities.cpu_experts.layer import RankExperts
from nanovllm.capabilities.disk.disk_moves import DiskSetup, least_load_tokens
from nanovllm.capabilities.disk.start import identify_weights, measure_disk, open_disk
from nanovllm.capabilities.disk.tier import DiskBoard, DiskTier
from nanovllm.capabilities.draft_head.drafts import HeadSetup
from nanovllm.capabilities.draft_head.pages import HeadPages
from nanovllm.capabilities.recurrent.memory import StateSetup
from nanovllm.capabilities.recurrent.places import RecurrentStates
from nanovllm.capabilities.shadow.drafts import ShadowSetup
from nanovllm.capabilities.shadow.pages import ShadowPages
from nanovllm.capabilities.speculation.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from nanovllm.capabilities.speculation.speculator import Speculator, StepTimes
from nanovllm.capabilities.windows.memory import WindowSetup
from nanovllm.capabilities.windows.places import WindowStates
from nanovllm.capacity.costs import prefill_flop, token_keys
from nanovllm.capacity.division import ShadowSize, divide_memory, kept_blocks
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan import experts_summary, plan_summary
from nanovllm.checkpoint.files import fetch_weights
from nanovllm.config import GPU_RESERVE_BYTES, Config
from nanovllm.device.devices import release_failed_start
from nanovllm.engine.engine import Engine
from nanovllm.engine.setup import EngineSetup
from nanovllm.errors import ConfigError
from nanovllm.executor.base import Executor, LocalExecutor, Runner
from nanovllm.executor.processes import ProcessExecutor
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.kvcache.seams import STREAM_ALL, Companion
from nanovllm.plan.kv_spec import KVCacheSizes, KVCacheSpec, WindowSpec, max_stateful_seqs, max_useful_blocks
from nanovllm.plan.shadow_spec import ShadowSpec
from nanovllm.plan.step_limits import MAX_GRAPH_CHUNK_TOKENS, has_mixed_graphs, max_step_rows
from nanovllm.runner.measure import measure_drafts, measure_kv_room
from nanovllm.runner.model_runner import make_runner
from nanovllm.runner.step_runner import CompanionSetup
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.schedule.step_bound import ChunkTimes, StepBound
from nanovllm.utils.arithmetic import format_bytes
from nanovllm.utils.interrupt import deferred_interrupt

logger = logging.getLogger("nanovllm")


def start_engine(setup: EngineSetup, end_token_ids: Sequence[int]) -> Engine:
    """Start the ranks, load the model and allocate the KV cache. end_token_ids: the tokens that end an answer.

    Raises ConfigError if the engine turns out not to fit in memory. After any exception, all workers have been stopped
    and all memory has been released.
    """
    executor: Executor | None = None
    try:
        executor = _make_executor(setup)
        return _start(setup, executor, end_token_ids)
    except BaseException as error:
        if executor is not None:
            with deferred_interrupt() as held, held.second_acts_at_once():
                executor.close()
        release_failed_start(error, setup.device)
        raise


def _make_executor(setup: EngineSetup) -> Executor:
    """Start the ranks and load the model on them."""
    config = setup.config
    if config.load_format != "dummy":
        fetch_weights(config.model, setup.directory, config.load_format)
    factory = partial(
        make_runner,
        config,
        setup.model_config,
        setup.directory,
        setup.plan.spec,
        setup.device,
        setup.internals.make_offload_engine,
        make_cpu_attention,
        partial(
            RankExperts,
            max_rows=setup.internals.max_cpu_expert_rows,
            link_share=setup.internals.expert_link_share,
        ),
    )
    if config.tensor_parallel_size == 1:
        return LocalExecutor(factory)
    return ProcessExecutor(factory, rank_devices(setup.device.type, config.tensor_parallel_size))


def rank_devices(device_type: str, size: int) -> list[torch.device]:
    """Return the device of each rank. device_type: "cuda" or "cpu"."""
    return [torch.device(f"cuda:{rank}" if device_type == "cuda" else "cpu") for rank in range(size)]


def _start(setup: EngineSetup, executor: Executor, end_token_ids: Sequence[int]) -> Engine:
    is_gpu = setup.device.type == "cuda"
    if setup.plan.host_table_bytes:
        logger.info("the embedding table is in CPU memory, %s", format_bytes(setup.plan.host_table_bytes))
    if setup.model_config.has_cpu_experts:
        reason = ""
        if setup.config.enable_expert_offload is None:
            reason = f", because the GPU has no room for them and the KV of max_model_len={setup.max_model_len}"
        logger.info("experts are in CPU memory: %s%s", experts_summary(setup.plan), reason)
    elif setup.config.enable_expert_offload:
        logger.info("all experts are on the GPU, which has room for them and the KV of max_model_len")
    if setup.config.kv_disk_path is not None:
        executor.call(Runner.apply, identify_weights)
    sizes = _kv_cache_sizes(setup, executor)
    executor.call(Runner.allocate_kv_cache, sizes, companion_setups(setup.plan.spec, sizes))
    if is_gpu and not setup.config.enforce_eager:
        executor.call(Runner.capture_graphs, sizes.num_gpu_blocks)
    split = setup.internals.cpu_split or executor.call(Runner.apply, measure_split)
    companions = _make_companions(setup.config, sizes, setup.plan.spec)
    kv = _make_kv_manager(setup.config, sizes, setup.plan.spec, companions, split)
    speculator = _make_speculator(setup, executor, kv)
    times = _chunk_times(setup)
    disk = _open_disk(setup, executor, kv)
    if is_gpu:
        executor.call(Runner.freeze_objects)
    report = executor.runner.start_report()
    scheduler = Scheduler(
        kv,
        max_num_seqs=_max_num_seqs(setup.config, setup.plan.spec, sizes),
        max_num_batched_tokens=setup.config.max_num_batched_tokens,
        chunked_prefill=setup.config.chunked_prefill,
        eos_token_ids=tuple(end_token_ids),
        speculator=speculator,
        max_step_rows=max_step_rows(setup.config, sizes.num_gpu_blocks),
        step_bound=_make_step_bound(setup, times, report.link_byte_per_s),
        store=disk,
    )
    logger.info("started in %s", report.phases)
    num_blocks = sizes.num_cpu_blocks or sizes.num_gpu_blocks
    cached = f"the KV cache holds {num_blocks * setup.config.block_size:,} tokens"
    logger.info("context: %s tokens; %s", f"{setup.max_model_len:,}", cached)
    if setup.config.enable_cpu_offload or setup.model_config.has_cpu_experts:
        plan, together = setup.plan, None
        if split is not None and split.link_byte_per_s and split.cpu_byte_per_s:
            together = (split.link_byte_per_s + split.cpu_byte_per_s) * plan.config.tensor_parallel_size
        machine = plan.machine.with_link(report.link_byte_per_s, "measured")
        if together or not setup.model_config.has_cpu_experts:
            machine = replace(machine, cpu_byte_per_s=together, cpu_source="measured, the link and the CPU together")
        plan = make_plan(plan.config, setup.model_config, machine, sizes=sizes, staging=plan.spec.staging)
        logger.info("%s", plan_summary(plan))
        setup = replace(setup, plan=plan)
    return Engine(setup, executor, scheduler, sizes, report)


def _kv_cache_sizes(setup: EngineSetup, executor: Executor) -> KVCacheSizes:
    """Return the number of blocks that the user gave, or as many as fit. Raises ConfigError if they do not fit.

    On the CPU, memory is not reserved in advance, so the given number is not checked against the free memory.
    """
    config, plan, spec = setup.config, setup.plan, setup.plan.spec
    name, least = ("num_gpu_blocks", 2) if config.enable_cpu_offload else ("num_kvcache_blocks", 1)
    given, num_cpu_blocks = max(getattr(config, name) or 0, 0), plan.num_cpu_blocks
    if given and setup.device.type == "cpu":
        sizes, room = KVCacheSizes(given, num_cpu_blocks, plan.num_pages, plan.shadow_bits), "memory is short"
        sizes = replace(sizes, num_state_slots=plan.num_state_slots)
    else:
        useful = max_useful_blocks(config, setup.max_model_len)
        if config.enable_cpu_offload:
            useful = max(2, min(useful, num_cpu_blocks))
        smallest = smallest_sizes(spec, num_cpu_blocks, plan.shadow_bits)
        companions = companion_setups(spec, smallest)
        measure = partial(measure_kv_room, num_cpu_blocks, given or useful, companions)
        num_bytes, room = executor.call(Runner.apply, measure)
        shadow = ShadowSize(plan.num_pages, plan.shadow_bits) if config.speculation_method == "auto" else None
        kept = kept_blocks(config, setup.model_config, setup.max_model_len)
        counts = {"given": given, "useful": useful, "num_cpu_blocks": num_cpu_blocks, "kept": kept}
        sizes = divide_memory(config, spec, num_bytes, **counts, shadow=shadow)
        draft_bytes = spec.draft_bytes(num_cpu_blocks)
        num_bytes -= draft_bytes + sizes.num_state_slots * spec.states.slot_bytes
        fitting = max(0, num_bytes) // spec.block_bytes if given else sizes.num_gpu_blocks
        if fitting < max(given, least):
            # Leave a reserve: another start may measure some MiB more, because memory fragments differently
            advised = max(least, (num_bytes - GPU_RESERVE_BYTES) // spec.block_bytes)
            lower = f"lower {name} to {advised}" if fitting >= least else "lower kvcache_block_size"
            if draft_bytes:
                lower += f", use a smaller CPU pool, for which the draft head takes {format_bytes(draft_bytes)} of that"
            raise ConfigError(
                f"there is no room for {name}={max(given, least)} blocks of "
                f"{format_bytes(spec.block_bytes)}: {room}; {lower}, lower max_num_batched_tokens or "
                "max_num_seqs, raise gpu_memory_utilization, or use a smaller model or more ranks"
            )
    if config.speculation_method == "shadow" and not sizes.num_pages:
        page = format_bytes(ShadowSpec.of(spec, sizes.shadow_bits).num_bytes(1))
        raise ConfigError(
            f"there is no room for the shadow: a block takes {page} in {sizes.shadow_bits} bits; {room}; lower {name} "
            "or kvcache_block_size, raise shadow_memory_gb or gpu_memory_utilization, or use another speculation"
        )
    return replace(sizes, num_snapshots=plan.num_snapshots)


def _max_num_seqs(config: Config, spec: KVCacheSpec, sizes: KVCacheSizes) -> int:
    """Return the most sequences that run together. If sequences have states, each needs a state slot."""
    if not spec.has_states:
        return config.max_num_seqs
    return min(config.max_num_seqs, max_stateful_seqs(config, spec.states, sizes.num_state_slots))


def _make_speculator(setup: EngineSetup, executor: Executor, kv: KVCacheManager) -> Speculator | None:
    """Make the speculator, and time a draft if a drafter runs the model. Returns None without speculation."""
    config, internals = setup.config, setup.internals
    if config.speculation_method == "off":
        return None
    drafters: list[Drafter] = []
    if config.speculation_method in ("prompt_lookup", "auto"):
        drafters.append(PromptLookupDrafter())
    shadow = next((companion for companion in kv.companions if isinstance(companion, ShadowPages)), None)
    if not kv.model_drafts:
        drafters.append(ModelDrafter("mtp", lambda seq: True))
    elif shadow is not None:
        drafters.append(ModelDrafter("shadow", shadow.has_pages))
    elif config.speculation_method in ("resident", "auto") and config.enable_cpu_offload:
        drafters.append(ModelDrafter("resident", kv.misses_keys))
    chosen = drafters if internals.drafters is None else internals.drafters
    times = None
    if not internals.always_guesses:
        drafts = any(drafter.costs_drafts for drafter in chosen)
        times = StepTimes(executor.call(Runner.apply, measure_drafts) if drafts else None)
    return Speculator(chosen, vocab_size=setup.model_config.vocab_size, max_guesses=config.max_guesses, times=times)


def _make_step_bound(setup: EngineSetup, times: ChunkTimes, link_byte_per_s: float | None) -> StepBound | None:
    """Make the bound, or return None if steps may take any time. If the link's rate is unknown, streaming is free."""
    if setup.config.max_step_ms is None:
        return None
    spec = setup.plan.spec
    missing_token_s = spec.block_bytes / spec.block_size / link_byte_per_s if link_byte_per_s else 0.0
    return StepBound(times, max_step_s=setup.config.max_step_ms / 1000, missing_token_s=missing_token_s)


def _chunk_times(setup: EngineSetup) -> ChunkTimes:
    is_gpu = setup.device.type == "cuda"
    has_graphs = is_gpu and not setup.config.enforce_eager and has_mixed_graphs(setup.model_config)
    return ChunkTimes(token_keys(setup.model_config), MAX_GRAPH_CHUNK_TOKENS if has_graphs else 0)


def _open_disk(setup: EngineSetup, executor: Executor, kv: KVCacheManager) -> DiskTier | None:
    """Open the cache on disk on all ranks, and measure from which prefix length on loading pays.

    Returns None without a cache on disk.
    """
    config = setup.config
    if config.kv_disk_path is None:
        return None
    snapshots = kv.pool.index.snapshots
    num_places = len(kv.pool.blocks) + (0 if snapshots is None else snapshots.count)
    board = DiskBoard(config.tensor_parallel_size, num_places)
    path = str(Path(config.kv_disk_path).expanduser().resolve())
    opened = DiskSetup(path, str(config.model), config.disk_bytes, board.address, num_places)
    try:
        keys = executor.call(Runner.apply, partial(open_disk, opened))
        least_tokens = _least_load_tokens(setup, executor)
    except BaseException:
        board.close()
        raise
    return DiskTier(keys, kv, board, least_load_tokens=least_tokens)


def _least_load_tokens(setup: EngineSetup, executor: Executor) -> int:
    """Return the shortest prefix, in tokens, that is loaded. On a CPU, loading is always faster than computing."""
    plan, spec = setup.plan, setup.plan.spec
    if setup.internals.least_load_tokens is not None:
        return setup.internals.least_load_tokens
    if setup.device.type == "cpu":
        return 0
    rates = executor.call(Runner.apply, measure_disk)
    token_bytes = spec.block_bytes // spec.block_size
    flop = partial(prefill_flop, plan.config, plan.model, capability=plan.machine.capability)
    least_tokens = least_load_tokens(rates, flop, token_bytes, spec.states.state_bytes, setup.max_model_len)
    logger.info(
        "KV on disk: computing %.0f tokens/s, reading %.2f GB/s: prefixes are loaded from %d tokens on",
        *(rates.num_tokens / rates.prompt_s, rates.read_byte_per_s / 1e9, least_tokens),
    )
    return least_tokens


def companion_setups(spec: KVCacheSpec, sizes: KVCacheSizes) -> list[CompanionSetup]:
    """Return what the ranks allocate for the companions of the KV cache, in the order of `_make_companions`."""
    setups: list[CompanionSetup] = []
    if sizes.num_pages:
        setups.append(ShadowSetup(sizes.num_pages, sizes.shadow_bits))
    if sizes.num_state_slots:
        setup = WindowSetup if isinstance(spec.states, WindowSpec) else StateSetup
        setups.append(setup(sizes.num_state_slots, sizes.num_snapshots))
    if spec.has_draft_head:
        setups.append(HeadSetup(sizes.num_cpu_blocks, sizes.num_state_slots))
    return setups


def smallest_sizes(spec: KVCacheSpec, num_cpu_blocks: int, shadow_bits: int) -> KVCacheSizes:
    """Return the sizes to profile memory with. All sequences use block 0, page 0 and slot 0.

    shadow_bits: 0 without a shadow.
    """
    return KVCacheSizes(1, num_cpu_blocks, int(shadow_bits > 0), shadow_bits, int(spec.has_states))


def _make_companions(config: Config, sizes: KVCacheSizes, spec: KVCacheSpec) -> list[Companion]:
    """Make the companions, which follow the blocks and sequences of the KV cache."""
    companions: list[Companion] = []
    if sizes.num_pages:
        # With "auto", the shadow gains little while the GPU slots hold every key
        num_spared_blocks = sizes.num_gpu_blocks if config.speculation_method == "auto" else 0
        num_sinks = ShadowSpec.of(spec, sizes.shadow_bits).num_sinks(sizes.num_pages)
        spared = num_spared_blocks if config.enable_cpu_offload else 0
        companions.append(ShadowPages(sizes.num_pages, num_sinks, spared))
    if sizes.num_state_slots:
        counts, model_drafts = (sizes.num_state_slots, sizes.num_snapshots), not spec.has_draft_head
        has_windows = isinstance(spec.states, WindowSpec)
        states = WindowStates(*counts) if has_windows else RecurrentStates(*counts, model_drafts=model_drafts)
        companions.append(states)
    if spec.has_draft_head:
        companions.append(HeadPages())
    return companions


def _make_kv_manager(
    config: Config, sizes: KVCacheSizes, spec: KVCacheSpec, companions: Sequence[Companion], split: CpuSplit | None
) -> KVCacheManager:
    model_drafts = not spec.has_draft_head
    if not config.enable_cpu_offload:
        return BlockManager(
            sizes.num_gpu_blocks,
            config.block_size,
            config.enable_prefix_caching,
            companions=companions,
            model_drafts=model_drafts,
        )
    drafts_over_slots = config.speculation_method in ("resident", "auto") and model_drafts and not sizes.num_pages
    return HybridKVCacheManager(
        sizes.num_cpu_blocks,
        sizes.num_gpu_blocks,
        config.block_size,
        spec.staging_group_blocks,
        config.enable_prefix_caching,
        STREAM_ALL if split is None else FollowingSplit(split),
        keeps_first_blocks=drafts_over_slots,
        companions=companions,
        model_drafts=model_drafts,
    )
