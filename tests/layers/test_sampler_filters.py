"""The tokens that the filters keep, against the logits processors of transformers: in plain torch and in the kernels.

A token is kept if a redraw leaves it as it is, so the rows of one call ask about one token each.
"""

import importlib
import random
from typing import NamedTuple

import pytest
import torch
from interpreter import HAS_TRITON, INTERPRETED, needs_triton, on_device
from tiers import RUNS_ALL

from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import redraw_cut_tokens, sample

if HAS_TRITON:
    kernel = importlib.import_module("nanovllm.kernels.sampler")

ROUNDING = 1e-5  # in a probability summed in fp32 over a few thousand tokens, and in a ratio of two


class Filters(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def tensors_of(filters: Filters, num_rows: int, device: str = "cpu") -> SamplingTensors:
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
    columns = [torch.full((num_rows,), value, dtype=dtype) for value, dtype in zip(filters, dtypes, strict=True)]
    rows = torch.arange(num_rows)
    return SamplingTensors(*(column.to(device) for column in (*columns, rows, 3 * rows)))


def kept_by_torch(logits: torch.Tensor, filters: Filters, tokens: torch.Tensor) -> torch.Tensor:
    rows = logits.float().expand(len(tokens), -1)
    return redraw_cut_tokens(rows, tensors_of(filters, len(tokens)), tokens) == tokens


def kept_by_kernel(logits: torch.Tensor, filters: Filters, tokens: torch.Tensor, device: str) -> torch.Tensor:
    rows = logits.to(device).expand(len(tokens), -1)
    params = tensors_of(filters, len(tokens), device)
    _, groups = kernel.draw_tokens(rows, params)
    redrawn = tokens.to(device, copy=True)
    kernel.redraw_cut_tokens(rows, params, groups, redrawn)
    return redrawn.cpu() == tokens


def kept_by_transformers(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """bool [vocab_size]. The processors in the order in which `generate` builds them."""
    from transformers.generation import logits_process as warpers

    processors = [warpers.TemperatureLogitsWarper(filters.temperature)]
    processors += [warpers.TopKLogitsWarper(filters.top_k)] if filters.top_k else []
    processors += [warpers.TopPLogitsWarper(filters.top_p)] if filters.top_p < 1 else []
    processors += [warpers.MinPLogitsWarper(filters.min_p)]
    scores = logits.float()[None]
    for processor in processors:
        scores = processor(None, scores)
    return scores[0] > -torch.inf


def is_close_call(logits: torch.Tensor, filters: Filters, token: int) -> bool:
    """Return True if a token, or one of its ties, is so close to the bound of top_p or min_p that rounding decides."""
    scaled = logits.double() / filters.temperature
    weights = (scaled - scaled.max()).exp()
    log_min_p = torch.tensor(filters.min_p, dtype=torch.float64).log()
    if abs(scaled[token] - scaled.max() - log_min_p) < ROUNDING * max(1.0, scaled.abs().max().item()):
        return True
    if filters.top_k:
        weights[logits < logits.topk(min(filters.top_k, len(logits))).values[-1]] = 0
    probabilities = weights / weights.sum()
    first = probabilities[logits > logits[token]].sum()
    steps = first + probabilities[token] * torch.arange((logits == logits[token]).sum() + 1)
    return filters.top_p < 1 and bool(((steps - filters.top_p).abs() < ROUNDING).any())


def assert_kept_as_in_transformers(logits: torch.Tensor, filters: Filters, kept: torch.Tensor) -> None:
    """kept bool [vocab_size]. Of equal logits as many, and those of the lowest ids."""
    expected = kept_by_transformers(logits, filters) & (logits > -torch.inf)
    for value in logits[logits > -torch.inf].unique():
        ties = (logits == value).nonzero()[:, 0]
        num_kept = int(expected[ties].sum())
        if kept[ties].tolist() != [i < num_kept for i in range(len(ties))]:
            assert is_close_call(logits, filters, int(ties[0])), (logits.tolist(), filters, kept.nonzero().tolist())


def random_logits(rng: random.Random, vocab_size: int) -> torch.Tensor:
    """Spread or nearly equal, with ties or without, with impossible tokens or without, in any type."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = rng.choice((0.01, 1.0, 3.0, 20.0)) * torch.randn(vocab_size, generator=generator)
    step = rng.choice((0.0, 0.0, 0.25, 2.0, 1000.0))
    if step:
        logits = (logits / step).round() * step  # -0.0 among them
    logits = logits.to(rng.choice((torch.float32, torch.bfloat16, torch.float16)))
    if rng.random() < 0.2:
        logits[torch.rand(vocab_size, generator=generator) < 0.5] = -torch.inf
        logits[rng.randrange(vocab_size)] = 0.5
    return logits


def random_filters(rng: random.Random, vocab_size: int) -> Filters:
    top_ks = (0, 0, 1, 2, 5, max(1, vocab_size - 1), vocab_size, vocab_size + 7)
    return Filters(
        temperature=rng.choice((0.2, 1.0, 1.0, 1.7)),
        top_k=rng.choice(top_ks),
        top_p=rng.choice((1.0, 0.999, 0.95, 0.8, 0.5, 0.1, 1e-6, rng.uniform(0.01, 1))),
        min_p=rng.choice((0.0, 0.0, 0.01, 0.05, 0.3, 1.0)),
    )


def test_filters_keep_what_transformers_keeps() -> None:
    """Regression: min_p was applied before top_p, and of the tokens that tie for the k-th place only some were kept."""
    rng = random.Random(0)
    for _ in range(1500 if RUNS_ALL else 150):
        vocab_size = rng.choice((1, 2, 3, 7, 20, 60))
        logits, filters = random_logits(rng, vocab_size), random_filters(rng, vocab_size)
        kept = kept_by_torch(logits, filters, torch.arange(vocab_size))
        assert_kept_as_in_transformers(logits, filters, kept)


def test_filters_with_ties_keep_the_lowest_ids_and_a_greedy_row_ignores_them() -> None:
    logits = torch.tensor([1.0, 2.0, -3.0, 1.0, 2.0, 1.0])
    for filters, expected in (
        (Filters(top_k=1), [1, 4]),  # every token that ties for the k-th place
        (Filters(top_k=2), [1, 4]),
        (Filters(top_k=3), [0, 1, 3, 4, 5]),
        (Filters(top_k=6), [0, 1, 2, 3, 4, 5]),
        (Filters(top_p=1e-6), [1]),  # the lowest ids among ties, as few as top_p needs
        (Filters(top_p=0.3), [1]),
        (Filters(top_p=0.4), [1, 4]),  # the first two have probability 0.32 each
        (Filters(top_p=0.7), [0, 1, 4]),
        (Filters(top_k=2, top_p=0.49), [1]),  # two of 0.5 each
        (Filters(top_k=2, top_p=0.51), [1, 4]),
        (Filters(min_p=1.0), [1, 4]),
        (Filters(min_p=0.36), [0, 1, 3, 4, 5]),
        (Filters(top_p=0.7, min_p=0.36), [0, 1, 4]),
        (Filters(temperature=0.1, top_p=0.999), [1, 4]),
    ):
        assert kept_by_torch(logits, filters, torch.arange(6)).nonzero()[:, 0].tolist() == expected
    assert sample(logits[None], tensors_of(Filters(0.0, 4, 0.1, 1.0), 1)).tolist() == [1]


def rows_of(cases: list[Filters], num_rows: int) -> list[torch.Tensor]:
    """The columns of SamplingTensors of rows that have these filters in turn, without seeds and positions."""
    columns = zip(*(cases[row % len(cases)] for row in range(num_rows)), strict=True)
    return [torch.tensor(column, dtype=torch.int64 if i == 1 else None) for i, column in enumerate(columns)]


# -- the kernels -------------------------------------------------------------------------------------------------------


@needs_triton
@on_device
def test_kernel_keeps_what_transformers_keeps(device: str) -> None:
    rng = random.Random(1)
    for _ in range((12 if RUNS_ALL else 4) if INTERPRETED else 400):
        vocab_size = rng.choice((1, 2, 7) if INTERPRETED else (1, 2, 7, 60, 500))
        logits, filters = random_logits(rng, vocab_size), random_filters(rng, vocab_size)
        kept = kept_by_kernel(logits, filters, torch.arange(vocab_size), device)
        assert_kept_as_in_transformers(logits, filters, kept)


def tokens_around_the_bounds(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """In order of their logits: the first tokens, some in the middle, the last, and those around the last one kept."""
    order = logits.float().sort(descending=True, stable=True).indices
    num_kept = int(kept_by_transformers(logits, filters).sum())
    ranks = [0, 1, num_kept // 2, num_kept - 2, num_kept - 1, num_kept, num_kept + 1, 2 * num_kept, len(order) - 1]
    return order[sorted({min(max(rank, 0), len(order) - 1) for rank in ranks})]


LARGE_CASES = [
    Filters(top_k=1),
    Filters(top_k=4),  # at most as many as there are groups, which bounds the k-th largest logit from below
    Filters(top_k=10),
    Filters(top_k=11),
    Filters(top_k=300),
    Filters(top_k=20_010),
    Filters(0.7, top_k=20, top_p=0.95),
    Filters(1.3, top_k=2000, top_p=0.9, min_p=0.01),
    Filters(top_p=0.9),
    Filters(top_p=0.01),
    Filters(top_p=1e-6),
    Filters(0.5, min_p=0.05),
]
SPREADS = [(torch.float32, 0.05), (torch.bfloat16, 5.0), (torch.float16, 0.05)]  # flat, peaked
if not INTERPRETED:
    SPREADS += [(torch.float32, 5.0), (torch.bfloat16, 0.05), (torch.float16, 5.0)]


@pytest.mark.slow
@needs_triton
@on_device
@pytest.mark.parametrize(("dtype", "spread"), SPREADS)
def test_kernel_keeps_what_plain_torch_keeps_of_several_groups(dtype: torch.dtype, spread: float, device: str) -> None:
    """All logits of one sign, or of both, with many ties where the type has few values; one group impossible."""
    vocab_size = 9_001 if INTERPRETED else 20_011
    logits = spread * torch.randn(vocab_size, generator=torch.Generator().manual_seed(2))
    logits[4096:6144] = -torch.inf
    logits[[5, 2050, 6150, 8200]] = logits.max() + spread * torch.tensor([0.03, 0.06, 0.09, 0.12])  # one of a group
    for filters in LARGE_CASES[1::3] if INTERPRETED else LARGE_CASES:
        for offset in (0.0,) if INTERPRETED else (0.0, 30.0, -30.0):
            shifted = (logits + offset).to(dtype)
            tokens = tokens_around_the_bounds(shifted, filters)
            expected = kept_by_torch(shifted, filters, tokens)
            kept = kept_by_kernel(shifted, filters, tokens, device)
            for token in tokens[kept != expected].tolist():
                assert is_close_call(shifted, filters, token), (filters, offset, token)


@pytest.mark.slow
@needs_triton
@on_device
def test_kernel_finds_the_kth_largest_of_any_magnitude(device: str) -> None:
    """Also 0.0 and -0.0, which are equal, and the largest and the smallest numbers of a type."""
    values = [0.0, -0.0, 2.0**-126, -(2.0**-24), 65504.0, -65504.0, 1.0, -1.0, 0.0, 2.0, 1.0 + 2**-23, -torch.inf]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.tensor(values).to(dtype)
        for k in (1, 5, 8) if INTERPRETED else range(1, len(values)):
            kept = kept_by_kernel(logits, Filters(1e6, top_k=k), torch.arange(len(values)), device)
            assert kept.tolist() == (logits >= logits.topk(k).values[-1]).tolist(), (dtype, k)


@pytest.mark.slow
@needs_triton
@on_device
def test_kernel_redraws_what_plain_torch_redraws(device: str) -> None:
    """Greedy, unfiltered, filtered and invalid rows side by side; of some filters hardly any first draw survives."""
    num_rows, vocab_size = (24, 9_001) if INTERPRETED else (600, 20_011)
    cases = [Filters(0.0, 5), Filters(), *LARGE_CASES]
    logits = 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(3))
    logits[1::3] /= 50
    logits[5, 8000], logits[7, 100] = torch.nan, torch.inf
    params = SamplingTensors(*rows_of(cases, num_rows), torch.arange(num_rows) * 77, torch.arange(num_rows))
    want = sample(logits, params)
    got = kernel.sample_tokens(logits.to(device), SamplingTensors(*(column.to(device) for column in params))).cpu()
    assert want[5] == want[7] == got[5] == got[7] == -1
    assert (got == want).float().mean() >= (1 if num_rows < 100 else 0.98)  # logarithms differ in their last bits


@pytest.mark.slow
@needs_triton
@on_device
def test_kernel_draws_the_invalid_token_wherever_the_nan_is(device: str) -> None:
    """Regression: a maximum drops NaN on a GPU, so a row of them drew whatever was next to it."""
    vocab_size = 5003
    places = [0, 1, 2047, 2048, 4096, 5002]
    logits = torch.randn(2 * len(places) + 2, vocab_size, generator=torch.Generator().manual_seed(4))
    for row, place in enumerate(places):
        logits[row, place], logits[len(places) + row, place] = torch.nan, torch.inf
    logits[-2] = -torch.inf
    for filters in (Filters(0.0), Filters(), Filters(top_k=3, top_p=0.9)):
        tokens = kernel.sample_tokens(logits.to(device), tensors_of(filters, len(logits), device)).tolist()
        assert tokens[:-1] == [-1] * (len(logits) - 1) and 0 <= tokens[-1] < vocab_size


@pytest.mark.gpu
def test_filtered_sampling_of_many_rows_takes_little_memory() -> None:
    """Regression: sorting took 35 bytes per logit, 2.5 GiB of 512 rows, which start-up had not measured."""
    logits = torch.randn(512, 151_936, device="cuda", dtype=torch.bfloat16)
    params = tensors_of(Filters(0.7, 20, 0.95), 512, "cuda")
    sample(logits, params)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample(logits, params)
    assert torch.cuda.max_memory_allocated() - before < 2**20


@pytest.mark.gpu
def test_row_filtered_draws_the_same_alone_and_in_any_batch_and_in_a_graph() -> None:
    """The whole vocabulary of a model, flat and peaked, so that sums run over one group and over all."""
    num_rows = 64
    logits = torch.randn(num_rows, 151_936, device="cuda", dtype=torch.bfloat16)
    logits[::2] *= 5
    cases = [*LARGE_CASES, Filters(1.0, 5000, 0.99)]
    rows = torch.arange(num_rows)
    params = SamplingTensors(*(column.cuda() for column in (*rows_of(cases, num_rows), rows, rows)))
    together = sample(logits, params)
    for row in range(num_rows):
        one = SamplingTensors(*(column[row : row + 1].clone() for column in params))
        assert sample(logits[row : row + 1], one).item() == together[row].item(), cases[row % len(cases)]
    tokens = torch.zeros_like(together)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, params, tokens)
    graph.replay()
    assert torch.equal(tokens, together)
