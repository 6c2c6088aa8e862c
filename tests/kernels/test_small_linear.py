"""The kernels of linear layers with few rows: in Triton's interpreter on CPU, and on a GPU at real sizes.

The interpreter truncates to bf16 where a GPU rounds; it is tested in fp16.
"""

import pytest
import torch
import torch.nn.functional as F
from interpreter import INTERPRETED, on_device

from nanovllm.layers.linear import MAX_GEMV_ROWS, gate_up, linear, use_gemv

pytest.importorskip("triton")

if INTERPRETED:
    DTYPES = [torch.float32, torch.float16]
    SIZES = [(1, 8), (5, 40), (8, 2056), (33, 1032)]
    TILES = [(1, 1, 1), (4, 2, 3)]
else:
    DTYPES = [torch.float32, torch.float16, torch.bfloat16]
    SIZES = [(1024, 1024), (4096, 1024), (1024, 3072), (3072, 1024), (4608, 3584), (1, 8), (1023, 2056), (3073, 1032)]
    TILES = [(block_n, warps, stages) for block_n in (1, 4, 8) for warps in (1, 8) for stages in (1, 3)]
CASES = [(*size, num_rows, dtype) for size in SIZES for num_rows in (1, 2, 3, 5, 8) for dtype in DTYPES]
if INTERPRETED:  # each size and number of rows with one of the dtypes
    CASES = [case for i, case in enumerate(CASES) if i // 2 % 2 == i % 2]


def make_case(
    num_rows: int, num_features: int, size: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x as a view of wider rows, weight, bias; outputs near 1."""
    x = torch.randn(num_rows, size + 16, device=device).to(dtype)[:, :size]
    weight = (torch.randn(num_features, size, device=device) / size**0.5).to(dtype)
    return x, weight, torch.randn(num_features, device=device).to(dtype)


def plain_gate_up(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def assert_as_good(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, sum_error: float) -> None:
    """Error at most twice that of plain torch, or two roundings where plain torch happens to be closer than one: of
    the result, and of the fp32 sum behind it.

    A test that left out the second failed on another CPU, whose plain torch adds in another order: one output of 0.16,
    from terms of up to 1.
    """
    assert got.dtype == plain.dtype and got.shape == plain.shape and got.is_contiguous()
    rounding = torch.finfo(got.dtype).eps * exact.abs().max().item() + sum_error
    error, plain_error = ((y.double() - exact).abs().max().item() for y in (got, plain))
    assert error <= max(2 * plain_error, 2 * rounding), f"{error:.2e}, plain torch {plain_error:.2e}"


def sum_error(x: torch.Tensor, weight: torch.Tensor) -> float:
    """A rounding of an fp32 sum is relative to the sum of |x w|, however small the result."""
    return torch.finfo(torch.float32).eps * F.linear(x.double().abs(), weight.double().abs()).max().item()


def check_linear(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_good(got, F.linear(x, weight, bias), exact, sum_error(x, weight))


def check_gate_up(
    got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "silu"
) -> None:
    """The error of either half counts as often as the other half is large."""
    exact_bias = None if bias is None else bias.double()
    other_half = F.linear(x.double(), weight.double(), exact_bias).abs().max().item()
    exact = plain_gate_up(x.double(), weight.double(), exact_bias, activation)
    assert_as_good(got, plain_gate_up(x, weight, bias, activation), exact, 2 * other_half * sum_error(x, weight))


@on_device
@pytest.mark.parametrize(("num_features", "size", "num_rows", "dtype"), CASES)
def test_small_linear_and_gate_up_as_good_as_plain_torch(
    device: str, dtype: torch.dtype, num_rows: int, num_features: int, size: int
) -> None:
    """Features that are no multiple of a tile, inputs that are a multiple of 8 only, strided rows of x."""
    from nanovllm.kernels import small_linear as kernels

    x, weight, some_bias = make_case(num_rows, 2 * num_features, size, dtype, device)
    bias = some_bias if num_rows > 1 else None  # with and without
    check_gate_up(kernels.small_gate_up(x, weight, bias), x, weight, bias)
    check_gate_up(kernels.small_gate_up(x, weight, bias, activation="gelu_tanh"), x, weight, bias, "gelu_tanh")
    weight, bias = weight[:num_features], bias if bias is None else bias[:num_features]
    check_linear(kernels.small_linear(x, weight, bias), x, weight, bias)


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("tile", TILES)
def test_small_linear_any_tile_as_good_as_plain_torch(device: str, tile: tuple[int, int, int]) -> None:
    """Every way through the kernel: one warp or several, loads in registers or through shared memory."""
    from nanovllm.kernels.small_linear import Tile, small_gate_up, small_linear

    x, weight, bias = make_case(2, 38, 1048, torch.float16, device)
    check_linear(small_linear(x, weight, bias, Tile(*tile)), x, weight, bias)
    check_gate_up(small_gate_up(x, weight, bias, Tile(*tile)), x, weight, bias)


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("num_rows", [1, 3])
def test_small_linear_of_16_bits_with_results_in_fp32(device: str, num_rows: int) -> None:
    """The router of a mixture of experts, whose sums are not rounded to 16 bits."""
    from nanovllm.kernels import small_linear as kernels

    x, weight, _ = make_case(num_rows, 60, 264, torch.float16, device)
    got = kernels.small_linear(x, weight, None, dtype=torch.float32)
    assert got.dtype == torch.float32
    check_linear(got, x.float(), weight.float(), None)


@on_device
def test_small_linear_no_rows_is_empty(device: str) -> None:
    from nanovllm.kernels import small_linear as kernels

    x, weight, bias = make_case(0, 6, 8, torch.float32, device)
    assert kernels.small_linear(x, weight, bias).shape == (0, 6)
    assert kernels.small_gate_up(x, weight, bias).shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, MAX_GEMV_ROWS, MAX_GEMV_ROWS + 1])
@pytest.mark.parametrize("size", [1024, 1028])
def test_linear_either_path_as_good_as_plain_torch(num_rows: int, size: int) -> None:
    x, weight, bias = make_case(num_rows, 512, size, torch.bfloat16, "cuda")
    assert use_gemv(x, weight) == (num_rows <= MAX_GEMV_ROWS and size == 1024)
    check_linear(linear(x, weight, bias), x, weight, bias)
    check_gate_up(gate_up(x, weight, bias), x, weight, bias)


def test_linear_on_cpu_is_plain_torch() -> None:
    x, weight, bias = make_case(1, 6, 16, torch.float32, "cpu")
    assert not use_gemv(x, weight)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(gate_up(x, weight, bias), plain_gate_up(x, weight, bias))
