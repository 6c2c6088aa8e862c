"""Jobs for the CPU attention kernels, and what they should write, computed in fp64."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from nanovllm.capabilities.cpu_attention.job import AttentionJob, RowSpans, TokenSpan

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 2, 7, 100
POOL_TOKENS = NUM_BLOCKS * BLOCK_SIZE


def row_spans(num_rows: int, *spans: tuple[int, int]) -> RowSpans:
    return RowSpans(num_rows, tuple(TokenSpan(*span) for span in spans))


def mixed_rows(num_rows: int) -> list[RowSpans]:
    """Spans over several blocks, one key alone, the pool's last key, and a row that sees none."""
    return [
        row_spans(num_rows, (5, 1), (100, 193), (400, 300)),
        row_spans(1),
        row_spans(num_rows, (POOL_TOKENS - 1, 1)),
        row_spans(1, (0, 64), (64, 1), (600, 65)),
    ]


@dataclass
class Case:
    """Random tensors for `rows`. Cells that no row may read hold NaN."""

    rows: Sequence[RowSpans]
    dtype: torch.dtype = torch.float32
    num_kv_heads: int = 2
    group: int = 2  # query heads per kv head
    head_dim: int = 64
    num_threads: int = 2
    seed: int = 0
    k_cache: torch.Tensor | None = None  # where to put the random keys and values, otherwise new memory
    v_cache: torch.Tensor | None = None
    job: AttentionJob = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        num_heads = self.num_kv_heads * self.group
        num_rows = sum(row.num_rows for row in self.rows)
        self.k_cache, self.v_cache = (self._random_cache(generator, cache) for cache in (self.k_cache, self.v_cache))
        q_THD = torch.randn(num_rows, num_heads, self.head_dim, generator=generator).to(self.dtype)
        self.job = AttentionJob(
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            q_THD=q_THD,
            out_THD=torch.full_like(q_THD, torch.nan),
            lse_HT=torch.full((num_heads, num_rows), torch.nan),
            rows=self.rows,
            scale=self.head_dim**-0.5,
            num_threads=self.num_threads,
        )

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, self.num_kv_heads, self.head_dim

    def _random_cache(self, generator: torch.Generator, cache: torch.Tensor | None) -> torch.Tensor:
        values = torch.randn(self.cache_shape, generator=generator).to(self.dtype)
        unread = torch.ones(POOL_TOKENS, dtype=torch.bool)
        unread[self.tokens(self.rows)] = False
        values.view(NUM_LAYERS, POOL_TOKENS, -1)[:, unread] = torch.nan
        return values if cache is None else cache.copy_(values)

    @staticmethod
    def tokens(rows: Sequence[RowSpans]) -> torch.Tensor:
        """The tokens that `rows` attend to, in order."""
        ranges = [torch.arange(first, first + num) for row in rows for first, num in row.spans]
        return torch.cat([torch.zeros(0, dtype=torch.long), *ranges])

    def forget(self) -> None:
        self.job.out_THD.fill_(torch.nan)
        self.job.lse_HT.fill_(torch.nan)

    def expected(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """out_THD and lse_HT in fp64."""
        job = self.job
        out_THD = torch.zeros(job.q_THD.shape, dtype=torch.float64)
        lse_HT = torch.full(job.lse_HT.shape, -torch.inf, dtype=torch.float64)
        first_row = 0
        for row in self.rows:
            rows = slice(first_row, first_row + row.num_rows)
            first_row += row.num_rows
            if row.spans:
                q_HTD, k_HND, v_HND = (tensor.double() for tensor in self._heads_first(row, rows, layer))
                scores_HTN = q_HTD @ k_HND.mT * job.scale
                lse_HT[:, rows] = scores_HTN.logsumexp(-1)
                out_THD[rows] = (scores_HTN.softmax(-1) @ v_HND).transpose(0, 1)
        return out_THD, lse_HT

    def by_torch(self, layer: int) -> torch.Tensor:
        """out_THD by torch's own operator in the dtype of the case."""
        out_THD = torch.zeros_like(self.job.q_THD)
        first_row = 0
        for row in self.rows:
            rows = slice(first_row, first_row + row.num_rows)
            first_row += row.num_rows
            if row.spans:
                q, k, v = (tensor[None] for tensor in self._heads_first(row, rows, layer))
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=self.job.scale)
                out_THD[rows] = out[0].transpose(0, 1)
        return out_THD

    def _heads_first(self, row: RowSpans, rows: slice, layer: int) -> list[torch.Tensor]:
        tokens = self.tokens([row])
        keys_values = [
            cache[layer].reshape(POOL_TOKENS, self.num_kv_heads, -1)[tokens].repeat_interleave(self.group, 1)
            for cache in (self.job.k_cache, self.job.v_cache)
        ]
        return [tensor.transpose(0, 1) for tensor in (self.job.q_THD[rows], *keys_values)]

    def largest_score_error(self, layer: int) -> float:
        """The most that one rounding in fp32 of the sum of |q| * |k| can change a score."""
        q, k = self.job.q_THD.double().abs(), self.job.k_cache[layer].double().nan_to_num().abs()
        largest = (q.flatten(0, 1) @ k.flatten(0, 2).T).max()
        return float(largest) * self.job.scale * 2**-24

    def check(self, layer: int = 0, *, has_large_scores: bool = False) -> None:
        """The error against fp64 is at most twice that of torch in the same precision, and two units more.

        Large scores allow for what rounding them to fp32 can change. That depends on the order of the sums, which
        differs between processors in torch too.
        """
        out_THD, lse_HT = self.expected(layer)
        units = 2 * torch.finfo(self.dtype).eps * out_THD.abs().max()
        allowed = 2 * (self.by_torch(layer).double() - out_THD).abs().max() + units
        if has_large_scores:
            allowed += self.largest_score_error(layer) * self.job.v_cache[layer].nan_to_num().abs().max()
        error = (self.job.out_THD.double() - out_THD).abs().max()
        assert error <= allowed, f"error {error:.3g} in out, allowed {allowed:.3g}"
        sees_keys = lse_HT > -torch.inf
        assert torch.equal(self.job.lse_HT > -torch.inf, sees_keys)
        rounding = 2**-8 if self.dtype == torch.bfloat16 else 3e-5  # bf16 kernels may round the weights that they sum
        lse_error = ((self.job.lse_HT.double() - lse_HT)[sees_keys] / (1 + lse_HT[sees_keys].abs())).abs().max()
        assert lse_error <= rounding, f"error {lse_error:.3g} in lse"


@contextmanager
def memory_before_guard_page(num_bytes: int) -> Iterator[torch.Tensor]:
    """`num_bytes` of memory as uint8. Reading the byte after the last one ends the process."""
    data_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, data_bytes + mmap.PAGESIZE)
    everything = torch.frombuffer(pages, dtype=torch.uint8)
    guard = ctypes.c_void_p(everything.data_ptr() + data_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    for protection in (mmap.PROT_READ, 0):  # the first call shows that the second one can work
        assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), protection) == 0
    yield everything[data_bytes - num_bytes : data_bytes]
