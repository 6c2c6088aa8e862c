"""The gated activation of the MLP."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension: [T, 2 * size] -> [T, size]. Hot: once per layer."""
    if x.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class SiluAndMul(torch.nn.Module):
    """`silu_and_mul` as a module. Not used by the engine; public, for tests and tools."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)
