"""The sampler's noise: its statistics, and that the kernel hashes the same bits as plain torch."""

import importlib
import math

import pytest
import torch
from interpreter import HAS_TRITON, INTERPRETED, needs_triton, on_device

from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import bits_to_noise, exponential_noise, random_bits, sample

NUM_ENTRIES = 4096


def rows(seeds: torch.Tensor | int, positions: torch.Tensor | int) -> torch.Tensor:
    """Noise in fp64, a row for each seed and position. One of the two may be the same for all rows."""
    seed, position = torch.broadcast_tensors(torch.as_tensor(seeds), torch.as_tensor(positions))
    return exponential_noise(seed, position, torch.arange(NUM_ENTRIES)).double()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlate two sets of Exp(1) noise. For independent ones it is normal with deviation 1 / sqrt(their number)."""
    return ((a - 1) * (b - 1)).mean().item() * math.sqrt(a.numel())


NEIGHBOURS = {
    "seeds": lambda i: rows(i, 7),
    "seeds_far_apart": lambda i: rows(i << 40, 7),
    "positions": lambda i: rows(1234, i),
    "seed_and_position": lambda i: rows(i, 1000 - i),
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_noise_is_exp_1_and_that_of_neighbours_uncorrelated(neighbours: str) -> None:
    noise = NEIGHBOURS[neighbours](torch.arange(256))
    num = noise.numel()
    assert abs(noise.mean().item() - 1) < 5 / math.sqrt(num)
    assert abs(noise.var().item() - 1) < 5 * math.sqrt(8 / num)  # the fourth central moment is 9
    assert ((noise.mean(1) - 1).abs() < 5 / math.sqrt(NUM_ENTRIES)).all()  # each row's mean
    assert ((noise.mean(0) - 1).abs() < 5.5 / math.sqrt(len(noise))).all()  # each entry's mean
    for quantile in (0.001, 0.01, 0.1, 0.5, 0.9, 0.99):
        share = (noise < -math.log(1 - quantile)).double().mean().item()
        assert share == pytest.approx(quantile, abs=5 * math.sqrt(quantile * (1 - quantile) / num))
    for distance in (1, 2, 3, 16, 64, 128):
        assert abs(correlation(noise[distance:], noise[:-distance])) < 5
        assert abs(correlation(noise[:, distance:], noise[:, :-distance])) < 5
        assert abs(correlation(noise[distance:, distance:], noise[:-distance, :-distance])) < 5


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_least_noise_of_neighbours_is_spread_evenly(neighbours: str) -> None:
    """With equal logits the least noise wins: every entry as often, and independently of the row before."""
    bins = 16
    num_rows = 5000
    batches = torch.arange(num_rows).split(20)  # the noise of a batch fits in a CPU's cache
    winners = torch.cat([NEIGHBOURS[neighbours](batch).argmin(1) for batch in batches])
    winners = winners * bins // NUM_ENTRIES
    pairs = torch.bincount(winners[1:] * bins + winners[:-1], minlength=bins * bins).double()
    for counts in (torch.bincount(winners, minlength=bins).double(), pairs):
        expected, freedom = counts.sum() / counts.numel(), counts.numel() - 1
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_bits_are_uniform_in_every_byte_and_pair_of_entries() -> None:
    bits = random_bits(torch.arange(512), torch.full((512,), 3), torch.arange(NUM_ENTRIES))
    assert bits.min() >= 0 and bits.max() < 1 << 32
    for shift in (0, 8, 16, 24):
        for values in (bits >> shift & 255, ((bits[:, 1:] >> shift & 15) << 4) | (bits[:, :-1] >> shift & 15)):
            counts = torch.bincount(values.flatten(), minlength=256).double()
            expected = counts.sum() / 256
            assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 5 * math.sqrt(2 * 255)


def test_noise_of_a_row_repeats_no_bits() -> None:
    """The hash of an entry is a bijection of 32 bits."""
    bits = random_bits(torch.tensor([5]), torch.tensor([6]), torch.arange(151_936))
    assert bits.unique().numel() == 151_936


def test_noise_of_extreme_bits_is_finite_and_positive() -> None:
    """Regression: 24 bits of ones gave a uniform number of 1 and a noise of 0, which won against any probability."""
    noise = bits_to_noise(torch.tensor([0, 255, 256, 1 << 31, (1 << 32) - 257, (1 << 32) - 256, (1 << 32) - 1]))
    assert noise.isfinite().all() and (noise > 0).all()
    assert noise.min() == pytest.approx(2.0**-24) and noise.max() == pytest.approx(24 * math.log(2))


# -- the kernel --------------------------------------------------------------------------------------------------------

if HAS_TRITON:
    import triton
    import triton.language as tl

    kernel = importlib.import_module("nanovllm.kernels.sampler")

    @triton.jit
    def _noise_kernel(seed_ptr, position_ptr, bits_ptr, noise_ptr, num_entries, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        key_low, key_high = kernel.row_key(seed_ptr, position_ptr, row)
        bits = kernel.random_bits(entry, key_low, key_high)
        inside = entry < num_entries
        tl.store(bits_ptr + row * num_entries + entry, bits.to(tl.int64), mask=inside)
        tl.store(noise_ptr + row * num_entries + entry, kernel.log2_noise(bits), mask=inside)


@pytest.mark.slow
@needs_triton
@on_device
def test_kernel_hashes_the_bits_of_plain_torch(device: str) -> None:
    """Bit for bit, and the noise to the accuracy of the device's logarithm, at seeds and positions of any size."""
    seed = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789], device=device)
    position = torch.tensor([0, 1, 40959, 2**31, 2**40, 17], device=device)
    num_entries, block = 151_936, 8192
    bits = torch.empty(len(seed), num_entries, dtype=torch.int64, device=device)
    log2_noise = torch.empty(len(seed), num_entries, device=device)
    _noise_kernel[(len(seed), triton.cdiv(num_entries, block))](
        seed, position, bits, log2_noise, num_entries, BLOCK=block
    )
    entry = torch.arange(num_entries, device=device)
    assert torch.equal(bits, random_bits(seed, position, entry))
    noise = exponential_noise(seed, position, entry).double()
    relative = (log2_noise.double() + math.log2(math.log(2))).exp2() / noise - 1
    assert relative.abs().max() < 5e-5


@needs_triton
@on_device
@pytest.mark.parametrize("num_rows", [2, 17] if INTERPRETED else [2, 300])
def test_kernel_draws_what_plain_torch_draws(device: str, num_rows: int) -> None:
    """Greedy rows beside random ones, ties within a group and between groups, cut tokens, a group that is cut whole."""
    vocab_size = 20_011
    logits = 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)).half()
    logits[:, ::7] = -torch.inf
    logits[:, 4096:6144] = -torch.inf
    logits[0, [4000, 4001, 9000, 19000]] = 100.0
    params = SamplingTensors(
        temperature=torch.linspace(0, 2, num_rows),
        top_k=torch.zeros(num_rows, dtype=torch.int64),
        top_p=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        seed=torch.arange(num_rows),
        position=torch.arange(num_rows) * 1000,
    )
    want = sample(logits, params)
    on_device = SamplingTensors(*(column.to(device) for column in params))
    got = kernel.sample_tokens(logits.to(device), on_device).cpu()
    assert got[0] == want[0] == 4000
    assert (got == want).float().mean() >= (1 if num_rows < 100 else 0.99)  # logarithms differ in their last bits
    on_device.temperature.zero_()
    greedy = kernel.sample_tokens(logits.to(device), on_device).cpu()
    assert torch.equal(greedy, logits.float().argmax(-1))
