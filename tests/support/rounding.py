"""Measures how far a result is off, in units of the error that rounding makes."""

import torch
import torch.nn.functional as F

from nanovllm.attention.base import PartialAttention

# Parts as large as the whole: many keys, whose values share a mean. (Values that cancel out make parts larger than the
# whole, and rounding the parts alone then costs as much as rounding the whole, however they are merged.)
MEAN_VALUE = 3.0
PART_COUNTS = (5, 16, 122)
MAX_ROUNDINGS = 1.2  # the last rounding, and those of five parts, which average out: sqrt(1 + 1 / 5)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def num_roundings(got: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS error of `got` over that of `exact`, fp64, rounded once to the dtype of `got`."""
    return rms(got.double() - exact) / rms(exact.to(got.dtype).double() - exact)


def make_parts(
    num_parts: int, dtype: torch.dtype, *, num_tokens: int = 37, device: str = "cpu"
) -> tuple[list[PartialAttention], PartialAttention]:
    """Parts as a kernel returns them, rounded to `dtype`, and the exact whole in fp64. Three heads of 24 dims."""
    generator = torch.Generator().manual_seed(num_parts)
    shared = torch.randn(num_tokens, 3, 24, generator=generator, dtype=torch.float64)
    outs = shared + 0.1 * torch.randn(num_parts, num_tokens, 3, 24, generator=generator, dtype=torch.float64)
    lses = 5 + 0.2 * torch.randn(num_parts, 3, num_tokens, generator=generator)
    weights = lses.double().softmax(0).transpose(1, 2).unsqueeze(-1)
    whole = PartialAttention((weights * outs).sum(0).to(device), lses.double().logsumexp(0).to(device))
    parts = zip(outs.to(device=device, dtype=dtype), lses.to(device), strict=True)
    return [PartialAttention(*part) for part in parts], whole


def assert_close(got: torch.Tensor, x: torch.Tensor, values: torch.Tensor, exact: torch.Tensor) -> None:
    """Error at most twice that of a product with the values in the dtype of x, or two roundings of the result."""
    plain = F.linear(x, values.to(x.dtype)) if exact.shape == (len(x), len(values)) else exact.to(x.dtype)
    rounding = torch.finfo(x.dtype).eps * exact.abs().max().item()
    error, plain_error = ((y.double() - exact).abs().max().item() for y in (got, plain))
    assert got.dtype == x.dtype and got.shape == exact.shape
    assert error <= max(2 * plain_error, 2 * rounding), f"{error:.2e}, plain {plain_error:.2e}, {rounding:.2e}"
