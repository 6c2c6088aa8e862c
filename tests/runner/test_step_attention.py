"""MergedAttention over a stream that is a list: every block but the newest ones is a group of its own."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from paged_cases import PagedCase, make_paged
from rounding import MAX_ROUNDINGS, MEAN_VALUE, PART_COUNTS, num_roundings

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention
from nanovllm.attention.cudnn_backend import CudnnBackend, CudnnLimits
from nanovllm.attention.selection import BACKENDS
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.runner.kv_memory import MergedAttention, StepBatches

SCALE = 0.1


class ListStream:
    """In place of an OffloadEngine: K and V of each group of a layer. Like a staging buffer, a group holds its keys
    until the next one is asked for.
    """

    def __init__(self, caches: Sequence[torch.Tensor], groups: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.k_cache_gpu, self.v_cache_gpu = caches
        self.kv = groups
        self.num_released = 0

    def begin_layer(self, layer: int) -> None: ...

    def stored(self, layer: int) -> None: ...

    def attended(self) -> None: ...

    def groups(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for k, v in self.kv:
            staged = k.clone(), v.clone()
            yield staged
            for x in staged:
                x.fill_(torch.nan)
            self.num_released += 1


class StreamedCase(NamedTuple):
    whole: PagedCase  # the same attention in one paged call
    stream: ListStream
    batch: PagedBatch
    groups: list[PagedBatch]

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        q_THD = self.whole.q_THD
        cells = torch.zeros(len(q_THD), dtype=torch.int64, device=q_THD.device)
        batches = StepBatches(self.batch, tuple(self.groups))
        attention = MergedAttention(backend, self.stream, None, cells, batches, batches, SCALE)
        attention.cells(0)
        return attention.attend(0, q_THD, self.whole.sinks_H)


def make_streamed(
    lens: list[tuple[int, int]],
    page: int,
    num_groups: int,
    heads: tuple[int, int],
    *,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    sinks: Sequence[float] = (),
) -> StreamedCase:
    """Each sequence's first `num_groups` blocks are streamed, a block of every sequence in a group."""
    whole = make_paged(
        lens,
        page,
        heads,
        causal=True,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        mean_value=MEAN_VALUE,
        sinks=sinks,
    )
    batch, host, num_seqs = whole.batch, whole.batch.host, len(lens)
    tables = batch.block_tables.long()

    def narrowed(context_lens: list[int], block_tables: torch.Tensor, causal: bool) -> PagedBatch:
        return replace(
            batch,
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            block_tables=block_tables.int().contiguous(),
            max_context_len=max(context_lens),
            causal=causal,
            host=replace(host, context_lens=context_lens, block_tables=block_tables.tolist()),
        )

    paged_lens = [context_len - num_groups * page for context_len in host.context_lens]
    paged = narrowed(paged_lens, batch.block_tables[:, num_groups:], causal=True)
    in_group = torch.arange(num_seqs, device=device).unsqueeze(1)
    group = narrowed([page] * num_seqs, in_group, causal=False)
    kv = [(whole.k_cache[tables[:, i]], whole.v_cache[tables[:, i]]) for i in range(num_groups)]
    stream = ListStream((whole.k_cache[None], whole.v_cache[None]), kv)
    return StreamedCase(whole, stream, paged, [group] * num_groups)


def test_streamed_attention_is_attention_over_all_keys():
    for sinks in ((), (-1000.0, 1.5, 1000.0)):  # a sink that were counted in several parts would take more weight
        case = make_streamed([(1, 50), (5, 49), (16, 63)], 8, 5, (6, 2), head_dim=16, sinks=sinks)
        got = case.attend(TorchBackend())
        want = case.whole.naive(SCALE)
        torch.testing.assert_close(got.double(), want.out_THD, atol=5e-6, rtol=5e-6)
        assert case.stream.num_released == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_parts", PART_COUNTS)
@pytest.mark.parametrize("query_len", [1, 7])
def test_streamed_attention_many_groups_rounds_once(query_len: int, num_parts: int, dtype: torch.dtype):
    """The running result was rounded after every group: 6 times the error of one rounding after 122 parts."""
    num_groups = num_parts - 1
    lens = [(query_len, num_groups * 32 + 32 - i) for i in range(2)]
    case = make_streamed(lens, 32, num_groups, (8, 2), head_dim=64, dtype=dtype)
    got = case.attend(TorchBackend())
    assert got.dtype == dtype
    assert num_roundings(got, case.whole.naive(SCALE).out_THD) <= MAX_ROUNDINGS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_attention_without_groups_is_the_paged_call_bit_for_bit(dtype: torch.dtype):
    case = make_streamed([(1, 50), (5, 49)], 8, 0, (6, 2), head_dim=16, dtype=dtype)
    whole = case.whole
    paged = TorchBackend().attend(whole.q_THD, whole.k_cache, whole.v_cache, whole.batch, SCALE)
    assert torch.equal(case.attend(TorchBackend()), paged.out_THD)


@pytest.mark.parametrize("num_groups", [1, 2, 5])
def test_streamed_attention_groups_without_keys_change_no_bit(num_groups: int):
    """A sequence attends to none of the blocks in another one's groups."""
    case = make_streamed([(1, 50), (5, 49)], 8, num_groups, (6, 2), head_dim=16, dtype=torch.bfloat16)
    want = case.attend(TorchBackend())
    (k, v), group = case.stream.kv[0], case.groups[0]
    empty = replace(group, context_lens=torch.zeros_like(group.context_lens), max_context_len=0)
    empty = replace(empty, host=replace(group.host, context_lens=[0, 0]))
    for place in (num_groups, 1, 0):
        case.stream.kv.insert(place, (torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)))
        case.groups.insert(place, empty)
    assert torch.equal(case.attend(TorchBackend()), want)


# -- the calls of a layer --------------------------------------------------------------------------------------------

Q_THD = torch.zeros(3, 2, 4)


class LoggingOffload:
    """Two streamed groups in each layer."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.k_cache_gpu = self.v_cache_gpu = torch.zeros(2, 1, 1, 2, 4)  # of two layers

    def begin_layer(self, layer: int) -> None:
        self.log.append(f"begin layer {layer}")

    def stored(self, layer: int) -> None:
        self.log.append(f"stored {layer}")

    def attended(self) -> None:
        self.log.append("attended")

    def groups(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for i in range(2):
            yield torch.full((1,), 2.0), torch.zeros(1)
            self.log.append(f"released {i}")


class LoggingBackend(TorchBackend):
    """All results weigh the same. That of a group is the value of its keys, that of the slots is 1."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def attend(
        self,
        q_THD: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: str,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        assert sum(reference() is not None for reference in self.alive) <= 2, "more than the two that wait for a merge"
        self.log.append(f"attend {batch}")
        out_THD = torch.full_like(q_THD, 1.0 if k.dim() > 1 else k.item())
        self.alive.append(weakref.ref(out_THD))
        return PartialAttention(out_THD, torch.zeros(q_THD.shape[1], len(q_THD)))


class LoggingCpu:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def step(self, rows: str, scale: float) -> "LoggingCpuStep":
        return LoggingCpuStep(self.log, rows)


class LoggingCpuStep:
    def __init__(self, log: list[str], rows: str) -> None:
        self.log, self.rows = log, rows

    def begin_layer(self, layer: int, q_THD: torch.Tensor) -> None:
        self.log.append(f"begin {self.rows}")

    def results(self, q_THD: torch.Tensor) -> PartialAttention:
        self.log.append("results")
        return PartialAttention(torch.full_like(q_THD, 7.0), torch.zeros(2, len(q_THD)))


def logging_attention(log: list[str]) -> MergedAttention:
    batches, last = StepBatches("all", ("a", "b"), "cpu"), StepBatches("last", ("last a", "last b"), "cpu of last")
    cells = torch.zeros(len(Q_THD), dtype=torch.int64)
    return MergedAttention(LoggingBackend(log), LoggingOffload(log), LoggingCpu(log), cells, batches, last, SCALE)


def test_merged_attention_begins_with_the_cpu_and_waits_for_it_last() -> None:
    log: list[str] = []
    attention = logging_attention(log)
    attention.cells(0)
    out_THD = attention.attend(0, Q_THD)
    assert log[:5] == ["begin layer 0", "stored 0", "begin cpu", "attend all", "attended"]
    assert log[5:] == ["attend a", "released 0", "attend b", "released 1", "results"]
    torch.testing.assert_close(out_THD, torch.full_like(Q_THD, (1 + 2 + 2 + 7) / 4))


def test_merged_attention_last_layer_attends_for_the_rows_that_sample() -> None:
    log: list[str] = []
    logging_attention(log).attend(1, Q_THD[:1])
    assert [entry for entry in log if "last" in entry] == [
        "begin cpu of last",
        "attend last",
        "attend last a",
        "attend last b",
    ]


def test_merged_attention_without_queries_only_releases_what_was_brought_in() -> None:
    log: list[str] = []
    assert len(logging_attention(log).attend(1, Q_THD[:0])) == 0
    assert log == ["stored 1", "attended", "released 0", "released 1"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "triton", "flash", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_parts", PART_COUNTS)
@pytest.mark.parametrize("query_len", [1, 200])
def test_gpu_streamed_attention_many_groups_rounds_once(name: str, query_len: int, num_parts: int, dtype: torch.dtype):
    """On every backend; 200 queries are long ones for cudnn, whose history and square are parts themselves."""
    reason = BACKENDS[name].why_unavailable(torch.device("cuda"), dtype, 128)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    limits = CudnnLimits(query_sizes=(64, 128, 256, 1024), min_keys=256)
    backend = CudnnBackend(TritonBackend(), limits) if name == "cudnn" else BACKENDS[name]()
    num_groups = num_parts - 1
    lens = [(query_len, num_groups * 256 + 512 - i) for i in range(2)]
    case = make_streamed(lens, 256, num_groups, (16, 8), head_dim=128, dtype=dtype, device="cuda")
    got = case.attend(backend)
    assert got.dtype == dtype
    assert num_roundings(got, case.whole.naive(SCALE).out_THD) <= MAX_ROUNDINGS
