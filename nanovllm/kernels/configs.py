"""Configurations of the attention kernels for each target: tiles, warps, stages, loads, and splits of the keys.

The choices are fixed, so that start-up spends no time on tuning. docs/measurements.md has the figures for the H200;
`benchmarks/bench_attention.py --tune` compares other choices. tests/kernels/test_compile.py compiles the kernels for
these targets, and checks that they fit into shared memory and registers and load their tiles asynchronously.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KernelTarget
from nanovllm.kernels.merge import MAX_SPLITS

DECODE_PROGRAMS_PER_SM = 2
MAX_HEADS_PER_TILE = 8  # in prefill
SPLIT_COST_TOKENS = 256  # starting a program and merging its part cost about as much as reading this many keys
SPLIT_GRAIN_TOKENS = 64  # a split consists of whole tiles
MAX_PREFILL_SPLITS = 32  # programs that share the keys of a tile
MAX_WAVES = 4  # waves of programs that share keys; bounds the memory of their parts
MERGE_COST_TOKENS = 1024  # launching a merge costs about as much as reading this many keys
SHORT_QUERY_LEN = 2048  # up to here sequences get the smaller tile of queries, and programs may share their keys


class PrefillConfig(NamedTuple):
    """Sizes of a tile of queries and a tile of keys. With `tma`, bulk copies load keys and values, else cp.async.

    A tile of queries has `block_m` rows. A row is a query of one head.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool
    num_parts: int = 1  # programs that share the columns of the values; each computes all scores

    @property
    def programs_per_sm(self) -> int:
        """Programs that run at once: 8 warps of up to 255 registers a thread fill the registers of an SM."""
        return max(1, 8 // self.num_warps)


class DecodeConfig(NamedTuple):
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


def heads_per_tile(group: int, max_query_len: int) -> int:
    """Number of the `group` heads with the same keys that share a tile of queries in prefill, a power of two.

    A short chunk of one head would leave most of a large tile empty, and a small one reads its keys once for each head.
    """
    return min(MAX_HEADS_PER_TILE, group & -group) if max_query_len <= SHORT_QUERY_LEN else 1


def prefill_config(
    target: KernelTarget, head_dim: int, itemsize: int, max_query_len: int, num_heads: int
) -> PrefillConfig:
    """Choose the configuration. `num_heads`: heads in a tile, see `heads_per_tile`."""
    block_d = triton.next_power_of_2(head_dim)
    if itemsize == 4:
        return _exact_prefill_config(block_d)
    # Short single-head chunks leave less of a small tile empty
    is_short = max_query_len <= SHORT_QUERY_LEN and num_heads == 1
    if target.has_shared_operands:
        if block_d > 256:  # where programs share keys, registers spill with TMA
            return PrefillConfig(128, 32, 8, 2, tma=max_query_len > SHORT_QUERY_LEN, num_parts=2)
        if block_d > 128:
            return PrefillConfig(128, 32, 8, 3, tma=True)
        return PrefillConfig(64, 64, 4, 3, tma=True) if is_short else PrefillConfig(128, 128, 8, 3, tma=True)
    if block_d > 256:  # with more warps than groups of 8 keys, several compute the same scores
        num_stages = 3 if target.shared_bytes >= 160 * 1024 else 2
        return PrefillConfig(32, 32, 4, num_stages, tma=False, num_parts=1 if target.capability < (9, 0) else 2)
    if block_d > 128:
        return PrefillConfig(64, 32, 8, 3 if target.shared_bytes >= 100 * 1024 else 2, tma=False)
    if block_d == 128:  # with fewer queries than columns, a row of scores would be split over the warps
        return PrefillConfig(128, 64 if target.capability < (9, 0) else 32, 8, 3, tma=False)
    return PrefillConfig(64, 64, 4, 3, tma=False) if is_short else PrefillConfig(128, 64, 8, 3, tma=False)


def _exact_prefill_config(block_d: int) -> PrefillConfig:
    """fp32 does not use tensor cores. With larger tiles, or tiles that TMA has swizzled, registers spill."""
    if block_d <= 64:
        return PrefillConfig(32, 32, 8, 2, tma=False)
    if block_d == 128:
        return PrefillConfig(32, 32, 16, 2, tma=False)
    return PrefillConfig(32 if block_d == 256 else 16, 16, 8, 2, tma=False)


def decode_config(target: KernelTarget, head_dim: int, itemsize: int, num_rows: int) -> DecodeConfig:
    """Choose the configuration for tiles of `num_rows` rows, 16 or a larger power of two. A row is a query of one head.

    A tile of keys has up to 64 keys and up to 16 KiB, or 8 KiB where DECODE_PROGRAMS_PER_SM programs would not fit
    otherwise, but at least 16 keys. With 64 rows and a head dim above 128 only one program fits. Tiles of 8 KiB have
    room for four stages, which for 64 rows were not measured.
    """
    block_d = triton.next_power_of_2(head_dim)
    if itemsize == 4:  # no tensor cores; with larger tiles registers spill
        num_stages = 3 if block_d <= 256 else 2
        return DecodeConfig(16 if head_dim > 64 else 32, num_warps=min(16, num_rows // 4), num_stages=num_stages)
    has_room = target.shared_bytes >= 160 * 1024

    def num_keys(tile_kib: int) -> int:
        return max(16, min(64, tile_kib * 1024 // (block_d * itemsize)))

    if num_rows <= 32:
        num_stages = 4 if has_room and block_d <= 64 else 3 if has_room or block_d <= 256 else 2
        return DecodeConfig(num_keys(16 if has_room else 8), num_warps=4, num_stages=num_stages)
    # Where operands pass through registers, larger tiles spill
    num_warps = 4 if head_dim <= 128 else 8
    return DecodeConfig(num_keys(16 if target.has_shared_operands else 8), num_warps, num_stages=3 if has_room else 2)


def max_decode_rows(head_dim: int, itemsize: int) -> int:
    """Rows of the largest tile for several queries per sequence. Larger tiles make registers spill."""
    if itemsize == 4:
        return 32 if head_dim <= 128 else 16
    return 64


def plan_num_splits(num_rows: int, context_len: int, num_sms: int) -> int:
    """Plan how many programs share the `context_len` keys of each of `num_rows` (sequence, kv head) pairs."""
    return _cheapest_num_splits(num_rows, context_len, num_sms * DECODE_PROGRAMS_PER_SM, MAX_SPLITS, 0)


def plan_prefill_splits(
    q_THD: torch.Tensor, num_kv_heads: int, num_sequences: int, max_query_len: int, max_context_len: int, num_sms: int
) -> int:
    """Plan how many programs of `paged_prefill` share the keys of a tile of queries. Hot: once per layer."""
    if max_query_len > SHORT_QUERY_LEN:
        return 1
    num_tokens, num_heads, head_dim = q_THD.shape
    tile_heads = heads_per_tile(num_heads // num_kv_heads, max_query_len)
    target = kernel_target.target_of(q_THD.device)
    config = prefill_config(target, head_dim, q_THD.element_size(), max_query_len, tile_heads)
    tile_queries = config.block_m // tile_heads
    num_tiles = (num_tokens - num_sequences) // tile_queries + num_sequences  # the most that there can be
    num_programs = num_tiles * num_heads // tile_heads * config.num_parts
    programs_per_wave = num_sms * config.programs_per_sm
    return plan_num_prefill_splits(num_programs, max_context_len, programs_per_wave, MAX_PREFILL_SPLITS)


def max_split_bytes(q_THD: torch.Tensor, num_sms: int) -> int:
    """Most bytes that the partial results of splits take, for any queries with the heads and dtype of `q_THD`."""
    head_dim, target = q_THD.shape[2], kernel_target.target_of(q_THD.device)
    configs = [prefill_config(target, head_dim, q_THD.element_size(), SHORT_QUERY_LEN, heads) for heads in (1, 2)]
    num_rows = MAX_WAVES * num_sms * max(config.programs_per_sm * config.block_m for config in configs)
    return num_rows * (head_dim + 1) * torch.float32.itemsize


def plan_num_prefill_splits(num_programs: int, context_len: int, programs_per_wave: int, max_splits: int) -> int:
    """Plan how many programs share the `context_len` keys that each of `num_programs` tiles of queries sees.

    With splits there are at most MAX_WAVES waves of programs; without splits there may be any number of waves.
    """
    max_splits = min(max_splits, MAX_WAVES * programs_per_wave // num_programs)
    return _cheapest_num_splits(num_programs, context_len, programs_per_wave, max_splits, MERGE_COST_TOKENS)


@lru_cache(maxsize=4096)
def _cheapest_num_splits(
    num_programs: int, context_len: int, programs_per_wave: int, max_splits: int, merge_cost: int
) -> int:
    """Minimise the time of the slowest SM, measured in keys read: waves of programs x keys per program, and a merge."""
    num_grains = triton.cdiv(context_len, SPLIT_GRAIN_TOKENS)

    def cost(num_splits: int) -> int:
        waves = triton.cdiv(num_programs * num_splits, programs_per_wave)
        split_tokens = triton.cdiv(num_grains, num_splits) * SPLIT_GRAIN_TOKENS
        return waves * (split_tokens + SPLIT_COST_TOKENS) + (merge_cost if num_splits > 1 else 0)

    return min(range(1, max(1, min(max_splits, num_grains)) + 1), key=cost)
