"""Exact merge of attention results over disjoint sets of keys, by log-sum-exp, and the one loop that merges many.

Legend: T packed query tokens, H query heads, D head dim.

Kernels return a part in the model's dtype. Parts are merged in fp32, and only the last merge rounds to that dtype
again: rounding after every merge would add up to six times the error of a single rounding after 122 parts.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from nanovllm.attention.base import PartialAttention

PARTS_PER_MERGE = 3  # the running result and two parts: reading and writing it costs as much as four parts

Merge: TypeAlias = Callable[[Sequence[PartialAttention], torch.dtype], PartialAttention]  # AttentionBackend.merge


def merge_attention_outputs(
    o1_THD: torch.Tensor, lse1_HT: torch.Tensor, o2_THD: torch.Tensor, lse2_HT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys: `(out [T, H, D], lse [H, T] fp32)`.

    Computed in fp32 or better. `out` has the promoted dtype of o1 and o2, so a running result in fp32 stays fp32.

    With s = sum of exp(score) over a part's keys, lse = log s and out = (s1 o1 + s2 o2) / (s1 + s2): the second part
    weighs s2 / (s1 + s2) = sigmoid(lse2 - lse1). A part that saw no key (lse -inf, out 0) is the identity, bit for
    bit; two such parts stay empty.
    """
    no_key = float("-inf")
    log_ratio_HT = (lse2_HT - lse1_HT).masked_fill(lse2_HT == no_key, no_key)  # -inf - -inf would be NaN
    weight2_TH1 = torch.sigmoid(log_ratio_HT).t().unsqueeze(-1)
    dtype = torch.promote_types(o1_THD.dtype, o2_THD.dtype)
    compute_dtype = running_dtype(dtype)
    out_THD = torch.lerp(o1_THD.to(compute_dtype), o2_THD.to(compute_dtype), weight2_TH1.to(compute_dtype))
    return out_THD.to(dtype), torch.logaddexp(lse1_HT, lse2_HT)


def merge_parts(parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
    """`AttentionBackend.merge` in plain torch: the reference for the fused kernels."""
    (out_THD, lse_HT), *others = parts
    out_THD = out_THD.to(running_dtype(out_THD.dtype))
    for other in others:
        out_THD, lse_HT = merge_attention_outputs(out_THD, lse_HT, *other)
    return PartialAttention(out_THD.to(dtype), lse_HT)


def running_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts of `dtype` are merged: fp32, or fp64 for fp64 parts."""
    return torch.promote_types(dtype, torch.float32)


class RunningMerge:
    """Attention over the keys of `num_parts` parts, which are added one after another.

    Up to PARTS_PER_MERGE - 1 parts wait to be merged together. The last merge writes the parts' own dtype, so the
    number of parts must be known beforehand. Merging several at once gives what merging them in turn would. A single
    part is the result as it is.

    The running result takes as much memory as two parts, and it is first written while the parts it is made of still
    exist. So where more than PARTS_PER_MERGE parts come, the first merge takes only two.
    """

    def __init__(self, merge: Merge, num_parts: int) -> None:
        self._merge, self._num_left = merge, num_parts
        self._num_merged = PARTS_PER_MERGE if num_parts <= PARTS_PER_MERGE else 2  # by the next merge
        self._parts: list[PartialAttention] = []  # the running result, if there is one yet, and the parts that wait

    def add(self, part: PartialAttention) -> None:
        """Add a part, whose tensors a merge may overwrite. Hot: once per part."""
        assert self._num_left > 0, "more parts than announced"
        self._num_left -= 1
        self._parts.append(part)
        if self._num_left and len(self._parts) < self._num_merged:
            return
        if len(self._parts) > 1:
            dtype = part.out_THD.dtype
            self._parts = [self._merge(self._parts, running_dtype(dtype) if self._num_left else dtype)]
            self._num_merged = PARTS_PER_MERGE

    def result(self) -> PartialAttention:
        """The whole, in the dtype of the parts."""
        assert not self._num_left, f"{self._num_left} parts are missing"
        (result,) = self._parts
        return result
