"""Quantizes values to GGUF's blocks, on any device: from rows of a checkpoint in 16 bits to the bytes of blocks.

A group of columns has a scale and, in most types, a minimum. Rounding the extremes of a group to the first and the last
code is not the best choice: a few other ranges are tried, for the codes of each the best scale and minimum follow from
least squares, and the range with the smallest error wins. In types whose blocks have 256 columns these scales and
minimums are rounded to 6 bits (8 in Q6_K), and the codes are computed again with the rounded ones. The factors of a
block's scales and minimums are then fitted to the codes, and the scales rounded anew.

Errors are not weighted: weighting by the values themselves, as llama.cpp does, made the answers of a real model no
better (docs/log/2026-11-27-quality.md). The operations depend on shapes alone, so that a GPU never waits for the host.

Legend: R rows, U blocks of 256 columns, G groups, N columns of a group.
"""

from typing import NamedTuple

import torch

from nanovllm.checkpoint.quantization import BLOCK_TYPES
from nanovllm.models.gguf_values import BlockParts, join_parts

_UNIT, _GROUP = 256, 32
_LARGEST_SCALE = 63  # of a group, in 6 bits
_RANGES = tuple(-2 + 0.5 * i for i in range(7))  # how far beyond the last code the largest value of a group is put
_LEAST_WIDTH = 1e-30  # of a group, so that the quotient by it is finite


def quantize_to_blocks(values: torch.Tensor, block_type: str) -> torch.Tensor:
    """Quantize rows [R, K] of whole blocks to a type of checkpoint/quantization.py's QUANTIZATIONS. Returns the blocks
    as a GGUF file has them, uint8 [R, bytes of a row].
    """
    assert values.shape[1] % BLOCK_TYPES[block_type].block[1] == 0, "blocks must be whole"
    x, bits = values.float(), BLOCK_TYPES[block_type].bits
    if block_type == "Q8_0":
        parts = _q8_0(x)
    elif block_type == "Q6_K":
        parts = _q6_k(x)
    else:
        parts = (_with_units if block_type.endswith("K") else _with_halves)(x, 2**bits - 1)
    return join_parts(parts, block_type)


class _Sums(NamedTuple):
    """Sums over the columns of each group that determine the error of a scale and a minimum, for given codes."""

    codes: torch.Tensor
    squares: torch.Tensor  # of the codes
    products: torch.Tensor  # of codes and values
    values: torch.Tensor
    num_columns: int

    @classmethod
    def of(cls, x: torch.Tensor, codes: torch.Tensor) -> "_Sums":
        sums = codes.sum(-1), codes.square().sum(-1), (codes * x).sum(-1), x.sum(-1)
        return cls(*sums, x.shape[-1])

    def gain(self, scales: torch.Tensor, leasts: torch.Tensor) -> torch.Tensor:
        """Return the sum of the squares of the values less the sum of squared errors."""
        linear = 2 * (scales * self.products - leasts * self.values)
        both = scales * scales * self.squares - 2 * scales * leasts * self.codes + leasts * leasts * self.num_columns
        return linear - both

    def fit(self, *, least_is_positive: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales, and the minimums to subtract, with the smallest errors."""
        n = self.num_columns
        determinant = n * self.squares - self.codes * self.codes
        is_regular, determinant = determinant > 0, determinant.clamp(min=1)
        leasts = (self.codes * self.products - self.squares * self.values) / determinant
        scales = (n * self.products - self.codes * self.values) / determinant
        if least_is_positive:
            is_regular &= leasts >= 0
        scales = torch.where(is_regular, scales, self.products / self.squares.clamp(min=1))
        equal = -self.values / n  # the minimums of groups of equal values, whose codes are all 0
        equal = equal.clamp(min=0) if least_is_positive else equal
        return scales, torch.where(is_regular, leasts, equal * (self.squares == 0))


def _search(x: torch.Tensor, most: int, *, least_is_positive: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minimums of groups x [.., G, N] for codes from 0 to `most`: [.., G] each."""
    least = x.amin(-1, keepdim=True)
    if least_is_positive:
        least = least.clamp(max=0)
    from_least = x - least
    width = from_least.amax(-1, keepdim=True).clamp_(min=_LEAST_WIDTH)
    best: tuple[torch.Tensor, ...] = ()
    for beyond in _RANGES:
        sums = _Sums.of(x, (from_least * ((most + beyond) / width)).round_().clamp_(0, most))
        fitted = sums.fit(least_is_positive=least_is_positive)
        found = sums.gain(*fitted), *fitted
        best = _better(found, best) if best else found
    return best[1], best[2]


def _better(found: tuple[torch.Tensor, ...], best: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Choose for each group what has the larger gain, the first of the tensors."""
    is_better = found[0] > best[0]
    return tuple(torch.where(is_better, new, old) for new, old in zip(found, best, strict=True))


def _half(x: torch.Tensor) -> torch.Tensor:
    """Round to fp16."""
    return x.half().float()


def _quotient(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Return x / divisor, or 0 where the divisor is 0."""
    return torch.where(divisor == 0, 0.0, x / torch.where(divisor == 0, 1.0, divisor))


def _codes(x: torch.Tensor, scales: torch.Tensor, leasts: torch.Tensor, most: int) -> torch.Tensor:
    return _quotient(x + leasts[..., None], scales[..., None]).round_().clamp_(0, most)


def _with_halves(x: torch.Tensor, most: int) -> BlockParts:
    """Q4_1 and Q5_1: a scale and a minimum, which is added, in fp16 for 32 columns."""
    x = x.unflatten(1, (-1, _GROUP))
    scales, leasts = (each.half() for each in _search(x, most, least_is_positive=False))
    codes = _codes(x, scales.float(), leasts.float(), most)
    return BlockParts(_bytes_of(codes), scales, -leasts)


def _with_units(x: torch.Tensor, most: int) -> BlockParts:
    """Q4_K and Q5_K: scales and minimums in 6 bits for 32 columns, and their factors in fp16 for 256."""
    x = x.unflatten(1, (-1, _UNIT // _GROUP, _GROUP))
    scales, leasts = _search(x, most, least_is_positive=True)
    factor, least_factor = (_half(each.amax(-1, keepdim=True) / _LARGEST_SCALE) for each in (scales, leasts))
    scales, leasts = _six_bits(_quotient(scales, factor)), _six_bits(_quotient(leasts, least_factor))
    sums = _Sums.of(x, _codes(x, scales * factor, leasts * least_factor, most))
    factor, least_factor = _fit_factors(sums, (scales, leasts), (factor, least_factor))
    best: tuple[torch.Tensor, ...] = ()
    for step in (-1, 0, 1):
        scale = _six_bits(scales + step)
        wanted = (scale * factor * sums.codes - sums.values) / sums.num_columns
        least = _six_bits(_quotient(wanted, least_factor))
        found = sums.gain(scale * factor, least * least_factor), scale, least
        best = _better(found, best) if best else found
    _, scales, leasts = best
    codes = _codes(x, scales * factor, leasts * least_factor, most)
    factor, least_factor = (each.squeeze(-1).half() for each in (factor, least_factor))
    return BlockParts(_bytes_of(codes), factor, least_factor, _bytes_of(scales), _bytes_of(leasts))


def _six_bits(x: torch.Tensor) -> torch.Tensor:
    return x.round().clamp_(0, _LARGEST_SCALE)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).to(torch.uint8)


def _fit_factors(
    sums: _Sums, integers: tuple[torch.Tensor, torch.Tensor], given: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a block's scales and minimums with the smallest errors, in fp16 [R, U, 1] each, or the
    `given` ones where those would be negative.
    """
    scales, leasts = integers
    squares = (scales * scales * sums.squares).sum(-1, keepdim=True)
    mixed = (scales * leasts * sums.codes).sum(-1, keepdim=True)
    least_squares = (leasts * leasts).sum(-1, keepdim=True) * sums.num_columns
    product = (scales * sums.products).sum(-1, keepdim=True)
    least_product = (leasts * sums.values).sum(-1, keepdim=True)
    determinant = squares * least_squares - mixed * mixed
    is_regular = determinant > 1e-6 * squares * least_squares
    factor = _quotient(least_squares * product - mixed * least_product, determinant)
    least_factor = _quotient(mixed * product - squares * least_product, determinant)
    is_better = is_regular & (factor > 0) & (least_factor > 0)
    fitted = torch.where(is_better, factor, given[0]), torch.where(is_better, least_factor, given[1])
    return _half(fitted[0]), _half(fitted[1])


def _q6_k(x: torch.Tensor) -> BlockParts:
    """Scales in 8 bits with a sign for 16 columns, and their factor in fp16 for 256. Codes of 0 are 32."""
    x = x.unflatten(1, (-1, 16, 16))
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))  # it gets the code at the longer end, -32
    best: tuple[torch.Tensor, ...] = ()
    for beyond in _RANGES:
        codes = _quotient(-(32 + beyond) * x, largest).round_().clamp_(-32, 31)
        product, squares = (codes * x).sum(-1), codes.square().sum(-1)
        scales = product / squares.clamp(min=1)
        found = product * scales, scales
        best = _better(found, best) if best else found
    scales = best[1]
    factor = _half(scales.gather(-1, scales.abs().argmax(-1, keepdim=True)) / -128)
    scales = _quotient(scales, factor).round_().clamp_(-128, 127)
    codes = _quotient(x, (scales * factor)[..., None]).round_().clamp_(-32, 31)
    return BlockParts(_bytes_of(codes + 32), factor.squeeze(-1).half(), None, _bytes_of(scales + 128))


def _q8_0(x: torch.Tensor) -> BlockParts:
    """A scale in fp16 for 32 columns, of which the largest gets the code 127 or -127. Codes of 0 are 128."""
    x = x.unflatten(1, (-1, _GROUP))
    scales = (x.abs().amax(-1) * (1 / 127)).half()
    codes = _quotient(x, scales.float()[..., None]).round_().clamp_(-127, 127)
    return BlockParts(_bytes_of(codes + 128), scales)
