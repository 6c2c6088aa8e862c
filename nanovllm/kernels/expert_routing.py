"""Sort the pairs of a step by expert, so that the pairs of an expert share the reads of its weight. A pair is a row and
one of the experts chosen for the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

_TILES = (1024, 4096)  # pairs that a program reads at once, for few pairs and for many
_PAIRS_OF_THREAD = 8


class Routing(NamedTuple):
    """The pairs of a step, in blocks of one expert each. Computed without waiting for the device."""

    pairs: torch.Tensor  # int32 [blocks * block_m]; padding is the number of pairs; arbitrary in blocks of no expert
    block_experts: torch.Tensor  # int32 [blocks]; padding is the number of experts
    block_m: int
    num_experts: int
    num_pairs: int


@triton.jit
def _load_experts(experts_ptr, pair, num_pairs, num_experts):
    """Load the experts of pairs, between 0 and the last one; num_experts for pairs that do not exist."""
    expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=0)
    expert = tl.minimum(tl.maximum(expert, 0), num_experts - 1).to(tl.int32)
    return tl.where(pair < num_pairs, expert, num_experts)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def sort_by_expert_kernel(
    experts_ptr,  # int64 [pairs]
    pairs_ptr,  # int32 [blocks * BLOCK_M]
    block_experts_ptr,  # int32 [blocks]
    num_pairs,
    num_blocks,
    num_experts,
    BLOCK_E: tl.constexpr,  # more than the number of experts
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the blocks of one expert. A first pass over all pairs counts the pairs of each expert, which says where the
    expert's blocks begin; a second pass writes the expert's pairs in order. The last program also marks the blocks that
    remain.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    own, expert, in_tile = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, TILE)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in tl.range(0, num_pairs, TILE):
        counts += tl.histogram(_load_experts(experts_ptr, start + in_tile, num_pairs, num_experts), BLOCK_E)
    blocks_of_expert = tl.where(expert < num_experts, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first_block = tl.sum(tl.where(expert < own, blocks_of_expert, 0))
    end_block = tl.sum(tl.where(expert <= own, blocks_of_expert, 0))
    next_place = first_block * BLOCK_M
    for start in tl.range(0, num_pairs, TILE):
        pair = start + in_tile
        is_own = (_load_experts(experts_ptr, pair, num_pairs, num_experts) == own).to(tl.int32)
        tl.store(pairs_ptr + next_place + tl.cumsum(is_own) - 1, pair, mask=is_own > 0)
        next_place += tl.sum(is_own)
    padding = next_place + tl.arange(0, BLOCK_M)
    tl.store(pairs_ptr + padding, num_pairs + 0 * padding, mask=padding < end_block * BLOCK_M)
    marked_end = num_blocks if own == num_experts - 1 else end_block
    for start in tl.range(first_block, marked_end, TILE):
        block = start + in_tile
        marks = tl.where(block < end_block, own, num_experts)
        tl.store(block_experts_ptr + block, marks, mask=block < marked_end)


def sort_by_expert(experts: torch.Tensor, num_experts: int, block_m: int) -> Routing:
    """Sort pairs by expert. `experts`: int64 [M, C], chosen for each row."""
    num_pairs = experts.numel()
    assert experts.is_contiguous(), "the kernel reads the experts in order"
    num_blocks = min(num_pairs, triton.cdiv(num_pairs, block_m) + num_experts)
    pairs, block_experts = (
        torch.empty(size, dtype=torch.int32, device=experts.device) for size in (num_blocks * block_m, num_blocks)
    )
    if num_pairs:
        tile = _TILES[num_pairs > _TILES[0]]
        on_grid(sort_by_expert_kernel, (num_experts,))(
            experts,
            pairs,
            block_experts,
            num_pairs,
            num_blocks,
            num_experts,
            BLOCK_E=triton.next_power_of_2(num_experts + 1),
            BLOCK_M=block_m,
            TILE=tile,
            num_warps=tile // _PAIRS_OF_THREAD // 32,
            **pdl_options(experts.device),
        )
    return Routing(pairs, block_experts, block_m, num_experts, num_pairs)
