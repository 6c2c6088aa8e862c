import itertools

import pytest
import torch
from cpu_attention_cases import POOL_TOKENS, Case, memory_before_guard_page, mixed_rows, row_spans
from run_threads import in_threads
from tiers import RUNS_ALL

from nanovllm.capabilities.cpu_attention.kernels import KERNEL_NAMES, choose_kernel, why_unfit
from nanovllm.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [  # kv heads, query heads per kv head, head dim
    (2, 1, 64),
    (8, 2, 128),
    (1, 4, 96),
    (4, 7, 128),
    (2, 8, 256),
    (1, 8, 512),
    (1, 16, 80),
    (3, 3, 16),
    (1, 5, 32),
]


def test_attend_is_as_exact_as_torch(open_kernel) -> None:
    """Groups, head dims, odd lengths, rows without keys, and more query vectors than a tile has (3 rows of 7 or 8)."""
    kernels = [open_kernel(num_threads) for num_threads in (1, 2, 3)]
    assert [kernel.num_threads for kernel in kernels] == [1, 2, 3]
    cases = itertools.product(HEADS, DTYPES, (1, 3), kernels)
    for heads, dtype, num_rows, kernel in itertools.islice(cases, 0, None, 1 if RUNS_ALL else 11):
        case = Case(mixed_rows(num_rows), dtype, *heads, kernel.num_threads)
        layer = num_rows % 2
        kernel.attend(case.job, layer)
        case.check(layer)


def test_attend_many_lengths(open_kernel) -> None:
    kernel = open_kernel()
    lengths = (1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, POOL_TOKENS)
    for i, num_tokens in enumerate(lengths):
        for dtype in DTYPES if RUNS_ALL else DTYPES[i % 3 :][:1]:
            case = Case([row_spans(2, (POOL_TOKENS - num_tokens, num_tokens))], dtype, 1, 3, 32)
            kernel.attend(case.job, 0)
            case.check()


def test_attend_without_any_key(open_kernel) -> None:
    case = Case([row_spans(1), row_spans(2)])
    open_kernel().attend(case.job, 0)
    assert not case.job.out_THD.any() and (case.job.lse_HT == -torch.inf).all()


def test_attend_large_scores_neither_overflow_nor_vanish(open_kernel) -> None:
    """In every chunk one key outweighs all other keys."""
    kernel = open_kernel()
    for factor, dtype in itertools.product((-300.0, 300.0), DTYPES):
        case = Case(mixed_rows(2), dtype)
        case.job.q_THD.mul_(factor)
        kernel.attend(case.job, 0)
        case.check(has_large_scores=True)


def test_attend_scores_of_minus_infinity_have_no_weight(open_kernel) -> None:
    """The first and the last tiles have no other scores."""
    kernel = open_kernel()
    if kernel.name == "torch":
        pytest.skip("torch's operator gives such keys a weight of about 1e-4")
    for dtype in (torch.float32, torch.bfloat16):
        case = Case([row_spans(1, (0, POOL_TOKENS))], dtype, num_kv_heads=1, group=1)
        case.job.q_THD.abs_().clamp_(min=0.1)
        for part in (slice(0, 150), slice(500, POOL_TOKENS)):
            case.job.k_cache[0].view(POOL_TOKENS, -1)[part] = -3e38
        kernel.attend(case.job, 0)
        seen = Case([row_spans(1, (150, 350))], dtype, num_kv_heads=1, group=1)
        for name in ("k_cache", "v_cache", "q_THD", "out_THD", "lse_HT"):
            getattr(seen.job, name).copy_(getattr(case.job, name))
        seen.check()


def test_attend_nan_stays_nan(open_kernel) -> None:
    kernel = open_kernel()
    places = itertools.product(("k_cache", "v_cache"), (0, 70, 300, POOL_TOKENS - 1), DTYPES, (1, 4, 5))
    for cache, token, dtype, group in itertools.islice(places, 0, None, 1 if RUNS_ALL else 5):
        case = Case([row_spans(1, (0, POOL_TOKENS))], dtype, num_kv_heads=2, group=group)
        getattr(case.job, cache)[0].view(POOL_TOKENS, 2, -1)[token, 1, 3] = torch.nan
        kernel.attend(case.job, 0)
        of_head = case.job.out_THD.view(2, group, -1)
        assert torch.isnan(of_head[1, :, 3]).all() and torch.isfinite(of_head[0]).all()
        lse_is_nan = torch.isnan(case.job.lse_HT.view(2, group))
        assert not lse_is_nan[0].any() and lse_is_nan[1].all() == (cache == "k_cache")


def test_attend_reads_nothing_after_the_pool(open_kernel) -> None:
    kernel = open_kernel()
    for dtype, (num_kv_heads, group, head_dim) in itertools.product(DTYPES, ((1, 1, 16), (2, 8, 96), (1, 5, 64))):
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
    in_threads(*(lambda case=case: [kernel.attend(case.job, 0) for _ in range(20)] for case in cases))
    for case in cases:
        case.check()


def test_close_twice_does_nothing(open_kernel) -> None:
    kernel = open_kernel()
    kernel.close()
    kernel.close()


def test_choose_kernel_leaves_other_shapes_to_torch() -> None:
    for head_dim, dtype, reason in (
        (72, torch.float32, "multiples of 16 up to 512, and the head dim is 72"),
        (528, torch.bfloat16, "multiples of 16 up to 512, and the head dim is 528"),
        (64, torch.float64, "not float64"),
    ):
        kernel = choose_kernel([0], head_dim=head_dim, dtype=dtype)
        assert kernel.name == "torch" and reason in str(why_unfit(head_dim, dtype))
        if dtype != torch.float64:
            case = Case(mixed_rows(2), dtype, head_dim=head_dim)
            kernel.attend(case.job, 0)
            case.check()


def test_choose_kernel_refuses_unknown_names() -> None:
    with pytest.raises(ConfigError, match=f"no CPU attention kernel 'avx'.*{KERNEL_NAMES[0]}"):
        choose_kernel([0], "avx")
