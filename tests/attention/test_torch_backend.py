"""The torch backend against a naive fp64 softmax."""

from dataclasses import replace

import pytest
import torch
from paged_cases import assert_matches, make_paged, make_qkv, naive
from rounding import MAX_ROUNDINGS, MEAN_VALUE, PART_COUNTS, num_roundings

from nanovllm.attention.backends.torch_backend import TorchBackend, TorchLimits, flash_attn_with_lse

GROUPS = [(1, 1), (2, 1), (6, 2), (4, 1), (7, 1), (8, 1), (4, 4)]  # query heads, kv heads


@pytest.fixture(params=["fused", "tiled"])
def limits(request: pytest.FixtureRequest) -> TorchLimits:
    """Both ways to run a dense block: torch's fused CPU kernel, and the tiled one of other devices, many tiles."""
    if request.param == "tiled":
        return TorchLimits(fused_on_cpu=False, score_tile_bytes=4 * 5 * 8 * 40)
    return TorchLimits()


@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [(1, 1), (1, 37), (5, 5), (33, 33), (7, 40), (40, 7), (3, 0)])
def test_flash_attn_with_lse_matches_naive(
    lens: tuple[int, int], causal: bool, heads: tuple[int, int], limits: TorchLimits
):
    q, k, v = make_qkv(*lens, heads, 24)
    got = flash_attn_with_lse(q, k, v, causal=causal, limits=limits)
    assert_matches(got, naive(q, k, v, 24**-0.5, causal))
    assert got.out_THD.shape == q.shape


@pytest.mark.parametrize("head_dim", [1, 40, 128, 320])
def test_flash_attn_with_lse_any_head_dim_and_scale(head_dim: int, limits: TorchLimits):
    q, k, v = make_qkv(9, 20, (6, 2), head_dim)
    got = flash_attn_with_lse(q, k, v, scale=0.3 / head_dim, limits=limits)
    assert_matches(got, naive(q, k, v, 0.3 / head_dim, False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_flash_attn_with_lse_precisions(dtype: torch.dtype, limits: TorchLimits):
    q, k, v = make_qkv(33, 80, (6, 2), 64, dtype)
    got = flash_attn_with_lse(q, k, v, causal=True, limits=limits)
    assert got.out_THD.dtype == dtype
    assert_matches(got, naive(q, k, v, 64**-0.5, True), 2e-6 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("order", ["adjacent", "reversed", "random", "runs"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(6, 2), (7, 1)])
@pytest.mark.parametrize("min_view_tokens", [0, TorchLimits().min_view_tokens])
def test_attend_paged_matches_naive(order: str, causal: bool, heads: tuple[int, int], min_view_tokens: int):
    """Decodes, chunks, whole prompts and sequences without keys in one batch, around the block edge."""
    lens = [(1, 1), (1, 50), (5, 8), (8, 8), (9, 9), (7, 65), (16, 64), (1, 8), (17, 17)]
    if not causal:
        lens[2:2] = [(3, 0), (1, 0), (9, 4)]
    case = make_paged(lens, 8, heads, order=order, causal=causal)
    backend = TorchBackend(TorchLimits(min_view_tokens=min_view_tokens))
    got = backend.attend(case.q_THD, case.k_cache, case.v_cache, case.batch, 0.25)
    assert_matches(got, case.naive(0.25))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_parts", PART_COUNTS)
@pytest.mark.parametrize("query_len", [1, 8])
def test_attend_many_spans_rounds_once(query_len: int, num_parts: int, dtype: torch.dtype, limits: TorchLimits):
    """The running result was rounded after every span: 6 times the error of one rounding after 122 parts."""
    backend = TorchBackend(replace(limits, min_view_tokens=0))  # no two blocks are adjacent: each is a span
    case = make_paged(
        [(query_len, num_parts * 32)] * 2,
        32,
        (8, 2),
        order="reversed",
        causal=True,
        head_dim=64,
        dtype=dtype,
        mean_value=MEAN_VALUE,
    )
    got = backend.attend(case.q_THD, case.k_cache, case.v_cache, case.batch, 0.1)
    assert num_roundings(got.out_THD, case.naive(0.1).out_THD) <= MAX_ROUNDINGS


def test_attend_without_host_tables_asserts():
    case = make_paged([(1, 5)], 8, (1, 1), causal=True)
    with pytest.raises(AssertionError, match="host"):
        TorchBackend().attend(case.q_THD, case.k_cache, case.v_cache, replace(case.batch, host=None), 1.0)
