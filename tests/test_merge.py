"""merge_attention_outputs against one softmax over all keys."""

import pytest
import torch

from nanovllm.attention.merge import merge_attention_outputs

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("empty_first", [True, False])
def test_merge_empty_part_is_identity_bit_for_bit(dtype: torch.dtype, empty_first: bool):
    out, lse = torch.randn(4, 2, 6).to(dtype), torch.randn(2, 4) * 30
    none, none_lse = torch.zeros_like(out), torch.full_like(lse, NO_KEY)
    parts = (none, none_lse, out, lse) if empty_first else (out, lse, none, none_lse)
    merged_out, merged_lse = merge_attention_outputs(*parts)
    assert torch.equal(merged_out, out) and torch.equal(merged_lse, lse)


def test_merge_both_empty_stays_empty():
    none, none_lse = torch.zeros(4, 2, 6), torch.full((2, 4), NO_KEY)
    out, lse = merge_attention_outputs(none, none_lse, none, none_lse)
    assert torch.equal(out, none) and torch.equal(lse, none_lse)


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
