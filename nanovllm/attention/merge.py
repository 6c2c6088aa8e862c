"""Exact merge of two attention results over disjoint sets of keys, by log-sum-exp. The plain form; kernels fuse it.

Legend: T packed query tokens, H query heads, D head dim.
"""

import torch


def merge_attention_outputs(
    o1_THD: torch.Tensor, lse1_HT: torch.Tensor, o2_THD: torch.Tensor, lse2_HT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys: `(out [T, H, D] in o1's dtype, lse [H, T] fp32)`.

    With s = sum of exp(score) over a part's keys, lse = log s and out = (s1 o1 + s2 o2) / (s1 + s2): the second part
    weighs s2 / (s1 + s2) = sigmoid(lse2 - lse1). A part that saw no key (lse -inf, out 0) is the identity, bit for
    bit; two such parts stay empty.
    """
    no_key = float("-inf")
    log_ratio_HT = (lse2_HT - lse1_HT).masked_fill(lse2_HT == no_key, no_key)  # -inf - -inf would be NaN
    weight2_TH1 = torch.sigmoid(log_ratio_HT).t().unsqueeze(-1)
    accumulate = torch.promote_types(o1_THD.dtype, torch.float32)
    out_THD = torch.lerp(o1_THD.to(accumulate), o2_THD.to(accumulate), weight2_TH1.to(accumulate))
    return out_THD.to(o1_THD.dtype), torch.logaddexp(lse1_HT, lse2_HT)
