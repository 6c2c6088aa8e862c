"""Attention of long chunks by cuDNN, through torch; everything else by a paged backend (flash or triton).

cuDNN takes contiguous keys and does not support block tables: adjacent blocks of a sequence are viewed, other blocks
are gathered. cuDNN's causal mask is aligned at the top left, so the causal square at the end of a sequence and the
history before the square are separate calls, whose results are merged.

cuDNN builds a plan for every new pair of lengths (measured: 30 ms on average), and its option that avoids this costs
12% of its speed. So the backend uses few pairs of lengths, whose plans start-up can build. A chunk is cut into pieces
of the sizes that CudnnLimits lists. The end of a chunk is padded to such a size, or, if it is short, goes to the paged
backend. The history is cut into parts whose number of keys is a power of two. The remainder, less than the smallest
part, lies at the front of the sequence and is one more part, which the paged backend computes.

cuDNN's attention in torch has neither windows nor sinks. The paged backend computes all attention with a window, which
skips most of the keys. `add_sinks` adds sinks to the results of cuDNN.

The history is attended on the backend's side stream, concurrent with the square. Stream edges:
  E9   all enqueued so far -> history attended   compute -> side
  E10  history attended -> all that follows      side -> compute
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from nanovllm.attention.base import (
    AttentionBackend,
    HostTables,
    PagedBatch,
    PartialAttention,
    RunningMerge,
    add_sinks,
)
from nanovllm.attention.torch_backend import GATHER_BYTES, SequenceKV
from nanovllm.device import kernel_target
from nanovllm.device.cuda import new_stream
from nanovllm.plan.step_limits import MIN_CAPABILITY


@dataclass(frozen=True, kw_only=True)
class CudnnLimits:
    """Sizes of cuDNN calls. Tests use smaller ones."""

    query_sizes: tuple[int, ...] = (1024, 2048, 3072, 4096, 6144, 8192, 16384)  # per call; multiples of the first
    max_padded_queries: int = 8192  # per call with padded queries, because padding copies them
    min_keys: int = 4096  # per call without a mask; a power of two
    max_keys: int = 32768  # per call without a mask; a power of two
    gather_bytes: int = GATHER_BYTES  # keys that are copied together, but at least min_keys

    @property
    def min_queries(self) -> int:
        """Number of queries below which a sequence goes to the paged backend."""
        return self.query_sizes[0]

    def sizes_of_pieces(self, num_queries: int) -> list[int]:
        """List the sizes of pieces of `num_queries` queries, ascending. A size beyond `num_queries` is padded.

        At least half of the last `min_queries` queries of a piece are real.
        """
        rounded = (num_queries + self.min_queries // 2) // self.min_queries * self.min_queries
        return [n for n in self.query_sizes if n <= max(num_queries, min(rounded, self.max_padded_queries))]

    def key_sizes(self, max_context_len: int) -> list[int]:
        """The numbers of keys per call without a mask for sequences of up to that length, largest first."""
        exponents = range(self.min_keys.bit_length() - 1, min(self.max_keys, max_context_len).bit_length())
        return [1 << exponent for exponent in reversed(exponents)]


DEFAULT_LIMITS = CudnnLimits()


class CudnnBackend(AttentionBackend):
    """`paged` merges, decodes, runs short sequences and layers with a window, and runs the rest of long sequences that
    cuDNN does not take.
    """

    name: ClassVar[str] = "cudnn"

    def __init__(self, paged: AttentionBackend, limits: CudnnLimits = DEFAULT_LIMITS) -> None:
        self.paged, self.limits = paged, limits
        self._side: torch.cuda.Stream | None = None  # made for the first sequence with a history

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

    def max_split_bytes(self, q_THD: torch.Tensor) -> int:
        return 2 * self.paged.max_split_bytes(q_THD)  # the two streams do not share memory

    def launch_kernels(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        self.paged.launch_kernels(q_THD, k_cache_NPKD, window, sinks_H)

    def build_plans(
        self,
        q_1HD: torch.Tensor,
        num_kv_heads: int,
        max_query_len: int,
        max_context_len: int,
        has_time: Callable[[], bool],
    ) -> None:
        """cuDNN keeps plans for each thread. A thread that runs steps, but did not start the engine, builds each plan
        again when a chunk first needs it. Windows need no plans.
        """
        sizes = self.limits.sizes_of_pieces(max_query_len)
        for num_queries in reversed(sizes):
            is_needed = num_queries in (sizes[-1], self.limits.max_padded_queries)
            for num_keys in (None, *self.limits.key_sizes(max_context_len)):  # None: the causal square
                if is_needed or has_time():
                    q_THD = q_1HD.new_zeros(num_queries, *q_1HD.shape[1:])
                    k_SKD = q_1HD.new_zeros(num_keys or num_queries, num_kv_heads, q_1HD.shape[2])
                    self.attend_dense(q_THD, k_SKD, k_SKD, scale=1.0, causal=num_keys is None)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        is_short = batch.max_query_len < self.limits.min_queries
        if is_short or batch.host is None or batch.window is not None:  # in a graph, chunks are short
            return self.paged.attend(q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale, sinks_H)
        parts = []
        start = 0
        for first, last in self._runs(batch.host, batch.causal):
            rows = slice(start, start + sum(batch.host.query_lens[first:last]))
            start = rows.stop
            if not self._is_long(batch.host, first, batch.causal):
                paged_batch = batch.sequences(first, last)
                part = self.paged.attend(q_THD[rows], k_cache_NPKD, v_cache_NPKD, paged_batch, scale, sinks_H)
            else:
                tables = batch.host.block_tables[first], batch.block_tables[first]
                kv = SequenceKV(k_cache_NPKD, v_cache_NPKD, *tables)
                num_keys = batch.host.context_lens[first]
                part = self._attend_long(q_THD[rows], kv, num_keys, scale, batch.causal, sinks_H)
            parts.append(part)
        return _concatenate(parts)

    def _attend_long(
        self,
        q_THD: torch.Tensor,
        kv: SequenceKV,
        num_keys: int,
        scale: float,
        causal: bool,
        sinks_H: torch.Tensor | None,
    ) -> PartialAttention:
        """Attend with the queries of one sequence, piece by piece."""
        num_queries = len(q_THD)
        result = None
        first = 0
        while first < num_queries:
            size = max(self.limits.sizes_of_pieces(num_queries - first), default=0)
            last = min(first + size, num_queries) if size else num_queries
            num_visible = num_keys - num_queries + last if causal else num_keys
            part = self._attend_piece(q_THD[first:last], size, kv, num_visible, scale, causal, sinks_H)
            if last - first == num_queries:
                return part
            if result is None:
                lse_HT = part.lse_HT.new_empty(part.lse_HT.shape[0], num_queries)
                result = PartialAttention(torch.empty_like(q_THD), lse_HT)
            # Copy each piece into the result at once, so that only one piece exists in addition to the result
            result.out_THD[first:last], result.lse_HT[:, first:last] = part
            del part  # before the next piece is made
            first = last
        assert result is not None, "a sequence without queries is not long"
        return result

    def _attend_piece(
        self,
        q_THD: torch.Tensor,
        size: int,
        kv: SequenceKV,
        num_keys: int,
        scale: float,
        causal: bool,
        sinks_H: torch.Tensor | None,
    ) -> PartialAttention:
        """Attend with queries padded to `size` to the first `num_keys` keys of a sequence. A `size` of 0 means that the
        queries are too few for cuDNN.
        """
        if size == 0:
            return self._attend_paged(q_THD, kv, num_keys, scale, causal, sinks_H)
        num_queries = len(q_THD)
        q_THD = _pad(q_THD, size - num_queries)
        if causal:
            part = self._attend_causal(q_THD, kv, num_keys - num_queries, num_keys, scale)
        else:
            part = self._attend_keys(q_THD, kv, num_keys, scale).result()
        part = PartialAttention(part.out_THD[:num_queries], part.lse_HT[:, :num_queries])
        return part if sinks_H is None else add_sinks(part, sinks_H)

    def _attend_causal(
        self, q_THD: torch.Tensor, kv: SequenceKV, first: int, last: int, scale: float
    ) -> PartialAttention:
        """Attend causally. The first query is token `first`. Tokens from `last` on are padding that no
        real query sees.
        """

        def history() -> RunningMerge:
            return self._attend_keys(q_THD, kv, first, scale, num_more_parts=1)

        def square() -> PartialAttention:
            k, v = (_pad(x, first + len(q_THD) - last) for x in kv.read(first, last))
            return self.attend_dense(q_THD, k, v, scale, causal=True)

        if first == 0:
            return square()
        merged, part = self._side_by_side(q_THD.device, history, square)
        merged.add(part)
        return merged.result()

    def _side_by_side(
        self, device: torch.device, aside: Callable[[], RunningMerge], here: Callable[[], PartialAttention]
    ) -> tuple[RunningMerge, PartialAttention]:
        """Run both functions, on a GPU concurrently: `aside` runs on the side stream, and each uses SMs that the other
        leaves idle.

        Memory needs no further care. Each engine has its own backend, so only this engine uses the side stream, and it
        enqueues all its steps on one compute stream. A block of memory that was allocated on one of the two streams is
        therefore reused only by work that is enqueued after a wait for the block's last reader.
        """
        if device.type != "cuda":
            return aside(), here()
        current = torch.cuda.current_stream(device)
        if self._side is None:
            self._side = new_stream(device, owner=self)
        self._side.wait_stream(current)  # E9: all enqueued so far -> history attended
        with torch.cuda.stream(self._side):
            first = aside()
        second = here()
        current.wait_stream(self._side)  # E10: history attended -> all that follows
        return first, second

    def _attend_keys(
        self, q_THD: torch.Tensor, kv: SequenceKV, num_keys: int, scale: float, num_more_parts: int = 0
    ) -> RunningMerge:
        """Attend with every query to keys 0..num_keys-1. The caller adds `num_more_parts` to the returned merge."""
        num_paged = num_keys % self.limits.min_keys
        spans = list(self._spans(kv, num_paged, num_keys))
        merged = RunningMerge(self.merge, num_parts=(num_paged > 0) + len(spans) + num_more_parts)
        if num_paged > 0:
            merged.add(self._attend_paged(q_THD, kv, num_paged, scale, causal=False))
        for span in spans:
            merged.add(self.attend_dense(q_THD, *kv.read(*span), scale, causal=False))
        return merged

    def _attend_paged(
        self,
        q_THD: torch.Tensor,
        kv: SequenceKV,
        num_keys: int,
        scale: float,
        causal: bool,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        """Attend with the paged backend to the first `num_keys` keys of a sequence."""
        num_queries = len(q_THD)
        batch = PagedBatch(
            cu_seqlens_q=torch.arange(0, num_queries + 1, num_queries, dtype=torch.int32, device=q_THD.device),
            context_lens=torch.full((1,), num_keys, dtype=torch.int32, device=q_THD.device),
            block_tables=kv.table_M[None],
            max_query_len=num_queries,
            max_context_len=num_keys,
            causal=causal,
            host=HostTables([num_queries], [num_keys], [kv.table]),
        )
        return self.paged.attend(q_THD, kv.k_cache_NPKD, kv.v_cache_NPKD, batch, scale, sinks_H)

    def _is_long(self, host: HostTables, seq: int, causal: bool) -> bool:
        """Return True if cuDNN runs this sequence. Without a mask the sequence may have too few keys for a call."""
        has_keys = causal or host.context_lens[seq] >= self.limits.min_keys
        return host.query_lens[seq] >= self.limits.min_queries and has_keys

    def _runs(self, host: HostTables, causal: bool) -> Iterator[tuple[int, int]]:
        """Yield ranges `[first, last)` of sequences: a single long sequence, or consecutive other sequences."""
        first = 0
        for seq in range(len(host.query_lens)):
            if self._is_long(host, seq, causal):
                if first < seq:
                    yield first, seq
                yield seq, seq + 1
                first = seq + 1
        if first < len(host.query_lens):
            yield first, len(host.query_lens)

    def _spans(self, kv: SequenceKV, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut tokens first..last-1, a multiple of min_keys, into spans whose lengths are powers of two.

        Adjacent blocks that hold a whole span are viewed. Other spans are gathered, which bounds their size.
        """
        limits = self.limits
        row_bytes = kv.k_cache_NPKD[0, 0].numel() * kv.k_cache_NPKD.element_size()
        max_gathered = max(limits.min_keys, limits.gather_bytes // row_bytes)
        while first < last:
            num_adjacent = kv.adjacent_end(first, last) - first
            longest = num_adjacent if num_adjacent >= limits.min_keys else min(max_gathered, last - first)
            size = min(limits.max_keys, 1 << (longest.bit_length() - 1))
            yield first, first + size
            first += size

    def attend_dense(
        self, q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, scale: float, causal: bool
    ) -> PartialAttention:
        """Call cuDNN once: every query sees every key, or, with `causal`, a square. cuDNN groups the heads (GQA)
        itself.

        A test on a CPU overrides this.
        """
        q, k, v = (x.contiguous().transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SKD, v_SKD))  # [1, heads, tokens, D]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, compute_log_sumexp=True, is_causal=causal, scale=scale
        )
        num_queries, num_heads, _ = q_THD.shape
        return PartialAttention(out.squeeze(0).transpose(0, 1), lse.reshape(num_heads, num_queries))


def _concatenate(parts: list[PartialAttention]) -> PartialAttention:
    """Concatenate the results of consecutive queries."""
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(torch.cat([p.out_THD for p in parts]), torch.cat([p.lse_HT for p in parts], dim=1))


def _pad(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Append `num_rows` rows of zeros to `x`."""
    if num_rows == 0:
        return x
    padded = x.new_empty(len(x) + num_rows, *x.shape[1:])  # F.pad would fill all of `padded` before copying
    padded[: len(x)] = x
    padded[len(x) :] = 0
    return padded
