"""New keys and values into the paged cache.

Legend: T packed tokens, K kv heads, D head dim, N blocks of a cache, P tokens per block.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.kernels.pdl import let_next_start, pdl_options, wait_for_previous


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_stride_t,
    v_stride_t,
    ROW: tl.constexpr,  # K * D elements, one cell of the cache
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if cell >= 0:
        offset = tl.arange(0, BLOCK)
        inside = offset < ROW
        k = tl.load(k_ptr + token * k_stride_t + offset, mask=inside)
        v = tl.load(v_ptr + token * v_stride_t + offset, mask=inside)
        tl.store(k_cache_ptr + cell * ROW + offset, k, mask=inside)
        tl.store(v_cache_ptr + cell * ROW + offset, v, mask=inside)


def store_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    slot_mapping_T: torch.Tensor,
) -> None:
    """Cell `slot_mapping_T[t]` of both caches = token t; -1 is skipped. Hot: once per layer.

    K and V may be views of a larger product: only the heads of one token must lie together.
    """
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    for x in (k_TKD, v_TKD):
        assert x.stride()[1:] == (head_dim, 1), f"the heads of a token must lie together, strides {x.stride()}"
    assert k_cache_NPKD.is_contiguous() and v_cache_NPKD.is_contiguous(), "a layer's cache is contiguous"
    if num_tokens == 0:
        return
    row = num_kv_heads * head_dim
    _store_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        k_cache_NPKD,
        v_cache_NPKD,
        slot_mapping_T,
        k_TKD.stride(0),
        v_TKD.stride(0),
        ROW=row,
        BLOCK=triton.next_power_of_2(row),
        num_warps=4,
        **pdl_options(k_TKD.device),
    )
