"""Windows and sinks in the kernels of attention: in Triton's interpreter, on CPU, and on a GPU at real sizes.

Cells whose tile no query sees hold NaN, so a kernel that reads a tile before the window returns NaN.
"""

from dataclasses import replace

import pytest
import torch
from interpreter import INTERPRETED, on_device
from paged_cases import PagedCase, assert_as_good_as_plain_torch, make_paged

from nanovllm.attention.base import PartialAttention
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES

pytest.importorskip("triton")

from nanovllm.kernels.configs import PrefillConfig
from nanovllm.kernels.decode import paged_decode
from nanovllm.kernels.prefill import paged_prefill

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SINKS = (-1000.0, 0.5, 6.0, 1000.0)  # without weight, with some, with most, with all
LOW = FP16 if INTERPRETED else BF16  # the interpreter truncates to bf16 where a GPU rounds
# Around the sizes of tiles and blocks, and more than any context
WINDOWS = [(1, 65, 256), (63, 64, 255), (257, 300, 5000)]
SPLITS_AND_SINKS = [(3, SINKS), (1, ()), *([] if INTERPRETED else [(1, SINKS), (3, ())])]
SHAPES = [((2, 1), 16, FP32), ((6, 2), 80, LOW)] if INTERPRETED else [((64, 8), 64, BF16), ((6, 2), 80, FP32)]


def attend(case: PagedCase, scale: float, num_splits: int, config: PrefillConfig | None = None) -> PartialAttention:
    """Attend with the kernel for the case's queries: decode with one or a few of each sequence, or prefill."""
    batch, window_and_sinks = case.batch, {"window": case.batch.window, "sinks_H": case.sinks_H}
    inputs, lens = (case.q_THD, case.k_cache, case.v_cache), (batch.context_lens, batch.block_tables)
    if batch.max_query_len > MAX_DECODE_QUERIES:
        sizes = batch.max_query_len, scale, batch.causal
        inputs += (batch.cu_seqlens_q,)
        got = paged_prefill(*inputs, *lens, *sizes, config, num_splits=num_splits, **window_and_sinks)
        return PartialAttention(*got)
    few = {}
    if not batch.has_one_query_each(case.q_THD):
        few = {"cu_seqlens_q": batch.cu_seqlens_q, "max_query_len": batch.max_query_len, "causal": batch.causal}
    return PartialAttention(*paged_decode(*inputs, *lens, scale, num_splits, **few, **window_and_sinks))


@on_device
@pytest.mark.parametrize(("heads", "head_dim", "dtype"), SHAPES)
@pytest.mark.parametrize(("num_splits", "sinks"), SPLITS_AND_SINKS)
@pytest.mark.parametrize("windows", WINDOWS)
def test_windows_match_naive(device, heads, head_dim, dtype, num_splits, sinks, windows):
    """Chunks, a few queries and one query each, after histories that end at the edges of tiles and blocks."""
    batches = [
        [(40, 300), (1, 1), (70, 70), (0, 9), (33, 257)],
        [(16, 300), (1, 1), (0, 40), (5, 5), (3, 257), (7, 64)],
        [(1, n) for n in (1, 64, 65, 256, 257, 330)],
    ]
    for number, window in enumerate(windows):
        for lens in batches[number:][:1] if INTERPRETED else batches:
            case = make_paged(
                lens, 256, heads, causal=True, head_dim=head_dim, dtype=dtype, device=device, window=window, sinks=sinks
            )
            assert_as_good_as_plain_torch(attend(case, head_dim**-0.5, num_splits), case, head_dim**-0.5)


@on_device
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_sinks_without_a_window_match_naive(device, num_splits, causal):
    """A row that sees no key gets out 0 and its sink as the LSE. Sinks may have the model's dtype."""
    few = [(5, 40), (3, 0), (16, 300), (1, 1)]
    for lens, dtype in ((few, FP32), ([*few, (20, 33)], LOW)):
        if causal:
            lens = [each for each in lens if each[1]]
        case = make_paged(lens, 256, (4, 2), causal=causal, head_dim=32, dtype=LOW, device=device, sinks=SINKS)
        case = case._replace(sinks_H=case.sinks_H.to(dtype))
        got = attend(case, 0.2, num_splits)
        assert_as_good_as_plain_torch(got, case, 0.2)
        if not causal:
            assert not got.out_THD[5:8].any()
            torch.testing.assert_close(got.lse_HT[:, 5:8], case.sinks_H.float()[:, None].expand(-1, 3))


@on_device
@pytest.mark.parametrize("max_query_len", [1, 4, 40])
def test_backend_without_host_sizes_reads_the_window_alone(device, max_query_len):
    """As inside a graph. There may be more sequences than tokens: the rest is empty."""
    lens = [(min(33, max_query_len), 700), (1, 40), (0, 0), (0, 0), (0, 0)]
    case = make_paged(lens, 256, (4, 2), causal=True, device=device, window=100, sinks=SINKS)
    batch = replace(case.batch, host=None, max_query_len=max_query_len, max_context_len=4096)
    got = TritonBackend().attend(case.q_THD, case.k_cache, case.v_cache, batch, 0.3, case.sinks_H)
    assert_as_good_as_plain_torch(got, case, 0.3)


@on_device
def test_backend_mixed_batch_has_windows_and_sinks_in_both_kernels(device):
    case = make_paged([(1, 300), (3, 70), (40, 290)], 256, (4, 2), causal=True, device=device, window=65, sinks=SINKS)
    assert_as_good_as_plain_torch(case.attend(TritonBackend(), 0.3), case, 0.3)


@on_device
@pytest.mark.parametrize("num_splits", [2, 1])
def test_head_dim_512_matches_naive(device, num_splits):
    """The global layers of Gemma 4."""
    for dtype in (LOW, FP32):
        for lens in ([(1, 33), (1, 20)], [(3, 40), (2, 2)], [(17, 37)]):
            case = make_paged(lens, 256, (2, 1), causal=True, head_dim=512, dtype=dtype, device=device)
            assert_as_good_as_plain_torch(attend(case, 0.04, num_splits), case, 0.04)


@on_device
@pytest.mark.parametrize("num_splits", [2, 1])
def test_programs_that_share_the_columns_of_values_match_naive(device, num_splits):
    """As on 9.0 at head dim 512."""
    for tma in (False, True) if INTERPRETED else (False,):
        config = PrefillConfig(32, 32, 4, 2, tma, num_parts=2)
        case = make_paged([(20, 70), (17, 17)], 256, (2, 1), causal=True, head_dim=64, device=device, sinks=SINKS)
        assert_as_good_as_plain_torch(attend(case, 0.1, num_splits, config), case, 0.1)
