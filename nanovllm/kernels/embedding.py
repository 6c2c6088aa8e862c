"""embed: look up rows of an embedding table in pinned CPU memory, which the GPU reads over the link.

Only the rows that are asked for cross the link, and rows that other ranks have are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _embed_kernel(
    token_ids_ptr,
    table_ptr,
    out_ptr,
    first_row,  # token id of the table's first row
    num_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    row = tl.load(token_ids_ptr + token) - first_row
    is_there = (row >= 0) & (row < num_rows) & (column < SIZE)
    values = tl.load(table_ptr + row * SIZE + column, mask=is_there, other=0.0)
    tl.store(out_ptr + token * SIZE + column, values, mask=column < SIZE)


def embed(token_ids: torch.Tensor, table: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return the rows of `table` [rows, size] for token ids int64 [T] -> [T, size]. Hot: once per step.

    The table has the tokens from `first_row` on. Other tokens get zeros.
    """
    assert table.is_contiguous() and token_ids.is_contiguous(), "the kernel reads both in order"
    (num_rows, size), num_tokens = table.shape, len(token_ids)
    out = torch.empty((num_tokens, size), dtype=table.dtype, device=token_ids.device)
    if num_tokens:
        block = min(1024, triton.next_power_of_2(size))  # many loads in flight hide the latency of the link
        on_grid(_embed_kernel, (num_tokens, triton.cdiv(size, block)))(
            *(token_ids, table, out, first_row, num_rows),
            SIZE=size,
            BLOCK=block,
            num_warps=max(1, min(4, block // 256)),
            **pdl_options(out.device),
        )
    return out
