"""The sampler against softmax itself, and its noise."""

import math

import pytest
import torch
from tiers import RUNS_ALL

from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import INVALID_TOKEN, sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB_SIZE = 11
LOGITS = torch.tensor([2.0, 1.5, 1.4, 0.3, 0.0, -0.5, -1.0, -1.1, 0.9, 1.45, -3.0])

# Seeds with the smallest noise, of random bits that are zeros, at position 7 and one of the first 320 entries
SMALLEST = (23824, 39953, 51276, 77117, 88429, 104182, 117799)


def params_of(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    device: str = "cpu",
) -> SamplingTensors:
    """The same parameters for every row; seeds 0.. and position 5 unless given."""

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return SamplingTensors(
        full(temperature, torch.float32),
        full(top_k, torch.int64),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        (torch.arange(num_rows) if seeds is None else seeds).to(device),
        (full(5, torch.int64) if positions is None else positions).to(device),
    )


def sample_in_batches(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The same tokens as those of one call, for a third of the time: the noise of a batch fits in a CPU's cache."""
    rows = torch.arange(len(logits)).split(40)
    return torch.cat([sample(logits[some], SamplingTensors(*(column[some] for column in params))) for some in rows])


def naive_probabilities(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """Softmax of what is kept, by the words of SamplingParams."""
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = [i for i in order if not top_k or weights[i] >= weights[order[top_k - 1]]]
    total = sum(weights[i] for i in kept)
    nucleus: list[int] = []
    for i in kept:
        if nucleus and sum(weights[j] for j in nucleus) / total >= top_p:
            break
        nucleus.append(i)
    nucleus = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


def assert_drawn_from(tokens: torch.Tensor, probabilities: list[float]) -> None:
    """Chi-square over the tokens that can be drawn, five standard deviations from its mean at most."""
    counts = torch.bincount(tokens.cpu(), minlength=len(probabilities)).tolist()
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0), "a cut token was drawn"
    expected = [(count, p * len(tokens)) for count, p in zip(counts, probabilities, strict=True) if p > 0]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in expected)
    freedom = len(expected) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom), f"{counts} is not drawn from {probabilities}"


SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.75},
    {"min_p": 0.3},
    {"top_p": 0.1},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.8, "min_p": 0.25},
    {"top_k": 7, "top_p": 0.85, "min_p": 0.25},  # with min_p before top_p it would be 4 tokens instead of 5
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("setting", "varying"),
    [*((setting, "seeds") for setting in SETTINGS), ({}, "positions"), (SETTINGS[-1], "positions")],
)
def test_tokens_are_drawn_from_the_softmax_of_what_is_kept(
    setting: dict[str, float], varying: str, device: str
) -> None:
    num_rows = 3000 if RUNS_ALL else 1000
    rows = torch.arange(num_rows)
    draw = {"seeds": rows} if varying == "seeds" else {"seeds": torch.full((num_rows,), 42), "positions": rows}
    params = params_of(num_rows, device=device, **draw, **setting)
    tokens = sample_in_batches(LOGITS.expand(num_rows, -1).to(device), params)
    everything = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting
    assert_drawn_from(tokens, naive_probabilities(LOGITS, **everything))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.6}, {"top_k": 8}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_tokens_of_several_groups_are_drawn_from_the_softmax(setting: dict[str, float], device: str) -> None:
    """Candidates at the edges of groups and alone in one, two groups without any."""
    entries = torch.tensor([0, 1, 2047, 2048, 2049, 4095, 4096, 9000, 11_000, 11_001, 12_288])
    num_rows = 1000 if RUNS_ALL else 400
    logits = torch.full((1, 12_290), -torch.inf, device=device)
    logits[0, entries] = LOGITS.to(device)
    tokens = sample_in_batches(logits.expand(num_rows, -1), params_of(num_rows, device=device, **setting)).cpu()
    assert set(tokens.tolist()) <= set(entries.tolist())
    everything = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting
    assert_drawn_from(torch.searchsorted(entries, tokens), naive_probabilities(LOGITS, **everything))


def test_draws_of_neighbouring_positions_and_seeds_are_independent() -> None:
    """Equal as often as two independent draws are."""
    num_rows = 2000
    probabilities = naive_probabilities(LOGITS, 1.0, 0, 1.0, 0.0)
    p_equal = sum(p * p for p in probabilities)
    tolerance = 5 * math.sqrt(p_equal * (1 - p_equal) / num_rows)
    rows, same = torch.arange(num_rows), torch.full((num_rows,), 3)
    for seeds, positions in ((rows, same), (same, rows), (rows, rows), (rows, num_rows - rows)):
        params = params_of(num_rows, seeds=seeds, positions=positions)
        tokens = sample_in_batches(LOGITS.expand(num_rows, -1), params)
        assert abs((tokens[1:] == tokens[:-1]).float().mean().item() - p_equal) < tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_temperature_zero_is_argmax_also_beside_random_rows(device: str) -> None:
    logits = torch.randn(9, 333, generator=torch.Generator().manual_seed(0)).to(device)
    assert sample(logits, params_of(9, temperature=0.0, device=device)).tolist() == logits.argmax(-1).tolist()
    params = params_of(9, top_k=50, device=device)
    params.temperature[::2] = 0
    assert sample(logits, params)[::2].tolist() == logits[::2].argmax(-1).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [11, 5003])
@pytest.mark.parametrize("setting", [{"temperature": 0.0}, *SETTINGS])
def test_row_without_a_distribution_draws_the_invalid_token_and_one_with_one_possible_token_draws_it(
    setting: dict[str, float], vocab_size: int, device: str
) -> None:
    """Regression: a row of NaN drew some token. Its neighbours draw what they draw without it.

    The only possible token is the last one: with 5003, alone in the last of three groups.
    """
    logits = torch.full((3, vocab_size), -torch.inf, device=device)
    logits[:, -1] = torch.tensor([-1000.0, 0.0, 1000.0])
    assert sample(logits, params_of(3, device=device, **setting)).tolist() == [vocab_size - 1] * 3
    logits = torch.randn(10, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    params = params_of(10, device=device, **setting)
    alone = sample(logits, params)
    logits[0], logits[1, 0], logits[2, vocab_size // 2], logits[3, -1], logits[4, ::2] = (torch.nan,) * 5
    logits[5], logits[6, -1], logits[7] = torch.inf, torch.inf, -torch.inf
    tokens = sample(logits, params)
    assert (tokens[:8] == INVALID_TOKEN).all(), tokens.tolist()
    assert torch.equal(tokens[8:], alone[8:])


@pytest.mark.parametrize("device", DEVICES)
def test_filters_leave_the_token_of_an_unfiltered_row_as_it_is(device: str) -> None:
    """Regression: beside a row that filters, the sum of probabilities reached 1.0 before the last tokens."""
    logits = (torch.randn(200, 20_011, generator=torch.Generator().manual_seed(0)) / 10).to(device)
    params = params_of(200, device=device)
    alone = sample(logits, params)
    params.top_k[::2] = 5
    assert torch.equal(sample(logits, params)[1::2], alone[1::2])
    params.top_k[:] = 20_011  # all tokens, as 0
    assert torch.equal(sample(logits, params), alone)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", [{"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_token_that_the_filters_keep_is_the_one_drawn_without_them(setting: dict[str, float], device: str) -> None:
    logits = (2 * torch.randn(500, 5003, generator=torch.Generator().manual_seed(0))).to(device)
    unfiltered = sample_in_batches(logits, params_of(500, device=device))
    filtered = sample_in_batches(logits, params_of(500, device=device, **setting))
    again = sample_in_batches(logits, params_of(500, device=device, seeds=torch.arange(500) + 1000, **setting))
    same = (filtered == unfiltered).float().mean().item()
    assert 0.1 < same < 0.9
    assert (again == unfiltered).float().mean().item() < same / 2


def test_draws_of_a_seed_stay_what_they_are() -> None:
    """Users who keep their seeds keep their texts."""
    entry, row = torch.arange(5003), torch.arange(12)
    logits = ((entry * 37 + row[:, None] * 101) % 1009).float() / 120
    tokens = sample(logits, params_of(12, temperature=0.8, seeds=row * 1_000_003, positions=row + 5))
    assert tokens.tolist() == [427, 4358, 365, 1460, 4133, 2792, 447, 1069, 573, 3163, 2126, 457]


@pytest.mark.parametrize("device", DEVICES)
def test_row_draws_the_same_alone_and_in_any_batch(device: str) -> None:
    """Beside rows with other filters, too."""
    num_rows = 5 * len(SETTINGS)
    logits = torch.randn(num_rows, 333, generator=torch.Generator().manual_seed(1)).to(device)
    rows = [
        params_of(1, device=device, seeds=torch.tensor([i]), **SETTINGS[i % len(SETTINGS)]) for i in range(num_rows)
    ]
    params = SamplingTensors(*(torch.cat(columns) for columns in zip(*rows, strict=True)))
    together = sample(logits, params)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(2))
    for some in (order, order[:5], *order[:, None]):
        picked = SamplingTensors(*(column[some] for column in params))
        assert sample(logits[some], picked).tolist() == together[some].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [5003, 151_936])
@pytest.mark.parametrize("setting", SETTINGS)
def test_gpu_draws_what_the_cpu_draws(setting: dict[str, float], vocab_size: int) -> None:
    logits = 2 * torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(1))
    expected = sample(logits, params_of(64, **setting))
    actual = sample(logits.cuda(), params_of(64, device="cuda", **setting)).cpu()
    assert (actual == expected).float().mean() > 0.98  # the last bits of exp and log differ


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [0, 3])
def test_unlikely_and_cut_tokens_are_not_drawn_by_the_smallest_noise(top_k: int, device: str) -> None:
    """Regression: a probability over a noise of 0 won against everything, and 0 over 0 as well."""
    seeds = torch.tensor(SMALLEST)
    logits = torch.full((len(seeds), 320), -30.0)
    logits[:, [5, 17, 300]] = 1.0
    params = params_of(len(seeds), top_k=top_k, seeds=seeds, positions=torch.full_like(seeds, 7), device=device)
    assert set(sample(logits.to(device), params).tolist()) <= {5, 17, 300}
