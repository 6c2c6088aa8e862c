"""CapacityPlan: memory, speed bounds and the number of sequences that fit, known before anything is allocated.

`make_plan` makes the plan of an engine: it decides how many blocks the engine gets on a machine. A plan has three uses.
The engine does not start if `plan_check.check_start` refuses the plan. With offload, the engine logs `plan_summary`
after measuring the link rate. `nanovllm plan` prints a plan without loading a model (entrypoints/planner.py).
This module is arithmetic only and loads neither torch nor weights.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

from nanovllm.capacity import costs
from nanovllm.capacity.costs import DeviceMemory, device_memory
from nanovllm.capacity.division import NO_SHADOW, auto_shadows, divide_memory, kept_blocks, wants_shadow
from nanovllm.capacity.machine import Machine
from nanovllm.checkpoint.model_config import ExpertsConfig, ModelConfig
from nanovllm.config import GPU_RESERVE_BYTES, Config
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import (
    SNAPSHOT_TOKENS,
    KVCacheSizes,
    KVCacheSpec,
    StagingSizes,
    dtype_name,
    kv_cache_spec,
    max_stateful_seqs,
    max_useful_blocks,
    num_blocks_for,
    num_sequences_in,
    num_spare_state_slots,
    with_watermark,
)
from nanovllm.plan.shadow_spec import MAX_SHADOW_HEAD_DIM, ShadowSpec
from nanovllm.plan.step_limits import expected_tokens, max_model_len, max_sampled_rows
from nanovllm.utils.arithmetic import ceil_div, format_bytes

MAX_HOST_SHARE = 0.7  # fraction of the available memory; limits a CPU pool whose size the user left open
MAX_SNAPSHOT_SHARE = 0.85  # fraction of the available memory; limits the CPU pool and snapshots of states together
MAX_SNAPSHOT_BYTES = 4 * 2**30  # per rank; pinning them takes a second
NUM_KEPT_PROMPTS = 64
# With experts in CPU memory: left free there for the process and for tensors that are being loaded, and on the GPU for
# what the estimates miss, so that the KV that the plan has room for fits
HOST_RESERVE_BYTES = 2 * 2**30
PLACEMENT_RESERVE_BYTES = 256 * 2**20
NUM_PLACED_SEQS = 8  # sequences whose recurrent states take precedence over experts on the GPU
SHORT_SEQUENCE_TOKENS = 1024  # prompt and answer of a short sequence, for sizing a CPU pool
AUTO_SHARE = 4  # with "auto" and offload, K and V of a draft head take at most 1/AUTO_SHARE of the room for KV
# Bits of the shadow -> share of right drafts: means of four tasks at two temperatures (python -m benchmarks.real_model)
SHADOW_ACCEPTANCE = {4: 0.97, 3: 0.96}
MIN_SHADOW_GAIN = 1.5  # in the expected rate, which counts only the memory that a draft reads and no other cost
MAX_SHADOW_LOSS = 1.05  # in the expected rate, for a shadow that holds more sequences or has more bits


class Capacity(NamedTuple):
    """The number of sequences of one length that can run together, and the limit that applies."""

    num_sequences: int
    limit: str


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """Memory and speed bounds of an engine that runs `num_sequences` sequences together. Bytes are per GPU.

    A bound is a number of tokens per second, over all sequences, that no schedule can exceed. A bound is the quotient
    of the machine's rate and the bytes that must be moved, or the arithmetic that must be done, per token. A bound is
    None if the rate is unknown or nothing must be moved.
    """

    config: Config
    model: ModelConfig  # with the places of the embedding table and of the experts
    machine: Machine
    spec: KVCacheSpec  # the KV cache of one GPU
    context: int  # tokens of each sequence
    num_sequences: int
    num_gpu_blocks: int  # the slots with offload, or the whole cache without offload
    num_cpu_blocks: int  # 0 without offload
    num_pages: int = 0  # pages of the shadow; 0 without a shadow
    shadow_bits: int = 0
    num_state_slots: int = 0  # 0 if sequences have no states
    num_snapshots: int = 0  # states in CPU memory
    unused_draft_bytes: int = 0  # K and V of a draft head that speculation="auto" leaves out to save memory

    # -- memory ----------------------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.block_bytes // self.spec.block_size

    @cached_property
    def memory(self) -> DeviceMemory:
        """The GPU memory in use, part by part."""
        limit = max_model_len(self.config, self.model)
        return device_memory(
            self.config,
            self.model,
            self.machine,
            self.spec,
            limit,
            self.num_gpu_blocks,
            self.shadow_bytes,
            self.state_bytes,
            self.spec.draft_bytes(self.num_cpu_blocks),
        )

    @property
    def state_bytes(self) -> int:
        return self.num_state_slots * self.spec.states.slot_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Size of the snapshots of all ranks together, in CPU memory."""
        return self.num_snapshots * self.spec.states.snapshot_bytes * self.config.tensor_parallel_size

    @property
    def shadow_bytes(self) -> int:
        return ShadowSpec.of(self.spec, self.shadow_bits).num_bytes(self.num_pages) if self.num_pages else 0

    @property
    def gpu_limit_bytes(self) -> int | None:
        """The GPU memory that the engine may use, or None on a CPU."""
        return self.machine.usable_gpu_bytes(self.config.gpu_memory_utilization)

    @property
    def fits_gpu(self) -> bool:
        """True if the GPU memory in use, including estimates, is within the limit; always True on a CPU."""
        return self.gpu_limit_bytes is None or self.memory.total_bytes <= self.gpu_limit_bytes

    @property
    def fits_exactly(self) -> bool:
        """True if the parts of the GPU memory that are known exactly are within the limit; always True on a CPU."""
        return self.gpu_limit_bytes is None or self.memory.exact_bytes <= self.gpu_limit_bytes

    @property
    def cpu_pool_bytes(self) -> int:
        """Size of the CPU pools of all ranks together."""
        return self.num_cpu_blocks * self.spec.block_bytes * self.config.tensor_parallel_size

    @property
    def host_table_bytes(self) -> int:
        """Size of the embedding table of all ranks together in pinned CPU memory, or 0 if it is on the GPU."""
        return _host_table_bytes(self.config, self.model)

    @property
    def num_gpu_expert_layers(self) -> int:
        """Layers whose experts are on the GPU."""
        experts = self.model.experts
        return 0 if experts is None else len(experts.layers) - len(experts.cpu_layers)

    @property
    def host_expert_bytes(self) -> int:
        """Size of the experts of all ranks together in CPU memory."""
        return _host_expert_bytes(self.config, self.model)

    @property
    def host_weight_bytes(self) -> int:
        """CPU memory for weights that are not on the GPU and, with experts, for the process itself."""
        return _host_weight_bytes(self.config, self.model)

    @property
    def fits_host(self) -> bool:
        return self.cpu_pool_bytes + self.snapshot_bytes + self.host_weight_bytes <= self.machine.host_bytes

    # -- sequences and blocks --------------------------------------------------------------------------------------

    def capacity(self, num_tokens: int) -> Capacity:
        """Return how many sequences of `num_tokens` tokens, prompt and answer, can run together."""
        each = ceil_div(num_tokens, self.spec.block_size)
        by_limit = {"max_num_seqs": self.config.max_num_seqs}
        if self.config.enable_cpu_offload:
            by_limit |= {"the slots": self.num_gpu_blocks, "the CPU pool": num_sequences_in(self.num_cpu_blocks, each)}
        else:
            by_limit |= {"the KV cache": num_sequences_in(self.num_gpu_blocks, each)}
        if self.spec.has_states:
            by_limit["the state slots"] = max_stateful_seqs(self.config, self.spec.states, self.num_state_slots)
        limit = min(by_limit, key=by_limit.__getitem__)
        return Capacity(by_limit[limit], limit)

    @property
    def num_missing_blocks(self) -> int:
        """The fewest blocks that must cross the link in a decode step: full blocks - (slots - sequences)."""
        if not self.config.enable_cpu_offload:
            return 0
        return costs.num_missing_blocks(self.context, self.spec.block_size, self.num_gpu_blocks, self.num_sequences)

    # -- bounds ----------------------------------------------------------------------------------------------------

    @property
    def cpu_byte_per_s(self) -> float | None:
        """Each rank's share of the rate of CPU memory."""
        rate = self.machine.cpu_byte_per_s
        return rate and rate / self.config.tensor_parallel_size

    def _missing_tok_per_s(self, byte_per_s: float | None) -> float | None:
        """Return sequences x rate / missing bytes."""
        if not (byte_per_s and self.num_missing_blocks and self.machine.gpu_bytes is not None):
            return None
        return self.num_sequences * byte_per_s / (self.num_missing_blocks * self.spec.block_bytes)

    @property
    def link_decode_tok_per_s(self) -> float | None:
        """The bound of decode if all missing blocks cross the link, which reads CPU memory."""
        return self._missing_tok_per_s(least(self.machine.link_byte_per_s, self.cpu_byte_per_s))

    @property
    def link_and_cpu_decode_tok_per_s(self) -> float | None:
        """The bound of decode if the CPU attends to some blocks: link and CPU share the rate of CPU memory."""
        return None if self.config.cpu_attention == "off" else self._missing_tok_per_s(self.cpu_byte_per_s)

    @cached_property
    def memory_decode_tok_per_s(self) -> float | None:
        """The bound of decode by GPU memory: sequences x rate of GPU memory / (weights + all keys and values)."""
        if not self.machine.memory_byte_per_s:
            return None
        num_keys = self.num_sequences * self.context
        step_bytes = costs.decode_bytes(self.config, self.model, self.num_sequences, num_keys, self.kv_bytes_per_token)
        return self.num_sequences * self.machine.memory_byte_per_s / step_bytes

    def expert_decode_tok_per_s(self, num_guesses: int = 0) -> float | None:
        """Return the bound of decode that experts in CPU memory set, with `num_guesses` draft tokens of each sequence,
        of which none is accepted.

        The rate of CPU memory bounds the CPU, which alone reads the chosen experts, on a desktop at about that rate. In
        each layer the GPU waits for the CPU, so the times of both add up. The GPU reads a shared expert meanwhile,
        which is so small that the bound neglects it.
        """
        if not (self.model.has_cpu_experts and self.cpu_byte_per_s and self.machine.gpu_bytes is not None):
            return None
        num_bytes = self._cpu_expert_bytes * costs.expert_share(self.model, self.num_sequences * (1 + num_guesses))
        gpu_tok_per_s = self.memory_decode_tok_per_s
        gpu_s = self.num_sequences / gpu_tok_per_s if gpu_tok_per_s else 0.0
        return self.num_sequences / (num_bytes / self.cpu_byte_per_s + gpu_s)

    @cached_property
    def _cpu_expert_bytes(self) -> float:
        return costs.cpu_expert_bytes(self.config, self.model)

    @property
    def decode_tok_per_s(self) -> float | None:
        """The lowest bound of decode."""
        is_link_alone = self.config.cpu_attention == "off"
        missing = self.link_decode_tok_per_s if is_link_alone else self.link_and_cpu_decode_tok_per_s
        return least(missing, self.memory_decode_tok_per_s, self.expert_decode_tok_per_s())

    @property
    def expected_decode_tok_per_s(self) -> float | None:
        """The bound of decode. With a shadow, the bound assumes that SHADOW_ACCEPTANCE of the drafts are accepted."""
        if not self.num_pages:
            return self.decode_tok_per_s
        return self.guessing_decode_tok_per_s(SHADOW_ACCEPTANCE[self.shadow_bits])

    def guessing_decode_tok_per_s(self, acceptance: float) -> float | None:
        """Return the bound of decode with the best number of draft tokens in each step at this acceptance rate.

        A draft token takes the time in which the GPU reads the weights and the shadow, or the draft head; with other
        drafters a draft token takes no time. Drafting and verifying a token also take the time in which the CPU reads
        the experts in its memory. The bound is None without speculation, or if no bound of decode is known.
        """
        decode_tok_per_s = self.decode_tok_per_s
        if not (self.config.max_guesses and decode_tok_per_s):
            return None
        rates = []
        for n in range(self.config.max_guesses + 1):
            pass_tok_per_s = min(decode_tok_per_s, self.expert_decode_tok_per_s(n) or decode_tok_per_s)
            seconds = self.num_sequences / pass_tok_per_s + n * self._draft_s
            rates.append(self.num_sequences * expected_tokens(acceptance, n) / seconds)
        return max(rates)

    @cached_property
    def _draft_s(self) -> float:
        num_keys, config, model = self.num_sequences * self.context, self.config, self.model
        if self.machine.memory_byte_per_s and self.spec.has_draft_head:
            num_bytes = costs.head_draft_bytes(config, model, self.spec, self.num_sequences, num_keys)
            expert_bytes = costs.head_draft_expert_bytes(config, model, self.num_sequences)
        elif self.num_pages and self.machine.memory_byte_per_s:
            token_bytes = ShadowSpec.of(self.spec, self.shadow_bits).page_bytes // self.spec.block_size
            num_bytes = costs.decode_bytes(config, model, self.num_sequences, num_keys, token_bytes)
            expert_bytes = self._cpu_expert_bytes * costs.expert_share(model, self.num_sequences)
        else:
            return 0.0
        expert_s = expert_bytes / self.cpu_byte_per_s if self.cpu_byte_per_s else 0.0
        return num_bytes / self.machine.memory_byte_per_s + expert_s


def least(*bounds: float | None) -> float | None:
    """Return the lowest of the known bounds, or None if no bound is known."""
    return min((bound for bound in bounds if bound is not None), default=None)


def experts_summary(plan: CapacityPlan) -> str:
    """Return the size and number of layers of the experts in CPU memory, for example `13.25 GiB of 40 of 48 layers`."""
    experts = plan.model.experts
    assert experts is not None, "the model has experts"
    return f"{format_bytes(plan.host_expert_bytes)} of {len(experts.cpu_layers)} of {len(experts.layers)} layers"


def plan_summary(plan: CapacityPlan) -> str:
    """Return the main figures of a plan with offload in one line, for the engine's log."""
    limit, link, decode = plan.gpu_limit_bytes, plan.machine.link_byte_per_s, plan.decode_tok_per_s
    blocks = f"{plan.num_gpu_blocks} of {plan.spec.block_size} tokens, {format_bytes(plan.memory.kv_bytes)}"
    parts = [f"KV cache: {blocks}"]
    if plan.config.enable_cpu_offload:
        parts = [
            f"slots: {blocks}",
            f"CPU pool: {plan.num_cpu_blocks} blocks, {format_bytes(plan.cpu_pool_bytes)}",
            f"blocks missing per step: {plan.num_missing_blocks}",
        ]
    if plan.model.has_cpu_experts:
        parts.append(f"experts in CPU memory: {experts_summary(plan)}")
    if limit is not None:
        parts.append(f"GPU memory: about {format_bytes(plan.memory.total_bytes)} of {format_bytes(limit)}")
    if plan.num_pages:
        parts.append(f"shadow: {plan.num_pages} blocks in {plan.shadow_bits} bits, {format_bytes(plan.shadow_bytes)}")
    if plan.unused_draft_bytes:
        parts.append(f"draft head: left out, its K and V would take {format_bytes(plan.unused_draft_bytes)}")
    parts += [f"link: {link / 1e9:.1f} GB/s, {plan.machine.link_source}"] if link else []
    parts += [f"decode: at most {decode:,.1f} tok/s"] if decode else []
    title = f"plan for {plan.num_sequences} x {plan.context:,} tokens of {plan.config.model} on {plan.machine.name}"
    return f"{title}; {'; '.join(parts)}"


# -- making a plan ---------------------------------------------------------------------------------------------------


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
    return _place_weights(config, model, machine, plan_of)


PlanOf: TypeAlias = Callable[[ModelConfig, Machine], CapacityPlan]  # a plan with all weights where the model has them


def _place_weights(config: Config, model: ModelConfig, machine: Machine, plan_of: PlanOf) -> CapacityPlan:
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


def _host_table_bytes(config: Config, model: ModelConfig) -> int:
    return costs.embedding_bytes(config, model) if model.embedding_on_cpu else 0


def _host_expert_bytes(config: Config, model: ModelConfig) -> int:
    return int(costs.cpu_expert_bytes(config, model)) * config.tensor_parallel_size


def _host_weight_bytes(config: Config, model: ModelConfig) -> int:
    reserve = HOST_RESERVE_BYTES if model.has_cpu_experts else 0
    return _host_table_bytes(config, model) + _host_expert_bytes(config, model) + reserve


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
    left_bytes = max(0, machine.host_bytes - _host_weight_bytes(config, model))
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
    if model.num_kv_heads % tp:
        divisor = f"choose a divisor of {model.num_kv_heads}"
        return f"num_kv_heads={model.num_kv_heads} is not divisible by tensor_parallel_size={tp}; {divisor}"
    if model.window is not None and model.window.num_kv_heads % tp:
        return (
            f"the {model.window.num_kv_heads} KV heads of layers with a window are not divisible by "
            f"tensor_parallel_size={tp}; choose a divisor"
        )
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

    def step_bytes(num_blocks: int) -> int:
        return sum(costs.step_bytes(config, model, machine, spec, limit, num_blocks).values())

    fixed_bytes = with_most.total_bytes - with_most.kv_bytes - step_bytes(most)

    def other_bytes(num_blocks: int) -> int:
        return fixed_bytes + step_bytes(num_blocks)

    num_fitting = min(useful, (room - other_bytes(most)) // block_bytes)
    if num_fitting < most:
        num_fitting = bisect_right(range(most), room, key=lambda n: other_bytes(n) + n * block_bytes) - 1
    return given, useful, room - other_bytes(given or max(0, num_fitting))
