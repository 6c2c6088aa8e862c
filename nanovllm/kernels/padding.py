"""Masks for head dims that are not powers of two: a tile has BLOCK_D columns, D rounded up to a power of two."""

import triton
import triton.language as tl


@triton.jit
def head_mask(is_row, dim, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Which cells of a tile [rows, BLOCK_D] exist. The mask is [rows, 1] if every column exists."""
    is_cell = is_row[:, None]
    if D != BLOCK_D:
        is_cell = is_cell & (dim < D)[None, :]
    return is_cell
