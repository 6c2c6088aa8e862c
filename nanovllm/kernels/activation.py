"""The activations of gated MLPs, which end several kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm.utils.arithmetic import SWIGLU_ALPHA, SWIGLU_LIMIT

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}  # by the name in ModelConfig
_GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])
_CLAMPED_SWIGLU = tl.constexpr(ACTIVATIONS["clamped_swiglu"])
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def gated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(gate) * up in fp32, where the activation is rounded to `dtype`, as torch rounds it (`act_and_mul` in
    layers/linear.py).
    """
    if ACTIVATION == _CLAMPED_SWIGLU:
        gate, up = tl.minimum(gate, _LIMIT), tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
        out = gate / (1.0 + tl.exp(-(gate * _ALPHA))) * (up + 1.0)
    else:
        exponent = gate
        if ACTIVATION == _GELU_TANH:  # gelu(x) = x (1 + tanh(z)) / 2 = x sigmoid(2 z), with z = sqrt(2 / pi) (x + ..)
            exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        out = (gate / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32) * up
    return out
