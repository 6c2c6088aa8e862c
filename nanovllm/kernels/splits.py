"""The keys of a sequence shared among programs: how many programs, and the merge of their parts.

Legend: T query tokens, H query heads, D head dim, S splits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from nanovllm.kernels.configs import DECODE_PROGRAMS_PER_SM
from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.padding import head_mask
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_previous

MAX_SPLITS = 128
MERGE_SIZES = (8, 32, MAX_SPLITS)  # splits that a merge kernel has room for; one is compiled for each
SPLIT_COST_TOKENS = 256  # starting a program and merging its part cost about as much as reading this many keys
SPLIT_GRAIN_TOKENS = 64  # a split consists of whole tiles


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    part_out_ptr,  # [T * H, S, D] fp32
    part_lse_ptr,  # [T * H, S] fp32
    out_ptr,  # [T * H, D]
    lse_ptr,  # [T * H]
    num_splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    inside = split < num_splits
    part = row * num_splits + split
    part_lse = tl.load(part_lse_ptr + part, mask=inside, other=float("-inf"))
    top = tl.max(part_lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(part_lse - top)
    total = tl.sum(weight, 0)
    is_cell = head_mask(inside, dim, D, BLOCK_D)
    part_out = tl.load(part_out_ptr + part[:, None] * D + dim[None, :], mask=is_cell, other=0.0)
    out = tl.sum(part_out * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    if D == BLOCK_D:
        tl.store(out_ptr + row * D + dim, out.to(out_ptr.dtype.element_ty))
    else:
        tl.store(out_ptr + row * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)
    tl.store(lse_ptr + row, top + tl.log(total))


def merge_splits(
    part_out_THSD: torch.Tensor,
    part_lse_THS: torch.Tensor,
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
) -> None:
    """Merge the parts of each row into `out_THD` and `lse_TH`. All are contiguous. Hot: once per layer."""
    num_tokens, num_heads, num_splits, head_dim = part_out_THSD.shape
    assert num_splits <= MAX_SPLITS, f"{num_splits} splits, more than {MAX_SPLITS}"
    block_d = triton.next_power_of_2(head_dim)
    block_s = next(size for size in MERGE_SIZES if num_splits <= size)
    on_grid(_merge_splits_kernel, (num_tokens * num_heads,))(
        part_out_THSD,
        part_lse_THS,
        out_THD,
        lse_TH,
        num_splits,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_S=block_s,
        num_warps=4 if block_s * block_d <= 2**14 else 16,  # at most 128 fp32 values per thread
        **pdl_options(out_THD.device),
    )


def launch_merge_variants(q_THD: torch.Tensor) -> None:
    """Launch every variant of the kernel, on parts of one query with arbitrary values."""
    _, num_heads, head_dim = q_THD.shape
    for num_splits in MERGE_SIZES:
        part_out_THSD = q_THD.new_zeros((1, num_heads, num_splits, head_dim), dtype=torch.float32)
        part_lse_THS = part_out_THSD.new_zeros((1, num_heads, num_splits))
        merge_splits(part_out_THSD, part_lse_THS, torch.empty_like(q_THD[:1]), part_lse_THS.new_empty((1, num_heads)))


@lru_cache(maxsize=4096)
def plan_num_splits(num_rows: int, context_len: int, num_sms: int) -> int:
    """How many programs share the keys of each of `num_rows` (sequence, kv head) pairs with about `context_len` keys.

    Minimises the time of the slowest SM, measured in keys read: waves of programs x keys per program. At most
    MAX_SPLITS.
    """
    programs_per_wave = num_sms * DECODE_PROGRAMS_PER_SM
    num_grains = triton.cdiv(context_len, SPLIT_GRAIN_TOKENS)

    def cost(num_splits: int) -> int:
        waves = triton.cdiv(num_rows * num_splits, programs_per_wave)
        return waves * (triton.cdiv(num_grains, num_splits) * SPLIT_GRAIN_TOKENS + SPLIT_COST_TOKENS)

    return min(range(1, max(1, min(MAX_SPLITS, num_grains)) + 1), key=cost)
