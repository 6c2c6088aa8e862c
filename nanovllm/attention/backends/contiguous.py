"""The paged keys and values of one sequence as contiguous tensors, for kernels that know no block table.

Legend: S keys of a sequence, K kv heads, D head dim, N blocks of a cache, P tokens per block, M columns of a table.

Blocks that are adjacent in the cache are read where they lie; others are copied together first.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nanovllm.utils.arithmetic import ceil_div

GATHER_BYTES = 16 << 20  # default bound on the keys copied together; the values take as much again


@dataclass(frozen=True)
class SequenceKV:
    """One sequence's keys and values in the caches `[N, P, K, D]`, through its block table."""

    k_cache_NPKD: torch.Tensor
    v_cache_NPKD: torch.Tensor
    table: Sequence[int]  # on the host
    table_M: torch.Tensor  # the same on the device

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens first..last-1, `[last - first, K, D]`: views when their blocks are adjacent."""
        block_size = self.k_cache_NPKD.shape[1]
        first_block, last_block = first // block_size, ceil_div(last, block_size)
        block_ids = self.table[first_block:last_block]
        adjacent = all(after == before + 1 for before, after in itertools.pairwise(block_ids))

        def span(cache_NPKD: torch.Tensor) -> torch.Tensor:
            if adjacent:
                blocks = cache_NPKD[block_ids[0] : block_ids[-1] + 1]
            else:
                blocks = cache_NPKD.index_select(0, self.table_M[first_block:last_block])
            return blocks.flatten(0, 1)[first - first_block * block_size : last - first_block * block_size]

        return span(self.k_cache_NPKD), span(self.v_cache_NPKD)

    def adjacent_end(self, first: int, last: int) -> int:
        """Tokens `first` up to the returned one, at most `last`, lie in adjacent blocks."""
        block_size = self.k_cache_NPKD.shape[1]
        block_idx, last_block = first // block_size + 1, ceil_div(last, block_size)
        while block_idx < last_block and self.table[block_idx] == self.table[block_idx - 1] + 1:
            block_idx += 1
        return min(block_idx * block_size, last)

    def spans(self, num_tokens: int, min_view_tokens: int, gather_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut tokens 0..num_tokens-1 into spans `[first, last)` to attend to in one call each.

        A run of adjacent blocks of `min_view_tokens` or more is a span of its own, read where it lies; shorter runs
        are gathered together, up to `gather_bytes` of keys.
        """
        _, block_size, num_kv_heads, head_dim = self.k_cache_NPKD.shape
        max_gather_tokens = gather_bytes // (num_kv_heads * head_dim * self.k_cache_NPKD.element_size())
        num_blocks = ceil_div(num_tokens, block_size)
        gather_start = run_start = 0  # tokens gather_start..run_start-1 are short runs, waiting to be gathered
        for block_idx in range(1, num_blocks + 1):
            if block_idx < num_blocks and self.table[block_idx] == self.table[block_idx - 1] + 1:
                continue
            run_end = min(block_idx * block_size, num_tokens)
            is_view = run_end - run_start >= min_view_tokens
            if gather_start < run_start and (is_view or run_end - gather_start > max_gather_tokens):
                yield gather_start, run_start
                gather_start = run_start
            if is_view or run_end == num_tokens:
                yield gather_start, run_end
                gather_start = run_end
            run_start = run_end
