"""The activations of gated MLPs, which end several kernels."""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # by the name in ModelConfig
_GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])


@triton.jit
def gated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(gate) * up in fp32, where the activation is rounded to `dtype`, as torch rounds it."""
    exponent = gate
    if ACTIVATION == _GELU_TANH:  # gelu(x) = x (1 + tanh(z)) / 2 = x sigmoid(2 z), with z = sqrt(2 / pi) (x + ..)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32) * up
