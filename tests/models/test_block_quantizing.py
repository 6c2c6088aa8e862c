"""Quantizing values to GGUF's blocks, against the package gguf, which reads all types and writes some."""

import gguf
import pytest
import torch

from nanovllm.checkpoint.quantization import BLOCK_TYPES, QUANTIZATIONS
from nanovllm.models.block_quantizing import quantize_to_blocks
from nanovllm.models.gguf_values import join_parts, part_values, read_parts

TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_1", "Q5_1")


def values_of(x: torch.Tensor, block_type: str) -> torch.Tensor:
    return part_values(read_parts(quantize_to_blocks(x, block_type), block_type), block_type)


def error_of(x: torch.Tensor, values: torch.Tensor) -> float:
    return float((values - x).norm() / x.norm())


def weights() -> torch.Tensor:
    """Normal values whose rows and columns have different sizes, with outliers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 768, generator=generator) * 0.02
    x *= torch.rand(24, 1, generator=generator) + 0.2
    return torch.where(torch.rand(x.shape, generator=generator) < 0.002, 5 * x, x)


def test_every_size_has_types_that_are_written() -> None:
    sizes = [each for each in QUANTIZATIONS.values() if each.block_types]
    sizes += [each for size in sizes for _, each in size.exceptions]
    assert {name for each in sizes for name in each.block_types} == set(TYPES)


@pytest.mark.parametrize("block_type", TYPES)
def test_blocks_in_a_file_have_the_values(block_type: str) -> None:
    x, kind = weights(), gguf.GGMLQuantizationType[block_type]
    blocks = quantize_to_blocks(x, block_type)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))
    parts = read_parts(blocks, block_type)
    torch.testing.assert_close(part_values(parts, block_type), expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(join_parts(parts, block_type), blocks)


@pytest.mark.parametrize(
    ("block_type", "most"),
    [("Q4_K", 0.078), ("Q5_K", 0.0385), ("Q6_K", 0.019), ("Q8_0", 0.0065), ("Q4_1", 0.077), ("Q5_1", 0.037)],
)
def test_errors_are_smaller_than_those_of_rounding_the_extremes(block_type: str, most: float) -> None:
    """The limits are 3% above what was measured. llama.cpp's conversion in the package rounds the extremes."""
    x = weights()
    error = error_of(x, values_of(x, block_type))
    assert error < most
    if not block_type.endswith("K"):
        kind = gguf.GGMLQuantizationType[block_type]
        rounded = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind), kind))
        assert error <= error_of(x, rounded) * (1.001 if block_type == "Q8_0" else 0.97)


@pytest.mark.parametrize("block_type", TYPES)
def test_special_groups_are_finite_and_as_exact_as_their_scales(block_type: str) -> None:
    """Zeros, equal values, values of one sign, an outlier, and values that are large or small."""
    x = weights()
    zeros, equal, opposite = torch.zeros(1, 768), torch.full((1, 768), 0.7), torch.full((1, 768), -0.7)
    assert not values_of(zeros, block_type).any()
    most = 2.0 ** -BLOCK_TYPES[block_type].bits
    for special in (equal, opposite, x.abs(), -x.abs(), x * 1e4, x * 0.1):
        assert error_of(special, values_of(special, block_type)) < 2 * most, special
    x[:, ::256] = 40.0
    assert error_of(x, values_of(x, block_type)) < most
    assert values_of(x * 1e-7, block_type).isfinite().all()


@pytest.mark.parametrize("block_type", TYPES)
def test_rows_do_not_depend_on_each_other(block_type: str) -> None:
    """So they can be quantized in pieces, in any number and in bf16."""
    x = weights().bfloat16()
    alone = torch.cat([values_of(row[None], block_type) for row in x[:4]])
    assert torch.equal(values_of(x, block_type)[:4], alone)
    size = BLOCK_TYPES[block_type].block[1]
    assert torch.equal(values_of(x[:, size : 2 * size], block_type), values_of(x, block_type)[:, size : 2 * size])
