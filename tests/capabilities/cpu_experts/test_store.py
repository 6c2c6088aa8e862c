"""The weights of experts in CPU memory, and what is refused."""

import pytest
import torch
from cpu_experts_cases import Case, fill, matrix_format, random_quantized

from nanovllm.capabilities.cpu_experts.store import ExpertLayer, ExpertMatrix, _words_of
from nanovllm.checkpoint.quantization import QUANTIZATIONS, Quantization
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.kernels.packed_values import pack_codes
from nanovllm.models.quantized_weights import quantize
from nanovllm.plan.expert_formats import (
    E4M3,
    INT4,
    WEIGHT_TYPES,
    LayerFormat,
    MatrixFormat,
    layer_bytes,
    stored_group,
)


def new_matrix(given: MatrixFormat, num_places: int = 2) -> ExpertMatrix:
    memory = torch.full((given.num_bytes(num_places) + 64,), 0xFF, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return ExpertMatrix(given, num_places, memory[start : start + given.num_bytes(num_places)])


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_values_are_those_that_were_stored(name: str) -> None:
    for group_size, has_zeros in ((64, False), (128, True), (256, True)):
        matrix = new_matrix(matrix_format(name, 64, 256, group_size, has_zeros=has_zeros))
        stored = fill(matrix, torch.Generator().manual_seed(0))
        for place in range(2):
            torch.testing.assert_close(matrix.values(place).double(), stored[place], rtol=1e-6, atol=0)


def test_quantized_at_loading_keeps_its_values() -> None:
    """Integers in groups, and what quantization="fp8" makes of a checkpoint's weights."""
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) / 16
    integers = Quantization(method="online", bits=4, block=(1, 128))
    for format, block_type in ((integers, INT4), (QUANTIZATIONS["fp8"], E4M3)):
        quantized = quantize(values, format)
        group_size = stored_group(block_type, 256, format.block[1])
        matrix = new_matrix(MatrixFormat(type=block_type, num_rows=64, num_columns=256, group_size=group_size))
        matrix.store_quantized(1, 0, quantized, "a test")
        expected = torch.empty(64, 256)
        quantized.copy_values(expected)
        assert torch.equal(matrix.values(1), expected)


def test_codes_have_the_order_of_the_gpu() -> None:
    codes = torch.randint(16, (5, 256), dtype=torch.uint8)
    assert torch.equal(_words_of(codes, INT4), pack_codes(codes, 4).view(torch.uint8))
    codes = torch.randint(256, (5, 256), dtype=torch.uint8)
    assert torch.equal(_words_of(codes, E4M3), pack_codes(codes, 8).view(torch.uint8))


def test_places_follow_each_other_in_one_allocation() -> None:
    case = Case("Q4_K", "Q4_K", "Q6_K", num_layers=2, absent=(0, 3))
    formats = LayerFormat(*(matrix.format for matrix in case.store.layers[0].matrices))
    assert case.store.memory.nbytes == 2 * layer_bytes(formats, 4)
    assert layer_bytes(formats, 4) == 4 * (2 * 256 * 144 + 256 * 210)
    starts = [matrix.codes.data_ptr() for layer in case.store.layers for matrix in layer.matrices]
    assert starts == sorted(starts) and not any(start % 64 for start in starts)


@pytest.mark.parametrize(
    ("name", "num_rows", "num_columns", "group_size", "reason"),
    [
        ("BF16", 48, 64, 0, r"48 rows and 64 columns, whose rows must be a multiple of 32"),
        ("BF16", 64, 48, 0, r"whose columns must be a multiple of 32"),
        ("Q4_K", 64, 384, 0, r"in Q4_K .* multiple of 256 in CPU memory; keep all experts on the GPU, or use fewer"),
        ("Q8_0", 0, 32, 0, r"rows must be a multiple of 32"),
        ("INT4", 64, 192, 64, r"multiple of 128"),
        ("INT4", 64, 256, 16, r"stored as groups of 16, which must be 32, 64, 128 columns wide in CPU memory"),
        ("INT4", 64, 256, 256, r"groups of 256"),
        ("INT8", 64, 256, 0, r"groups of 0, which must be 32, 64 columns"),
        ("E4M3", 64, 256, 32, r"groups of 32, which must be 64, 128 columns"),
    ],
)
def test_formats_that_the_kernels_cannot_read_are_refused(
    name: str, num_rows: int, num_columns: int, group_size: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        MatrixFormat(type=WEIGHT_TYPES[name], num_rows=num_rows, num_columns=num_columns, group_size=group_size)


def test_large_groups_are_stored_as_several() -> None:
    sizes = [(INT4, 256, 0), (INT4, 384, 192), (INT4, 256, 48), (E4M3, 512, 128), (E4M3, 192, 128), (E4M3, 256, 0)]
    assert [stored_group(*each) for each in sizes] == [128, 64, 16, 128, 64, 128]
    whole = random_quantized(matrix_format("INT4", 32, 256, 128), torch.Generator().manual_seed(0))
    whole = whole._replace(groups=torch.zeros(256, dtype=torch.int64))  # all columns have the first scale
    matrix = new_matrix(matrix_format("INT4", 32, 256, 0))
    matrix.store_quantized(0, 0, whole, "a test")
    expected = torch.empty(32, 256)
    whole.copy_values(expected)
    assert torch.equal(matrix.values(0), expected)


def test_weights_that_cannot_be_stored_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    given = matrix_format("INT4", 64, 256)
    quantized, matrix = random_quantized(given, generator), new_matrix(given)
    with pytest.raises(CheckpointError, match=r"expert 3 has columns in another order \(desc_act\)"):
        matrix.store_quantized(0, 0, quantized._replace(groups=quantized.groups.roll(5)), "expert 3")
    assert quantized.zeros is not None
    with pytest.raises(CheckpointError, match=r"zeros from 7 to 7; .* the zero 8 alone"):
        matrix.store_quantized(0, 0, quantized._replace(zeros=quantized.zeros - 1), "expert 3")
    with_zeros = new_matrix(matrix_format("INT4", 64, 256, has_zeros=True))
    with pytest.raises(CheckpointError, match=r"zeros from 17 to 17; .* zeros from 0 to 16"):
        with_zeros.store_quantized(0, 0, quantized._replace(zeros=quantized.zeros + 9), "expert 3")


def test_columns_of_a_rank_have_the_groups_of_the_whole_weight() -> None:
    """A rank has columns 128 to 255 of down, whose groups are 64 wide in its own weight and 128 in the checkpoint."""
    whole = random_quantized(matrix_format("INT4", 64, 256, 128, has_zeros=True), torch.Generator().manual_seed(0))
    matrix = new_matrix(matrix_format("INT4", 64, 128, 64, has_zeros=True))
    matrix.store_quantized(0, 0, whole.part(slice(None), slice(128, 256)), "a test")
    expected = torch.empty(64, 256)
    whole.copy_values(expected)
    assert torch.equal(matrix.values(0), expected[:, 128:])


def test_places_must_be_complete() -> None:
    formats = LayerFormat(*(matrix_format("BF16", 32, 32) for _ in range(3)))
    memory = torch.zeros(0, dtype=torch.uint8)
    for places in ([0, 2, -1], [0, 0, 1], [1, 2, -1]):
        with pytest.raises(AssertionError, match="each place has one expert"):
            ExpertLayer(formats, torch.tensor(places, dtype=torch.int32), memory)
    with pytest.raises(AssertionError, match="do not fit"):
        wrong = LayerFormat(matrix_format("BF16", 32, 64), matrix_format("BF16", 32, 64), matrix_format("BF16", 32, 32))
        ExpertLayer(wrong, torch.zeros(1, dtype=torch.int32), memory)
