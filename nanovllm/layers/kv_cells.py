"""Where new keys and values go: cells of one layer's paged cache.

Legend: T packed tokens, K kv heads, D head dim, N blocks of a cache, P tokens per block.
"""

from typing import NamedTuple

import torch


class KVCells(NamedTuple):
    """Token t belongs into cell `slot_mapping_T[t]` (int64, block * P + offset; -1: nowhere) of both caches."""

    k_cache_NPKD: torch.Tensor
    v_cache_NPKD: torch.Tensor
    slot_mapping_T: torch.Tensor


def store_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cells: KVCells) -> None:
    """Write each token's K and V into its cell. On a GPU this is part of the rotary kernel."""
    written_T = cells.slot_mapping_T >= 0
    index = cells.slot_mapping_T[written_T]
    cells.k_cache_NPKD.view(-1, *k_TKD.shape[1:])[index] = k_TKD[written_T]
    cells.v_cache_NPKD.view(-1, *v_TKD.shape[1:])[index] = v_TKD[written_T]
