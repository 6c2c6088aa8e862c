"""The shape and size of the KV cache and of the states of sequences, and the states of blocks. Plain data."""

from dataclasses import dataclass
from enum import IntEnum

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import ceil_div

# Fraction of the blocks that admission leaves free, so that running sequences can grow for a while. If admission left
# no blocks free, a newly admitted sequence would soon be preempted when other sequences need their next blocks, and
# would have to recompute its prompt. A sequence that runs alone may use all blocks.
WATERMARK = 0.03


def num_watermark_blocks(num_blocks: int, watermark: float = WATERMARK) -> int:
    """Return how many of `num_blocks` admission leaves free while sequences run."""
    return int(watermark * num_blocks)


def num_sequences_in(num_blocks: int, blocks_each: int) -> int:
    """Return how many sequences of `blocks_each` blocks a pool of `num_blocks` runs together."""
    together = (num_blocks - num_watermark_blocks(num_blocks)) // blocks_each
    return max(together, min(1, num_blocks // blocks_each))


def num_blocks_for(num_sequences: int, blocks_each: int) -> int:
    """Return the smallest pool, in blocks, that runs `num_sequences` of `blocks_each` blocks together."""
    return blocks_each if num_sequences == 1 else with_watermark(num_sequences * blocks_each)


def with_watermark(num_used_blocks: int) -> int:
    """Return the smallest pool, in blocks, in which running sequences can be given `num_used_blocks`."""
    num_blocks = num_used_blocks
    while (larger := num_used_blocks + num_watermark_blocks(num_blocks)) > num_blocks:
        num_blocks = larger
    return num_blocks


def max_useful_blocks(config: Config, max_model_len: int) -> int:
    """Return the size of the largest pool, in blocks, that max_num_seqs sequences of max_model_len tokens can use."""
    return num_blocks_for(config.max_num_seqs, ceil_div(max_model_len, config.block_size))


@dataclass(frozen=True)
class StagingSizes:
    """Sizes of the groups in which the keys of one layer are streamed, and of the pages of layers with a window."""

    group_tokens: int = 8192  # keys of one streamed partial attention, in whole blocks; at least one block
    num_groups: int = 3  # attention reads one group while the next groups are being filled
    window_page_tokens: int = 128  # the largest tile of keys of the attention kernels


@dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """Shape of the keys of one sequence in the layers with a window, on one rank.

    A slot on the GPU holds, for each layer, a ring of pages with K and V of the newest tokens: the token at a position
    has the place `position % ring_tokens`. A snapshot in CPU memory is a copy of a slot.
    """

    num_layers: int  # layers with a window
    window: int  # tokens that a token sees, including itself
    num_kv_heads: int  # on this rank
    head_dim: int
    scale: float
    itemsize: int  # bytes per element
    page_tokens: int
    max_guesses: int  # draft tokens that a step verifies
    draft_size: int = 0  # as in StateSpec: no draft head

    @property
    def num_pages(self) -> int:
        """Return the number of pages of a ring. The new tokens of a decode step replace none that the step reads."""
        return ceil_div(self.window - 1 + max(MIN_SHORT_TOKENS, 1 + self.max_guesses), self.page_tokens)

    @property
    def ring_tokens(self) -> int:
        return self.num_pages * self.page_tokens

    @property
    def max_short_tokens(self) -> int:
        """Return the most new tokens that can be written to the ring before any of them attends."""
        return self.ring_tokens - self.window + 1

    @property
    def token_bytes(self) -> int:
        """K and V of a token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def state_bytes(self) -> int:
        return self.num_layers * self.ring_tokens * self.token_bytes

    snapshot_bytes = slot_bytes = state_bytes

    def read_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a decode step of one sequence of `num_tokens` tokens reads."""
        return self.num_layers * min(num_tokens, self.window) * self.token_bytes


MIN_SHORT_TOKENS = 16  # chunks of up to this many tokens are always written to the ring


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Shape of the recurrent state of one sequence on one rank (see kernels/state_tensors.py), with sizes of 0 if no
    layer is recurrent.

    A slot on the GPU and a snapshot in CPU memory hold a state and the inputs of the last draft tokens. A slot also
    holds the draft head's outputs for the last tokens.
    """

    num_layers: int = 0  # recurrent layers
    conv_channels: int = 0
    conv_tokens: int = 0  # inputs of the convolution that the state holds: the convolution's width - 1
    num_value_heads: int = 0
    key_head_dim: int = 0
    value_head_dim: int = 0
    itemsize: int = 0  # bytes per element of the convolution's inputs; the matrices are in fp32
    max_guesses: int = 0
    draft_size: int = 0  # numbers in the draft head's output for a token, or 0 without a draft head

    @property
    def input_size(self) -> int:
        """Return how many numbers per token enter the recurrence of a layer."""
        return self.conv_channels + 2 * self.num_value_heads

    @property
    def conv_bytes(self) -> int:
        return self.num_layers * self.conv_channels * self.conv_tokens * self.itemsize

    @property
    def matrix_bytes(self) -> int:
        return self.num_layers * self.num_value_heads * self.key_head_dim * self.value_head_dim * 4

    @property
    def pending_bytes(self) -> int:
        return self.num_layers * self.max_guesses * self.input_size * self.itemsize

    @property
    def state_bytes(self) -> int:
        """Size of a state alone, as on disk."""
        return self.conv_bytes + self.matrix_bytes

    @property
    def snapshot_bytes(self) -> int:
        return self.state_bytes + self.pending_bytes

    @property
    def slot_bytes(self) -> int:
        return self.snapshot_bytes + (1 + self.max_guesses) * self.draft_size * self.itemsize

    def read_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a decode step of one sequence reads and writes."""
        return 2 * self.state_bytes


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Shape of the KV cache of one rank, and of the states of its sequences (recurrent layers or windows)."""

    num_layers: int  # layers that attend to all keys, including the draft head's layer unless offload is on
    block_size: int  # tokens
    num_kv_heads: int  # on this rank
    head_dim: int
    itemsize: int  # bytes per element
    attention_scale: float | None = None  # None for head_dim ** -0.5
    staging: StagingSizes = StagingSizes()
    states: StateSpec | WindowSpec = StateSpec()

    @property
    def layer_block_bytes(self) -> int:
        """K and V of one block in one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """K and V of one block in all layers: 2 x layers x block_size x kv_heads x head_dim x itemsize."""
        return self.num_layers * self.layer_block_bytes

    @property
    def has_states(self) -> bool:
        """True if sequences have states."""
        return self.states.num_layers > 0

    @property
    def has_draft_head(self) -> bool:
        return self.states.draft_size > 0

    def draft_bytes(self, num_cpu_blocks: int) -> int:
        """Return the size of the draft head's K and V on the GPU with offload: one page for each CPU block.

        Without offload, the blocks contain the draft head's K and V.
        """
        return num_cpu_blocks * self.layer_block_bytes if self.has_draft_head else 0

    @property
    def staging_group_blocks(self) -> int:
        """Number of blocks that are streamed and attended to together."""
        return max(1, self.staging.group_tokens // self.block_size)

    @property
    def staging_bytes(self) -> int:
        """Size of the staging groups. They hold blocks of a single layer, and all layers share them."""
        return self.staging.num_groups * self.staging_group_blocks * self.layer_block_bytes


@dataclass(frozen=True)
class KVCacheSizes:
    """Numbers of GPU blocks, CPU blocks, shadow pages and states, measured at start-up or set by the user."""

    num_gpu_blocks: int
    num_cpu_blocks: int = 0  # 0 without offload
    num_pages: int = 0  # of the shadow, or 0 without a shadow
    shadow_bits: int = 0
    num_state_slots: int = 0  # on the GPU; 0 if sequences have no states
    num_snapshots: int = 0  # states in CPU memory


def dtype_name(config: Config, model: ModelConfig) -> str:
    """Return the dtype of weights, activations and KV: "float32", "bfloat16" or "float16"."""
    return model.torch_dtype if config.dtype == "auto" else config.dtype


def value_bytes(dtype_name: str) -> int:
    """Return the bytes of a value of this dtype."""
    return 4 if dtype_name == "float32" else 2


def uses_draft_head(config: Config, model: ModelConfig) -> bool:
    """Return True if the checkpoint's draft head is loaded.

    "auto" does not load the draft head with KV on disk, because blocks from disk lack the draft head's K and V. If
    "auto" drops the draft head for lack of memory, the plan's ModelConfig has no draft head.
    """
    return config.speculation_method == "mtp" or (
        config.speculation_method == "auto" and model.has_mtp and config.kv_disk_path is None
    )


def kv_heads_of_rank(num_kv_heads: int, num_ranks: int, rank: int = 0) -> range:
    """Return the KV heads of a rank: an equal share or, with fewer heads than ranks, one head, of which several ranks
    have a copy. Raises ConfigError if that is not possible.
    """
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads={num_kv_heads} cannot be shared by tensor_parallel_size={num_ranks} ranks; choose a "
            f"divisor or a multiple of {num_kv_heads}"
        )
    first, count = rank * num_kv_heads // num_ranks, max(1, num_kv_heads // num_ranks)
    return range(first, first + count)


def kv_cache_spec(
    config: Config, model: ModelConfig, tp_size: int, staging: StagingSizes = StagingSizes()
) -> KVCacheSpec:
    """Return the shape of the KV cache on each of `tp_size` ranks."""
    itemsize = value_bytes(dtype_name(config, model))
    return KVCacheSpec(
        num_layers=model.num_attention_layers + (uses_draft_head(config, model) and not config.enable_cpu_offload),
        block_size=config.block_size,
        num_kv_heads=len(kv_heads_of_rank(model.num_kv_heads, tp_size)),
        head_dim=model.head_dim,
        itemsize=itemsize,
        attention_scale=model.attention_scale,
        staging=staging,
        states=_state_spec(config, model, tp_size, itemsize, staging.window_page_tokens),
    )


def _state_spec(
    config: Config, model: ModelConfig, tp_size: int, itemsize: int, page_tokens: int
) -> StateSpec | WindowSpec:
    r, window = model.recurrent, model.window
    if window is not None:
        return WindowSpec(
            num_layers=model.num_window_layers,
            window=window.num_tokens,
            num_kv_heads=len(kv_heads_of_rank(window.num_kv_heads, tp_size)),
            head_dim=window.head_dim,
            scale=window.scale,
            itemsize=itemsize,
            page_tokens=page_tokens,
            max_guesses=config.max_guesses,
        )
    if r is None:
        return StateSpec()
    return StateSpec(
        num_layers=model.num_recurrent_layers,
        conv_channels=r.conv_channels // tp_size,
        conv_tokens=r.conv_kernel - 1,
        num_value_heads=r.num_value_heads // tp_size,
        key_head_dim=r.key_head_dim,
        value_head_dim=r.value_head_dim,
        itemsize=itemsize,
        max_guesses=config.max_guesses,
        draft_size=model.hidden_size if uses_draft_head(config, model) else 0,
    )


def num_spare_state_slots(config: Config, states: StateSpec | WindowSpec) -> int:
    """Count the state slots besides one slot per running sequence. Windows need none.

    Recurrent layers need slot 0, SAVE_SLOTS with prefix caching, and one for drafting with the model itself. While
    fewer sequences run, their unused slots serve the last two purposes, too.
    """
    if isinstance(states, WindowSpec):
        return 0
    model_drafts = not states.draft_size and (config.wants_shadow or config.speculation_method == "resident")
    return 1 + SAVE_SLOTS * config.enable_prefix_caching + int(model_drafts)


def max_stateful_seqs(config: Config, states: StateSpec | WindowSpec, num_state_slots: int) -> int:
    """Return how many sequences can run together with `num_state_slots` state slots."""
    return num_state_slots - num_spare_state_slots(config, states)


def num_state_slots(config: Config, states: StateSpec | WindowSpec, room_bytes: int) -> int:
    """Return the number of state slots for max_num_seqs sequences, or as many as fit, but enough for one sequence.
    Without states it is 0.
    """
    if not states.num_layers:
        return 0
    others = num_spare_state_slots(config, states)
    return max(others + 1, min(others + config.max_num_seqs, room_bytes // states.slot_bytes))


SAVE_SLOTS = 2  # slots for states in the middle of chunks, in addition to slots that no running sequence uses
SNAPSHOT_TOKENS = 8192  # prefill takes a snapshot of the state at each multiple of this many tokens


class BlockState(IntEnum):
    """State of a KV block, for display only: where the block is, and what the last step did with the block.

    If two states apply, the later one in this list wins: a block is STREAMED if a step streams one part of the block
    and the CPU attends to the rest.
    """

    FREE = 0  # empty, or holds nothing that a request could use
    CACHED = 1  # no request owns the block, but a new prompt can match it; with offload, it is in CPU memory only
    WAITING = 2  # a request owns the block; it is in CPU memory only, and the last step did not read it
    RESIDENT = 3  # on the GPU; with offload, some request owns the block or a new prompt can match it
    CPU_ATTENDED = 4  # in the last step, the CPU attended to the block in CPU memory
    STREAMED = 5  # copied to the GPU for the last step, layer by layer
    WRITTEN = 6  # the last step wrote to the block, or the next step will


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """Rank 0's report on its start-up."""

    needs_rope_lens: bool  # True if the keys of a sequence can depend on the length of its prompt
    link_byte_per_s: float | None  # measured from host to device, or None without offload or on a CPU
    phases: str  # the duration of each phase, for the log
