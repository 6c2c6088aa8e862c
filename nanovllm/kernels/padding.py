"""Head dims that are not powers of two: tiles have BLOCK_D columns, the next power of two, of which D are a head's."""

import triton
import triton.language as tl


@triton.jit
def head_mask(is_row, dim, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Which cells of a tile [rows, BLOCK_D] exist; [rows, 1] where every column does."""
    is_cell = is_row[:, None]
    if D != BLOCK_D:
        is_cell = is_cell & (dim < D)[None, :]
    return is_cell
