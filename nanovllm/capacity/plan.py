"""CapacityPlan: memory, speed bounds and the number of sequences that fit, known before anything is allocated.

`make_plan` decides how many blocks an engine gets on a machine, and so makes its plan. A plan has three uses. The
engine does not start if `plan_check.check_start` refuses its plan. With offload, the engine logs its plan, as
`plan_table` formats it, once it has measured the link rate. `nanovllm plan` prints a plan without loading a model. This
is arithmetic only: it loads neither torch nor weights.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

from nanovllm.capabilities.disk.disk_moves import document_disk_bytes, num_document_states
from nanovllm.capabilities.shadow.shadow_spec import NO_SHADOW, ShadowSpec, auto_shadows, divide_memory, wants_shadow
from nanovllm.capacity import costs
from nanovllm.capacity.costs import DeviceMemory, device_memory
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.checkpoint.model_config import ModelConfig, RecurrentConfig
from nanovllm.config import BLOCK_SIZE_STEP, GPU_RESERVE_BYTES, Config
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import (
    SNAPSHOT_TOKENS,
    KVCacheSizes,
    KVCacheSpec,
    StagingSizes,
    kv_cache_spec,
    max_stateful_seqs,
    max_useful_blocks,
    num_blocks_for,
    num_sequences_in,
    with_watermark,
)
from nanovllm.plan.step_limits import expected_tokens, max_model_len
from nanovllm.utils.arithmetic import ceil_div, format_bytes
from nanovllm.utils.options import check_options, option

MAX_HOST_SHARE = 0.7  # fraction of the available memory; limits a CPU pool whose size the user left open
MAX_SNAPSHOT_SHARE = 0.85  # likewise; limits the CPU pool and the snapshots of states together
MAX_SNAPSHOT_BYTES = 4 * 2**30  # per rank; pinning them takes a second
NUM_KEPT_PROMPTS = 64
ANSWER_TOKENS = 500  # after a prompt of the whole context, to compare plans by their time
SHORT_SEQUENCE_TOKENS = 1024  # prompt and answer of a short sequence, for sizing a CPU pool
AUTO_SHARE = 4  # with "auto" and offload, K and V of a draft head take at most 1/AUTO_SHARE of the room for KV
# Bits of the shadow -> share of right drafts, measured with SmolLM2-135M on code and prose at temperature 0.7
SHADOW_ACCEPTANCE = {4: 0.96, 3: 0.91, 2: 0.76}
MIN_SHADOW_GAIN = 1.5  # in the expected rate, which leaves out what a draft costs besides reading memory
MAX_SHADOW_LOSS = 1.05  # in the expected rate, for a shadow that holds more sequences or has more bits
ACCEPTANCES = (0.8, 0.9, 0.95, 0.98)  # shares of right guesses that the bound of decode is shown for
MAX_TOKENS = 10**9  # limit of a context, which bounds the loop over its chunks
MAX_GB = 10**9  # limit of memory, and of a rate per second: beyond any machine
_WORK, _MACHINE = "the work", "the machine, if not this one"  # groups

Row: TypeAlias = tuple[str, str, str]  # (name, figure, remark)


class Capacity(NamedTuple):
    """The number of sequences of one length that can run together, and the limit that applies."""

    num_sequences: int
    limit: str


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """Memory and speed bounds of an engine that runs `num_sequences` sequences together. Bytes are per GPU.

    A bound is a number of tokens per second, over all sequences, that no schedule can exceed. It follows from the
    bytes that must be moved or the arithmetic that must be done, and from the machine's rate for that. If a rate is
    unknown, or nothing needs it, its bound is None.
    """

    config: Config
    model: ModelConfig
    machine: Machine
    spec: KVCacheSpec  # the KV cache of one GPU
    context: int  # tokens of each sequence
    num_sequences: int
    num_gpu_blocks: int  # slots, or without offload the whole cache
    num_cpu_blocks: int  # 0 without offload
    num_pages: int = 0  # pages of the shadow; 0 without one
    shadow_bits: int = 0
    num_state_slots: int = 0  # with slot 0, which belongs to nobody; 0 if no layer is recurrent
    num_snapshots: int = 0  # states kept in CPU memory
    unused_draft_bytes: int = 0  # K and V of a draft head that "auto" leaves out because they would take too much

    # -- memory ----------------------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.block_bytes // self.spec.block_size

    @property
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
        return self.num_state_slots * self.spec.states.slot_bytes if self.spec.states is not None else 0

    @property
    def snapshot_bytes(self) -> int:
        """Size of the snapshots of all ranks together, in CPU memory."""
        states = self.spec.states
        return 0 if states is None else self.num_snapshots * states.snapshot_bytes * self.config.tensor_parallel_size

    @property
    def shadow_bytes(self) -> int:
        return self.num_pages * ShadowSpec.of(self.spec, self.shadow_bits).page_bytes if self.num_pages else 0

    @property
    def gpu_limit_bytes(self) -> int | None:
        """GPU memory that the engine may use; None on a CPU."""
        if self.machine.gpu_bytes is None:
            return None
        return int(self.machine.gpu_bytes * self.config.gpu_memory_utilization)

    @property
    def fits_gpu(self) -> bool:
        """True if the GPU memory in use, including estimates, is within the limit; always True on a CPU."""
        return self.gpu_limit_bytes is None or self.memory.total_bytes <= self.gpu_limit_bytes

    @property
    def cpu_pool_bytes(self) -> int:
        """Size of the CPU pools of all ranks together."""
        return self.num_cpu_blocks * self.spec.block_bytes * self.config.tensor_parallel_size

    @property
    def num_disk_states(self) -> int:
        """States of recurrent layers that a document of `context` tokens leaves on disk."""
        return 0 if self.spec.states is None else num_document_states(self.context, self._grain)

    @property
    def disk_bytes(self) -> int:
        """Size on disk of a document of `context` tokens, on all ranks."""
        state_bytes = 0 if self.spec.states is None else self.spec.states.state_bytes
        of_rank = document_disk_bytes(self.context, self.kv_bytes_per_token, state_bytes, self._grain)
        return of_rank * self.config.tensor_parallel_size

    @property
    def _grain(self) -> int:
        """Tokens that prefix hits are counted in."""
        return BLOCK_SIZE_STEP if self.config.enable_cpu_offload else self.config.block_size

    @property
    def fits_host(self) -> bool:
        return self.cpu_pool_bytes + self.snapshot_bytes <= self.machine.host_bytes

    # -- sequences and blocks --------------------------------------------------------------------------------------

    def capacity(self, num_tokens: int) -> Capacity:
        """Return how many sequences of `num_tokens` tokens, prompt and answer, can run together."""
        each = ceil_div(num_tokens, self.spec.block_size)
        by_limit = {"max_num_seqs": self.config.max_num_seqs}
        if self.config.enable_cpu_offload:
            by_limit |= {"the slots": self.num_gpu_blocks, "the CPU pool": num_sequences_in(self.num_cpu_blocks, each)}
        else:
            by_limit |= {"the KV cache": num_sequences_in(self.num_gpu_blocks, each)}
        if self.spec.states is not None:
            by_limit["the state slots"] = max_stateful_seqs(self.config, self.spec.states, self.num_state_slots)
        limit = min(by_limit, key=by_limit.__getitem__)
        return Capacity(by_limit[limit], limit)

    @property
    def num_full_blocks(self) -> int:
        """Number of full blocks of each sequence."""
        return costs.num_full_blocks(self.context, self.spec.block_size)

    @property
    def num_missing_blocks(self) -> int:
        """The fewest blocks that can cross the link in a decode step: full blocks - (slots - sequences)."""
        if not self.config.enable_cpu_offload:
            return 0
        return costs.num_missing_blocks(self.context, self.spec.block_size, self.num_gpu_blocks, self.num_sequences)

    # -- bounds ----------------------------------------------------------------------------------------------------

    @property
    def _cpu_byte_per_s(self) -> float | None:
        """Each rank's share of the rate of CPU memory."""
        rate = self.machine.cpu_byte_per_s
        return rate and rate / self.config.tensor_parallel_size

    def _missing_tok_per_s(self, byte_per_s: float | None) -> float | None:
        """sequences x rate / missing bytes."""
        if not (byte_per_s and self.num_missing_blocks and self.machine.gpu_bytes is not None):
            return None
        return self.num_sequences * byte_per_s / (self.num_missing_blocks * self.spec.block_bytes)

    @property
    def link_decode_tok_per_s(self) -> float | None:
        """The bound where all that is missing crosses the link, which reads CPU memory."""
        return self._missing_tok_per_s(_least(self.machine.link_byte_per_s, self._cpu_byte_per_s))

    @property
    def link_and_cpu_decode_tok_per_s(self) -> float | None:
        """The bound where the CPU attends to a part: both read CPU memory, which bounds them together."""
        return None if self.config.cpu_attention == "off" else self._missing_tok_per_s(self._cpu_byte_per_s)

    @property
    def memory_decode_tok_per_s(self) -> float | None:
        """sequences x GPU memory rate / (weights + all keys and values)."""
        if not self.machine.memory_byte_per_s:
            return None
        num_keys = self.num_sequences * self.context
        step_bytes = costs.decode_bytes(self.config, self.model, self.num_sequences, num_keys, self.kv_bytes_per_token)
        return self.num_sequences * self.machine.memory_byte_per_s / step_bytes

    @property
    def decode_tok_per_s(self) -> float | None:
        """The lowest bound of decode."""
        is_link_alone = self.config.cpu_attention == "off"
        missing = self.link_decode_tok_per_s if is_link_alone else self.link_and_cpu_decode_tok_per_s
        return _least(missing, self.memory_decode_tok_per_s)

    @property
    def expected_decode_tok_per_s(self) -> float | None:
        """The bound of decode, with the shadow's drafts if there is one, of which SHADOW_ACCEPTANCE are right."""
        if not self.num_pages:
            return self.decode_tok_per_s
        return self.guessing_decode_tok_per_s(SHADOW_ACCEPTANCE[self.shadow_bits])

    def guessing_decode_tok_per_s(self, acceptance: float) -> float | None:
        """The bound of decode with the best number of guesses in each step, of which this share is right.

        Drafts take the time in which the GPU reads the weights and the shadow, or the draft head; without either they
        are taken to cost nothing. None without speculation, or if no bound of decode is known.
        """
        if not (self.config.max_guesses and self.decode_tok_per_s):
            return None
        pass_s, draft_s = self.num_sequences / self.decode_tok_per_s, self._draft_s
        return max(
            self.num_sequences * expected_tokens(acceptance, n) / (pass_s + n * draft_s)
            for n in range(self.config.max_guesses + 1)
        )

    @property
    def _draft_s(self) -> float:
        num_keys = self.num_sequences * self.context
        if self.machine.memory_byte_per_s and self.spec.has_draft_head:
            num_bytes = costs.head_draft_bytes(self.config, self.model, self.spec, self.num_sequences, num_keys)
            return num_bytes / self.machine.memory_byte_per_s
        if not (self.num_pages and self.machine.memory_byte_per_s):
            return 0.0
        token_bytes = ShadowSpec.of(self.spec, self.shadow_bits).page_bytes // self.spec.block_size
        num_bytes = costs.decode_bytes(self.config, self.model, self.num_sequences, num_keys, token_bytes)
        return num_bytes / self.machine.memory_byte_per_s

    @property
    def link_prefill_tok_per_s(self) -> float | None:
        """Prompts run one after the other. For each chunk, the earlier blocks that are not resident cross the link."""
        byte_per_s = _least(self.machine.link_byte_per_s, self._cpu_byte_per_s)
        if not (byte_per_s and self.config.enable_cpu_offload and self.machine.gpu_bytes is not None):
            return None
        num_loaded = costs.num_prefill_loaded_blocks(
            self.context, self.spec.block_size, self.num_gpu_blocks, self.config.max_num_batched_tokens
        )
        seconds = num_loaded * self.spec.block_bytes / byte_per_s
        return self.context / seconds if seconds else None

    @property
    def flop_prefill_tok_per_s(self) -> float | None:
        if not self.machine.flop_per_s:
            return None
        return self.context * self.machine.flop_per_s / costs.prefill_flop(self.config, self.model, self.context)

    @property
    def first_token_s(self) -> float | None:
        """The least time until the first token after a prompt of `context` tokens."""
        rate = _least(self.link_prefill_tok_per_s, self.flop_prefill_tok_per_s)
        return self.context / rate if rate else None

    @property
    def request_s(self) -> float:
        """The least time of a request with a prompt of `context` tokens and an answer of ANSWER_TOKENS, to compare
        plans. A part whose bound is not known counts as 0.
        """
        num_tokens = self.num_sequences * ANSWER_TOKENS
        return (self.first_token_s or 0.0) + num_tokens / (self.expected_decode_tok_per_s or float("inf"))


def _least(*bounds: float | None) -> float | None:
    """The least of those that are known."""
    return min((bound for bound in bounds if bound is not None), default=None)


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
    """The plan of an engine with these options that runs `num_sequences` sequences of `context` tokens together.

    `context` defaults to max_model_len. `sizes` are those that start-up has chosen, once it has. speculation="auto" may
    leave out the draft head: then the plan's `model` has none. Raises ConfigError if max_model_len exceeds what the
    model's rope covers, and if the kv heads cannot be split evenly. plan_check.py checks everything else.
    """
    limit = max_model_len(config, model)
    if model.num_kv_heads % config.tensor_parallel_size:
        raise ConfigError(
            f"num_kv_heads={model.num_kv_heads} is not divisible by tensor_parallel_size="
            f"{config.tensor_parallel_size}; choose a divisor of {model.num_kv_heads}"
        )
    if model.recurrent is not None:
        _check_recurrent(config, model.recurrent)
    if config.speculation_method == "mtp" and not model.has_mtp:
        raise ConfigError(
            f"speculation='mtp' drafts with the head for multi-token prediction, which {config.model} does not have; "
            "use another speculation"
        )
    spec, num_cpu_blocks = _spec_and_pool(config, model, machine, limit, staging)
    unused_draft_bytes = 0
    if config.speculation_method == "auto" and (draft_bytes := spec.draft_bytes(num_cpu_blocks)):
        given, _, room_bytes = _room(config, model, machine, spec, limit, num_cpu_blocks)
        if draft_bytes > (room_bytes - given * spec.block_bytes) // AUTO_SHARE:
            model, unused_draft_bytes = replace(model, has_mtp=False), draft_bytes
            spec, num_cpu_blocks = _spec_and_pool(config, model, machine, limit, staging)
    for name in ("shadow_bits", "shadow_memory_gb"):
        if spec.has_draft_head and getattr(config, name) is not None:
            raise ConfigError(
                f"{name} has no effect: with speculation='auto' the draft head of {config.model} takes the place of a "
                "shadow; leave it out, or use speculation='shadow'"
            )
    sizes = sizes or _sizes(config, model, machine, spec, limit, num_cpu_blocks)
    return CapacityPlan(
        config=config,
        model=model,
        machine=machine,
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
    """The shape of the KV cache, and the number of blocks in the CPU pool."""
    spec = kv_cache_spec(config, model, config.tensor_parallel_size, staging)
    return spec, _num_cpu_blocks(config, model, machine, spec, limit) if config.enable_cpu_offload else 0


def _check_recurrent(config: Config, recurrent: RecurrentConfig) -> None:
    """Raise ConfigError for options that do not work with recurrent layers."""
    tp = config.tensor_parallel_size
    if recurrent.num_key_heads % tp or recurrent.num_value_heads % tp:
        raise ConfigError(
            f"the {recurrent.num_key_heads} key heads and {recurrent.num_value_heads} value heads of recurrent layers "
            f"are not divisible by tensor_parallel_size={tp}; choose a divisor of both"
        )


def _num_snapshots(config: Config, machine: Machine, spec: KVCacheSpec, num_blocks: int) -> int:
    """Number of states that are kept in CPU memory: for every SNAPSHOT_TOKENS tokens of a cache of `num_blocks`, and
    for the ends of NUM_KEPT_PROMPTS prompts, as far as there is room beside the CPU pool. They take at most
    MAX_SNAPSHOT_BYTES, or an eighth of that pool if that is more. While one is read from disk, another one is left.
    """
    if spec.states is None or not config.enable_prefix_caching:
        return 0
    pool_bytes = num_blocks * spec.block_bytes if config.enable_cpu_offload else 0
    host_bytes = int(machine.host_bytes * MAX_SNAPSHOT_SHARE) // config.tensor_parallel_size - pool_bytes
    most = min(max(MAX_SNAPSHOT_BYTES, pool_bytes // 8), host_bytes) // spec.states.snapshot_bytes
    least = 1 if config.kv_disk_path is None else 2
    return max(least, min(num_blocks * spec.block_size // SNAPSHOT_TOKENS + NUM_KEPT_PROMPTS, most))


def _num_cpu_blocks(config: Config, model: ModelConfig, machine: Machine, spec: KVCacheSpec, limit: int) -> int:
    """Number of blocks in the CPU pool, where a block has the heads of all ranks.

    If the user left the size open, the pool runs two sequences of max_model_len together, or has one block per slot if
    that is more. Slots beyond what two such sequences and max_num_seqs short ones can use are not counted, because
    pinning memory takes time at start-up.
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
    """The fewest blocks on the GPU that an engine can start with."""
    return 2 if config.enable_cpu_offload else 1


def _sizes(
    config: Config, model: ModelConfig, machine: Machine, spec: KVCacheSpec, limit: int, num_cpu_blocks: int
) -> KVCacheSizes:
    """Return the blocks and pages that the user asks for, or an estimate of what start-up will have room for; at least
    the fewest blocks that work. With speculation="auto" and offload, choose a shadow or none by the expected rate of
    decode at max_model_len; if the machine's rates are unknown, the shadow takes at most 1/AUTO_SHARE of the slots.
    """
    given, useful, room = _room(config, model, machine, spec, limit, num_cpu_blocks)
    divide = partial(divide_memory, config, spec, room, given=given, useful=useful, num_cpu_blocks=num_cpu_blocks)

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
    if spec.states is not None:
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
    """The blocks on the GPU that the user asks for, the most that can be used, and an estimate of the bytes that
    start-up will have for them, for states and for drafts.
    """
    given = (config.num_gpu_blocks or 0) if config.enable_cpu_offload else max(config.num_kvcache_blocks, 0)
    useful = max_useful_blocks(config, limit)
    if config.enable_cpu_offload:
        useful = min(useful, num_cpu_blocks)
    if machine.gpu_bytes is None:  # the same rule as ModelRunner.measure_kv_room
        room = int(machine.host_bytes * config.gpu_memory_utilization / 2 / config.tensor_parallel_size)
        return given, useful, room - (spec.staging_bytes if config.enable_cpu_offload else 0)

    def other_bytes(num_blocks: int) -> int:
        return device_memory(config, model, machine, spec, limit, num_blocks).total_bytes - num_blocks * block_bytes

    room = int(machine.gpu_bytes * config.gpu_memory_utilization) - GPU_RESERVE_BYTES
    block_bytes = spec.block_bytes  # all other needs grow with the number of blocks
    num_fitting = bisect_right(range(useful + 1), room, key=lambda n: other_bytes(n) + n * block_bytes) - 1
    return given, useful, room - other_bytes(given or max(0, num_fitting))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan beside the engine's. An invalid value raises ConfigError."""

    context: int | None = option(
        None,
        help="tokens of each sequence, such as 131072 or 131k; by default, max_model_len",
        group=_WORK,
        above=0,
        most=MAX_TOKENS,
    )
    sequences: int = option(1, help="number of sequences that run together", group=_WORK, above=0)
    fit: bool = option(
        False,
        help="list the presets, formats and contexts that run on the GPU, with their options and projected bounds of "
        "speed",
        group=_WORK,
    )
    gpu: str | None = option(
        None, help="name of a GPU, such as 'RTX 4090'; by default, the one here or else an H200", group=_MACHINE
    )
    gpu_memory_gb: float | None = option(
        None, help="memory of one GPU in GiB; by default, that of the GPU", group=_MACHINE, above=0, most=MAX_GB
    )
    host_memory_gb: float | None = option(
        None,
        help="available CPU memory in GiB; by default, what is available here",
        group=_MACHINE,
        above=0,
        most=MAX_GB,
    )
    link_gb_per_s: float | None = option(
        None,
        help="rate from CPU memory to the GPU in GB/s (10^9 bytes); by default, the GPU's, measured or projected",
        group=_MACHINE,
        above=0,
        most=MAX_GB,
    )
    cpu_gb_per_s: float | None = option(
        None,
        help="rate in GB/s at which the link and the CPU together read CPU memory; by default, measured if the GPU is "
        "here, else that of the kind of machine that the GPU is usually in",
        group=_MACHINE,
        above=0,
        most=MAX_GB,
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.gpu is not None:
            find_gpu(self.gpu)

    def apply(self, machine: Machine) -> Machine:
        """`machine` with these options applied. Raises ConfigError if the plan is for the CPU and an option describes a
        GPU.
        """
        named = {name: getattr(self, name) for name in ("gpu", "gpu_memory_gb", "link_gb_per_s", "cpu_gb_per_s")}
        if machine.gpu_bytes is None and (given := [name for name, value in named.items() if value is not None]):
            raise ConfigError(f"{', '.join(given)} describe a GPU, but device='cpu' plans for the CPU; give only one")
        if self.gpu is not None:
            machine = Machine.gpu(machine.host_bytes, find_gpu(self.gpu))
        if self.gpu_memory_gb is not None:
            machine = replace(machine, gpu_bytes=int(self.gpu_memory_gb * 2**30))
        if self.host_memory_gb is not None:
            machine = replace(machine, host_bytes=int(self.host_memory_gb * 2**30))
        machine = machine.with_link(self.link_gb_per_s and self.link_gb_per_s * 1e9, "given")
        return machine.with_cpu(self.cpu_gb_per_s and self.cpu_gb_per_s * 1e9, "given")


# -- the table -------------------------------------------------------------------------------------------------------


def plan_table(plan: CapacityPlan) -> str:
    """The plan, one figure per line. `~` marks an estimate, `(!)` a figure above its limit.

    Bytes are per GPU, except for the CPU pool, which is counted for all ranks together.
    """
    ranks = plan.config.tensor_parallel_size
    where = f"{ranks} x {plan.machine.name}" if ranks > 1 else plan.machine.name
    title = f"plan for {plan.num_sequences} x {plan.context:,} tokens of {plan.config.model} on {where}"
    rows = [*_memory_rows(plan), *_sequence_rows(plan), *_bound_rows(plan)]
    return "\n".join([title, *(f"  {name:<11} {figure:>11}  {remark}".rstrip() for name, figure, remark in rows)])


def _memory_rows(plan: CapacityPlan) -> list[Row]:
    """The parts of the GPU memory that are not empty, their sum, and the CPU pool."""
    spec, memory, limit = plan.spec, plan.memory, plan.gpu_limit_bytes
    offload = plan.config.enable_cpu_offload
    blocks = f"{plan.num_gpu_blocks} of {spec.block_size} tokens, {format_bytes(spec.block_bytes)} each"
    blocks += f", {format_bytes(plan.kv_bytes_per_token)} a token"
    parts = (
        ("weights", "", memory.weight_bytes, ""),
        ("slots" if offload else "KV cache", "", memory.kv_bytes, blocks),
        ("shadow", "", memory.shadow_bytes, f"{plan.num_pages} blocks in {plan.shadow_bits} bits, for drafts"),
        ("states", "", memory.state_bytes, _states_remark(plan)),
        ("draft head", "", memory.draft_bytes, "its K and V, for all blocks of the CPU pool"),
        ("staging", "", memory.staging_bytes, ""),
        ("logits", "", memory.logits_bytes, "one buffer for all graphs"),
        ("inputs", "~", memory.input_bytes, "static inputs of the graphs"),
        ("activations", "~", memory.activation_bytes, "in the largest step"),
        ("graphs", "~", memory.graph_bytes, ""),
        ("workspaces", "~", memory.workspace_bytes, "cuBLAS"),
        ("CUDA", "~", memory.context_bytes, "its context and kernels"),
    )
    rows = [(name, f"{sign}{format_bytes(num_bytes)}", remark) for name, sign, num_bytes, remark in parts if num_bytes]
    if plan.unused_draft_bytes:
        needs = f"its K and V would take {format_bytes(plan.unused_draft_bytes)}, over a quarter of the memory for KV"
        rows.append(("draft head", "left out", needs))
    if limit is not None:
        remark = f"of {format_bytes(limit)} that may be used" + ("" if plan.fits_gpu else " (!)")
        rows.append(("GPU memory", f"~{format_bytes(memory.total_bytes)}", remark))
    if offload:
        num_tokens = plan.num_cpu_blocks * spec.block_size
        remark = f"{plan.num_cpu_blocks} blocks, {num_tokens:,} tokens of all requests together"
        remark += f"; {format_bytes(plan.machine.host_bytes)} was available"
        rows.append(("CPU pool", format_bytes(plan.cpu_pool_bytes), remark + ("" if plan.fits_host else " (!)")))
    if plan.snapshot_bytes:
        remark = f"{plan.num_snapshots} state{'s' * (plan.num_snapshots > 1)} for later prompts, in CPU memory"
        rows.append(("snapshots", format_bytes(plan.snapshot_bytes), remark))
    if disk_limit := plan.config.disk_bytes:
        remark = f"a document of {plan.context:,} tokens"
        if plan.num_disk_states:
            remark += f" with {plan.num_disk_states} state{'s' * (plan.num_disk_states > 1)}"
        if plan.disk_bytes:
            remark += f"; there is room for {disk_limit // plan.disk_bytes:,} in {format_bytes(disk_limit)}"
        rows.append(("on disk", format_bytes(plan.disk_bytes), remark))
    return rows


def _states_remark(plan: CapacityPlan) -> str:
    if plan.spec.states is None:
        return ""
    num_seqs = max_stateful_seqs(plan.config, plan.spec.states, plan.num_state_slots)
    return f"of {num_seqs} sequence{'s' * (num_seqs > 1)}, {format_bytes(plan.spec.states.slot_bytes)} each"


def _sequence_rows(plan: CapacityPlan) -> list[Row]:
    """The sequences that fit, both of the plan's length and of one block, and the blocks that are missing."""
    long, short = plan.capacity(plan.context), plan.capacity(plan.spec.block_size)
    remark = f"of {plan.context:,} tokens at once, limited by {long.limit}"
    if plan.context > plan.spec.block_size:
        remark += f"; {short.num_sequences} of up to {plan.spec.block_size:,}, by {short.limit}"
    rows = [("sequences", f"{long.num_sequences:,}", remark)]
    if plan.config.enable_cpu_offload:
        remark = f"full per sequence; at least {plan.num_missing_blocks} missing per step"
        rows.append(("blocks", f"{plan.num_full_blocks:,}", remark))
    return rows


def _bound_rows(plan: CapacityPlan) -> list[Row]:
    """The machine's rates with their sources, and the bounds that follow from them, lowest first."""
    m = plan.machine
    rows = []
    if m.gpu_bytes is not None and plan.config.enable_cpu_offload:
        rows += [("link", f"{m.link_byte_per_s / 1e9:.1f} GB/s", m.link_source)] if m.link_byte_per_s else []
        rows += [("CPU memory", f"{m.cpu_byte_per_s / 1e9:.1f} GB/s", m.cpu_source)] if m.cpu_byte_per_s else []
    if m.memory_byte_per_s:
        rows.append(("memory rate", f"{m.memory_byte_per_s / 1e12:.2f} TB/s", m.rates_source))
    if m.flop_per_s:
        rows.append(("arithmetic", f"{m.flop_per_s / 1e12:.0f} TFLOP/s", m.rates_source))
    decode, remark = {"memory rate": plan.memory_decode_tok_per_s}, ""
    if plan.config.cpu_attention == "off":
        decode["link"] = plan.link_decode_tok_per_s
    elif plan.link_decode_tok_per_s:
        decode["link and the CPU"] = plan.link_and_cpu_decode_tok_per_s
        remark = f"{rate_text(plan.link_decode_tok_per_s)} by the link alone"
    rows += _bound_row("decode", decode, remark)
    guessing = {f"at acceptance {a}": plan.guessing_decode_tok_per_s(a) for a in ACCEPTANCES}
    if shares := ", ".join(f"{rate_text(rate)} {share}" for share, rate in guessing.items() if rate is not None):
        rows.append(("guesses", "", f"tok/s: {shares}, with up to {plan.config.max_guesses} a step"))
    rows += _bound_row("prefill", {"link": plan.link_prefill_tok_per_s, "arithmetic": plan.flop_prefill_tok_per_s})
    if plan.first_token_s is not None:
        rows.append(
            ("first token", f">= {seconds_text(plan.first_token_s)}", f"after a prompt of {plan.context:,} tokens")
        )
    return rows


def _bound_row(name: str, by_cause: Mapping[str, float | None], remark: str = "") -> list[Row]:
    """The lowest of the bounds that are known, and all of them in the remark. Without any, no row."""
    known = sorted((rate, cause) for cause, rate in by_cause.items() if rate is not None)
    causes = ", ".join(f"{rate_text(rate)} by the {cause}" for rate, cause in known)
    remarks = "; ".join(text for text in (causes, remark) if text)
    return [(name, f"<= {rate_text(known[0][0])}", f"tok/s: {remarks}")] if known else []


def rate_text(tok_per_s: float) -> str:
    return f"{tok_per_s:,.0f}" if tok_per_s >= 1000 else f"{tok_per_s:.1f}"


def seconds_text(number: float) -> str:
    return f"{number:,.0f} s" if number >= 100 else f"{number:.1f} s" if number >= 0.1 else f"{number:.1g} s"
