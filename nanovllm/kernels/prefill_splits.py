"""How many programs share the keys of a tile of queries in `paged_prefill`, and the memory that their parts take."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from nanovllm.device import kernel_target
from nanovllm.kernels.configs import SHORT_QUERY_LEN, heads_per_tile, prefill_config
from nanovllm.kernels.splits import SPLIT_COST_TOKENS, SPLIT_GRAIN_TOKENS

MAX_PREFILL_SPLITS = 32  # of a tile
MAX_WAVES = 4  # of programs that share keys; bounds the memory of their parts
MERGE_COST_TOKENS = 1024  # launching a merge costs about as much as reading this many keys


def plan_prefill_splits(
    q_THD: torch.Tensor, num_kv_heads: int, num_sequences: int, max_query_len: int, max_context_len: int, num_sms: int
) -> int:
    """How many programs of `paged_prefill` should share the keys of a tile of queries. Hot: once per layer."""
    if max_query_len > SHORT_QUERY_LEN:
        return 1
    num_tokens, num_heads, head_dim = q_THD.shape
    tile_heads = heads_per_tile(num_heads // num_kv_heads, max_query_len)
    target = kernel_target.target_of(q_THD.device)
    config = prefill_config(target, head_dim, q_THD.element_size(), max_query_len, tile_heads)
    tile_queries = config.block_m // tile_heads
    num_tiles = (num_tokens - num_sequences) // tile_queries + num_sequences  # the most that there can be
    num_programs, programs_per_wave = num_tiles * num_heads // tile_heads, num_sms * config.programs_per_sm
    return plan_num_prefill_splits(num_programs, max_context_len, programs_per_wave, MAX_PREFILL_SPLITS)


def max_split_bytes(q_THD: torch.Tensor, num_sms: int) -> int:
    """The most memory that the parts of splits take, for any queries of the heads and dtype of `q_THD`."""
    head_dim, target = q_THD.shape[2], kernel_target.target_of(q_THD.device)
    configs = [prefill_config(target, head_dim, q_THD.element_size(), SHORT_QUERY_LEN, heads) for heads in (1, 2)]
    num_rows = MAX_WAVES * num_sms * max(config.programs_per_sm * config.block_m for config in configs)
    return num_rows * (head_dim + 1) * torch.float32.itemsize


@lru_cache(maxsize=4096)
def plan_num_prefill_splits(num_programs: int, context_len: int, programs_per_wave: int, max_splits: int) -> int:
    """How many programs share the keys of each of `num_programs` tiles of queries, which see about `context_len` keys.

    Minimises the same cost as `plan_num_splits`, and counts the launch of the merge. With splits there are at most
    MAX_WAVES waves of programs; without there may be any number.
    """
    num_grains = triton.cdiv(context_len, SPLIT_GRAIN_TOKENS)
    max_splits = min(max_splits, num_grains, MAX_WAVES * programs_per_wave // num_programs)

    def cost(num_splits: int) -> int:
        waves = triton.cdiv(num_programs * num_splits, programs_per_wave)
        merge_cost = MERGE_COST_TOKENS if num_splits > 1 else 0
        return waves * (triton.cdiv(num_grains, num_splits) * SPLIT_GRAIN_TOKENS + SPLIT_COST_TOKENS) + merge_cost

    return min(range(1, max(1, max_splits) + 1), key=cost)
