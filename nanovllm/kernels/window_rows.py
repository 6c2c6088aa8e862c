"""Where the tokens of a step are in the rings of layers with a window (capabilities/windows/memory.py).

Legend: T tokens, B rows, M columns of a block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import on_grid


@triton.jit
def _window_rows_kernel(
    cu_seqlens_ptr,  # int32 [B + 1]
    slots_ptr,  # int32 [B]
    ends_ptr,  # int32 [B]
    context_lens_ptr,  # int32 [B]
    tables_ptr,  # int32 [B, M]
    cells_ptr,  # int64 [T]
    num_rows,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_PAGES: tl.constexpr,  # of a ring
    SLOT_PAGES: tl.constexpr,  # from one slot to the next
    COLUMNS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Each program computes a row, and the cell of the token with the same number."""
    i, row = tl.program_id(0), tl.arange(0, BLOCK_B)
    end = tl.load(ends_ptr + i)
    first_page = tl.maximum(end - tl.load(cu_seqlens_ptr + i + 1) + tl.load(cu_seqlens_ptr + i) + 1 - WINDOW, 0) // PAGE
    tl.store(context_lens_ptr + i, tl.maximum(end - first_page * PAGE, 0))
    column = tl.arange(0, BLOCK_M)
    pages = tl.load(slots_ptr + i) * SLOT_PAGES + (first_page + column) % NUM_PAGES
    tl.store(tables_ptr + i * COLUMNS + column, pages, mask=column < COLUMNS)
    row_ends = tl.load(cu_seqlens_ptr + row + 1, mask=row < num_rows, other=num_rows + 1)
    own = tl.minimum(tl.sum((row_ends <= i).to(tl.int32)), num_rows - 1)  # the row of token i
    own_end = tl.load(ends_ptr + own)
    position = own_end - tl.load(cu_seqlens_ptr + own + 1) + i
    page = tl.load(slots_ptr + own).to(tl.int64) * SLOT_PAGES + position // PAGE % NUM_PAGES
    tl.store(cells_ptr + i, tl.where(own_end > 0, page * PAGE + position % PAGE, -1))


def window_rows(
    cu_seqlens_q: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    window: int,
    page_tokens: int,
    num_pages: int,
    slot_pages: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the number of keys in the pages of each row, int32 [B], the pages, int32 [B, M], and the cell of each
    token, int64 [T]. T = B: a graph of T tokens has room for T rows.

    cu_seqlens_q [B + 1], slots [B], ends [B], int32: boundaries of the rows' new tokens, their slots, and their numbers
    of tokens after the step. A row with `end` 0 is padding: it has no keys, and its token has the cell -1.
    `page_tokens`: tokens of a page. `num_pages`: pages of a ring. `slot_pages`: pages from one slot to the next.
    """
    num_rows, num_columns = len(slots), num_pages + 1
    context_lens, tables = torch.empty_like(slots), slots.new_empty(num_rows, num_columns)
    cells = slots.new_empty(num_rows, dtype=torch.int64)
    on_grid(_window_rows_kernel, (num_rows,))(
        *(cu_seqlens_q, slots, ends, context_lens, tables, cells, num_rows),
        WINDOW=window,
        PAGE=page_tokens,
        NUM_PAGES=num_pages,
        SLOT_PAGES=slot_pages,
        COLUMNS=num_columns,
        BLOCK_B=triton.next_power_of_2(num_rows),
        BLOCK_M=triton.next_power_of_2(num_columns),
        num_warps=1,
    )
    return context_lens, tables, cells
