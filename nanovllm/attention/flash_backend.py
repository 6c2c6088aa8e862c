"""Attention by flash-attn 2, where it is installed.

Our own kernels compute the merge, attention of a few queries per sequence, and attention of short chunks over a long
history, because for these flash-attn 2 does not share the keys of a paged cache among programs. They also compute all
attention with a window, whose pages flash-attn 2 would need larger. `add_sinks` adds sinks to flash-attn's results.

flash-attn gives a row that saw no key the lse +inf, which the backend changes to -inf.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention, add_sinks
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.checkpoint.model_config import HEAD_DIMS
from nanovllm.device import kernel_target
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES, MIN_CAPABILITY

PAGE_GRAIN_TOKENS = 256  # flash-attn 2 pages are multiples of this
MAX_CHUNK_QUERIES, MIN_CHUNK_KEYS = 1024, 16384  # a short chunk over a long history
MAX_BUILD_ERROR = 0.05  # for values and scores around 1; rounding to bfloat16 makes 0.01


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
        return _why_build_fails(device, dtype, head_dim)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        one_query_each = batch.has_one_query_each(q_THD)
        gains = not one_query_each and _gains_from_shared_keys(batch) and q_THD.shape[2] in HEAD_DIMS
        if gains or batch.window is not None:
            return self.triton.attend(q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale, sinks_H)
        assert k_cache_NPKD.shape[1] % PAGE_GRAIN_TOKENS == 0, "flash-attn 2 needs blocks of a multiple of 256 tokens"
        if one_query_each:
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
            # For a sequence without keys flash-attn writes the LSE outside of the result, into other tensors. So every
            # sequence is given at least one key.
            cu_seqlens_k = torch.nn.functional.pad(batch.context_lens.clamp(min=1).cumsum(0, dtype=torch.int32), (1, 0))
            out_THD, lse_HT, _ = self.flash_attn.flash_attn_varlen_func(
                q_THD,
                k_cache_NPKD,
                v_cache_NPKD,
                batch.cu_seqlens_q,
                cu_seqlens_k,
                batch.max_query_len,
                max(1, batch.max_context_len),
                softmax_scale=scale,
                causal=batch.causal,
                block_table=batch.block_tables,
                return_attn_probs=True,
            )
            if not batch.causal:  # with a mask a sequence has at least the keys of its queries
                token = torch.arange(len(q_THD), device=q_THD.device)
                sequence = torch.bucketize(token, batch.cu_seqlens_q[1:], right=True)
                no_key_T = batch.context_lens[sequence] == 0
                out_THD = out_THD.masked_fill(no_key_T[:, None, None], 0.0)
                lse_HT = lse_HT.masked_fill(no_key_T, float("-inf"))
        part = PartialAttention(out_THD, lse_HT.masked_fill(lse_HT == float("inf"), float("-inf")))
        return part if sinks_H is None else add_sinks(part, sinks_H)

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        return self.triton.merge(parts, dtype)

    def launch_kernels(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        if window is not None:
            self.triton.launch_kernels(q_THD, k_cache_NPKD, window, sinks_H)
        elif q_THD.shape[2] in HEAD_DIMS:
            self.triton.launch_kernels(q_THD[:MAX_CHUNK_QUERIES], k_cache_NPKD, sinks_H=sinks_H)

    def max_split_bytes(self, q_THD: torch.Tensor) -> int:
        return self.triton.max_split_bytes(q_THD)


def _gains_from_shared_keys(batch: PagedBatch) -> bool:
    if batch.max_query_len <= MAX_DECODE_QUERIES:
        return True
    return batch.max_query_len <= MAX_CHUNK_QUERIES and batch.max_context_len >= MIN_CHUNK_KEYS


@cache
def _why_build_fails(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the installed flash-attn computes wrong results, or None if it works.

    flash-attn can be built without some head dims, or for another torch. It then refuses these head dims, or it uses a
    kernel for another head dim and returns garbage. So attend to a few tokens and compare.
    """
    name = f"the installed flash_attn with {dtype} and head dim {head_dim}"
    try:
        errors = [_error_of_build(device, dtype, head_dim, query_lens) for query_lens in ((1, 1), (25, 23))]
    except torch.OutOfMemoryError:  # says nothing about the build
        raise
    except (ImportError, RuntimeError) as error:
        return f"{name} fails ({str(error).splitlines()[0]})"
    return None if max(errors) <= MAX_BUILD_ERROR else f"{name} computes wrong results; it may lack this head dim"


def _error_of_build(device: torch.device, dtype: torch.dtype, head_dim: int, query_lens: Sequence[int]) -> float:
    """The largest error of out and LSE against plain torch in fp32, for two sequences, one of which fills two pages."""
    context_lens, tables = (300, 40), ((1, 0), (2, 2))
    generator = torch.Generator(device).manual_seed(0)
    q_THD, k_NPKD, v_NPKD = (
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape in ((sum(query_lens), 4, head_dim), *[(3, PAGE_GRAIN_TOKENS, 2, head_dim)] * 2)
    )
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, query_lens[0], sum(query_lens)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        causal=True,
        host=HostTables(query_lens, context_lens, tables),
    )
    got = FlashBackend().attend(q_THD, k_NPKD, v_NPKD, batch, head_dim**-0.5)
    expected = TorchBackend().attend(q_THD.float(), k_NPKD.float(), v_NPKD.float(), batch, head_dim**-0.5)
    pairs = zip(got, expected, strict=True)
    return max(float((ours.float() - theirs).abs().nan_to_num(torch.inf).max()) for ours, theirs in pairs)
