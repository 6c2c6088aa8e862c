"""send and receive: rows that a GPU hands to threads of the CPU, which compute experts, and the rows that come back.

Both sides share pinned memory. `send` writes the tokens' rows, their experts and the weights of these, then the layer
and the number of tokens, and then raises a number, for which a thread of the CPU waits. The thread sets another number
when the output is complete, and `receive` waits for that one. So a step needs no call of the host, and both can be in a
CUDA graph.

The numbers are compared with a count in the GPU's memory. All of it runs in the order of one stream, so a row is
overwritten only after its last reader has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous
from nanovllm.kernels.packed_words import INTERPRETED

# Places in `ExchangedRows.exchange`, int32 [EXCHANGE_SIZE]; the CPU's number is in another cache line
ARRIVED, LAYER, NUM_TOKENS, DONE, EXCHANGE_SIZE = (tl.constexpr(i) for i in (0, 1, 2, 16, 32))
_BLOCK = 1024


class ExchangedRows(NamedTuple):
    """What both sides share, as tensors on the GPU. All but `counts` are in pinned CPU memory."""

    x: torch.Tensor  # [R, H]
    experts: torch.Tensor  # int32 [R, C]
    weights: torch.Tensor  # fp32 [R, C]
    out: torch.Tensor  # [R, H]
    exchange: torch.Tensor  # int32 [EXCHANGE_SIZE]
    counts: torch.Tensor  # int32 [2], on the GPU: layers that were sent, and programs of `send` that have ended


@triton.jit
def _fence():
    """Order everything before this before everything after it, also as the CPU sees it."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["layer", "num_tokens"])
def _send_kernel(
    x_ptr,
    experts_ptr,
    weights_ptr,
    cells_ptr,  # int64 [T]; negative for rows of padding, whose experts are not computed
    host_x_ptr,
    host_experts_ptr,
    host_weights_ptr,
    exchange_ptr,
    counts_ptr,
    layer,
    num_tokens,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CELLS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token, part = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    column = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + token * SIZE + column, mask=column < SIZE)
    tl.store(host_x_ptr + token * SIZE + column, values, mask=column < SIZE)
    if part == 0:
        choice = tl.arange(0, CHOSEN_BLOCK)
        place, is_choice = token * CHOSEN + choice, choice < CHOSEN
        experts = tl.load(experts_ptr + place, mask=is_choice, other=-1).to(tl.int32)
        if HAS_CELLS:
            experts = tl.where(tl.load(cells_ptr + token) < 0, -1, experts)
        tl.store(host_experts_ptr + place, experts, mask=is_choice)
        tl.store(host_weights_ptr + place, tl.load(weights_ptr + place, mask=is_choice), mask=is_choice)
    _fence()
    tl.debug_barrier()
    num_programs = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(counts_ptr + 1, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        number = tl.load(counts_ptr) + 1
        tl.store(counts_ptr, number)
        tl.store(counts_ptr + 1, 0)
        tl.store(exchange_ptr + LAYER, layer)
        tl.store(exchange_ptr + NUM_TOKENS, num_tokens)
        _fence()
        tl.debug_barrier()
        tl.store(exchange_ptr + ARRIVED, number)


@triton.jit
def _receive_kernel(
    host_out_ptr, exchange_ptr, counts_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    number = tl.load(counts_ptr)
    done = tl.load(exchange_ptr + DONE, volatile=True)
    while done - number < 0:
        done = tl.load(exchange_ptr + DONE, volatile=True)
    _fence()
    tl.debug_barrier()
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(host_out_ptr + token * SIZE + column, mask=column < SIZE)
    tl.store(out_ptr + token * SIZE + column, values, mask=column < SIZE)


def send(
    rows: ExchangedRows,
    layer: int,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    cells: torch.Tensor | None = None,
) -> None:
    """Let the CPU compute the experts of a layer for x [T, H]. experts int64 and weights fp32, [T, C]: the router's
    choice. cells: int64 [T], negative for rows of padding, or None if there are none. Hot: once per layer.
    """
    (num_tokens, size), num_chosen = x.shape, experts.shape[1]
    assert 0 < num_tokens <= len(rows.x) and x.is_contiguous(), f"{num_tokens} tokens of {len(rows.x)}"
    on_grid(_send_kernel, (num_tokens, triton.cdiv(size, _BLOCK)))(
        *(x, experts, weights, experts if cells is None else cells),
        *(rows.x, rows.experts, rows.weights, rows.exchange, rows.counts, layer, num_tokens),
        SIZE=size,
        CHOSEN=num_chosen,
        CHOSEN_BLOCK=triton.next_power_of_2(num_chosen),
        BLOCK=_BLOCK,
        HAS_CELLS=cells is not None,
        num_warps=4,
        **pdl_options(x.device),
    )


def receive(rows: ExchangedRows, like: torch.Tensor) -> torch.Tensor:
    """Wait for the layer that was sent last. Returns its output, with the shape and dtype of `like`. Hot."""
    out = torch.empty_like(like)
    num_tokens, size = out.shape
    on_grid(_receive_kernel, (num_tokens, triton.cdiv(size, _BLOCK)))(
        *(rows.out, rows.exchange, rows.counts, out),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_options(out.device),
    )
    return out
