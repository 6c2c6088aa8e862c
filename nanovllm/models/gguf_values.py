"""GGUF's blocks: their codes and scales, and their values as ggml's reference code computes them in fp32.

Legend: B blocks. Blocks are bytes, uint8 [B, bytes of a block]. The layouts are defined in ggml-common.h; a block has
its parts in the order in which the functions split it. Nibbles of a part come first the low ones of some bytes, then
the high ones of the same bytes.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm.checkpoint.gguf import TYPES, BlockType
from nanovllm.checkpoint.quantization import BLOCK_TYPES

_SIGN = 128  # added to signed bytes
_UNIT = 256  # values of a block whose groups have scales
_MAX_SAFE_EXPONENT = 252  # of MXFP4: the largest value of such a block is below 2^128
_WITH_LEAST = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
# The standard deviation of the values of random blocks with scales of 1, divided by the standard deviation of the codes
_GROUP_FACTORS = {"Q4_K": 56, "Q5_K": 57, "Q6_K": 74, "IQ4_XS": 18.5}
_ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32, "Q8_0": _SIGN}  # codes of 0
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers in e2m1
_TABLES = {"IQ4_NL": _IQ4_VALUES, "IQ4_XS": _IQ4_VALUES, "MXFP4": _MXFP4_VALUES}


class BlockParts(NamedTuple):
    """n rows and k columns of a weight in GGUF's blocks. The type of the blocks says what the parts mean
    (kernels/gguf_words.py).
    """

    codes: torch.Tensor  # uint8 [n, k]
    scales: torch.Tensor  # fp16 [n, blocks], or exponents, uint8
    leasts: torch.Tensor | None = None  # fp16 [n, blocks]: minimums, or factors of minimums
    group_scales: torch.Tensor | None = None  # uint8 [n, groups]
    group_leasts: torch.Tensor | None = None  # uint8 [n, groups]


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


def join_parts(parts: BlockParts, block_type: str) -> torch.Tensor:
    """Return the rows of blocks, uint8 [n, bytes of a row], with these parts. The inverse of `read_parts`, for the
    types to which weights are quantized at loading.
    """
    num_values, num_rows = _TYPES[block_type].num_values, len(parts.codes)
    codes, scales = parts.codes.view(-1, num_values), _half_bytes(parts.scales)
    low, bits = codes & 15, BLOCK_TYPES[block_type].bits
    if block_type == "Q8_0":
        joined = [scales, codes ^ _SIGN]
    elif block_type == "Q6_K":
        assert parts.group_scales is not None
        group_scales = parts.group_scales.view(-1, 16) ^ _SIGN
        joined = [_fields(low, 4, 64), _fields(codes >> 4, 2, 32), group_scales, scales]
    else:
        assert parts.leasts is not None, "the other types are not written"
        joined = [scales, _half_bytes(parts.leasts)]
        if parts.group_scales is not None and parts.group_leasts is not None:
            joined.append(_joined_groups(parts.group_scales.view(-1, 8), parts.group_leasts.view(-1, 8)))
        if bits == 5:
            joined.append(_fields(codes >> 4, 1, 32 if num_values == _UNIT else 1))
        joined.append(_fields(low, 4, 32 if num_values == _UNIT else 16))
    return torch.cat(joined, 1).view(num_rows, -1)


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


def are_finite(blocks: torch.Tensor, block_type: str) -> bool:
    """Return True if all values of rows of blocks, uint8 [n, bytes of a row], are finite numbers. In almost all cases
    their scales tell.
    """
    scales = _scale_bytes(blocks, block_type)
    if block_type == "MXFP4":
        is_small = bool((scales <= _MAX_SAFE_EXPONENT).all())
        return is_small or bool(dequantize(blocks, _TYPES[block_type]).isfinite().all())
    return bool(_half(scales).isfinite().all())


def select_columns(blocks: torch.Tensor, block_type: str, columns: slice) -> torch.Tensor:
    """Return some columns, which consist of whole blocks, of rows of blocks, uint8 [n, bytes of a row]."""
    _, num_values, num_bytes = _TYPES[block_type]
    start, end, _ = columns.indices(blocks.shape[1] // num_bytes * num_values)
    return blocks[:, start // num_values * num_bytes : end // num_values * num_bytes]


def random_blocks(num_rows: int, num_columns: int, block_type: str, generator: torch.Generator) -> torch.Tensor:
    """Draw rows of blocks, uint8 [n, bytes of a row], on the generator's device. Values have a mean of about 0 and
    a variance of about 1 / columns.
    """
    _, num_values, num_bytes = _TYPES[block_type]
    shape, device = (num_rows, num_columns // num_values * num_bytes), generator.device
    blocks = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
    numbers = torch.tensor(_TABLES.get(block_type, range(2 ** BLOCK_TYPES[block_type].bits)), dtype=torch.float32)
    scale = num_columns**-0.5 / (numbers.std().item() * _GROUP_FACTORS.get(block_type, 1))
    scales = _scale_bytes(blocks, block_type)
    if block_type == "MXFP4":
        scales.fill_(128 + round(math.log2(scale)))
        return blocks
    halves = (1 - 2 * (scales[..., :1] & 1).to(torch.float16)) * scale
    if block_type in _WITH_LEAST:
        least = numbers.mean().item() * (1 if num_values == _UNIT else -1)
        halves = torch.cat((halves, halves * least), -1)
    scales.copy_(halves.view(torch.uint8))
    return blocks


def _scale_bytes(blocks: torch.Tensor, block_type: str) -> torch.Tensor:
    """Return the bytes of each block's scale, and of its minimum if it has one: [n, bytes of a row] -> a view
    [n, blocks, bytes].
    """
    of_blocks = blocks.unflatten(1, (-1, _TYPES[block_type].num_bytes))
    if block_type == "Q6_K":
        return of_blocks[..., -2:]
    return of_blocks[..., : 1 if block_type == "MXFP4" else 4 if block_type in _WITH_LEAST else 2]


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


def _fields(values: torch.Tensor, size: int, width: int) -> torch.Tensor:
    """Pack fields of `size` bits, uint8 [B, n], into bytes. The inverse of `_bits`."""
    places = torch.arange(0, 8, size, dtype=torch.uint8, device=values.device)[:, None]
    return (values.view(len(values), -1, 8 // size, width) << places).sum(2, dtype=torch.uint8).flatten(1)


def _half_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bytes of numbers in fp16, one number for each block: [n, blocks of a row] -> uint8 [B, 2]."""
    return numbers.contiguous().view(torch.uint8).view(-1, 2)


def _joined_groups(scales: torch.Tensor, leasts: torch.Tensor) -> torch.Tensor:
    """The inverse of `_groups`."""
    first = [each[:, :4] | (each[:, 4:] >> 4) << 6 for each in (scales, leasts)]
    return torch.cat([*first, (scales[:, 4:] & 15) | (leasts[:, 4:] & 15) << 4], 1)


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
