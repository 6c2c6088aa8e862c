import threading

import pytest
import torch
from cpu_attention_cases import POOL_TOKENS, Case, memory_before_guard_page, mixed_rows, row_spans

from nanovllm.cpu_attention import instruction_sets, torch_operator
from nanovllm.cpu_attention.build import find_compiler
from nanovllm.cpu_attention.compiled import CompiledKernel
from nanovllm.cpu_attention.kernels import KERNEL_NAMES, choose_kernel
from nanovllm.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [  # kv heads, query heads per kv head, head dim
    (2, 1, 64),
    (8, 2, 128),
    (1, 4, 96),
    (4, 7, 128),
    (2, 8, 256),
    (1, 16, 80),
    (3, 3, 16),
    (1, 5, 32),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_attend_is_as_exact_as_torch(open_kernel, num_threads: int, dtype: torch.dtype) -> None:
    """Groups, head dims, odd lengths, rows without keys, and more query vectors than a tile has (3 rows of 7 or 8)."""
    kernel = open_kernel(num_threads)
    assert kernel.num_threads == num_threads
    for num_kv_heads, group, head_dim in HEADS:
        for num_rows in (1, 3):
            case = Case(mixed_rows(num_rows), dtype, num_kv_heads, group, head_dim, num_threads)
            layer = num_rows % 2
            kernel.attend(case.job, layer)
            case.check(layer)


def test_attend_many_lengths(open_kernel) -> None:
    kernel = open_kernel()
    for num_tokens in (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, POOL_TOKENS):
        for dtype in DTYPES:
            case = Case([row_spans(2, (POOL_TOKENS - num_tokens, num_tokens))], dtype, 1, 3, 32)
            kernel.attend(case.job, 0)
            case.check()


def test_attend_without_any_key(open_kernel) -> None:
    case = Case([row_spans(1), row_spans(2)])
    open_kernel().attend(case.job, 0)
    assert not case.job.out_THD.any() and (case.job.lse_HT == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_large_scores_neither_overflow_nor_vanish(open_kernel, dtype: torch.dtype) -> None:
    """One key outweighs all others by far, and every chunk has another one."""
    kernel = open_kernel()
    for factor in (-300.0, 300.0):
        case = Case(mixed_rows(2), dtype)
        case.job.q_THD.mul_(factor)
        kernel.attend(case.job, 0)
        case.check(has_large_scores=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attend_scores_of_minus_infinity_have_no_weight(open_kernel, dtype: torch.dtype) -> None:
    """Whole tiles of them come first and last."""
    case = Case([row_spans(1, (0, POOL_TOKENS))], dtype, num_kv_heads=1, group=1)
    case.job.q_THD.abs_().clamp_(min=0.1)
    for part in (slice(0, 150), slice(500, POOL_TOKENS)):
        case.job.k_cache[0].view(POOL_TOKENS, -1)[part] = -3e38
    kernel = open_kernel()
    if kernel.name == "torch":
        pytest.skip("torch's operator gives such keys a weight of about 1e-4")
    kernel.attend(case.job, 0)
    seen = Case([row_spans(1, (150, 350))], dtype, num_kv_heads=1, group=1)
    for name in ("k_cache", "v_cache", "q_THD"):
        getattr(seen.job, name).copy_(getattr(case.job, name))
    seen.job.out_THD.copy_(case.job.out_THD)
    seen.job.lse_HT.copy_(case.job.lse_HT)
    seen.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("token", [0, 70, 300, POOL_TOKENS - 1])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_attend_nan_stays_nan(open_kernel, cache: str, token: int, dtype: torch.dtype) -> None:
    kernel = open_kernel()
    for group in (1, 4, 5):
        case = Case([row_spans(1, (0, POOL_TOKENS))], dtype, num_kv_heads=2, group=group)
        getattr(case.job, cache)[0].view(POOL_TOKENS, 2, -1)[token, 1, 3] = torch.nan
        kernel.attend(case.job, 0)
        of_head = case.job.out_THD.view(2, group, -1)
        assert torch.isnan(of_head[1, :, 3]).all() and torch.isfinite(of_head[0]).all()
        lse_is_nan = torch.isnan(case.job.lse_HT.view(2, group))
        assert not lse_is_nan[0].any() and lse_is_nan[1].all() == (cache == "k_cache")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_reads_nothing_behind_the_pool(open_kernel, dtype: torch.dtype) -> None:
    kernel = open_kernel()
    for num_kv_heads, group, head_dim in ((1, 1, 16), (2, 8, 96), (1, 5, 64)):
        shape = Case([row_spans(1)], dtype, num_kv_heads, group, head_dim).cache_shape
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        with memory_before_guard_page(num_bytes) as k_memory, memory_before_guard_page(num_bytes) as v_memory:
            k_cache, v_cache = (memory.view(dtype).view(shape) for memory in (k_memory, v_memory))
            rows = [row_spans(1, (POOL_TOKENS - num, num)) for num in (1, 2, 7, 64, 130)]
            case = Case(rows, dtype, num_kv_heads, group, head_dim, k_cache=k_cache, v_cache=v_cache)
            kernel.attend(case.job, 1)
            case.check(1)


def test_attend_from_two_threads_takes_turns(open_kernel) -> None:
    kernel = open_kernel()
    cases = [Case(mixed_rows(2), seed=seed) for seed in range(2)]
    threads = [
        threading.Thread(target=lambda case=case: [kernel.attend(case.job, 0) for _ in range(20)]) for case in cases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case in cases:
        case.check()


def test_close_twice_does_nothing(open_kernel) -> None:
    kernel = open_kernel()
    kernel.close()
    kernel.close()


def test_choose_kernel_takes_the_best_that_runs_here() -> None:
    kernel = choose_kernel([0])
    built = [variant.name for variant in instruction_sets.loadable()]
    assert kernel.name in ([*built, "torch"] if built[:1] == ["amx"] else [*built, "torch"][:1])
    kernel.close()
    if find_compiler():
        assert "portable" in built, "run python -m nanovllm.cpu_attention.build"


@pytest.mark.parametrize(("head_dim", "dtype"), [(72, torch.float32), (272, torch.bfloat16)])
def test_choose_kernel_leaves_other_shapes_to_torch(head_dim: int, dtype: torch.dtype) -> None:
    assert CompiledKernel.why_unavailable(head_dim, dtype)
    kernel = choose_kernel([0], head_dim=head_dim, dtype=dtype)
    assert kernel.name == "torch"
    case = Case(mixed_rows(2), dtype, head_dim=head_dim)
    kernel.attend(case.job, 0)
    case.check()
    with pytest.raises(ConfigError, match="multiples of 16"):
        choose_kernel([0], "portable", head_dim=head_dim, dtype=dtype)


def test_compiled_kernels_are_not_for_fp64() -> None:
    assert "not float64" in str(CompiledKernel.why_unavailable(64, torch.float64))


def test_choose_kernel_refuses_unknown_names() -> None:
    with pytest.raises(ConfigError, match=f"no CPU attention kernel 'avx'.*{KERNEL_NAMES[0]}"):
        choose_kernel([0], "avx")


def test_torch_kernel_falls_back_to_plain_products(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("not for this dtype")

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", refuse)
    torch_operator._operator_serves.cache_clear()
    request.addfinalizer(torch_operator._operator_serves.cache_clear)
    for dtype in DTYPES:
        case = Case(mixed_rows(3), dtype, group=4)
        choose_kernel([0], "torch").attend(case.job, 1)
        case.check(1)
