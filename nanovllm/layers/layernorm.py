"""RMSNorm, alone and fused with the residual addition before it.

On a GPU each function runs one fused kernel (nanovllm/kernels) that computes the same as the code here. The results
equal transformers' results: the norm is computed in fp32 and rounded to the dtype of the weight before the
multiplication by the weight. Models whose norms multiply in fp32 store the weight, or 1 + weight, in fp32.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nanovllm.layers.linear import NamedShard, WeightShard
from nanovllm.layers.packed_weight import MAX_ROWS_BEFORE_CODES, Activations, CodedRows, new_parameter


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""
    if x.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.rms_norm(x, weight, eps)
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), where the sum is rounded to the dtype of `x` before the norm."""
    if x.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.add_rms_norm(x, residual, weight, eps)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def norm_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    scalar: torch.Tensor | None = None,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm of the sum, the sum) of `residual` and the norm of `x`, where the sum is multiplied by `scalar`
    [1] if it is given. Without `next_weight` the first is the sum, too.
    """
    if x.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.norm_add_norm(x, residual, weight, eps, scalar=scalar, next_weight=next_weight)
    total = residual + rms_norm(x, weight, eps)
    if scalar is not None:
        total = total * scalar
    return total if next_weight is None else rms_norm(total, next_weight, eps), total


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with the same weight on every rank.

    adds_one: multiply by 1 + the checkpoint's weight, in fp32. in_fp32: multiply by the weight in fp32. order:
    arrangement of the elements, or None for the checkpoint's. makes_codes: return many rows as CodedRows, for a layer
    that takes them.
    """

    makes_codes = False

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        adds_one: bool = False,
        in_fp32: bool = False,
        order: Sequence[slice] | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size, dtype=torch.float32 if adds_one or in_fp32 else dtype)
        self._plus, self._order = float(adds_one), order or [slice(0, size)]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[Activations, torch.Tensor]:
        """[..., size] -> (normed, new residual). Without a residual, `x` becomes the residual. Hot: twice per layer."""
        if self.makes_codes and len(x) > MAX_ROWS_BEFORE_CODES:
            from nanovllm.kernels.quantizing import rms_norm_and_quantize

            codes, scales, total = rms_norm_and_quantize(x, residual, self.weight, self.eps)
            return CodedRows(codes, scales, len(x)), total
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weight_shards(self) -> Iterator[NamedShard]:
        end = 0
        for rows in self._order:
            start, end = end, end + rows.stop - rows.start
            target, shape = self.weight[start:end], tuple(self.weight.shape)
            yield NamedShard(0, "weight", WeightShard(target, shape, (rows,), plus=self._plus))
