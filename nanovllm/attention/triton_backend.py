"""Attention by our own Triton kernels: paged prefill, split-KV decode and merge, on any NVIDIA GPU."""

import importlib.util
import os
from collections.abc import Sequence
from typing import ClassVar

import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention, RunningMerge
from nanovllm.checkpoint.model_config import HEAD_DIMS
from nanovllm.device import kernel_target
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES, MIN_CAPABILITY
from nanovllm.utils.arithmetic import ceil_div

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MERGED_PARTS = range(2, 7)  # with more parts the merges are of the same kinds


class TritonBackend(AttentionBackend):
    name: ClassVar[str] = "triton"

    def __init__(self) -> None:
        from nanovllm.kernels import configs, decode, merge, prefill

        self.configs, self.decode, self.merging, self.prefill = configs, decode, merge, prefill

    @classmethod
    def why_unavailable(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"it needs a CUDA GPU, the device is {device.type}"
        if device.type == "cuda" and kernel_target.target_of(device).capability < MIN_CAPABILITY:
            return f"it needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        if dtype not in DTYPES:
            return f"it runs float16, bfloat16 and float32, not {dtype}"
        if head_dim not in HEAD_DIMS:
            return f"it runs head dims {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        return None

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        num_short, num_tokens = _leading_short(batch)
        if num_tokens > 0:
            # In the prefill kernel, a few queries would leave a tile nearly empty and one program would read all keys
            short, chunks = batch.sequences(0, num_short), batch.sequences(num_short, len(batch.context_lens))
            parts = ((slice(0, num_tokens), short), (slice(num_tokens, None), chunks))
            lse = [
                self._attend_into(out_THD[rows], q_THD[rows], k_cache_NPKD, v_cache_NPKD, part, scale, sinks_H)
                for rows, part in parts
            ]
            return PartialAttention(out_THD, torch.cat(lse, dim=1))
        lse_HT = self._attend_into(out_THD, q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale, sinks_H)
        return PartialAttention(out_THD, lse_HT)

    def _attend_into(
        self,
        out_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with one kernel. Returns the LSE [H, T]."""
        num_sms = kernel_target.target_of(q_THD.device).num_sms
        if batch.max_query_len > MAX_DECODE_QUERIES:
            # In a graph, plan for the longest chunk; shorter chunks leave more of the GPU idle
            planned, num_sequences = q_THD, len(batch.context_lens)
            if batch.host is None:
                planned, num_sequences = q_THD[: batch.max_query_len], 1
            num_splits = self.configs.plan_prefill_splits(
                planned, k_cache_NPKD.shape[2], num_sequences, batch.max_query_len, batch.max_visible_keys, num_sms
            )
            return self.prefill.paged_prefill(
                q_THD,
                k_cache_NPKD,
                v_cache_NPKD,
                batch.cu_seqlens_q,
                batch.context_lens,
                batch.block_tables,
                batch.max_query_len,
                scale,
                batch.causal,
                out_THD=out_THD,
                num_splits=num_splits,
                window=batch.window,
                sinks_H=sinks_H,
            )[1]
        num_keys = batch.max_visible_keys
        if batch.host is None:  # a graph knows only the longest possible context; most contexts are much shorter
            num_keys = min(num_keys, batch.max_context_len // 4)
        num_kv_heads = k_cache_NPKD.shape[2]
        _, num_tiles = self.decode.tile_rows(q_THD, num_kv_heads, batch.max_query_len)
        num_rows = _num_sequences(q_THD, batch) * num_kv_heads * num_tiles
        return self.decode.paged_decode(
            q_THD,
            k_cache_NPKD,
            v_cache_NPKD,
            batch.context_lens,
            batch.block_tables,
            scale,
            self.configs.plan_num_splits(num_rows, num_keys, num_sms),
            out_THD=out_THD,
            cu_seqlens_q=None if batch.has_one_query_each(q_THD) else batch.cu_seqlens_q,
            max_query_len=batch.max_query_len,
            causal=batch.causal,
            window=batch.window,
            sinks_H=sinks_H,
        )[1]

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        """Merge into the first part that has `dtype`, if there is one. Hot: once per merge."""
        out_THD = next((part.out_THD for part in parts if part.out_THD.dtype == dtype), None)
        if out_THD is None:
            out_THD = torch.empty(parts[0].out_THD.shape, dtype=dtype, device=parts[0].out_THD.device)
        lse_HT = parts[0].lse_HT
        self.merging.merge_into(out_THD, lse_HT, parts)
        return PartialAttention(out_THD, lse_HT)

    def launch_kernels(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        self.prefill.launch_prefill_variants(q_THD, k_cache_NPKD, window, sinks_H)
        self.merging.launch_merge_variants(q_THD)
        for num_parts in MERGED_PARTS:
            merged = RunningMerge(self.merge, num_parts)
            for _ in range(num_parts):
                out_THD = torch.zeros_like(q_THD[:1])
                merged.add(PartialAttention(out_THD, out_THD.new_zeros(q_THD.shape[1], 1, dtype=torch.float32)))

    def max_split_bytes(self, q_THD: torch.Tensor) -> int:
        return self.configs.max_split_bytes(q_THD, kernel_target.target_of(q_THD.device).num_sms)


def _num_sequences(q_THD: torch.Tensor, batch: PagedBatch) -> int:
    """Count the sequences with queries. In a graph, count the fewest sequences that can have all the queries, because
    these gain the most from sharing their keys among programs.
    """
    return ceil_div(len(q_THD), batch.max_query_len) if batch.host is None else len(batch.context_lens)


def _leading_short(batch: PagedBatch) -> tuple[int, int]:
    """Count the sequences with a few queries before the first longer sequence, and their tokens.

    The scheduler puts short sequences first. (0, 0) if all are short, or if sizes are not known.
    """
    if batch.max_query_len <= MAX_DECODE_QUERIES or batch.host is None:
        return 0, 0
    query_lens = batch.host.query_lens
    num_short = next(i for i, query_len in enumerate(query_lens) if query_len > MAX_DECODE_QUERIES)
    return num_short, sum(query_lens[:num_short])
