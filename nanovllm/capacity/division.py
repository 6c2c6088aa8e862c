"""How the memory of a GPU is divided between KV blocks, pages of the shadow and slots of states."""

from collections.abc import Iterator
from typing import NamedTuple

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.plan.kv_spec import KVCacheSizes, KVCacheSpec, num_state_slots
from nanovllm.plan.shadow_spec import MAX_SHADOW_HEAD_DIM, SHADOW_BITS, ShadowSpec
from nanovllm.utils.arithmetic import ceil_div

LEAST_SLOTS = 32  # slots that the shadow leaves room for with speculation="auto", if their number is not given
NUM_SHADOWED_SEQS = 2  # with speculation="auto", the shadow holds at most this many sequences of max_model_len


class ShadowSize(NamedTuple):
    """Number of pages of a shadow, and their bits."""

    num_pages: int
    bits: int


NO_SHADOW = ShadowSize(0, 0)


def wants_shadow(config: Config, spec: KVCacheSpec) -> bool:
    """Return True if drafts read a shadow if there is room for it. A draft head replaces the shadow, and there is none
    of large heads.
    """
    return config.wants_shadow and not spec.has_draft_head and spec.head_dim <= MAX_SHADOW_HEAD_DIM


def auto_shadows(
    config: Config, spec: KVCacheSpec, room_bytes: int, *, given: int, num_cpu_blocks: int, max_model_len: int
) -> Iterator[ShadowSize]:
    """Yield the shadows that speculation="auto" can choose from with offload, the preferred shadow first.

    Each shadow leaves room for the given slots or, if none are given, for the smaller of LEAST_SLOTS and max_num_seqs
    slots. Each holds at least one sequence of max_model_len, because drafts that miss keys are often wrong.
    """
    free_bytes = room_bytes - (given or _least_slots(config)) * spec.block_bytes
    if config.shadow_memory_gb is not None:
        free_bytes = min(free_bytes, int(config.shadow_memory_gb * 2**30))
    num_blocks = max_model_len // spec.block_size
    for bits in SHADOW_BITS if config.shadow_bits is None else (config.shadow_bits,):
        for num_seqs in range(min(NUM_SHADOWED_SEQS, config.max_num_seqs), 0, -1):
            num_pages = min(num_seqs * num_blocks, num_cpu_blocks)
            if num_pages and ShadowSpec.of(spec, bits).num_bytes(num_pages) <= free_bytes:
                yield ShadowSize(num_pages, bits)


def _least_slots(config: Config) -> int:
    """Return the fewest slots that a shadow leaves if num_gpu_blocks is not given. The engine needs two to start."""
    return max(2, min(LEAST_SLOTS, config.max_num_seqs))


def kept_blocks(config: Config, model: ModelConfig, max_model_len: int) -> int:
    """Return the number of blocks that states leave to the KV. With experts in CPU memory, the GPU has just room for
    the KV of one sequence of `max_model_len`.
    """
    return ceil_div(max_model_len, config.block_size) if model.has_cpu_experts else 0


def divide_memory(
    config: Config,
    spec: KVCacheSpec,
    room_bytes: int,
    *,
    given: int,
    useful: int,
    num_cpu_blocks: int,
    kept: int = 0,
    shadow: ShadowSize | None = None,
) -> KVCacheSizes:
    """Divide the memory of a GPU between KV blocks, the shadow and the slots of states.

    States get the room that the given blocks or, if they fit, `kept` blocks leave, or else at most half of the room.
    `given`: number of blocks that the user asks for, or 0 for the largest number that fits, up to `useful`. The result
    may have too few blocks to start with, and no pages. `shadow`: the planner's choice. It gets fewer pages if start-up
    finds less room than the planner estimated, because the given blocks, or else `_least_slots`, come first.
    If `shadow` is None, its size depends on the room: the shadow should hold the `useful` blocks, which are all that
    can run at once. With offload, if num_gpu_blocks is not given, it gets at most half of the room for pages and slots.
    Without offload, each block has a page.
    """
    room_bytes -= spec.draft_bytes(num_cpu_blocks)
    free_bytes = room_bytes // 2
    if given or 0 < kept * spec.block_bytes < room_bytes:
        free_bytes = room_bytes - (given or kept) * spec.block_bytes
    num_slots = num_state_slots(config, spec.states, free_bytes)
    room_bytes -= num_slots * spec.states.slot_bytes
    least = given
    if not wants_shadow(config, spec):
        shadow = NO_SHADOW
    elif shadow is None:
        shadow = _shadow_that_fits(config, spec, room_bytes, given, useful, num_cpu_blocks)
    else:
        least = given or _least_slots(config)
    num_pages = shadow_bytes = 0
    if shadow.num_pages:
        shadow_spec = ShadowSpec.of(spec, shadow.bits)
        num_pages = min(shadow.num_pages, shadow_spec.num_pages_in(room_bytes - least * spec.block_bytes))
        shadow_bytes = shadow_spec.num_bytes(num_pages)
    num_blocks = given or min(useful, (room_bytes - shadow_bytes) // spec.block_bytes)
    return KVCacheSizes(num_blocks, num_cpu_blocks, num_pages, shadow.bits, num_slots)


def _shadow_that_fits(
    config: Config, spec: KVCacheSpec, room_bytes: int, given: int, useful: int, num_cpu_blocks: int
) -> ShadowSize:
    specs = {bits: ShadowSpec.of(spec, bits) for bits in SHADOW_BITS}
    most = room_bytes if config.shadow_memory_gb is None else int(config.shadow_memory_gb * 2**30)
    if config.enable_cpu_offload:
        wanted = min(useful, num_cpu_blocks)
        most = min(most, room_bytes - given * spec.block_bytes if given else room_bytes // 2)
    else:
        bits = config.shadow_bits or SHADOW_BITS[0]
        num_blocks = given or min(useful, specs[bits].num_pages_in(room_bytes, spec.block_bytes))
        wanted = min(useful, num_blocks)
        most = min(most, room_bytes - num_blocks * spec.block_bytes)
    fitting = [bits for bits in SHADOW_BITS if specs[bits].num_bytes(wanted) <= most]
    bits = config.shadow_bits or next(iter(fitting), SHADOW_BITS[-1])
    return ShadowSize(min(wanted, specs[bits].num_pages_in(most)), bits)
