"""Attention of long chunks by cuDNN, through torch; everything else by a paged backend (flash or triton).

cuDNN takes contiguous keys and knows no block table: a sequence's adjacent blocks are viewed, others gathered. Its
causal mask is aligned at the top left, so the causal square at the end of a sequence and the history before it are two
calls, merged.

cuDNN builds a plan for every new pair of lengths, which takes some 0.4 s. With TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1,
which torch reads at the first call of the process, lengths are rounded up to powers of two in the plan.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention
from nanovllm.attention.contiguous import SequenceKV

MIN_QUERY_TOKENS = 1024  # below, one paged call for several sequences is faster, and needs no plan
MIN_HISTORY_TOKENS = 256  # a shorter history is not worth a call and a merge of its own
AVOID_RECOMPILE = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


class CudnnBackend(AttentionBackend):
    """`paged` stores, merges, decodes and runs the short sequences."""

    name: ClassVar[str] = "cudnn"

    def __init__(self, paged: AttentionBackend) -> None:
        self.paged = paged
        os.environ.setdefault(AVOID_RECOMPILE, "1")

    @classmethod
    def why_unavailable(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA GPU, the device is {device.type}"
        if not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it runs float16 and bfloat16, not {dtype}"
        if head_dim > 128 or head_dim % 8:
            return f"it runs head dims up to 128, multiples of 8, not {head_dim}"
        return None

    def store(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        slot_mapping_T: torch.Tensor,
    ) -> None:
        self.paged.store(k_TKD, v_TKD, k_cache_NPKD, v_cache_NPKD, slot_mapping_T)

    def merge(self, a: PartialAttention, b: PartialAttention) -> PartialAttention:
        return self.paged.merge(a, b)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
    ) -> PartialAttention:
        if batch.max_query_len < MIN_QUERY_TOKENS:
            return self.paged.attend(q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale)
        assert batch.host is not None, "the cudnn backend loops over long sequences: it needs PagedBatch.host"
        num_tokens, num_heads, _ = q_THD.shape
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        lse_HT = torch.empty((num_heads, num_tokens), dtype=torch.float32, device=q_THD.device)
        start = 0
        for first, last in _segments(batch.host, batch.causal):
            rows = slice(start, start + sum(batch.host.query_lens[first:last]))
            if _suits_cudnn(batch.host, first, batch.causal):
                kv = SequenceKV(k_cache_NPKD, v_cache_NPKD, batch.host.block_tables[first], batch.block_tables[first])
                part = self._attend_sequence(q_THD[rows], kv, batch.host.context_lens[first], scale, batch.causal)
            else:
                sub_batch = _slice_batch(batch, batch.host, first, last, start)
                part = self.paged.attend(q_THD[rows], k_cache_NPKD, v_cache_NPKD, sub_batch, scale)
            if rows == slice(0, num_tokens):
                return part
            out_THD[rows], lse_HT[:, rows] = part
            start = rows.stop
        return PartialAttention(out_THD, lse_HT)

    def _attend_sequence(
        self, q_THD: torch.Tensor, kv: SequenceKV, num_keys: int, scale: float, causal: bool
    ) -> PartialAttention:
        """The keys before the causal square span by span, then the square."""
        num_queries, num_heads, _ = q_THD.shape
        history_len = num_keys - num_queries if causal else num_keys
        part = None
        # A run worth viewing: copying it costs more than merging one more part
        for first, last in kv.spans(history_len, num_queries * num_heads // kv.k_cache_NPKD.shape[2]):
            seen = _attend_dense(q_THD, *kv.read(first, last), scale, causal=False)
            part = seen if part is None else self.merge(part, seen)
        if causal:
            square = _attend_dense(q_THD, *kv.read(history_len, num_keys), scale, causal=True)
            part = square if part is None else self.merge(part, square)
        assert part is not None, "a sequence that suits cuDNN has keys"
        return part


def _suits_cudnn(host: HostTables, row: int, causal: bool) -> bool:
    query_len, context_len = host.query_lens[row], host.context_lens[row]
    history_len = context_len - query_len if causal else context_len
    return query_len >= MIN_QUERY_TOKENS and (history_len >= MIN_HISTORY_TOKENS or (causal and history_len == 0))


def _segments(host: HostTables, causal: bool) -> Iterator[tuple[int, int]]:
    """Rows `[first, last)` of the batch: one that suits cuDNN, or as many others as follow each other."""
    first = 0
    for row in range(len(host.query_lens)):
        if _suits_cudnn(host, row, causal):
            if first < row:
                yield first, row
            yield row, row + 1
            first = row + 1
    if first < len(host.query_lens):
        yield first, len(host.query_lens)


def _slice_batch(batch: PagedBatch, host: HostTables, first: int, last: int, start: int) -> PagedBatch:
    """Rows first..last-1 as a batch of their own; `start` is their first token. Views, but for cu_seqlens_q."""
    cu_seqlens_q = batch.cu_seqlens_q[first : last + 1]
    return replace(
        batch,
        cu_seqlens_q=cu_seqlens_q - start if start else cu_seqlens_q,
        context_lens=batch.context_lens[first:last],
        block_tables=batch.block_tables[first:last],
        max_query_len=max(host.query_lens[first:last]),
        max_context_len=max(host.context_lens[first:last]),
        host=HostTables(host.query_lens[first:last], host.context_lens[first:last], host.block_tables[first:last]),
    )


def _attend_dense(
    q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, scale: float, causal: bool
) -> PartialAttention:
    """One cuDNN call: every query sees every key, or, with `causal`, a square. cuDNN groups the heads (GQA) itself."""
    q, k, v = (x.contiguous().transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SKD, v_SKD))  # [1, heads, tokens, D]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, is_causal=causal, scale=scale
    )
    num_queries, num_heads, _ = q_THD.shape
    return PartialAttention(out.squeeze(0).transpose(0, 1), lse.reshape(num_heads, num_queries))
