"""The backends beside the torch one: which is chosen and why, cuDNN's cutting of batches, and all of them on a GPU."""

import itertools
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from paged_cases import assert_as_good_as_plain_torch, assert_matches, make_paged
from rounding import MAX_ROUNDINGS, MEAN_VALUE, PART_COUNTS, num_roundings

from nanovllm.attention import flash_backend
from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention
from nanovllm.attention.cudnn_backend import CudnnBackend, CudnnLimits
from nanovllm.attention.flash_backend import FlashBackend
from nanovllm.attention.selection import BACKENDS, choose_backend, find_backend
from nanovllm.attention.torch_backend import GATHER_BYTES, TorchBackend, TorchLimits, flash_attn_with_lse
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.checkpoint.model_config import HEAD_DIMS
from nanovllm.config import ATTENTION_BACKENDS
from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KernelTarget
from nanovllm.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SLOW_CYCLES = 20_000_000  # about 10 ms, longer than all the rest takes


def test_backends_are_those_that_the_config_names() -> None:
    assert set(BACKENDS) == set(ATTENTION_BACKENDS)


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch):
    """Pretend that the GPU has this compute capability, with cuDNN and without flash-attn."""

    def pretend(capability: tuple[int, int], flash: bool = False) -> None:
        monkeypatch.setattr(kernel_target, "target_of", lambda device: KernelTarget(capability, 99 * 1024, 82))
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        reason = None if flash else "flash_attn is not installed"
        monkeypatch.setattr(FlashBackend, "why_unavailable", classmethod(lambda *_: reason))
        monkeypatch.setattr(FlashBackend, "__init__", lambda self: None)

    return pretend


def test_flash_gate_asks_the_installed_build(monkeypatch):
    """Regressions: a build without head dims above 128 passed the gate, and the engine failed at its start. A build
    that has kernels for 64 and 128 only returned garbage for 80.
    """

    def attend(self, q_THD, k_NPKD, v_NPKD, batch, scale):
        head_dim = q_THD.shape[2]
        if head_dim > 128:
            raise RuntimeError("this build has head dims up to 128 only\nC++ trace")
        out_THD, lse_HT = TorchBackend().attend(q_THD, k_NPKD, v_NPKD, batch, scale)
        if head_dim == 80 and batch.max_query_len == 1:
            lse_HT[-1, -1] = float("nan")
        if head_dim == 96 and batch.max_query_len > 1:
            out_THD[0, 0, -1] += 1
        return PartialAttention(out_THD, lse_HT)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setattr(FlashBackend, "attend", attend)
    why_fails = flash_backend._why_build_fails.__wrapped__
    for dtype in (torch.bfloat16, torch.float16):
        assert why_fails(CPU, dtype, 64) is why_fails(CPU, dtype, 128) is None
    assert why_fails(CPU, torch.bfloat16, 160) == (
        "the installed flash_attn with torch.bfloat16 and head dim 160 fails (this build has head dims up to 128 only)"
    )
    assert all("computes wrong results" in why_fails(CPU, torch.bfloat16, head_dim) for head_dim in (80, 96))
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it fails
    assert "fails" in why_fails(CPU, torch.bfloat16, 128)


def test_choose_on_cpu_takes_torch_and_refuses_others(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert isinstance(choose_backend("auto", CPU, dtype, 128, enforce_eager=False), TorchBackend)
    assert find_backend("torch", CPU, torch.float32, 128, enforce_eager=False) == "torch"
    for name in ("flash", "cudnn", "triton"):
        with pytest.raises(ConfigError, match=rf"attn_backend='{name}'.*CUDA.*\['torch'\]"):
            choose_backend(name, CPU, torch.float32, 64, enforce_eager=False)
    with pytest.raises(ConfigError, match=r"attn_backend='xformers' .*no such backend.*'torch'"):
        choose_backend("xformers", CPU, torch.float32, 64, enforce_eager=False)


def test_choose_auto_on_gpu(gpu_of, caplog):
    pytest.importorskip("triton")
    for capability, flash, dtype, head_dim, chosen, paged in (
        ((9, 0), False, torch.bfloat16, 128, CudnnBackend, TritonBackend),
        ((9, 0), True, torch.bfloat16, 128, CudnnBackend, TritonBackend),
        ((9, 0), False, torch.float32, 128, TritonBackend, None),
        ((9, 0), False, torch.bfloat16, 80, CudnnBackend, TritonBackend),
        ((9, 0), False, torch.bfloat16, 256, TritonBackend, None),
        ((9, 0), True, torch.bfloat16, 160, FlashBackend, None),
        ((8, 0), False, torch.bfloat16, 128, TritonBackend, None),
        ((8, 0), True, torch.bfloat16, 128, FlashBackend, None),
        ((8, 9), False, torch.float16, 96, TritonBackend, None),
    ):
        gpu_of(capability, flash)
        caplog.clear()
        with caplog.at_level("INFO", logger="nanovllm"):
            backend = choose_backend("auto", CUDA, dtype, head_dim, enforce_eager=False)
        assert type(backend) is chosen, (capability, flash, dtype, head_dim)
        assert len(caplog.records) == 1 and backend.name in caplog.text
        assert paged is None or type(backend.paged) is paged


def test_find_backend_asks_nobody_after_the_one_that_can_run(gpu_of, monkeypatch):
    """Every backend was asked. Where flash-attn is installed, it took 4.4 s of a 15 s start to say that it could run
    too.
    """
    pytest.importorskip("triton")
    gpu_of((9, 0))
    monkeypatch.setattr(FlashBackend, "why_unavailable", lambda *args: pytest.fail("flash was asked"))
    for name, chosen in (("auto", "cudnn"), ("cudnn", "cudnn"), ("triton", "triton")):
        assert find_backend(name, CUDA, torch.bfloat16, 128, enforce_eager=False) == chosen


def test_choose_forced_names_the_reason_and_what_can_run(gpu_of):
    pytest.importorskip("triton")
    gpu_of((9, 0))
    for name, dtype, head_dim, reason in (
        ("flash", torch.bfloat16, 128, "flash_attn is not installed.*'cudnn', 'triton'"),
        ("cudnn", torch.float32, 128, ".*float32"),
        ("cudnn", torch.bfloat16, 72, "it also needs flash or triton"),
    ):
        with pytest.raises(ConfigError, match=f"'{name}' cannot run here: {reason}"):
            choose_backend(name, CUDA, dtype, head_dim, enforce_eager=False)


def test_choose_auto_every_supported_head_dim_runs_in_graphs(gpu_of):
    """auto fell back to torch for 80, 96, 112, 160 and 192; the first step died in Triton's compiler."""
    pytest.importorskip("triton")
    for capability in ((8, 0), (9, 0), (12, 0)):
        gpu_of(capability)
        for head_dim, dtype in itertools.product(HEAD_DIMS, (torch.float32, torch.bfloat16, torch.float16)):
            assert find_backend("auto", CUDA, dtype, head_dim, enforce_eager=False) in ("cudnn", "triton")


def test_choose_torch_on_gpu_needs_eager(gpu_of):
    """With graphs the engine died at their capture: "it needs PagedBatch.host"."""
    pytest.importorskip("triton")
    none_runs = r"no attention backend can run here: .*triton: .*torch: .*enforce_eager=True"
    torch_cannot = r"attn_backend='torch' cannot run here: .*set enforce_eager=True.*'triton'"
    for name, capability, dtype, head_dim, message in (
        ("auto", (7, 5), torch.float16, 128, none_runs),
        ("auto", (9, 0), torch.bfloat16, 72, none_runs),
        ("torch", (9, 0), torch.bfloat16, 128, torch_cannot),
    ):
        gpu_of(capability)
        with pytest.raises(ConfigError, match=message):
            find_backend(name, CUDA, dtype, head_dim, enforce_eager=False)
        assert find_backend(name, CUDA, dtype, head_dim, enforce_eager=True) == "torch"


class CountingBackend(TorchBackend):
    """Stands for the paged backend beside cuDNN; remembers the batches it got."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[PagedBatch] = []

    def attend(self, q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale, sinks_H=None):
        self.batches.append(batch)
        assert q_THD.shape[0] == batch.cu_seqlens_q[-1] and batch.cu_seqlens_q[0] == 0
        assert batch.cu_seqlens_q.diff().tolist() == list(batch.host.query_lens)
        assert batch.context_lens.tolist() == list(batch.host.context_lens)
        return super().attend(q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale, sinks_H)


class CudnnOnCpu(CudnnBackend):
    """Torch's kernel stands in for cuDNN's. `asked`: queries, keys and mask of each call."""

    def __init__(self, paged: AttentionBackend, limits: CudnnLimits) -> None:
        super().__init__(paged, limits)
        self.asked: list[tuple[int, int, bool]] = []

    def attend_dense(self, q, k, v, scale, causal):
        self.asked.append((len(q), len(k), causal))
        return flash_attn_with_lse(q, k, v, scale, causal)


CPU_LIMITS = CudnnLimits(query_sizes=(16, 32, 48, 64, 128), max_padded_queries=64, min_keys=32, max_keys=128)


# Queries and keys of each sequence, and the paged calls that are left
CUT_BATCHES = [
    ([(1, 9), (1, 30), (2, 2), (32, 32), (16, 80), (1, 5)], 2),  # the history of 64 keys needs no paged call
    ([(48, 80)], 0),
    ([(48, 81)], 1),  # one key of the history is left
    ([(16, 40)], 1),  # all of the history is
    ([(37, 59)], 2),  # 32 queries with 22 keys left, and 5 queries
    ([(41, 41)], 0),  # padded to 48
    ([(71, 71)], 1),  # 64 queries, and 7
    ([(16, 64), (100, 101), (1, 1)], 5),  # 64, 32 and 4 queries; two of them leave keys
    ([(17, 33), (15, 15)], 3),
    ([(129, 200), (128, 128)], 2),
    ([(16, 400)], 0),  # more keys than one call takes
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["adjacent", "random", "runs"])
def test_cudnn_cuts_batches(order, causal):
    """cuDNN is asked for few pairs of lengths. The paged backend gets short sequences and what is left of long ones."""
    for lens, num_paged_calls in CUT_BATCHES:
        paged = CountingBackend()
        backend = CudnnOnCpu(paged, CPU_LIMITS)
        case = make_paged(lens, 8, (4, 2), causal=causal, order=order, unwritten=0.0)
        assert_matches(case.attend(backend, 0.3), case.naive(0.3))
        for num_queries, num_keys, square in backend.asked:
            assert num_queries in CPU_LIMITS.query_sizes
            assert num_keys == num_queries if square else num_keys in (32, 64, 128)
        assert not causal or (len(paged.batches) == num_paged_calls and backend.asked), lens


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["adjacent", "random"])
def test_cudnn_any_block_size(order, causal):
    """Includes blocks that are larger than the smallest call, or not a multiple of it. Cells never written hold NaN."""
    for page in (8, 24, 64, 256):
        backend = CudnnOnCpu(TorchBackend(), replace(CPU_LIMITS, gather_bytes=1))
        case = make_paged([(50, 300), (70, 333), (129, 129)], page, (4, 2), causal=causal, order=order)
        assert_matches(case.attend(backend, 0.3), case.naive(0.3))
        assert backend.asked


@pytest.mark.parametrize("window", [None, 40])
def test_cudnn_leaves_windows_to_the_paged_backend_and_counts_sinks_once(window):
    for lens, _ in CUT_BATCHES:
        paged = CountingBackend()
        backend = CudnnOnCpu(paged, CPU_LIMITS)
        case = make_paged(lens, 8, (4, 2), causal=True, window=window, sinks=(-1000.0, 0.5, 3.0, 1000.0))
        assert_matches(case.attend(backend, 0.3), case.naive(0.3))
        assert bool(backend.asked) == (window is None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_many_spans_round_once(causal, dtype):
    """The running result was rounded after every span of the history: 6 times the error of one rounding after 122."""
    for num_parts in PART_COUNTS:
        backend = CudnnOnCpu(TorchBackend(), CudnnLimits(query_sizes=(32,), min_keys=32, max_keys=32))
        lens = [(32, num_parts * 32)]
        case = make_paged(lens, 32, (8, 2), causal=causal, head_dim=64, dtype=dtype, mean_value=MEAN_VALUE)
        got = case.attend(backend, 0.1)
        assert len(backend.asked) == num_parts and got.out_THD.dtype == dtype
        assert num_roundings(got.out_THD, case.naive(0.1).out_THD) <= MAX_ROUNDINGS


def plans_built(
    limits: CudnnLimits, num_tokens: int, max_context_len: int, has_time: bool
) -> set[tuple[int, int, bool]]:
    """Shapes for which `build_plans` builds plans: all of them, or only those that every long prompt needs."""
    backend = CudnnOnCpu(TorchBackend(), limits)
    backend.attend_dense = lambda q, k, v, scale, causal: backend.asked.append((len(q), len(k), causal))
    backend.build_plans(torch.zeros(1, 2, 1), 1, num_tokens, max_context_len, lambda: has_time)
    assert len(set(backend.asked)) == len(backend.asked)
    return set(backend.asked)


def test_cudnn_plans_are_what_prompts_need():
    for chunks, has_time in (
        ([(128, 128), (128, 256), (60, 410)], False),  # a prompt in chunks, with a longer rest
        ([(128, 128), (128, 256), (128, 384), (20, 404)], True),
        ([(50, 50), (40, 80), (20, 100), (64, 248)], True),  # shorter ones, and prefixes that were cached
    ):
        built = plans_built(CPU_LIMITS, 128, 420, has_time)
        backend = CudnnOnCpu(TorchBackend(), CPU_LIMITS)
        for chunk in chunks:
            case = make_paged([chunk], 8, (4, 2), causal=True, order="adjacent", unwritten=0.0)
            case.attend(backend, 0.3)
        assert backend.asked and set(backend.asked) <= built


def test_cudnn_plans_needed_by_all_are_those_of_long_chunks():
    always = plans_built(CudnnLimits(), 16384, 131072, has_time=False)
    squares = {(n, n, True) for n in (8192, 16384)}
    assert always == squares | {(n, k, False) for n in (8192, 16384) for k in (32768, 16384, 8192, 4096)}
    assert len(plans_built(CudnnLimits(), 16384, 131072, has_time=True)) == 35
    assert plans_built(CudnnLimits(), 8000, 8000, has_time=False) == {(8192, 8192, True), (8192, 4096, False)}
    assert plans_built(CudnnLimits(), 300, 131072, has_time=True) == set()
    squares = {(1024, 1024, True), (2048, 2048, True)}
    assert plans_built(CudnnLimits(), 2048, 2048, has_time=True) == squares  # no history is long enough


@pytest.mark.parametrize("num_tokens", [16384, 16351, 7900, 2048])
def test_cudnn_asks_for_no_pair_without_a_library_plan(num_tokens):
    """Regression: each chunk of a new length asked for new pairs, and building their plans stalled a server for 0.5 s.

    Random lengths, positions, block sizes and orders of blocks, with and without a mask.
    """
    max_context_len, asked = 131072, set()
    built = plans_built(CudnnLimits(), num_tokens, max_context_len, has_time=True)
    generator = random.Random(num_tokens)
    for _ in range(300):
        page = generator.choice([256, 768, 1024, 4096, 8192])
        query_len = generator.randint(1, num_tokens)
        context_len = generator.randint(query_len, max_context_len)
        table = list(range(-(-context_len // page)))
        if generator.random() < 0.5:
            generator.shuffle(table)
        backend = PairsOnly(EmptyResults(), CudnnLimits())
        host = HostTables([query_len], [context_len], [table])
        empty = torch.empty(0, dtype=torch.int32)
        batch = PagedBatch(
            cu_seqlens_q=empty,
            context_lens=empty,
            block_tables=torch.tensor([table], dtype=torch.int32),
            max_query_len=query_len,
            max_context_len=context_len,
            causal=generator.random() < 0.7,
            host=host,
        )
        cache = torch.empty(len(table), page, 1, 1, dtype=torch.int8)
        backend.attend(torch.empty(query_len, 1, 1), cache, cache, batch, 1.0)
        asked |= set(backend.asked)
    assert asked <= built and len(built) <= 35


class EmptyResults(TorchBackend):
    """A paged backend that computes nothing."""

    def attend(self, q_THD, k_cache_NPKD, v_cache_NPKD, batch, scale, sinks_H=None):
        return PartialAttention(torch.empty_like(q_THD), torch.empty(1, len(q_THD)))

    def merge(self, parts, dtype):
        return parts[0]


class PairsOnly(CudnnOnCpu):
    """Remembers what it is asked for, and computes nothing."""

    def attend_dense(self, q, k, v, scale, causal):
        self.asked.append((len(q), len(k), causal))
        return PartialAttention(torch.empty_like(q), torch.empty(1, len(q)))


def test_flash_gets_sinks_added_and_leaves_windows_to_the_paged_backend(monkeypatch):

    def flash_attn_with_kvcache(*inputs, **options):
        return plain.out_THD.float().unsqueeze(1), plain.lse_HT.float().t().unsqueeze(2)

    def flash_attn_varlen_func(*inputs, **options):
        return plain.out_THD.float(), plain.lse_HT.float(), None

    monkeypatch.setattr(FlashBackend, "__init__", lambda self: None)
    flash = FlashBackend()
    flash.flash_attn = SimpleNamespace(
        flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
    )
    for lens, window in itertools.product(([(1, 300), (1, 40)], [(20, 300), (1, 9)]), (None, 100)):
        case = make_paged(lens, 256, (2, 1), causal=True, window=window, sinks=(0.5, 3.0))
        plain, flash.triton = case._replace(sinks_H=None).naive(0.3), CountingBackend()
        assert_matches(case.attend(flash, 0.3), case.naive(0.3))
        assert bool(flash.triton.batches) == (window is not None)


def test_cudnn_and_flash_leave_some_batches_to_the_paged_backend(monkeypatch):
    """flash-attn 2 does not split the keys of several queries, nor those of a short chunk with a long history."""
    monkeypatch.setattr(FlashBackend, "__init__", lambda self: None)
    flash = FlashBackend()
    for backend, lens, page in (
        (None, [(1, 9), (1, 30)], 8),
        (None, [(1, 9), (0, 0), (16, 30)], 8),
        (flash, [(2, 9), (1, 30)], 8),
        (flash, [(16, 30)], 8),
        (flash, [(1, 9), (0, 4), (1, 30)], 8),
        (flash, [(1, 9), (20, 16400)], 256),
    ):
        flash.triton = paged = CountingBackend()
        case = make_paged(lens, page, (2, 1), causal=True)
        assert_matches(case.attend(backend or CudnnBackend(paged), 0.3), case.naive(0.3))
        assert paged.batches == [case.batch]


GPU_LIMITS = CudnnLimits(query_sizes=(64, 128, 256, 512, 1024), min_keys=256)


def gpu_backend(name: str, dtype: torch.dtype, head_dim: int, gather_bytes: int = GATHER_BYTES) -> AttentionBackend:
    reason = BACKENDS[name].why_unavailable(CUDA, dtype, head_dim)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    if name == "cudnn":
        return CudnnBackend(TritonBackend(), replace(GPU_LIMITS, gather_bytes=gather_bytes))
    return TorchBackend(TorchLimits(gather_bytes=gather_bytes)) if name == "torch" else BACKENDS[name]()


gpu_backends = pytest.mark.parametrize("name", ["torch", "triton", "flash", "cudnn"])
IN_BF16 = {"head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.mark.gpu
@gpu_backends
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("unwritten", [0.0, float("nan")])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page", "dtype"),
    [
        ((16, 8), 128, 256, torch.bfloat16),
        ((28, 4), 64, 1024, torch.float16),
        ((32, 8), 128, 4096, torch.bfloat16),
        ((32, 8), 80, 256, torch.bfloat16),
        ((16, 2), 192, 256, torch.bfloat16),
        *(((6, 2), head_dim, 256, torch.bfloat16) for head_dim in (80, 96, 112, 160, 192, 256)),
        *(((6, 2), head_dim, 256, torch.float16) for head_dim in (80, 192)),
    ],
)
def test_gpu_backend_matches_naive(name, heads, head_dim, page, dtype, unwritten, causal):
    """Mixed batches at odd lengths, a few queries each as when guesses are verified, alone and in front of a chunk, and
    one query each. What was never written may be NaN.
    """
    backend = gpu_backend(name, dtype, head_dim)
    mixed = [(1, 1), (1, page + 1), (333, 2 * page + 77), (5, page), (129, 129), (64, page - 1), (1000, 1000)]
    few = [(1, 1), (2, 257), (16, 16), (5, 5000), (3, 256), (16, 700), (7, 255)]
    batches = [mixed, few, [*few, (100, 1000)]]
    if causal:
        batches.append([(1, n) for n in (1, 0, 17, 255, 256, 257, 5000)])
    else:
        batches = [[lens[0], (3, 0), *lens[1:]] for lens in batches]
    shape = {"head_dim": head_dim, "dtype": dtype, "device": "cuda", "unwritten": unwritten}
    for lens in batches:
        case = make_paged(lens, page, heads, causal=causal, **shape)
        assert_as_good_as_plain_torch(case.attend(backend, head_dim**-0.5), case, head_dim**-0.5)


# The layers of gpt-oss, and the local and the global layers of Gemma 4: heads, head dim, window, sinks
LAYERS = [((64, 8), 64, 128, (-20.0, 0.5, 5.0)), ((64, 8), 64, None, (-20.0, 0.5, 5.0))]
LAYERS += [((32, 16), 256, 1024, ()), ((32, 4), 512, None, ())]


@pytest.mark.gpu
@gpu_backends
@pytest.mark.parametrize(("heads", "head_dim", "window", "sinks"), LAYERS)
def test_gpu_windows_and_sinks_at_real_sizes_match_naive(name, heads, head_dim, window, sinks):
    backend = gpu_backend(name, torch.bfloat16, head_dim)
    shape = {"head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda", "window": window, "sinks": sinks}
    batches = [
        [(1, 1), (1, 257), (333, 589), (5, 256), (129, 129), (1000, 1000)],
        [(1, n) for n in (1, 0, 127, 128, 129, 1023, 1024, 1025, 40_000)],
        [(1, 1), (2, 257), (16, 16), (5, 5000), (3, 256), (16, 20_000), (7, 255), (100, 3000)],
        [(1100, 9001)],
        [(100, 20_000)],
    ]
    for lens in batches:
        case = make_paged(lens, 256, heads, causal=True, **shape)
        assert_as_good_as_plain_torch(case.attend(backend, head_dim**-0.5), case, head_dim**-0.5)


@pytest.mark.gpu
@gpu_backends
@pytest.mark.parametrize(("heads", "page"), [((16, 8), 256), ((32, 8), 4096)])
def test_gpu_backend_at_the_sizes_of_real_models_matches_naive(name, heads, page):
    """Qwen3-0.6B and 8B: long contexts that decode, verify guesses, and continue a prompt."""
    backend = gpu_backend(name, torch.bfloat16, 128)
    for lens in ([(1, 40_000), (1, 8191), (1, 20_000)], [(5, 40_000), (16, 8193), (100, 30_000)]):
        case = make_paged(lens, page, heads, causal=True, **IN_BF16)
        assert_as_good_as_plain_torch(case.attend(backend, 128**-0.5), case, 128**-0.5)


@pytest.mark.gpu
@gpu_backends
def test_gpu_sequences_without_keys_leave_other_memory_alone(name):
    """Regression: flash-attn wrote the LSE of sequences without keys into whatever lay behind the result."""
    backend = gpu_backend(name, torch.bfloat16, 128)
    case = make_paged([(1, 1792), (1, 1280), (300, 0), (256, 0)], 256, (8, 2), causal=False, **IN_BF16)
    neighbours = [torch.full((8, 558), 7.0, device="cuda") for _ in range(64)]
    del neighbours[::2]  # the results go to the gaps
    got = case.attend(backend, 128**-0.5)
    assert all(bool((neighbour == 7).all()) for neighbour in neighbours)
    assert_as_good_as_plain_torch(got, case, 128**-0.5)


@pytest.mark.gpu
@gpu_backends
def test_gpu_parts_merged_equal_one_call(name):
    """History and causal chunk apart, over different tables, then merged."""
    backend = gpu_backend(name, torch.bfloat16, 128)
    case = make_paged([(300, 1324)], 256, (16, 8), causal=True, **IN_BF16)
    batch, host = case.batch, case.batch.host
    cut = 4
    tail = replace(
        batch,
        context_lens=batch.context_lens - cut * 256,
        block_tables=batch.block_tables[:, cut:].contiguous(),
        host=replace(host, context_lens=[1324 - cut * 256], block_tables=[host.block_tables[0][cut:]]),
    )
    head = replace(
        batch,
        context_lens=torch.full_like(batch.context_lens, cut * 256),
        causal=False,
        host=replace(host, context_lens=[cut * 256], block_tables=[host.block_tables[0][:cut]]),
    )
    parts = [backend.attend(case.q_THD, case.k_cache, case.v_cache, part, 0.09) for part in (tail, head)]
    assert_as_good_as_plain_torch(backend.merge(parts, torch.bfloat16), case, 0.09)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_parts", PART_COUNTS)
def test_gpu_backend_many_spans_round_once(name, num_parts, dtype):
    """The backends that merge within a call, over blocks that lie apart and are gathered one by one."""
    block_bytes = 256 * 8 * 128 * dtype.itemsize
    backend = gpu_backend(name, dtype, 128, gather_bytes=block_bytes)
    lens = [(256, num_parts * 256)]
    case = make_paged(lens, 256, (16, 8), causal=True, head_dim=128, dtype=dtype, device="cuda", mean_value=MEAN_VALUE)
    got = case.attend(backend, 0.1)
    assert got.out_THD.dtype == dtype
    assert num_roundings(got.out_THD, case.naive(0.1).out_THD) <= MAX_ROUNDINGS


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [256, 768, 8192])
@pytest.mark.parametrize("lens", [(1024, 9001), (2600, 20001), (1300, 1300), (1100, 5197)])
def test_gpu_cudnn_at_its_real_sizes_matches_naive(lens, page, causal):
    """Keys and queries start at odd tokens; what was never written is NaN."""
    gpu_backend("cudnn", torch.bfloat16, 128)  # skips where it cannot run
    case = make_paged([lens], page, (4, 2), causal=causal, **IN_BF16)
    assert_as_good_as_plain_torch(case.attend(CudnnBackend(TritonBackend()), 0.09), case, 0.09)


@pytest.mark.gpu
def test_gpu_cudnn_backends_have_their_own_side_streams():
    """All engines of a process shared one, which was safe only while they shared their compute stream."""
    gpu_backend("cudnn", torch.bfloat16, 128)  # skips where it cannot run
    case = make_paged([(576, 5000)], 256, (16, 8), causal=True, **IN_BF16)
    backends = [CudnnBackend(TritonBackend(), GPU_LIMITS) for _ in range(2)]
    for backend, stream in zip(backends, (torch.cuda.Stream(), torch.cuda.Stream()), strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = case.attend(backend, 0.09)
        stream.synchronize()
        assert_as_good_as_plain_torch(got, case, 0.09)
    assert len({backend._side.cuda_stream for backend in backends}) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("slow", ["before", "history", "square"])
def test_gpu_cudnn_streams_wait_for_each_other(slow):
    """History and square run on two streams: whatever is slow, all is written before it is read, and read in time. The
    paged backend attends to 72 keys of the history.

    In each round the tensors hold the round's data only from just before the call to just after it, for the GPU.
    """

    class SlowCudnn(CudnnBackend):
        def attend_dense(self, q, k, v, scale, causal):
            if slow == ("square" if causal else "history"):
                torch.cuda._sleep(SLOW_CYCLES)
            return super().attend_dense(q, k, v, scale, causal)

        def _attend_paged(self, *args, **options):
            if slow == "history":
                torch.cuda._sleep(SLOW_CYCLES)
            return super()._attend_paged(*args, **options)

    gpu_backend("cudnn", torch.bfloat16, 128)  # skips where it cannot run
    backend = SlowCudnn(TritonBackend(), GPU_LIMITS)
    cases = [
        make_paged([(576, 5000)], 256, (16, 8), causal=True, order=order, **IN_BF16)
        for order in ("adjacent", "random", "runs")
    ]
    q, k_cache, v_cache = (torch.full_like(x, torch.nan) for x in cases[0][:3])
    results = []
    for case in [cases[0], *cases]:  # the first builds cuDNN's plans, for which the host takes longer than the GPU
        if slow == "before":
            torch.cuda._sleep(SLOW_CYCLES)
        for x, source in zip((q, k_cache, v_cache), case[:3], strict=True):
            x.copy_(source)
        got = backend.attend(q, k_cache, v_cache, case.batch, 0.09)
        for x in (q, k_cache, v_cache):
            x.fill_(torch.nan)
        results.append(PartialAttention(*(x.clone() for x in got)))
        del got  # its memory is free for the next round
    for case, result in zip(cases, results[1:], strict=True):
        assert_as_good_as_plain_torch(result, case, 0.09)


# The sequences of the captured step, then those of the steps that are replayed
ONE_QUERY_EACH = [[(1, n) for n in contexts] for contexts in ((700, 2000), (1, 300), (0, 513))]
FEW_QUERIES = [
    [(16, 700), (16, 2000), (16, 16)],
    [(1, 1), (5, 300), (2, 513)],
    [(4, 3000), (0, 0), (0, 0)],
    [(3, 3), (0, 0), (16, 257)],
    [(0, 0), (0, 0), (1, 40)],
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flash", "cudnn"])
@pytest.mark.parametrize(
    ("steps", "heads"), [(ONE_QUERY_EACH, (16, 8)), (FEW_QUERIES, (16, 8)), (FEW_QUERIES, (32, 4))]
)
@pytest.mark.parametrize(("window", "sinks"), [(None, ()), (200, (-20.0, 0.5, 5.0))])
def test_gpu_short_queries_replay_in_a_cuda_graph_with_other_lengths(name, steps, heads, window, sinks):
    """Captured without host tables. Replayed with fewer queries, other lengths and empty sequences, behind the others
    or between them. The rows of no sequence hold NaN.
    """
    backend = gpu_backend(name, torch.bfloat16, 128)
    cases = [make_paged(lens, 256, heads, causal=True, window=window, sinks=sinks, **IN_BF16) for lens in steps]
    num_blocks = max(len(case.k_cache) for case in cases)
    q = torch.empty_like(cases[0].q_THD)
    caches = torch.full((2, num_blocks, 256, heads[1], 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros(len(steps[0]), 16, dtype=torch.int32, device="cuda")
    cu_seqlens_q, context_lens = tables.new_zeros(1 + len(steps[0])), tables.new_zeros(len(steps[0]))
    batch = replace(
        cases[0].batch,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        block_tables=tables,
        max_context_len=16 * 256,
        host=None,
    )
    sinks_H = cases[0].sinks_H
    backend.attend(q, *caches, batch, 0.09, sinks_H)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = backend.attend(q, *caches, batch, 0.09, sinks_H)
    for case in [*cases, cases[0]]:
        num_tokens = len(case.q_THD)
        q.fill_(torch.nan)
        q[:num_tokens] = case.q_THD
        for cache, source in zip(caches, (case.k_cache, case.v_cache), strict=True):
            cache[: len(source)] = source
        tables[:, : case.batch.block_tables.shape[1]] = case.batch.block_tables
        cu_seqlens_q.copy_(case.batch.cu_seqlens_q)
        context_lens.copy_(case.batch.context_lens)
        graph.replay()
        real = PartialAttention(got.out_THD[:num_tokens], got.lse_HT[:, :num_tokens])
        assert_as_good_as_plain_torch(real, case, 0.09)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flash", "cudnn"])
@pytest.mark.parametrize("query_len", [1, 8, 200])
def test_gpu_cache_past_2_31_elements(name, query_len):
    """The last blocks of a cache of 2^31 elements and more, K and V the same 4.3 GB."""
    backend = gpu_backend(name, torch.bfloat16, 128)
    case = make_paged([(query_len, 700)], 256, (8, 8), causal=True, **IN_BF16)
    num_blocks = 2**31 // (256 * 8 * 128) + len(case.k_cache)
    big = torch.zeros(num_blocks, *case.k_cache.shape[1:], dtype=torch.bfloat16, device="cuda")
    big[-len(case.k_cache) :] = case.k_cache
    shift = num_blocks - len(case.k_cache)
    tables = [[block + shift for block in case.batch.host.block_tables[0]]]
    batch = replace(
        case.batch, block_tables=case.batch.block_tables + shift, host=replace(case.batch.host, block_tables=tables)
    )
    got = backend.attend(case.q_THD, big, big, batch, 0.09)
    same = case._replace(sequences=[(q, k, k) for q, k, _ in case.sequences])
    assert_as_good_as_plain_torch(got, same, 0.09)
