"""The torch backend against a naive fp64 softmax."""

import itertools
from dataclasses import replace

import pytest
import torch
from paged_cases import assert_matches, make_paged, make_qkv, naive
from rounding import MAX_ROUNDINGS, MEAN_VALUE, PART_COUNTS, num_roundings

from nanovllm.attention.torch_backend import TorchBackend, TorchLimits, flash_attn_with_lse

GROUPS = [(1, 1), (2, 1), (6, 2), (4, 1), (7, 1), (8, 1), (4, 4)]  # query heads, kv heads


@pytest.fixture(params=["fused", "tiled"])
def limits(request: pytest.FixtureRequest) -> TorchLimits:
    """Both ways to run a dense block: torch's fused CPU kernel, and the tiled one of other devices, many tiles."""
    if request.param == "tiled":
        return TorchLimits(fused_on_cpu=False, score_tile_bytes=4 * 5 * 8 * 40)
    return TorchLimits()


def test_flash_attn_with_lse_matches_naive(limits: TorchLimits):
    lens = [(1, 1), (1, 37), (5, 5), (33, 33), (7, 40), (40, 7), (3, 0)]
    for heads, (num_queries, num_keys), causal in itertools.product(GROUPS, lens, (False, True)):
        q, k, v = make_qkv(num_queries, num_keys, heads, 24)
        got = flash_attn_with_lse(q, k, v, causal=causal, limits=limits)
        assert_matches(got, naive(q, k, v, 24**-0.5, causal))
        assert got.out_THD.shape == q.shape


def test_flash_attn_with_lse_any_head_dim_scale_and_precision(limits: TorchLimits):
    for head_dim in (1, 40, 128, 320):
        q, k, v = make_qkv(9, 20, (6, 2), head_dim)
        got = flash_attn_with_lse(q, k, v, scale=0.3 / head_dim, limits=limits)
        assert_matches(got, naive(q, k, v, 0.3 / head_dim, False))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        q, k, v = make_qkv(33, 80, (6, 2), 64, dtype)
        got = flash_attn_with_lse(q, k, v, causal=True, limits=limits)
        assert got.out_THD.dtype == dtype
        tolerance = 2e-6 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
        assert_matches(got, naive(q, k, v, 64**-0.5, True), tolerance)


@pytest.mark.parametrize("order", ["adjacent", "reversed", "random", "runs"])
@pytest.mark.parametrize("causal", [True, False])
def test_attend_paged_matches_naive(order: str, causal: bool):
    """Decodes, chunks, whole prompts and sequences without keys in one batch, around the block edge."""
    lens = [(1, 1), (1, 50), (5, 8), (8, 8), (9, 9), (7, 65), (16, 64), (1, 8), (17, 17)]
    if not causal:
        lens[2:2] = [(3, 0), (1, 0), (9, 4)]
    for heads, min_view_tokens in itertools.product([(6, 2), (7, 1)], (0, TorchLimits().min_view_tokens)):
        case = make_paged(lens, 8, heads, order=order, causal=causal)
        backend = TorchBackend(TorchLimits(min_view_tokens=min_view_tokens))
        assert_matches(case.attend(backend, 0.25), case.naive(0.25))


@pytest.mark.parametrize("order", ["adjacent", "random"])
def test_attend_windows_and_sinks_match_naive(order: str, limits: TorchLimits):
    """Windows and contexts around the block edge. Keys before the windows hold NaN."""
    lens = [(1, 1), (1, 300), (5, 8), (8, 8), (9, 9), (7, 265), (40, 64), (0, 30), (1, 0), (17, 17)]
    for window, sinks in itertools.product((None, 1, 7, 8, 9, 40, 1000), ((), (-1000.0, 0.5, 1000.0))):
        case = make_paged(lens, 8, (6, 2), order=order, causal=True, window=window, sinks=sinks)
        assert_matches(case.attend(TorchBackend(limits), 0.25), case.naive(0.25))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attend_many_spans_rounds_once(dtype: torch.dtype, limits: TorchLimits):
    """The running result was rounded after every span: 6 times the error of one rounding after 122 parts."""
    backend = TorchBackend(replace(limits, min_view_tokens=0))  # no two blocks are adjacent: each is a span
    shape = {"order": "reversed", "causal": True, "head_dim": 64, "dtype": dtype, "mean_value": MEAN_VALUE}
    for num_parts, query_len in itertools.product(PART_COUNTS, (1, 8)):
        case = make_paged([(query_len, num_parts * 32)] * 2, 32, (8, 2), **shape)
        assert num_roundings(case.attend(backend, 0.1).out_THD, case.naive(0.1).out_THD) <= MAX_ROUNDINGS


def test_attend_without_host_tables_asserts():
    case = make_paged([(1, 5)], 8, (1, 1), causal=True)
    with pytest.raises(AssertionError, match="host"):
        case._replace(batch=replace(case.batch, host=None)).attend(TorchBackend(), 1.0)
