"""Attention by flash-attn 2, where it is installed. The merge is our own kernel.

flash-attn marks a row that saw no key with lse +inf; it becomes -inf here.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch

from nanovllm.attention.backends.triton_backend import TritonBackend
from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention
from nanovllm.core.support import MIN_CAPABILITY
from nanovllm.device import kernel_target

PAGE_GRAIN_TOKENS = 256  # flash-attn 2 pages are multiples of this


class FlashBackend(AttentionBackend):
    name: ClassVar[str] = "flash"

    def __init__(self) -> None:
        import flash_attn

        self.flash_attn = flash_attn
        self.triton = TritonBackend()

    @classmethod
    def why_unavailable(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA GPU, the device is {device.type}"
        for package in ("flash_attn", "triton"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
        if kernel_target.target_of(device).capability < MIN_CAPABILITY:
            return f"it needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it runs float16 and bfloat16, not {dtype}"
        if head_dim > 256 or head_dim % 8:
            return f"it runs head dims that are multiples of 8 up to 256, not {head_dim}"
        return _why_build_refuses(device, dtype, head_dim)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
    ) -> PartialAttention:
        assert k_cache_NPKD.shape[1] % PAGE_GRAIN_TOKENS == 0, "flash-attn 2 needs blocks of a multiple of 256 tokens"
        if batch.max_query_len == 1:
            out_B1HD, lse_BH1 = self.flash_attn.flash_attn_with_kvcache(
                q_THD.unsqueeze(1),
                k_cache_NPKD,
                v_cache_NPKD,
                cache_seqlens=batch.context_lens,
                block_table=batch.block_tables,
                softmax_scale=scale,
                return_softmax_lse=True,
            )
            out_THD, lse_HT = out_B1HD.squeeze(1), lse_BH1.squeeze(2).t()
        else:
            cu_seqlens_k = torch.nn.functional.pad(batch.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
            out_THD, lse_HT, _ = self.flash_attn.flash_attn_varlen_func(
                q_THD,
                k_cache_NPKD,
                v_cache_NPKD,
                batch.cu_seqlens_q,
                cu_seqlens_k,
                batch.max_query_len,
                batch.max_context_len,
                softmax_scale=scale,
                causal=batch.causal,
                block_table=batch.block_tables,
                return_attn_probs=True,
            )
            if not batch.causal:  # without a mask it leaves the rows of a sequence that has no keys as they were
                token = torch.arange(len(q_THD), device=q_THD.device)
                sequence = torch.bucketize(token, batch.cu_seqlens_q[1:], right=True)
                no_key_T = batch.context_lens[sequence] == 0
                out_THD = out_THD.masked_fill(no_key_T[:, None, None], 0.0)
                lse_HT = lse_HT.masked_fill(no_key_T, float("-inf"))
        return PartialAttention(out_THD, lse_HT.masked_fill(lse_HT == float("inf"), float("-inf")))

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        return self.triton.merge(parts, dtype)


@cache
def _why_build_refuses(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """flash-attn can be built without some head dims, or for another torch: attend to one token to find out."""
    q_THD = torch.zeros(1, 1, head_dim, dtype=dtype, device=device)
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=device)
    try:
        import flash_attn

        flash_attn.flash_attn_varlen_func(q_THD, q_THD, q_THD, cu_seqlens, cu_seqlens, 1, 1)
    except torch.OutOfMemoryError:  # says nothing about the build
        raise
    except (ImportError, RuntimeError) as error:
        return f"the installed flash_attn refuses {dtype} with head dim {head_dim} ({str(error).splitlines()[0]})"
    return None
