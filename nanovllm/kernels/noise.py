"""The sampler's noise, hashed in registers: the bits of `random_bits` in layers/sampler.py, and their logarithm."""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(seed_ptr, position_ptr, row):
    """The two halves of a row's 64-bit key."""
    seed = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True)
    key = _mix(_mix(seed) + tl.load(position_ptr + row).to(tl.uint64, bitcast=True))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def random_bits(entry, key_low, key_high):
    bits = entry.to(tl.uint32) * 0x9E3779B9 + key_low
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15) ^ key_high) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def log2_noise(bits):
    """log2(-log2(1 - u)) for u an odd multiple of 2^-24. This is log2 of Exp(1) noise, up to a constant."""
    u = ((bits >> 8) | 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    return tl.log2(-tl.log2(1.0 - u))
