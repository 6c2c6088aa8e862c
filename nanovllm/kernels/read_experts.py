"""Experts that the GPU reads from pinned CPU memory by itself, in steps with few tokens.

`divide` gives some of the experts of a step a slot on the GPU, and leaves the others to the CPU. `read_rows` and
`arrange_scales` fill the slots with the weights of these experts, in CUDA graphs, too. capabilities/cpu_experts/link.py
calls them.

Legend: T tokens, C experts chosen for each token, S slots, P experts in memory, N output features, G groups of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.gguf_pack import PartRows
from nanovllm.kernels.launch import on_grid
from nanovllm.kernels.packed_values import Packed, scale_row
from nanovllm.kernels.packed_words import INT4, INT8
from nanovllm.plan.expert_formats import LINK_SHARES, MAX_LINK_SLOTS
from nanovllm.plan.step_limits import MAX_CPU_EXPERT_ROWS

_BLOCK = 2048  # elements that a program reads
SHARES = tl.constexpr(LINK_SHARES)


class Divided(NamedTuple):
    """A step's experts, divided between the GPU's slots and the CPU."""

    on_cpu: torch.Tensor  # int64 [T, C]: the chosen experts that the CPU computes, -1 for others
    slots: torch.Tensor  # int64 [T, C]: the slots of the others; -1 for the CPU's
    slot_experts: torch.Tensor  # int32 [S]: the expert of each slot, -1 for unused slots


@triton.jit(do_not_specialize=["num_pairs", "num_places", "share"])
def _divide_kernel(
    experts_ptr,
    cells_ptr,  # int64 [T]; negative for rows of padding
    on_cpu_ptr,
    slots_ptr,
    slot_experts_ptr,
    slot_of_expert_ptr,  # int32 [EXPERTS]: scratch memory
    num_pairs,
    num_places,  # S
    share,
    CHOSEN: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,  # S or more
    HAS_CELLS: tl.constexpr,
):
    pair, number = tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    is_used = pair < num_pairs
    experts = tl.load(experts_ptr + pair, mask=is_used, other=0)
    if HAS_CELLS:
        is_used &= tl.load(cells_ptr + pair // CHOSEN, mask=is_used, other=-1) >= 0
    tl.store(slot_of_expert_ptr + number, 0)
    tl.debug_barrier()
    tl.store(slot_of_expert_ptr + experts, 1, mask=is_used)
    tl.debug_barrier()
    is_chosen = tl.load(slot_of_expert_ptr + number)
    num_slots = tl.minimum(tl.sum(is_chosen) * share // SHARES, num_places)
    slot = tl.cumsum(is_chosen) - 1
    has_slot = (is_chosen > 0) & (slot < num_slots)
    tl.debug_barrier()
    tl.store(slot_of_expert_ptr + number, tl.where(has_slot, slot, -1))
    tl.store(slot_experts_ptr + slot, number, mask=has_slot)
    unused = tl.arange(0, SLOTS)
    tl.store(slot_experts_ptr + unused, -1, mask=(unused >= num_slots) & (unused < num_places))
    tl.debug_barrier()
    slots = tl.load(slot_of_expert_ptr + experts, mask=is_used, other=-1)
    tl.store(slots_ptr + pair, slots, mask=pair < num_pairs)
    tl.store(on_cpu_ptr + pair, tl.where(is_used & (slots < 0), experts, -1), mask=pair < num_pairs)


@triton.jit
def _read_rows_kernel(source_ptr, experts_ptr, target_ptr, size, stride, BLOCK: tl.constexpr):
    slot, element = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + slot).to(tl.int64)
    is_there = (element < size) & (expert >= 0)
    values = tl.load(source_ptr + expert * size + element, mask=is_there)
    tl.store(target_ptr + slot.to(tl.int64) * stride + element, values, mask=is_there)


@triton.jit(do_not_specialize=["first"])
def _arrange_scales_kernel(
    scales_in_ptr,  # fp32 [P, N, G]
    zeros_ptr,  # int16 [P, N, G]
    experts_ptr,  # int32, the expert of each place on the GPU
    scales_ptr,
    first,  # place on the GPU
    num_rows,
    num_groups,
    kept_rows,
    kept_groups,
    offset,
    first_row,
    part_stride,
    tile_stride,
    row_stride,
    group_stride,
    IS_FLOAT: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place, element = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    expert = place
    if HAS_EXPERTS:
        expert = tl.load(experts_ptr + place).to(tl.int64)
    row, group = element // kept_groups, element % kept_groups
    is_there = (row < kept_rows) & (expert >= 0)
    at = (expert * num_rows + row * (num_rows // kept_rows)) * num_groups + group * (num_groups // kept_groups)
    words = tl.load(scales_in_ptr + at, mask=is_there)
    if not IS_FLOAT:
        zero = offset + tl.zeros(element.shape, tl.int32)
        if HAS_ZEROS:
            zero += tl.load(zeros_ptr + at, mask=is_there, other=0).to(tl.int32)
        bits = words.to(SCALE_TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = bits | (zero << 16)
    target = scale_row(scales_ptr, first_row + (first + place) * part_stride + row, tile_stride, row_stride, 1)
    tl.store(target + group * group_stride, words, mask=is_there)


def divide(
    experts: torch.Tensor, cells: torch.Tensor | None, *, num_experts: int, num_slots: int, share: int
) -> Divided:
    """Give `share` / LINK_SHARES of the experts that any token chose a slot, as long as there are slots. Experts with
    low numbers come first.

    experts: int64 [T, C]. cells: int64 [T], negative for rows of padding, whose experts do not count, or None. Hot:
    once per layer.
    """
    on_cpu, slots = torch.empty_like(experts), torch.empty_like(experts)
    slot_experts = experts.new_empty(num_slots, dtype=torch.int32)
    expert_block = triton.next_power_of_2(num_experts)
    on_grid(_divide_kernel, (1,))(
        *(experts, experts if cells is None else cells, on_cpu, slots, slot_experts),
        experts.new_empty(expert_block, dtype=torch.int32),
        *(experts.numel(), num_slots, share),
        CHOSEN=experts.shape[1],
        # The same for all steps, so that the kernel is compiled once
        PAIRS=triton.next_power_of_2(MAX_CPU_EXPERT_ROWS * experts.shape[1]),
        EXPERTS=expert_block,
        SLOTS=triton.next_power_of_2(MAX_LINK_SLOTS),
        HAS_CELLS=cells is not None,
        num_warps=4,
    )
    return Divided(on_cpu, slots, slot_experts)


def read_rows(source: torch.Tensor, experts: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the rows `experts` of source [P, ..] to target [S, ..], where each row is contiguous. experts: int32 [S],
    negative for rows that stay as they are. Hot: for each weight.
    """
    row_bytes = source[0].nbytes
    assert target[0].nbytes == row_bytes and len(target) == len(experts), "rows have other sizes"
    dtype = next(each for each in (torch.int32, torch.int16, torch.uint8) if row_bytes % each.itemsize == 0)
    source, target = (each.flatten(1).view(torch.uint8).view(dtype) for each in (source, target))
    on_grid(_read_rows_kernel, (len(experts), triton.cdiv(source.shape[1], _BLOCK)))(
        source, experts, target, source.shape[1], target.stride(0), BLOCK=_BLOCK, num_warps=4
    )


def arrange_scales(
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    weight: Packed,
    rows: PartRows,
    *,
    middle: int = 0,
    first: int = 0,
    experts: torch.Tensor | None = None,
) -> None:
    """Store the scales of experts, fp32 [P, N, G], in the layout of a weight, and the zeros of integers, int16
    [P, N, G], or all `middle`. Rows, and neighbouring groups, that share a scale on the GPU have it several times.

    rows: of the first place of the weight, in scales. The P experts go to the places from `first` on, or if `experts`
    is given, int32 [S], expert experts[i] goes to place i, and none to places with a negative number. Hot.
    """
    assert weight.scales is not None and weight.group_size, "the weight has scales"
    num_experts, num_rows, num_groups = scales.shape
    is_float = weight.kind not in (INT4.value, INT8.value)
    kept_groups = weight.num_columns // weight.group_size
    num_places = num_experts if experts is None else len(experts)
    on_grid(_arrange_scales_kernel, (num_places, triton.cdiv(rows.size * kept_groups, _BLOCK)))(
        *(scales, scales if zeros is None else zeros, scales if experts is None else experts, weight.scales, first),
        *(num_rows, num_groups, rows.size, kept_groups),
        (0 if zeros is not None else middle) + (16 if weight.kind == INT4.value else 16 * 17),
        *(rows.first, rows.stride, *weight.scales.stride()),
        IS_FLOAT=is_float,
        SCALE_TYPE=tl.float32 if is_float else weight.scale_type,
        HAS_ZEROS=zeros is not None,
        HAS_EXPERTS=experts is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
