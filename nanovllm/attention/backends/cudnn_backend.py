"""Attention of long chunks by cuDNN, through torch; everything else by a paged backend (flash or triton).

cuDNN takes contiguous keys and knows no block table: a sequence's adjacent blocks are viewed, others gathered. Its
causal mask is aligned at the top left, so the causal square at the end of a sequence and the history before it are
separate calls, merged.

cuDNN builds a plan for every new pair of lengths (measured: 0.04 to 0.5 s), and its own way around that costs 12% of
its speed. So few pairs are asked of it: queries in multiples of 1024 up to 16384, keys in powers of two from 256 to
32768. Queries are padded to that: in front back to a multiple of 256 tokens, so that the history before the square is
one too, behind with rows and keys that no real row sees. What the added rows yield is dropped.

The history is attended on a stream of its own, `side`, beside the square. Stream edges:
  E9   all enqueued so far -> history attended   compute -> side
  E10  history attended -> all that follows      side -> compute
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from nanovllm.attention.backends.contiguous import GATHER_BYTES, SequenceKV
from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention
from nanovllm.attention.merge import RunningMerge
from nanovllm.core.support import MIN_CAPABILITY
from nanovllm.device import kernel_target
from nanovllm.device.cuda_streams import new_stream
from nanovllm.utils.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True)
class CudnnLimits:
    """How attention is cut into calls of cuDNN. Tests cut smaller."""

    query_grain: int = 1024  # queries of a call are a multiple of it; shorter sequences go to the paged backend
    key_grain: int = 256  # keys of a call are this or a larger power of two; block sizes are multiples of it
    max_queries: int = 16384  # of one call
    max_padded_queries: int = 8192  # the same where they are padded, which copies them
    max_keys: int = 32768  # of one call without a mask
    gather_bytes: int = GATHER_BYTES


class CudnnBackend(AttentionBackend):
    """`paged` merges, decodes and runs the short sequences."""

    name: ClassVar[str] = "cudnn"

    def __init__(self, paged: AttentionBackend, limits: CudnnLimits = CudnnLimits()) -> None:
        self.paged, self.limits = paged, limits

    @classmethod
    def why_unavailable(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA GPU, the device is {device.type}"
        if not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        if kernel_target.target_of(device).capability < MIN_CAPABILITY:
            return f"it needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it runs float16 and bfloat16, not {dtype}"
        if head_dim > 128 or head_dim % 8:
            return f"it runs head dims that are multiples of 8 up to 128, not {head_dim}"
        return None

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        return self.paged.merge(parts, dtype)

    def warm_up(
        self, q_THD: torch.Tensor, num_kv_heads: int, max_context_len: int, has_time: Callable[[], bool]
    ) -> None:
        """cuDNN keeps its plans for one thread: this must be the one that runs the steps."""
        limits = self.limits
        max_queries = min(len(q_THD), limits.max_queries) // limits.query_grain * limits.query_grain
        max_padded = min(max_queries, limits.max_padded_queries)
        max_keys = min(limits.max_keys, 1 << (max_context_len.bit_length() - 1))
        key_counts = [1 << i for i in reversed(range(limits.key_grain.bit_length() - 1, max_keys.bit_length()))]
        k_SKD = q_THD.new_zeros(max(max_keys, max_queries), num_kv_heads, q_THD.shape[2])

        def build(num_queries: int, num_keys: int | None) -> None:
            """None: the causal square."""
            k = k_SKD[: num_keys or num_queries]
            self.attend_dense(q_THD[:num_queries], k, k, scale=1.0, causal=num_keys is None)

        for num_queries in {max_queries, max_padded} - {0}:  # a chunk, and a longer rest of a prompt
            for num_keys in (None, *key_counts[:2]):
                build(num_queries, num_keys)
        for num_keys in (None, *key_counts):  # rests of all lengths, after chunks and after cached prefixes
            for num_queries in range(max_queries, 0, -limits.query_grain):
                if not has_time():
                    return
                build(num_queries, num_keys)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
    ) -> PartialAttention:
        if batch.max_query_len < self.limits.query_grain:
            return self.paged.attend(q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale)
        assert batch.host is not None, "the cudnn backend loops over long sequences: it needs PagedBatch.host"
        parts = []
        start = 0
        for first, last in self._runs(batch.host, batch.causal):
            rows = slice(start, start + sum(batch.host.query_lens[first:last]))
            start = rows.stop
            if not self._is_long(batch.host, first, batch.causal):
                paged_batch = batch.sequences(first, last)
                part = self.paged.attend(q_THD[rows], k_cache_NPKD, v_cache_NPKD, paged_batch, scale)
            else:
                tables = batch.host.block_tables[first], batch.block_tables[first]
                kv = SequenceKV(k_cache_NPKD, v_cache_NPKD, *tables)
                part = self._attend_long(q_THD[rows], kv, batch.host.context_lens[first], scale, batch.causal)
            parts.append(part)
        return _concatenate(parts)

    def _attend_long(
        self, q_THD: torch.Tensor, kv: SequenceKV, num_keys: int, scale: float, causal: bool
    ) -> PartialAttention:
        """One sequence, piece by piece of its queries. Token indices count from its first key."""
        limits = self.limits
        base = num_keys - len(q_THD) if causal else 0  # the first query's token
        start = base // limits.key_grain * limits.key_grain
        end = base + len(q_THD)
        result = None
        while start < end:
            size = min(limits.max_queries, ceil_div(end - start, limits.query_grain) * limits.query_grain)
            if start < base or start + size > end:
                size = min(size, limits.max_padded_queries)
            first, last = max(start, base), min(start + size, end)  # tokens of the piece that are real queries
            padding = (first - start, start + size - last)
            q = _pad(q_THD[first - base : last - base], padding)
            if causal:
                part = self._attend_causal(q, kv, start, last, scale)
            else:
                part = self._attend_keys(q, kv, num_keys, scale).result()
            rows = slice(padding[0], size - padding[1])
            part = PartialAttention(part.out_THD[rows], part.lse_HT[:, rows])
            start += size
            if last - first == len(q_THD):
                return part
            if result is None:
                lse_HT = part.lse_HT.new_empty(part.lse_HT.shape[0], len(q_THD))
                result = PartialAttention(torch.empty_like(q_THD), lse_HT)
            rows = slice(first - base, last - base)  # to its place at once: one piece exists beside the whole
            result.out_THD[rows], result.lse_HT[:, rows] = part
            del part  # before the next piece is made
        assert result is not None, "a sequence without queries is not long"
        return result

    def _attend_causal(
        self, q_THD: torch.Tensor, kv: SequenceKV, first: int, last: int, scale: float
    ) -> PartialAttention:
        """The first query is token `first`. Tokens from `last` on are padding, which no real query sees."""

        def history() -> RunningMerge:
            return self._attend_keys(q_THD, kv, first, scale, num_more_parts=1)

        def square() -> PartialAttention:
            k, v = (_pad(x, (0, first + len(q_THD) - last)) for x in kv.read(first, last))
            return self.attend_dense(q_THD, k, v, scale, causal=True)

        if first == 0:
            return square()
        merged, part = _side_by_side(q_THD.device, history, square)
        merged.add(part)
        return merged.result()

    def _attend_keys(
        self, q_THD: torch.Tensor, kv: SequenceKV, num_keys: int, scale: float, num_more_parts: int = 0
    ) -> RunningMerge:
        """Every query sees keys 0..num_keys-1, a positive multiple of key_grain. The caller adds `num_more_parts`."""
        num_queries, num_heads, _ = q_THD.shape
        # A run worth viewing: copying it costs more than merging one more part
        min_view_tokens = num_queries * num_heads // kv.k_cache_NPKD.shape[2]
        spans = list(kv.spans(num_keys, min_view_tokens, self.limits.gather_bytes))
        cuts = [list(self._powers_of_two(last - first)) for first, last in spans]
        merged = RunningMerge(self.merge, num_parts=sum(map(len, cuts)) + num_more_parts)
        for span, pieces in zip(spans, cuts, strict=True):
            k_SKD, v_SKD = kv.read(*span)
            for first, last in pieces:
                merged.add(self.attend_dense(q_THD, k_SKD[first:last], v_SKD[first:last], scale, causal=False))
        return merged

    def _is_long(self, host: HostTables, seq: int, causal: bool) -> bool:
        """Whether cuDNN runs this sequence. Without a mask its keys cannot be padded."""
        keys_fit = causal or (host.context_lens[seq] > 0 and host.context_lens[seq] % self.limits.key_grain == 0)
        return host.query_lens[seq] >= self.limits.query_grain and keys_fit

    def _runs(self, host: HostTables, causal: bool) -> Iterator[tuple[int, int]]:
        """Sequences `[first, last)`: a long one, or as many others as follow each other."""
        first = 0
        for seq in range(len(host.query_lens)):
            if self._is_long(host, seq, causal):
                if first < seq:
                    yield first, seq
                yield seq, seq + 1
                first = seq + 1
        if first < len(host.query_lens):
            yield first, len(host.query_lens)

    def _powers_of_two(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Cut tokens 0..num_tokens-1, a multiple of key_grain, into spans of a power of two, at most max_keys."""
        grain = self.limits.key_grain
        assert num_tokens % grain == 0, f"{num_tokens} keys are not a multiple of {grain}"
        first = 0
        while first < num_tokens:
            size = min(self.limits.max_keys, 1 << ((num_tokens - first).bit_length() - 1))
            yield first, first + size
            first += size

    def attend_dense(
        self, q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, scale: float, causal: bool
    ) -> PartialAttention:
        """One cuDNN call: every query sees every key, or, with `causal`, a square. cuDNN groups the heads (GQA) itself.

        A test on a CPU overrides this.
        """
        q, k, v = (x.contiguous().transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SKD, v_SKD))  # [1, heads, tokens, D]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, compute_log_sumexp=True, is_causal=causal, scale=scale
        )
        num_queries, num_heads, _ = q_THD.shape
        return PartialAttention(out.squeeze(0).transpose(0, 1), lse.reshape(num_heads, num_queries))


def _concatenate(parts: list[PartialAttention]) -> PartialAttention:
    """The results of consecutive queries as one."""
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(torch.cat([p.out_THD for p in parts]), torch.cat([p.lse_HT for p in parts], dim=1))


def _pad(x: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """Rows of zeros before and after `x`."""
    if not any(padding):
        return x
    before, after = padding
    padded = x.new_empty(before + len(x) + after, *x.shape[1:])  # F.pad would fill all of it before it copies
    padded[:before] = 0
    padded[before : before + len(x)] = x
    padded[before + len(x) :] = 0
    return padded


def _side_by_side(
    device: torch.device, aside: Callable[[], RunningMerge], here: Callable[[], PartialAttention]
) -> tuple[RunningMerge, PartialAttention]:
    """What both return. On a GPU `aside` runs on a stream of its own, so that each fills the SMs the other leaves idle.

    Memory needs no further care: whichever stream it was taken on, what reuses it is enqueued behind a wait for its
    last reader.
    """
    if device.type != "cuda":
        return aside(), here()
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)  # E9: all enqueued so far -> history attended
    with torch.cuda.stream(side):
        first = aside()
    second = here()
    current.wait_stream(side)  # E10: history attended -> all that follows
    return first, second


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines: cuBLAS and the allocator keep memory for every stream they have seen."""
    return new_stream(device)
