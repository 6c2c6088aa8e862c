"""Sampler: turns logits into token ids, each row with separate parameters and noise.

A token is drawn in two steps: first one of the groups that the vocabulary is divided into, by the sum of its
probabilities, then an entry of that group. Each step is an argmax of probability over Exp(1) noise (the exponential
race, which has the same distribution as drawing from the probabilities), so noise is needed only for the groups and for
one group's entries. The noise is a hash of the request's seed, the token's position and the vocabulary entry, so a
seeded request draws the same noise in every batch, on every device and rank.

Filters do not sort the vocabulary. First a token is drawn from the whole distribution. Then the filters are evaluated
for that one token. If they cut the token, they also cut every less likely token, so the next attempt draws, with new
noise, from the tokens ahead of it, and so on. Rejecting a draw does not change the ratios between the probabilities of
the kept tokens, so the result is distributed as if the other tokens had been masked beforehand. A first draw that is
kept is the token that the request would have drawn without filters. top_p takes 1 + ln(1 / top_p) attempts on average
for any logits: the probability ahead of a draw is uniform between 0 and the probability ahead of the previous draw.

The filters apply in the order of transformers' logits processors: temperature, then top_k, then top_p of the tokens
that top_k keeps, then min_p.

- Tokens are ordered by logit, largest first. Tokens with equal logits are ordered by id, lowest first.
- top_k keeps every token whose logit is at least the k-th largest, so with ties it may keep more than k.
- top_p keeps a token if the probability of the tokens ahead of it is below top_p, where the tokens that top_k keeps sum
  to 1. top_p splits ties: it keeps the fewest tied tokens that it needs. (transformers keeps equally many, but which of
  them depends on an unstable sort.) Sums are fp32, in an order that does not depend on the batch. If the probability
  ahead of a token is within rounding of top_p, devices may disagree about that token.
- min_p keeps a token if its logit is at least the largest logit + temperature * ln(min_p).
- The first token in the order is always kept, and greedy rows ignore filters.
"""

import itertools

import torch

from nanovllm.kernels.sampling_tensors import GROUP_SIZE, EditTensors, SamplingTensors
from nanovllm.sampling_params import INVALID_TOKEN
from nanovllm.utils.arithmetic import ceil_div


def sample(logits: torch.Tensor, params: SamplingTensors, out: torch.Tensor | None = None) -> torch.Tensor:
    """logits [S, vocab_size] of any float type -> token ids int64 [S], written to `out` if given.

    A row gets INVALID_TOKEN if one of its logits is NaN or +inf, or all of them are -inf. A greedy row gets the lowest
    id among its largest logits. Hot: once per step. On a GPU nothing here waits for the GPU or depends on its results.
    """
    if logits.is_cuda:
        from nanovllm.kernels import sampler as kernels

        return kernels.sample_tokens(logits, params, out)
    values = logits.float()
    tokens = _race(values, params, attempt=0)
    is_valid = (values < torch.inf).all(dim=-1) & (values > -torch.inf).any(dim=-1)  # NaN compares false
    rows = (is_valid & _filters(params, logits.shape[1])).nonzero()[:, 0]
    if len(rows):
        tokens[rows] = redraw_cut_tokens(values[rows], _take(params, rows), tokens[rows])
    tokens = torch.where(is_valid, tokens, INVALID_TOKEN)
    return tokens if out is None else out.copy_(tokens)


def redraw_cut_tokens(values: torch.Tensor, params: SamplingTensors, tokens: torch.Tensor) -> torch.Tensor:
    """Replace the tokens in `tokens` [S] that the filters cut.

    `values` are valid logits in fp32, [S, vocab_size]. Every temperature must be above 0.
    """
    tokens = tokens.clone()
    temperature = params.temperature.clamp(min=_LEAST_TEMPERATURE)[:, None]
    top = values.amax(dim=-1, keepdim=True)
    weights = ((values - top) / temperature).exp()
    kth = _kth_largest(values, params.top_k)
    total = torch.where(values >= kth, weights, 0.0).sum(dim=-1)
    limit = torch.where(params.top_p < 1, params.top_p * total, torch.inf)
    floor = torch.maximum(kth, top + temperature * params.min_p.log()[:, None])  # log 0 = -inf keeps all
    entry = torch.arange(values.shape[1])
    for attempt in itertools.count(1):
        value = values.gather(1, tokens[:, None])
        is_ahead = (values > value) | ((values == value) & (entry < tokens[:, None]))
        weight_ahead = torch.where(is_ahead, weights, 0.0).sum(dim=-1)
        is_kept = (value >= floor)[:, 0] & ((weight_ahead < limit) | (weight_ahead == 0))
        if is_kept.all():
            break
        candidates = torch.where(is_ahead & (values >= floor), values, -torch.inf)
        tokens[~is_kept] = _race(candidates[~is_kept], _take(params, ~is_kept), attempt)
    return tokens


def _take(params: SamplingTensors, rows: torch.Tensor) -> SamplingTensors:
    return SamplingTensors(*(column[rows] for column in params))


def _filters(params: SamplingTensors, vocab_size: int) -> torch.Tensor:
    """bool [S]: True for a row in which filters may cut tokens."""
    cuts = ((params.top_k > 0) & (params.top_k < vocab_size)) | (params.top_p < 1) | (params.min_p > 0)
    return cuts & (params.temperature > 0)


def _kth_largest(values: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[S, 1]: the k-th largest value of each row, -inf for a row without top_k."""
    filters = (top_k > 0) & (top_k < values.shape[1])
    k = torch.where(filters, top_k, 1)
    largest = values.topk(int(k.max()), dim=-1).values
    return torch.where(filters, largest.gather(1, k[:, None] - 1)[:, 0], -torch.inf)[:, None]


def _race(values: torch.Tensor, params: SamplingTensors, attempt: int) -> torch.Tensor:
    """Draw once for each row, [S]: a group, then an entry of the group. A greedy row gets its largest value."""
    num_groups = ceil_div(values.shape[1], GROUP_SIZE)
    num_entries = num_groups * GROUP_SIZE
    first = attempt * (num_entries + num_groups)  # where the noise of this attempt starts
    draws = params.temperature[:, None] != 0
    scaled = values / torch.where(draws, params.temperature[:, None].clamp(min=_LEAST_TEMPERATURE), 1.0)
    scaled = torch.nn.functional.pad(scaled, (0, num_entries - values.shape[1]), value=-torch.inf)
    scaled = scaled.unflatten(1, (num_groups, GROUP_SIZE))

    def best(log_weight: torch.Tensor, first_entry: torch.Tensor) -> torch.Tensor:
        """argmax [S] of weight / noise. `first_entry` [S or 1] is where the noise of the columns starts."""
        entry = first_entry[:, None] + torch.arange(log_weight.shape[1])
        noise = exponential_noise(params.seed, params.position, entry)
        return torch.where(draws, log_weight - noise.log(), log_weight).argmax(dim=-1)

    group_weight = torch.where(draws, scaled.logsumexp(dim=-1), scaled.amax(dim=-1))
    group = best(group_weight, torch.tensor([first + num_entries]))  # the noise of groups follows the noise of entries
    start = group * GROUP_SIZE
    return start + best(scaled[torch.arange(len(group)), group], first + start)


def exponential_noise(seed: torch.Tensor, position: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """Exp(1) noise [S, N] in fp32, for entries [S or 1, N]; see `random_bits` and `bits_to_noise`."""
    return bits_to_noise(random_bits(seed, position, entry))


def bits_to_noise(bits: torch.Tensor) -> torch.Tensor:
    """Exp(1) noise in fp32, from 6e-8 to 16.6, of 32 random bits each.

    It is -log1p(-u) for u an odd multiple of 2^-24. Such u in (0, 1) are exact in fp32, so the noise is never 0 or
    infinite.
    """
    uniform = ((bits >> 8) | 1).float() * 2.0**-24
    return -torch.log1p(-uniform)


def random_bits(seed: torch.Tensor, position: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """32 random bits [S, N], as int64: a 64-bit key per row, then a 32-bit hash of the entries [S or 1, N].

    The key is mixed by splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014). Its low half is the start of the row's Weyl sequence over the entries. Each term is mixed by lowbias32
    (Wellons: Prospecting for hash functions, https://nullprogram.com/blog/2018/07/31/); the key's high half enters
    between its two multiplications. The hash is 32-bit because a GPU multiplies 32 bits several times faster than 64.
    kernels/sampler.py computes the same.
    """
    key = _mix(_mix(seed) + position)[:, None]
    bits = (entry * 0x9E3779B9 + key) & _LOW_32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _LOW_32
    bits = ((bits ^ (bits >> 15) ^ _shift_right(key, 32)) * 0x846CA68B) & _LOW_32
    return bits ^ (bits >> 16)


_LOW_32 = (1 << 32) - 1
_LEAST_TEMPERATURE = 1e-10  # smaller temperatures count as this one, because dividing by them overflows


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical right shift of int64; torch only has the arithmetic one."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)


def resample_edited(
    edits: EditTensors, params: SamplingTensors, logits: torch.Tensor, input_ids: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Sample the rows whose logits [S, vocab_size] a request edits, and replace their `tokens`, int64 [S]. Hot.

    Most requests edit nothing, so graphs and the plain path sample all rows from the model's own logits. The edited
    rows are copied, edited and sampled afterwards, a limited number at a time. Rows without edits pay only for the
    launches. `params` has the edited rows alone. `input_ids`, int64 [T], are the step's own, in the form in which the
    model has read them.
    """
    num_rows = max(1, _CHUNK_BYTES // (4 * logits.shape[1] * _ROW_STEP)) * _ROW_STEP
    for start in range(0, len(edits.rows), num_rows):
        end = start + num_rows
        part = edits.part(start, end)
        edited = edit_logits(logits, part, input_ids)
        tokens[part.rows] = sample(edited, SamplingTensors(*(column[start:end] for column in params)))


_ROW_STEP = 16  # edited rows of a chunk are a multiple of this, so that its arrays stay aligned
_CHUNK_BYTES = 32 << 20  # fp32 logits that are edited at once


def edit_logits(logits: torch.Tensor, edits: EditTensors, input_ids: torch.Tensor) -> torch.Tensor:
    """logits [S, vocab_size] of any float type -> the edited rows, fp32 [R, vocab_size].

    input_ids: int64 [T], of this step. Hot: once per step. On a GPU nothing here waits for the GPU.
    """
    if logits.is_cuda:
        from nanovllm.kernels import logit_edits as kernels

        return kernels.edit_logits(logits, edits, input_ids)
    edited = logits[edits.rows].float()
    for i, row in enumerate(edited):
        _edit_row(row, edits, i, input_ids)
    return edited


def _edit_row(row: torch.Tensor, edits: EditTensors, i: int, input_ids: torch.Tensor) -> None:
    """Edit row i [vocab_size] in place."""
    if edits.allowed_row[i] >= 0:
        row.masked_fill_(~_bits(edits.allowed[edits.allowed_row[i]], len(row)), -torch.inf)
    new_ids = input_ids[edits.new_start[i] : edits.new_end[i]]
    biases = slice(edits.bias_start[i], edits.bias_end[i])
    row.index_add_(0, edits.bias_ids[biases], edits.bias_values[biases])

    seen = slice(edits.seen_start[i], edits.seen_end[i])
    counts = torch.zeros(len(row), dtype=torch.int32).index_add_(0, edits.seen_ids[seen], edits.seen_counts[seen])
    counts.index_add_(0, new_ids, torch.ones_like(new_ids, dtype=torch.int32))
    repeats = counts > 0
    if edits.prompt_row[i] >= 0:
        repeats |= _bits(edits.prompt_masks[edits.prompt_row[i]], len(row))
    repeated = torch.where(row > 0, row / edits.repetition[i], row * edits.repetition[i])
    penalized = torch.where(repeats, repeated, row)
    penalized -= edits.frequency[i] * counts + edits.presence[i] * (counts > 0)
    row.copy_(penalized)


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """A mask of int32 words as bool [count]."""
    return ((words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).flatten()[:count] != 0
