"""How the attention kernels run on each target: tiles, warps, stages, and how keys and values are loaded.

Fixed choices, so that start-up spends no time on tuning. docs/measurements.md has the figures of the H200;
`benchmarks/bench_attention.py --tune` compares others. tests/kernels/test_compile.py compiles every one of them for
every target, and checks that it fits into shared memory and registers and loads its tiles asynchronously.
"""

from typing import NamedTuple

import triton

from nanovllm.device.kernel_target import KernelTarget

DECODE_PROGRAMS_PER_SM = 2


class PrefillConfig(NamedTuple):
    """A tile of queries and a tile of keys. With `tma` the GPU's bulk copies load keys and values, else cp.async."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool


class DecodeConfig(NamedTuple):
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int


def prefill_config(target: KernelTarget, head_dim: int, itemsize: int, max_query_len: int) -> PrefillConfig:
    block_d = triton.next_power_of_2(head_dim)
    if itemsize == 4:
        return _exact_prefill_config(block_d)
    is_short = max_query_len <= 2048  # many short sequences fill more of a small tile
    if target.has_shared_operands:
        if block_d > 128:
            return PrefillConfig(128, 32, 8, 3, tma=True)
        return PrefillConfig(64, 64, 4, 3, tma=True) if is_short else PrefillConfig(128, 128, 8, 3, tma=True)
    if block_d > 128:
        return PrefillConfig(64, 32, 8, 3 if target.shared_bytes >= 100 * 1024 else 2, tma=False)
    if block_d == 128:  # fewer queries than columns would split a row of scores over the warps
        return PrefillConfig(128, 64 if target.capability < (9, 0) else 32, 8, 3, tma=False)
    return PrefillConfig(64, 64, 4, 3, tma=False) if is_short else PrefillConfig(128, 64, 8, 3, tma=False)


def _exact_prefill_config(block_d: int) -> PrefillConfig:
    """fp32 has no tensor cores. Larger tiles spill, and so does what TMA has swizzled."""
    if block_d <= 64:
        return PrefillConfig(32, 32, 8, 2, tma=False)
    if block_d == 128:
        return PrefillConfig(32, 32, 16, 2, tma=False)
    return PrefillConfig(32, 16, 8, 2, tma=False)


def decode_config(target: KernelTarget, head_dim: int, itemsize: int, num_rows: int) -> DecodeConfig:
    """For `num_rows` query heads that share their keys, padded to 16 or a larger power of two.

    Tiles of 16 KiB and up to 64 keys, or of 8 KiB where DECODE_PROGRAMS_PER_SM programs would not fit.
    """
    if itemsize == 4:  # no tensor cores: in larger tiles registers spill
        return DecodeConfig(block_n=16 if head_dim > 64 else 32, num_warps=min(16, num_rows // 4), num_stages=3)
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    tile_bytes = (16 if target.shared_bytes >= 160 * 1024 else 8) * 1024
    return DecodeConfig(block_n=min(64, tile_bytes // row_bytes), num_warps=4, num_stages=3)
