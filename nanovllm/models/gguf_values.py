"""GGUF's blocks: their codes and scales, and their values as ggml's reference code computes them in fp32.

Legend: B blocks. Blocks are bytes, uint8 [B, bytes of a block]. The layouts are defined in ggml-common.h; a block has
its parts in the order in which the functions split it. Nibbles of a part come first the low ones of some bytes, then
the high ones of the same bytes.
"""

import math
from collections.abc import Callable

import torch

from nanovllm.checkpoint.gguf import TYPES, BlockType
from nanovllm.checkpoint.quantization import BLOCK_TYPES
from nanovllm.layers.packed_weight import BlockParts

_SIGN = 128  # added to signed bytes
_UNIT = 256  # values of a block whose groups have scales
_MAX_SAFE_EXPONENT = 252  # of MXFP4: the largest value of such a block is below 2^128
_WITH_LEAST = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32, "Q8_0": _SIGN}  # codes of 0
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers in e2m1
_TABLES = {"IQ4_NL": _IQ4_VALUES, "IQ4_XS": _IQ4_VALUES, "MXFP4": _MXFP4_VALUES}


def dequantize(blocks: torch.Tensor, block_type: BlockType) -> torch.Tensor:
    """Return the values of rows of blocks, uint8 [..., bytes of a row] -> fp32 [..., values of a row]."""
    if block_type.is_quantized:
        values = part_values(read_parts(blocks.reshape(-1, blocks.shape[-1]), block_type.name), block_type.name)
    else:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[block_type.name]
        values = blocks.contiguous().view(dtype).float()
    return values.view(*blocks.shape[:-1], -1)


def read_parts(blocks: torch.Tensor, block_type: str) -> BlockParts:
    """Return the codes and scales of rows of blocks, uint8 [n, bytes of a row]."""
    parts = _PARTS[block_type](blocks.reshape(-1, _TYPES[block_type].num_bytes))
    of_rows = {name: part.reshape(len(blocks), -1) for name, part in parts._asdict().items() if part is not None}
    return BlockParts(**of_rows)


def part_values(parts: BlockParts, block_type: str) -> torch.Tensor:
    """Return the values of rows, fp32 [n, values of a row]."""
    scales = _exponential(parts.scales) if block_type == "MXFP4" else parts.scales.float()
    leasts = None if parts.leasts is None else parts.leasts.float()
    if parts.group_scales is not None:
        num_groups = parts.group_scales.shape[1] // scales.shape[1]
        group_scales = parts.group_scales.float() - (_SIGN if parts.group_leasts is None else 0)
        scales = scales.repeat_interleave(num_groups, 1) * group_scales
        if leasts is not None and parts.group_leasts is not None:
            leasts = -leasts.repeat_interleave(num_groups, 1) * parts.group_leasts.float()
    if block_type in _TABLES:
        numbers = torch.tensor(_TABLES[block_type], dtype=torch.float32, device=scales.device)[parts.codes.int()]
    else:
        numbers = parts.codes.float() - _ZEROS.get(block_type, 0)
    values = scales[..., None] * numbers.unflatten(1, (scales.shape[1], -1))
    return (values if leasts is None else values + leasts[..., None]).flatten(1)


def are_finite(parts: BlockParts, block_type: str) -> bool:
    """Return True if all values are finite numbers."""
    if block_type == "MXFP4":
        is_small = bool((parts.scales <= _MAX_SAFE_EXPONENT).all())
        return is_small or bool(part_values(parts, block_type).isfinite().all())
    return all(bool(part.isfinite().all()) for part in (parts.scales, parts.leasts) if part is not None)


def random_parts(num_rows: int, num_columns: int, block_type: str, generator: torch.Generator) -> BlockParts:
    """Draw rows whose values have a mean of about 0 and a variance of about 1 / columns, on the generator's device."""
    bits, size = BLOCK_TYPES[block_type].bits, _TYPES[block_type].num_values
    blocks = num_rows, num_columns // size

    def draw(low: int, high: int, num_each: int) -> torch.Tensor:
        shape, device = (num_rows, num_each), generator.device
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    codes, signs = draw(0, 2**bits, num_columns), 1 - 2 * draw(0, 2, blocks[1]).to(torch.float16)
    numbers = torch.tensor(_TABLES.get(block_type, range(2**bits)), dtype=torch.float32)
    scale = num_columns**-0.5 / numbers.std().item()
    if block_type == "MXFP4":
        return BlockParts(codes, torch.full(blocks, 128 + round(math.log2(scale)), dtype=torch.uint8).to(codes.device))
    group_scales = group_leasts = None
    if size == _UNIT:
        has_least = block_type in _WITH_LEAST
        first = 0 if has_least else _SIGN
        group_scales = draw(first + 16, first + 32, num_columns // (16 if block_type == "Q6_K" else 32))
        group_leasts, scale = group_scales if has_least else None, scale / 24
    scales = signs * scale
    leasts = None
    if block_type in _WITH_LEAST:
        leasts = scales * (numbers.mean().item() * (1 if group_leasts is not None else -1))
    return BlockParts(codes, scales, leasts, group_scales, group_leasts)


def _exponential(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^(e - 128), half of what E8M0 means. The two smallest are subnormal in fp32."""
    e = exponents.int()
    return torch.where(e < 2, (1 << 21) << e.clamp(max=1), (e - 1) << 23).view(torch.float32)


def _bits(part: torch.Tensor, size: int, width: int) -> torch.Tensor:
    """Unpack the fields of `size` bits in each byte: [B, n] -> uint8 [B, n * fields].

    The first fields of `width` bytes come first, then the second fields of the same bytes, and so on.
    """
    places = torch.arange(0, 8, size, dtype=torch.uint8, device=part.device)[:, None]
    fields = (part.reshape(len(part), -1, 1, width) >> places) & (2**size - 1)
    return fields.flatten(1)


def _half(part: torch.Tensor) -> torch.Tensor:
    """Read numbers in fp16: [B, 2 n] -> [B, n]."""
    return part.contiguous().view(torch.float16)


def _q4_0(blocks: torch.Tensor) -> BlockParts:
    scale, codes = blocks.split((2, 16), 1)
    return BlockParts(_bits(codes, 4, 16), _half(scale))


def _q4_1(blocks: torch.Tensor) -> BlockParts:
    scale, least, codes = blocks.split((2, 2, 16), 1)
    return BlockParts(_bits(codes, 4, 16), _half(scale), _half(least))


def _five_bits(high: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Join fifth bits, of which a byte has eight neighbours, with nibbles: [B, 32]."""
    return _bits(codes, 4, 16) | _bits(high, 1, 1) << 4


def _q5_0(blocks: torch.Tensor) -> BlockParts:
    scale, high, codes = blocks.split((2, 4, 16), 1)
    return BlockParts(_five_bits(high, codes), _half(scale))


def _q5_1(blocks: torch.Tensor) -> BlockParts:
    scale, least, high, codes = blocks.split((2, 2, 4, 16), 1)
    return BlockParts(_five_bits(high, codes), _half(scale), _half(least))


def _q8_0(blocks: torch.Tensor) -> BlockParts:
    scale, codes = blocks.split((2, 32), 1)
    return BlockParts(codes ^ _SIGN, _half(scale))


def _groups(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minimums of the 8 groups of a block, [B, 8].

    packed: 12 bytes with 6 bits for each. Of groups 0 to 3, bytes 0 to 3 have the scales and bytes 4 to 7 the minimums;
    their upper two bits are the upper bits of groups 4 to 7, whose lower bits are the nibbles of bytes 8 to 11.
    """
    scales, leasts, rest = packed.split(4, 1)
    scales = torch.cat((scales & 63, (rest & 15) | (scales >> 6) << 4), 1)
    leasts = torch.cat((leasts & 63, (rest >> 4) | (leasts >> 6) << 4), 1)
    return scales, leasts


def _q4_k(blocks: torch.Tensor) -> BlockParts:
    scale, least, packed, codes = blocks.split((2, 2, 12, 128), 1)
    return BlockParts(_bits(codes, 4, 32), _half(scale), _half(least), *_groups(packed))


def _q5_k(blocks: torch.Tensor) -> BlockParts:
    scale, least, packed, high, low = blocks.split((2, 2, 12, 32, 128), 1)
    codes = _bits(low, 4, 32) | _bits(high, 1, 32) << 4
    return BlockParts(codes, _half(scale), _half(least), *_groups(packed))


def _q6_k(blocks: torch.Tensor) -> BlockParts:
    low, high, scales, scale = blocks.split((128, 64, 16, 2), 1)
    codes = _bits(low, 4, 64) | _bits(high, 2, 32) << 4
    return BlockParts(codes, _half(scale), None, scales ^ _SIGN)


def _iq4_nl(blocks: torch.Tensor) -> BlockParts:
    return _q4_0(blocks)


def _iq4_xs(blocks: torch.Tensor) -> BlockParts:
    scale, high, low, codes = blocks.split((2, 2, 4, 128), 1)
    scales = (_bits(low, 4, 1) | _bits(high, 2, 1) << 4) + (_SIGN - 32)
    return BlockParts(_bits(codes, 4, 16), _half(scale), None, scales)


def _mxfp4(blocks: torch.Tensor) -> BlockParts:
    exponent, codes = blocks.split((1, 16), 1)
    return BlockParts(_bits(codes, 4, 16), exponent)


_PARTS: dict[str, Callable[[torch.Tensor], BlockParts]] = {
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
_TYPES = {each.name: each for each in TYPES.values()}
