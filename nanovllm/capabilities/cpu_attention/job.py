"""AttentionJob: one step's attention on the CPU, and how its tokens are divided among threads. CpuKernel: the interface
of the kernels.

A kernel owns threads, and runs one job at a time: either while the caller waits (`attend`) or in a server (`serve`). A
server waits for the queries of each job. So the thread that launches the GPU's work never waits for the CPU. The same
threads compute experts (ExpertJob in cpu_experts/job.py).

Legend: L layers, N blocks, P tokens per block, T query rows, H query heads, K kv heads, D head dim.
"""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from nanovllm.offload.streams import CpuServer

if TYPE_CHECKING:
    from nanovllm.capabilities.cpu_experts.job import ExpertJob

TILE_TOKENS = 64  # TILE in source/vectors.h: tokens that are scored together
_MAX_CHUNK_TOKENS = 1024  # exceeded only to keep the chunks' partial results below MAX_SCRATCH_BYTES
MAX_SCRATCH_BYTES = 32 * 2**20  # exceeded only if a single chunk for each span already takes (almost) this much
MAX_QUEUED_JOBS = 2048  # CAPACITY in source/server.h
FAR_AHEAD = 2**30  # a closed server marks this many jobs after its newest job as done
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # Dtype in source/vectors.h


class TokenSpan(NamedTuple):
    """Contiguous tokens of each layer's pool."""

    first_token: int  # cpu_block_id * block_size + offset
    num_tokens: int


class RowSpans(NamedTuple):
    """Consecutive query rows that attend to the same tokens. Rows without spans attend to no key: out 0, lse -inf."""

    num_rows: int
    spans: tuple[TokenSpan, ...]


class Chunk(NamedTuple):
    """Contiguous tokens that one thread attends to (Chunk in source/job.h)."""

    first_token: int
    num_tokens: int
    row_range: int  # index of the RowRange that attends to the chunk
    partial: int  # first row of the chunk's partial results


class RowRange(NamedTuple):
    """Query rows and the chunks that they attend to (RowRange in source/job.h)."""

    first_row: int
    num_rows: int
    first_chunk: int
    num_chunks: int


class CJob(ctypes.Structure):
    """Job in source/job.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "k v q out lse partials chunks row_ranges".split()),
        *((name, ctypes.c_int64) for name in "num_chunks num_row_ranges num_rows num_heads num_kv_heads".split()),
        *((name, ctypes.c_int64) for name in "head_dim dtype layer_bytes".split()),
        ("scale", ctypes.c_double),
    ]


class AttentionJob:
    """A step's attention on the CPU. All layers share the buffers, and read the same tokens, each from its own pool.

    `k_cache` and `v_cache` are [L, N, P, K, D], `q_THD` and `out_THD` have the dtype of the caches, `lse_HT` is fp32,
    and all five are contiguous and in CPU memory. Any number of threads may run a job, but only one layer at a time.

    `scratch` is fp32 memory for the partial results. If `scratch` is too small, the job allocates new memory. Jobs that
    never run concurrently, such as the jobs of one kernel, may share their scratch.
    """

    def __init__(
        self,
        *,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        q_THD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor,
        rows: Sequence[RowSpans],
        scale: float,
        num_threads: int,  # threads to divide the tokens among
        scratch: torch.Tensor | None = None,
    ) -> None:
        self.k_cache, self.v_cache = k_cache, v_cache
        self.q_THD, self.out_THD, self.lse_HT = q_THD, out_THD, lse_HT
        self.rows = [RowSpans(num_rows, tuple(joined(spans))) for num_rows, spans in rows]
        self.scale = scale
        self._check()
        _, num_heads, head_dim = q_THD.shape
        partial_row_values = num_heads * (head_dim + 2)
        chunks, row_ranges = divide(self.rows, num_threads, MAX_SCRATCH_BYTES // (4 * partial_row_values))
        num_partial_rows = chunks[-1].partial + row_ranges[chunks[-1].row_range].num_rows if chunks else 0
        self._chunks, self._row_ranges = (
            np.fromiter(chain.from_iterable(records), np.int64, 4 * len(records)) for records in (chunks, row_ranges)
        )
        self._scratch = _at_least(num_partial_rows * partial_row_values, scratch)
        self.num_chunks, self.num_row_ranges = len(chunks), len(row_ranges)
        self.c_job = self._make_c_job()

    @property
    def scratch(self) -> torch.Tensor:
        """Return the memory for partial results. Another job may get this memory as its `scratch`."""
        return self._scratch

    def _check(self) -> None:
        tensors = (self.k_cache, self.v_cache, self.q_THD, self.out_THD, self.lse_HT)
        assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors), (
            "attention on the CPU takes contiguous tensors in CPU memory"
        )
        num_tokens, num_heads, head_dim = self.q_THD.shape
        _, num_blocks, block_size, num_kv_heads, kv_head_dim = self.k_cache.shape
        assert self.v_cache.shape == self.k_cache.shape, "K and V differ in shape"
        assert head_dim == kv_head_dim and num_heads % num_kv_heads == 0, "the queries' heads do not fit the heads of K"
        assert self.out_THD.shape == self.q_THD.shape, "out_THD must have the shape of q_THD"
        assert self.lse_HT.shape == (num_heads, num_tokens), "lse_HT must be [H, T]"
        assert self.lse_HT.dtype == torch.float32, "lse_HT must be float32"
        dtypes = {tensor.dtype for tensor in tensors[:-1]}
        assert len(dtypes) == 1, f"K, V, q and out must have one dtype, not {dtypes}"
        assert sum(row.num_rows for row in self.rows) == num_tokens, f"the rows do not add up to {num_tokens}"
        assert all(row.num_rows > 0 for row in self.rows), "a range has no rows"
        pool_tokens = num_blocks * block_size
        for row in self.rows:
            for first, num in row.spans:
                assert first >= 0 and num > 0 and first + num <= pool_tokens, (
                    f"span of {num} tokens at {first} exceeds the pool of {pool_tokens} tokens"
                )

    def _make_c_job(self) -> CJob:
        layer = self.k_cache[0]
        return CJob(
            k=self.k_cache.data_ptr(),
            v=self.v_cache.data_ptr(),
            q=self.q_THD.data_ptr(),
            out=self.out_THD.data_ptr(),
            lse=self.lse_HT.data_ptr(),
            partials=self._scratch.data_ptr(),
            chunks=self._chunks.ctypes.data,
            row_ranges=self._row_ranges.ctypes.data,
            num_chunks=self.num_chunks,
            num_row_ranges=self.num_row_ranges,
            num_rows=self.q_THD.shape[0],
            num_heads=self.q_THD.shape[1],
            num_kv_heads=layer.shape[2],
            head_dim=layer.shape[3],
            dtype=DTYPE_CODES.get(layer.dtype, -1),
            layer_bytes=layer.numel() * layer.element_size(),
            scale=self.scale,
        )


def _at_least(num_values: int, scratch: torch.Tensor | None) -> torch.Tensor:
    if scratch is not None:
        assert scratch.dtype == torch.float32 and scratch.device.type == "cpu" and scratch.is_contiguous(), (
            "scratch must be contiguous float32 in CPU memory"
        )
        if scratch.numel() >= num_values:
            return scratch
    return torch.empty(num_values, dtype=torch.float32)


def joined(spans: Sequence[TokenSpan]) -> Iterator[TokenSpan]:
    """Join spans that are adjacent in memory."""
    if not spans:
        return
    first_token, num_tokens = spans[0]
    for first, num in spans[1:]:
        if first == first_token + num_tokens:
            num_tokens += num
        else:
            yield TokenSpan(first_token, num_tokens)
            first_token, num_tokens = first, num
    yield TokenSpan(first_token, num_tokens)


def divide(rows: Sequence[RowSpans], num_threads: int, max_partial_rows: int) -> tuple[list[Chunk], list[RowRange]]:
    """Divide all spans into chunks, which the threads take in turn.

    A chunk has at most half of a thread's share of the remaining tokens, so chunks get smaller towards the end and all
    threads finish at about the same time. A chunk has at least one tile and at most 1,024 tokens, or the rest of its
    span.

    A chunk yields a partial result for each of its rows. If the chunks would yield more than `max_partial_rows` partial
    rows, chunks get longer in proportion to their rows, up to a whole span. If even whole spans yield more than three
    quarters of `max_partial_rows`, one quarter is reserved for dividing long spans of few rows.
    """
    left = sum(span.num_tokens for row in rows for span in row.spans)
    # If each range of r rows has chunks of r * t tokens, they yield at most left / t partial rows, and r more per span
    num_least = sum(row.num_rows * len(row.spans) for row in rows)
    tokens_per_row = left / max(max_partial_rows - num_least, max_partial_rows // 4, 1)
    shares = 2 * num_threads * TILE_TOKENS
    chunks: list[Chunk] = []
    row_ranges: list[RowRange] = []
    first_row = partial = 0
    for row_range, (num_rows, spans) in enumerate(rows):
        first_chunk = len(chunks)
        least = _tiles(min(num_rows * tokens_per_row, left))
        for first_token, num_tokens in spans:
            end = first_token + num_tokens
            while first_token < end:
                # Inlined: for thousands of short spans, calls of min() and ceil_div() would take most of the time
                size = TILE_TOKENS * (1 + (left - 1) // shares)
                if size > _MAX_CHUNK_TOKENS:
                    size = _MAX_CHUNK_TOKENS
                if size < least:
                    size = least
                if size > end - first_token:
                    size = end - first_token
                chunks.append(Chunk(first_token, size, row_range, partial))
                first_token += size
                partial += num_rows
                left -= size
        row_ranges.append(RowRange(first_row, num_rows, first_chunk, len(chunks) - first_chunk))
        first_row += num_rows
    return chunks, row_ranges


def _tiles(num_tokens: float) -> int:
    """Round up to tokens that fill whole tiles."""
    return math.ceil(num_tokens / TILE_TOKENS) * TILE_TOKENS


class ExpertServer(Protocol):
    """Computes experts as soon as the GPU has written what a layer needs (see `CpuKernel.serve_experts`)."""

    def close(self) -> None:
        """Finish the layer that has started, and release all waiters: the number of done layers moves far ahead."""


class CpuKernel(ABC):
    """A CpuWorker: `num_threads` threads for attention of a few query rows to keys in CPU memory, and for experts."""

    name: str
    num_threads: int
    unit_tokens = TILE_TOKENS  # the CPU's share of a block should be a multiple of this

    @abstractmethod
    def attend(self, job: AttentionJob, layer: int) -> None:
        """Compute out_THD and lse_HT of the job. Returns when both are complete. Releases the interpreter lock."""

    @abstractmethod
    def serve(self, flags: torch.Tensor) -> CpuServer:
        """Start a server; see CpuWorker."""

    @abstractmethod
    def compute_experts(self, job: "ExpertJob", layer: int) -> None:
        """Compute the job's output in a layer. Returns when it is complete. Releases the interpreter lock."""

    @abstractmethod
    def serve_experts(self, job: "ExpertJob", exchange: torch.Tensor) -> ExpertServer:
        """Start a server. `exchange`: int32 [EXCHANGE_SIZE], see cpu_experts/job.py. The caller keeps the job's tensors
        alive until the server is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the servers and end the threads. Closing twice does nothing."""


def check_flags(flags: torch.Tensor) -> None:
    assert (
        flags.dtype == torch.int32 and flags.shape == (2,) and flags.device.type == "cpu" and flags.is_contiguous()
    ), "flags must be two contiguous int32 in CPU memory"
