"""The cells of one layer's paged cache that new keys and values are written to. A cell holds one token.

`slot_mapping` is the usual name for the map from tokens to cells; it has nothing to do with the slots of the ring.

Legend: T packed tokens, K kv heads, D head dim, N blocks of a cache, P tokens per block.
"""

from typing import NamedTuple

import torch


class KVCells(NamedTuple):
    """Token t goes into cell `slot_mapping_T[t]` of both caches (int64, block * P + offset), or nowhere if it is -1."""

    k_cache_NPKD: torch.Tensor
    v_cache_NPKD: torch.Tensor
    slot_mapping_T: torch.Tensor


def store_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cells: KVCells) -> None:
    """Write each token's K and V into its cell. On a GPU the rotary kernel does this."""
    written_T = cells.slot_mapping_T >= 0
    index = cells.slot_mapping_T[written_T]
    cells.k_cache_NPKD.view(-1, *k_TKD.shape[1:])[index] = k_TKD[written_T]
    cells.v_cache_NPKD.view(-1, *v_TKD.shape[1:])[index] = v_TKD[written_T]
