"""CapacityPlan: memory, speed bounds and the number of sequences that fit, known before anything is allocated.

`make_plan` (make_plan.py) makes the plan of an engine: it decides how many blocks the engine gets on a machine. A plan
has three uses. The engine does not start if `plan_check.check_start` refuses the plan. With offload, the engine logs
`plan_summary` after measuring the link rate. `nanovllm plan` prints a plan without loading a model
(entrypoints/planner.py). This module is arithmetic only and loads neither torch nor weights.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nanovllm.capacity import costs
from nanovllm.capacity.device_memory import DeviceMemory, device_memory
from nanovllm.capacity.machine import Machine
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.plan.kv_spec import KVCacheSpec, max_stateful_seqs, num_sequences_in
from nanovllm.plan.shadow_spec import ShadowSpec
from nanovllm.plan.step_limits import expected_tokens, max_model_len
from nanovllm.utils.arithmetic import ceil_div, format_bytes

# With experts in CPU memory: left free there for the process and for tensors that are being loaded
HOST_RESERVE_BYTES = 2 * 2**30
# Bits of the shadow -> share of right drafts: means of four tasks at two temperatures (python -m benchmarks.real_model)
SHADOW_ACCEPTANCE = {4: 0.97, 3: 0.96}


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
        return host_weight_bytes(self.config, self.model)

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


def _host_table_bytes(config: Config, model: ModelConfig) -> int:
    return costs.embedding_bytes(config, model) if model.embedding_on_cpu else 0


def _host_expert_bytes(config: Config, model: ModelConfig) -> int:
    return int(costs.cpu_expert_bytes(config, model)) * config.tensor_parallel_size


def host_weight_bytes(config: Config, model: ModelConfig) -> int:
    """Return CapacityPlan.host_weight_bytes of a model whose weights have their places."""
    reserve = HOST_RESERVE_BYTES if model.has_cpu_experts else 0
    return _host_table_bytes(config, model) + _host_expert_bytes(config, model) + reserve
