"""merge_attention_outputs against one softmax over all keys, and the merge of many parts."""

import itertools

import pytest
import torch
from rounding import MAX_ROUNDINGS, PART_COUNTS, make_parts, num_roundings

from nanovllm.attention.base import PartialAttention, RunningMerge, add_sinks, merge_attention_outputs, merge_parts

NO_KEY = float("-inf")


def attention_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads on dim 1 everywhere. Returns out [T, H, D] and lse [H, T]."""
    score = torch.einsum("thd,shd->hts", q.double(), k.double())
    lse = torch.logsumexp(score, -1)
    return torch.einsum("hts,shd->thd", (score - lse[..., None]).exp(), v.double()), lse


def test_merge_two_parts_equals_one_softmax():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 3, 8), torch.randn(11, 3, 8), torch.randn(11, 3, 8)
    want_out, want_lse = attention_fp64(q, k, v)
    for cut in (1, 4, 10):
        (o1, l1), (o2, l2) = attention_fp64(q, k[:cut], v[:cut]), attention_fp64(q, k[cut:], v[cut:])
        out, lse = merge_attention_outputs(o1.float(), l1.float(), o2.float(), l2.float())
        torch.testing.assert_close(out.double(), want_out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=1e-6)
        assert out.dtype == lse.dtype == torch.float32


def test_merge_empty_part_is_identity_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out, lse = torch.randn(4, 2, 6).to(dtype), torch.randn(2, 4) * 30
        none, none_lse = torch.zeros_like(out), torch.full_like(lse, NO_KEY)
        for parts in ((none, none_lse, out, lse), (out, lse, none, none_lse)):
            merged_out, merged_lse = merge_attention_outputs(*parts)
            assert torch.equal(merged_out, out) and torch.equal(merged_lse, lse)
        merged_out, merged_lse = merge_attention_outputs(none, none_lse, none, none_lse)
        assert torch.equal(merged_out, none) and torch.equal(merged_lse, none_lse)


def test_merge_empty_in_some_rows_only():
    o1, o2, l1, l2 = torch.randn(2, 1, 4), torch.randn(2, 1, 4), torch.zeros(1, 2), torch.zeros(1, 2)
    l1[0, 0], o1[0] = NO_KEY, 0.0
    out, lse = merge_attention_outputs(o1, l1, o2, l2)
    assert torch.equal(out[0], o2[0]) and lse[0, 0] == 0.0
    torch.testing.assert_close(out[1], (o1[1] + o2[1]) / 2)


def test_merge_far_apart_lse_does_not_overflow():
    o1, o2 = torch.ones(1, 1, 4), torch.full((1, 1, 4), 2.0)
    out, lse = merge_attention_outputs(o1, torch.tensor([[-1e4]]), o2, torch.tensor([[1e4]]))
    assert torch.equal(out, o2) and lse.item() == 1e4


def test_merge_low_precision_accumulates_in_fp32():
    """Error of merged bf16 parts stays within twice the rounding of the parts themselves."""
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 2, 16), torch.randn(64, 2, 16), torch.randn(64, 2, 16)
    want, _ = attention_fp64(q, k, v)
    (o1, l1), (o2, l2) = attention_fp64(q, k[:20], v[:20]), attention_fp64(q, k[20:], v[20:])
    out, lse = merge_attention_outputs(o1.bfloat16(), l1.float(), o2.bfloat16(), l2.float())
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    rounding = max((x.bfloat16().double() - x).abs().max() for x in (o1, o2, want))
    assert (out.double() - want).abs().max() <= 2 * rounding


def test_merge_returns_the_promoted_dtype():
    """So that a running result in fp32 stays fp32, whichever side it is on."""
    (low, low_lse), (high, high_lse) = make_parts(2, torch.bfloat16)[0][0], make_parts(2, torch.float32)[0][1]
    assert merge_attention_outputs(low, low_lse, high, high_lse)[0].dtype == torch.float32
    assert merge_attention_outputs(high, high_lse, low, low_lse)[0].dtype == torch.float32
    assert merge_attention_outputs(high.double(), high_lse, low, low_lse)[0].dtype == torch.float64


# -- many parts ------------------------------------------------------------------------------------------------------


def merge_all(parts: list[PartialAttention]) -> PartialAttention:
    merged = RunningMerge(merge_parts, len(parts))
    for part in parts:
        merged.add(part)
    return merged.result()


def test_running_merge_rounds_once():
    """The running result was rounded after every part: 6.4 times the error of one rounding after 122 parts."""
    for dtype, num_parts in itertools.product((torch.bfloat16, torch.float16), PART_COUNTS):
        parts, whole = make_parts(num_parts, dtype)
        out, lse = merge_all(parts)
        assert out.dtype == dtype and lse.dtype == torch.float32
        assert num_roundings(out, whole.out_THD) <= MAX_ROUNDINGS
        torch.testing.assert_close(lse.double(), whole.lse_HT, atol=1e-5, rtol=1e-6)
    for dtype in (torch.float32, torch.float64):
        parts, whole = make_parts(122, dtype)
        out, _ = merge_all(parts)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), whole.out_THD, atol=1e-5, rtol=1e-5)


def test_running_merge_single_part_is_the_result():
    (part, *_), _ = make_parts(1, torch.bfloat16)
    assert merge_all([part]) is part


def test_running_merge_merges_few_at_a_time_and_rounds_last():
    """At most three parts exist at once; every part is merged once; only the last merge is asked for the low dtype."""
    for num_parts in range(2, 9):
        calls: list[tuple[int, torch.dtype]] = []

        def recording_merge(parts, dtype, calls=calls):
            calls.append((len(parts), dtype))
            return merge_parts(parts, dtype)

        merged = RunningMerge(recording_merge, num_parts)
        for part in make_parts(num_parts, torch.bfloat16)[0]:
            merged.add(part)
        sizes, dtypes = zip(*calls, strict=True)
        assert set(sizes) <= {2, 3} and sum(size - 1 for size in sizes) == num_parts - 1
        assert dtypes == (torch.float32,) * (len(calls) - 1) + (torch.bfloat16,)


def test_running_merge_parts_without_keys_are_the_identity_bit_for_bit():
    """Wherever they come among the others, and so however parts are grouped."""
    parts, _ = make_parts(7, torch.bfloat16)
    empty = PartialAttention(torch.zeros_like(parts[0].out_THD), torch.full_like(parts[0].lse_HT, NO_KEY))
    for seeing in ([0], [3], [6], [1, 2], [0, 5, 6], [0, 1, 2, 3, 4, 5, 6]):
        got = merge_all([part if i in seeing else empty for i, part in enumerate(parts)])
        want = merge_all([parts[i] for i in seeing])
        assert torch.equal(got.out_THD, want.out_THD) and torch.equal(got.lse_HT, want.lse_HT)


def test_sinks_in_one_of_several_parts_equal_sinks_over_all_keys():
    """In whichever part, even one that saw no key. A sink is one more key, whose value is 0."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 3, 8), torch.randn(11, 3, 8), torch.randn(11, 3, 8)
    for sinks_H in (torch.tensor([-1e4, 0.3, 1e4]), torch.tensor([2.0, -2.0, 30.0]).bfloat16()):
        score = torch.einsum("thd,shd->hts", q.double(), k.double())
        with_sink = torch.cat((score, sinks_H.double()[:, None, None].expand(-1, 5, 1)), -1)
        want_out = torch.einsum("hts,shd->thd", with_sink.softmax(-1)[..., :-1], v.double())
        for place in range(4):
            cuts = [slice(0, 4), slice(4, 5), slice(5, 11), slice(0, 0)]
            parts = [attention_fp64(q, k[cut], v[cut]) for cut in cuts[:3]]
            parts.append((torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], NO_KEY)))
            singles = [PartialAttention(out.float(), lse.float()) for out, lse in parts]
            singles[place] = add_sinks(singles[place], sinks_H)
            got = merge_all(singles)
            torch.testing.assert_close(got.out_THD.double(), want_out, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(got.lse_HT.double(), with_sink.logsumexp(-1), atol=1e-6, rtol=1e-6)


def test_running_merge_wrong_number_of_parts_asserts():
    parts, _ = make_parts(3, torch.float32)
    merged = RunningMerge(merge_parts, 2)
    merged.add(parts[0])
    with pytest.raises(AssertionError, match="1 parts are missing"):
        merged.result()
    merged.add(parts[1])
    with pytest.raises(AssertionError, match="more parts"):
        merged.add(parts[2])
