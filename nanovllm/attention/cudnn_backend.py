"""Attention of long chunks by cuDNN, through torch; everything else by a paged backend (flash or triton).

cuDNN takes contiguous keys and knows no block table: a sequence's adjacent blocks are viewed, others gathered. Its
causal mask is aligned at the top left, so the causal square at the end of a sequence and the history before it are
separate calls, merged.

cuDNN builds a plan for every new pair of lengths (measured: 0.04 to 0.5 s), and a padded one would cost 12% of its
speed. So only powers of two are asked of it: queries in pieces of 1024 to 16384, keys in pieces of 256 to 16384, 40
plans at most. The queries before the first and after the last multiple of 1024 tokens go to the paged backend.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention
from nanovllm.attention.contiguous import SequenceKV

MIN_QUERY_TOKENS = 1024
MIN_KEY_TOKENS = 256  # block sizes are multiples of it
MAX_TOKENS = 16384  # of queries and keys in one call


class CudnnBackend(AttentionBackend):
    """`paged` stores, merges, decodes and runs the short sequences."""

    name: ClassVar[str] = "cudnn"

    def __init__(self, paged: AttentionBackend) -> None:
        self.paged = paged

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
        for piece in _plan(batch.host, batch.causal):
            rows = slice(piece.first_row, piece.last_row)
            if piece.num_keys is None:
                part = self.paged.attend(q_THD[rows], k_cache_NPKD, v_cache_NPKD, _sub_batch(batch, piece), scale)
            else:
                table = batch.host.block_tables[piece.first_seq], batch.block_tables[piece.first_seq]
                kv = SequenceKV(k_cache_NPKD, v_cache_NPKD, *table)
                part = self._attend_piece(q_THD[rows], kv, piece.num_keys, scale, batch.causal)
            out_THD[rows], lse_HT[:, rows] = part
        return PartialAttention(out_THD, lse_HT)

    def _attend_piece(
        self, q_THD: torch.Tensor, kv: SequenceKV, num_keys: int, scale: float, causal: bool
    ) -> PartialAttention:
        """Keys 0..num_keys-1 span by span; with `causal`, the square at their end last."""
        num_queries, num_heads, _ = q_THD.shape
        history_len = num_keys - num_queries if causal else num_keys
        part = None
        # A run worth viewing: copying it costs more than merging one more part
        for span in kv.spans(history_len, num_queries * num_heads // kv.k_cache_NPKD.shape[2]):
            k_SKD, v_SKD = kv.read(*span)
            for first, last in _powers_of_two(0, len(k_SKD), MIN_KEY_TOKENS):
                seen = _attend_dense(q_THD, k_SKD[first:last], v_SKD[first:last], scale, causal=False)
                part = seen if part is None else self.merge(part, seen)
        if causal:
            square = _attend_dense(q_THD, *kv.read(history_len, num_keys), scale, causal=True)
            part = square if part is None else self.merge(part, square)
        assert part is not None, "a piece for cuDNN has keys"
        return part


class _Piece(NamedTuple):
    """Rows `[first_row, last_row)` of the packed queries, of sequences `[first_seq, last_seq)`.

    For cuDNN, rows of one sequence, with the keys they see (with `causal`, the last row). For the paged backend
    num_keys is None: `skipped` leading queries of the first sequence, and those after the last row, are not among them.
    """

    first_row: int
    last_row: int
    first_seq: int
    last_seq: int
    num_keys: int | None = None
    skipped: int = 0


def _plan(host: HostTables, causal: bool) -> Iterator[_Piece]:
    """Cut the batch into pieces; adjacent sequences that do not suit cuDNN are taken together."""
    first_row = row = first_seq = 0
    for seq, (query_len, context_len) in enumerate(zip(host.query_lens, host.context_lens, strict=True)):
        lead = (query_len - context_len) % MIN_QUERY_TOKENS if causal else 0
        aligned = (query_len - lead) // MIN_QUERY_TOKENS * MIN_QUERY_TOKENS
        suits = causal or (context_len > 0 and context_len % MIN_KEY_TOKENS == 0)
        if aligned > 0 and suits:
            if first_seq < seq:
                yield _Piece(first_row, row, first_seq, seq)
            if lead:
                yield _Piece(row, row + lead, seq, seq + 1)
            for first, last in _powers_of_two(lead, lead + aligned, MIN_QUERY_TOKENS):
                num_keys = context_len - query_len + last if causal else context_len
                yield _Piece(row + first, row + last, seq, seq + 1, num_keys)
            if lead + aligned < query_len:
                yield _Piece(row + lead + aligned, row + query_len, seq, seq + 1, skipped=lead + aligned)
            first_row, first_seq = row + query_len, seq + 1
        row += query_len
    if first_seq < len(host.query_lens):
        yield _Piece(first_row, row, first_seq, len(host.query_lens))


def _powers_of_two(first: int, last: int, smallest: int) -> Iterator[tuple[int, int]]:
    """Cut `[first, last)`, a multiple of `smallest` long, into spans that are powers of two, at most MAX_TOKENS."""
    assert (last - first) % smallest == 0, f"{last - first} tokens are no multiple of {smallest}"
    while first < last:
        size = min(MAX_TOKENS, 1 << ((last - first).bit_length() - 1))
        yield first, first + size
        first += size


def _sub_batch(batch: PagedBatch, piece: _Piece) -> PagedBatch:
    """The rows of a paged piece as a batch of their own. Small arithmetic on the device, no wait for it."""
    assert batch.host is not None
    seqs = slice(piece.first_seq, piece.last_seq)
    query_lens, context_lens = list(batch.host.query_lens[seqs]), list(batch.host.context_lens[seqs])
    context_lens_B = batch.context_lens[seqs]
    cu_seqlens_q = batch.cu_seqlens_q[piece.first_seq : piece.last_seq + 1]
    if len(query_lens) < len(batch.host.query_lens) or piece.skipped:
        cu_seqlens_q = cu_seqlens_q - batch.cu_seqlens_q[piece.first_seq]
    num_rows = piece.last_row - piece.first_row
    if num_rows < sum(query_lens):  # the first or the last rows of one sequence
        left_out = query_lens[0] - num_rows - piece.skipped
        query_lens = [num_rows]
        cu_seqlens_q = cu_seqlens_q.clamp(max=num_rows)
        if batch.causal and left_out:
            context_lens = [context_lens[0] - left_out]
            context_lens_B = context_lens_B - left_out
    return replace(
        batch,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens_B,
        block_tables=batch.block_tables[seqs],
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        host=HostTables(query_lens, context_lens, batch.host.block_tables[seqs]),
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
