"""The decode kernel with a few queries per sequence: in Triton's interpreter, on CPU, and on a GPU at real sizes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from interpreter import INTERPRETED, on_device
from paged_cases import PagedCase, assert_as_good_as_plain_torch, assert_matches, make_paged

from nanovllm.attention.base import PartialAttention
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.checkpoint.model_config import HEAD_DIMS
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES

pytest.importorskip("triton")

from nanovllm.kernels.configs import DecodeConfig
from nanovllm.kernels.decode import paged_decode, tile_rows
from nanovllm.kernels.prefill import paged_prefill

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
if INTERPRETED:  # it truncates to bf16 where a GPU rounds
    SHAPES = [((2, 2), 64, 256, FP32), ((2, 1), 80, 256, FP16), ((4, 1), 128, 256, FP16), ((7, 1), 64, 256, FP32)]
    SHAPES += [((7, 1), 80, 512, FP16), ((16, 2), 64, 256, FP16)]
else:
    SHAPES = [(heads, 128, 1024, BF16) for heads in [(8, 8), (16, 8), (32, 8), (28, 4), (8, 1), (40, 2)]]
    SHAPES += [(heads, 128, 256, FP32) for heads in [(8, 8), (16, 8), (28, 4)]]
    SHAPES += [((6, 3), head_dim, 512, dtype) for head_dim in HEAD_DIMS for dtype in (BF16, FP32)]
    SHAPES += [((16, 8), 128, 4096, FP16)]
    SHAPES += [((8, 1), head_dim, 256, BF16) for head_dim in HEAD_DIMS]
CASES = [(*shape, causal, num_splits) for shape in SHAPES for causal in (True, False) for num_splits in (1, 3)]
if INTERPRETED:  # of the first two shapes all four, of the others two
    CASES = [case for i, case in enumerate(CASES) if i < 8 or i % 4 in ((0, 3) if i // 4 % 2 else (1, 2))]


def decode(
    case: PagedCase,
    scale: float,
    num_splits: int,
    config: DecodeConfig | None = None,
    out_THD: torch.Tensor | None = None,
    max_query_len: int | None = None,
) -> PartialAttention:
    batch = case.batch
    got = paged_decode(
        case.q_THD,
        case.k_cache,
        case.v_cache,
        batch.context_lens,
        batch.block_tables,
        scale,
        num_splits,
        config,
        out_THD,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_query_len=max_query_len or batch.max_query_len,
        causal=batch.causal,
    )
    return PartialAttention(*got)


@on_device
@pytest.mark.parametrize(("heads", "head_dim", "page", "dtype", "causal", "num_splits"), CASES)
def test_few_queries_match_naive(device, heads, head_dim, page, dtype, num_splits, causal):
    """0 to 16 queries; no key, only the queries' own keys, and more, around the edges of tiles and blocks."""
    lens = [(1, 1), (0, 40), (16, page + 3), (5, 5), (3, page), (0, 0), (4, 0), (2, page + 1), (16, 16), (7, page - 1)]
    if not INTERPRETED:
        lens += [(n, 3 * page + n) for n in range(1, MAX_DECODE_QUERIES + 1)]
    case = make_paged(lens, page, heads, causal=causal, head_dim=head_dim, dtype=dtype, device=device)
    got = decode(case, head_dim**-0.5, num_splits)
    start, end = case.batch.cu_seqlens_q[6:8].tolist()
    assert got.lse_HT[:, start:end].isneginf().all() and not got.out_THD[start:end].any()
    assert_as_good_as_plain_torch(got, case, head_dim**-0.5)


@pytest.mark.slow
@on_device
@pytest.mark.parametrize(("num_splits", "num_queries"), [(1, 5), (2, 16), (3, 2), (3, 5), (3, 16), (5, 5)])
def test_few_queries_limits_around_edges_match_naive(device, num_splits, num_queries):
    """Keys of the first and the last query end before, at and after the edges of tiles of 16 keys, and of splits.

    With 3 splits of 33 keys the last split has one key, which only the last query sees.
    """
    contexts = [num_queries, 16, 17, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 80]
    lens = [(num_queries, n) for n in contexts if n >= num_queries]
    case = make_paged(lens, 64, (2, 1), causal=True, device=device)
    got = decode(case, 0.3, num_splits, DecodeConfig(16, num_warps=4, num_stages=3))
    assert_as_good_as_plain_torch(got, case, 0.3)


@on_device
@pytest.mark.parametrize("heads", [(2, 1), (8, 1)])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_few_queries_are_fewer_than_allowed(device, num_splits, heads):
    """As in a graph: fewer queries than the bound, empty sequences behind the others, and rows of no sequence.

    These rows stay as they are where nothing is merged.
    """
    case = make_paged([(3, 70), (1, 9), (0, 0), (0, 0)], 256, heads, causal=True, head_dim=32, device=device)
    num_tokens = len(case.q_THD)
    wide = case._replace(q_THD=torch.cat((case.q_THD, torch.full_like(case.q_THD, torch.nan))))
    out = torch.full_like(wide.q_THD, 7.0)
    got = decode(wide, 0.2, num_splits, out_THD=out, max_query_len=MAX_DECODE_QUERIES)
    assert num_splits > 1 or bool((out[num_tokens:] == 7).all())
    assert_as_good_as_plain_torch(PartialAttention(out[:num_tokens], got.lse_HT[:, :num_tokens]), case, 0.2)


@on_device
@pytest.mark.parametrize("num_splits", [1, 3])
def test_at_most_one_query_each_matches_naive(device, num_splits):
    case = make_paged([(1, 5), (0, 9), (1, 300), (1, 0)], 256, (4, 2), causal=True, head_dim=32, device=device)
    assert_as_good_as_plain_torch(decode(case, 0.2, num_splits), case, 0.2)


@pytest.mark.slow
@on_device
def test_few_queries_strided_and_other_heads_hidden(device):
    """q is a view of the qkv product; heads are narrower than a tile, and the keys of the second kv head are NaN."""
    case = make_paged([(5, 5), (2, 300)], 256, (4, 2), causal=True, head_dim=80, device=device)
    want = case.naive(0.2)
    qkv = torch.randn(7, 8, 80, device=device)
    qkv[:, :4] = case.q_THD
    for cache in (case.k_cache, case.v_cache):
        cache[:, :, 1] = torch.nan
    got = decode(case._replace(q_THD=qkv[:, :4]), 0.2, 2)
    assert_matches(PartialAttention(got.out_THD[:, :2], got.lse_HT[:2]), first_heads(want, 2), 5e-6)


def first_heads(part: PartialAttention, num_heads: int) -> PartialAttention:
    return PartialAttention(part.out_THD[:, :num_heads], part.lse_HT[:num_heads])


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("query_lens", "calls"),
    [
        ([1, 1, 1, 40], ["one each: 3", "prefill: 1"]),
        ([1, 1, 3, 16, 17, 40], ["few: 4", "prefill: 2"]),
        ([1, 0, 1, 17], ["few: 3", "prefill: 1"]),
        ([0, 20], ["prefill: 2"]),
        ([2, 1, 16], ["few: 3"]),
        ([1, 0, 1], ["few: 3"]),
        ([17, 1, 4], ["prefill: 3"]),
        ([4, 33, 1, 16], ["few: 1", "prefill: 3"]),
    ],
)
def test_backend_mixed_batch_equals_torch_backend(device, query_lens, calls, causal):
    """Short sequences at the front go to the decode kernel together; behind a long one nothing does."""
    lens = [(n, context_len) for n, context_len in zip(query_lens, (50, 300, 40, 256, 70, 41), strict=False)]
    case = make_paged(lens, 256, (4, 2), causal=causal, device=device)
    backend, called = TritonBackend(), []

    def spy_decode(q_THD, k_cache, v_cache, context_lens, *args, **options):
        kind = "one each" if options["cu_seqlens_q"] is None else "few"
        called.append(f"{kind}: {len(context_lens)}")
        return paged_decode(q_THD, k_cache, v_cache, context_lens, *args, **options)

    def spy_prefill(*args, **options):
        called.append(f"prefill: {len(args[4])}")
        return paged_prefill(*args, **options)

    backend.decode = SimpleNamespace(paged_decode=spy_decode, tile_rows=tile_rows)
    backend.prefill = SimpleNamespace(paged_prefill=spy_prefill)
    got, want = (b.attend(case.q_THD, case.k_cache, case.v_cache, case.batch, 0.3) for b in (backend, TorchBackend()))
    assert called == calls
    assert_matches(got, want, 5e-6)


@on_device
@pytest.mark.parametrize("max_query_len", [1, 4, 16])
def test_backend_without_host_sizes_goes_by_the_bound(device, max_query_len):
    """As inside a graph. There may be more sequences than tokens: the rest is empty."""
    lens = [(min(2, max_query_len), 300), (1, 40), (0, 0), (0, 0), (0, 0)]
    case = make_paged(lens, 256, (4, 2), causal=True, device=device)
    batch = replace(case.batch, host=None, max_query_len=max_query_len, max_context_len=4096)
    got = TritonBackend().attend(case.q_THD, case.k_cache, case.v_cache, batch, 0.3)
    assert_as_good_as_plain_torch(got, case, 0.3)


def test_tile_rows():
    for max_query_len, heads, dtype, expected in (
        (1, (8, 8), BF16, (16, 1)),
        (1, (28, 4), BF16, (16, 1)),
        (1, (128, 1), BF16, (128, 1)),
        (2, (8, 8), BF16, (16, 1)),
        (16, (16, 8), BF16, (32, 1)),
        (16, (32, 8), BF16, (64, 1)),
        (16, (28, 4), BF16, (64, 2)),
        (9, (28, 4), BF16, (64, 1)),
        (10, (28, 4), BF16, (64, 2)),
        (16, (32, 8), FP32, (32, 2)),
    ):
        assert tile_rows(torch.empty(1, heads[0], 128, dtype=dtype), heads[1], max_query_len) == expected


def test_paged_decode_refuses_what_it_cannot_run():
    case = make_paged([(MAX_DECODE_QUERIES + 1, 40)], 256, (2, 1), causal=True)
    with pytest.raises(AssertionError, match="17 queries, more than 16"):
        decode(case, 0.2, 1)
    batch = case.batch
    with pytest.raises(AssertionError, match="need cu_seqlens_q"):
        paged_decode(
            case.q_THD, case.k_cache, case.v_cache, batch.context_lens, batch.block_tables, 0.2, 1, max_query_len=2
        )
