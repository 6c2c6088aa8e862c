"""Fused Triton kernels of the layers, with the same rounding as the plain torch functions that they replace.

Import this module lazily: a machine without triton runs the plain functions. Each function allocates its result.
"""

from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.layernorm import add_rms_norm, rms_norm
from nanovllm.kernels.logit_edits import edit_logits
from nanovllm.kernels.rotary import norm_rotate_store
from nanovllm.kernels.sampler import sample_tokens
from nanovllm.kernels.small_linear import small_gate_up, small_linear

__all__ = [
    "add_rms_norm",
    "edit_logits",
    "norm_rotate_store",
    "rms_norm",
    "sample_tokens",
    "silu_and_mul",
    "small_gate_up",
    "small_linear",
]
