"""The values of GGUF's blocks, as ggml's reference code computes them in fp32.

Legend: B blocks. Each function takes the bytes of B blocks, uint8 [B, bytes of a block], and returns fp32
[B, values of a block]. The layouts are defined in ggml-common.h; a block has its parts in the order in which the
functions split it. Nibbles of a part come first the low ones of some bytes, then the high ones of the same bytes.
"""

from collections.abc import Callable

import torch

from nanovllm.checkpoint.gguf import BlockType

_SHIFTS_1 = range(8)  # of the bits of a byte
_SHIFTS_2 = range(0, 8, 2)
_SHIFTS_4 = (0, 4)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers in e2m1


def dequantize(blocks: torch.Tensor, block_type: BlockType) -> torch.Tensor:
    """Return the values of rows of blocks, uint8 [..., bytes of a row] -> fp32 [..., values of a row]."""
    values = _VALUES[block_type.name](blocks.reshape(-1, block_type.num_bytes))
    return values.view(*blocks.shape[:-1], -1)


def _bits(part: torch.Tensor, shifts: range | tuple[int, ...], width: int) -> torch.Tensor:
    """Unpack the fields of equal size in each byte: [B, n] -> uint8 [B, n * fields].

    The first fields of `width` bytes come first, then the second fields of the same bytes, and so on.
    """
    size = 8 // len(shifts)
    places = torch.tensor(shifts, dtype=torch.uint8, device=part.device)[:, None]
    fields = (part.reshape(len(part), -1, 1, width) >> places) & (2**size - 1)
    return fields.flatten(1)


def _half(part: torch.Tensor) -> torch.Tensor:
    """Read numbers in fp16: [B, 2 n] -> fp32 [B, n]."""
    return part.contiguous().view(torch.float16).float()


def _lookup(codes: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float32)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = blocks.split((2, 16), 1)
    return _half(scale) * (_bits(codes, _SHIFTS_4, 16).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, codes = blocks.split((2, 2, 16), 1)
    return _half(scale) * _bits(codes, _SHIFTS_4, 16).float() + _half(least)


def _five_bits(high: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Join fifth bits, of which a byte has eight neighbours, with nibbles: fp32 [B, 32]."""
    return (_bits(codes, _SHIFTS_4, 16) | _bits(high, _SHIFTS_1, 1) << 4).float()


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, high, codes = blocks.split((2, 4, 16), 1)
    return _half(scale) * (_five_bits(high, codes) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, high, codes = blocks.split((2, 2, 4, 16), 1)
    return _half(scale) * _five_bits(high, codes) + _half(least)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = blocks.split((2, 32), 1)
    return _half(scale) * codes.contiguous().view(torch.int8).float()


def _groups(scale: torch.Tensor, least: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minimums of the 8 groups of a block, fp32 [B, 8, 1].

    packed: 12 bytes with 6 bits for each. Of groups 0 to 3, bytes 0 to 3 have the scales and bytes 4 to 7 the minimums;
    their upper two bits are the upper bits of groups 4 to 7, whose lower bits are the nibbles of bytes 8 to 11.
    """
    scales, leasts, rest = packed.split(4, 1)
    scales = torch.cat((scales & 63, (rest & 15) | (scales >> 6) << 4), 1)
    leasts = torch.cat((leasts & 63, (rest >> 4) | (leasts >> 6) << 4), 1)
    return (_half(scale) * scales.float())[..., None], (_half(least) * leasts.float())[..., None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, packed, codes = blocks.split((2, 2, 12, 128), 1)
    scales, leasts = _groups(scale, least, packed)
    return (scales * _bits(codes, _SHIFTS_4, 32).float().unflatten(1, (8, 32)) - leasts).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least, packed, high, low = blocks.split((2, 2, 12, 32, 128), 1)
    scales, leasts = _groups(scale, least, packed)
    codes = _bits(low, _SHIFTS_4, 32) | _bits(high, _SHIFTS_1, 32) << 4
    return (scales * codes.float().unflatten(1, (8, 32)) - leasts).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low, high, scales, scale = blocks.split((128, 64, 16, 2), 1)
    codes = (_bits(low, _SHIFTS_4, 64) | _bits(high, _SHIFTS_2, 32) << 4).float() - 32
    factors = _half(scale) * scales.contiguous().view(torch.int8).float()
    return (factors[..., None] * codes.unflatten(1, (16, 16))).flatten(1)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    scale, codes = blocks.split((2, 16), 1)
    return _half(scale) * _lookup(_bits(codes, _SHIFTS_4, 16), _IQ4_VALUES)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scale, high, low, codes = blocks.split((2, 2, 4, 128), 1)
    scales = (_bits(low, _SHIFTS_4, 1) | _bits(high, _SHIFTS_2, 1) << 4).float() - 32
    values = _lookup(_bits(codes, _SHIFTS_4, 16), _IQ4_VALUES).unflatten(1, (8, 32))
    return ((_half(scale) * scales)[..., None] * values).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponent, codes = blocks.split((1, 16), 1)
    e = exponent.int()
    # 2^(e - 128), half of the scale in E8M0; the two smallest are subnormal in fp32
    scale = torch.where(e < 2, (1 << 21) << e.clamp(max=1), (e - 1) << 23).view(torch.float32)
    return scale * _lookup(_bits(codes, _SHIFTS_4, 16), _MXFP4_VALUES)


_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _f32,
    "F16": _half,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
