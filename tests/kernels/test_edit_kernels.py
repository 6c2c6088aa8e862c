"""The kernels that edit logits do what the plain functions do: in Triton's interpreter, and on a GPU."""

import pytest
import torch
from interpreter import INTERPRETED, on_device
from tiers import RUNS_ALL

from nanovllm.kernels.sampling_tensors import EditTensors
from nanovllm.layers.sampler import edit_logits

pytest.importorskip("triton")

VOCABS = [100, 2500] if INTERPRETED else [100, 2500, 151_936]
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def random_edits(vocab_size: int, num_rows: int, num_logits: int, num_inputs: int, seed: int) -> EditTensors:
    """Rows with every combination of edits, among them tokens that are both seen and new, or biased twice."""
    rng = torch.Generator().manual_seed(seed)

    def integers(high: int, count: int) -> torch.Tensor:
        return torch.randint(high, (count,), generator=rng)

    def ranges(total: int) -> tuple[torch.Tensor, torch.Tensor]:
        ends = torch.stack([integers(total + 1, num_rows), integers(total + 1, num_rows)])
        return ends.amin(0), ends.amax(0)

    def numbers(low: float, high: float) -> torch.Tensor:
        values = low + (high - low) * torch.rand(num_rows, generator=rng)
        return values.where(integers(3, num_rows) > 0, torch.tensor(1.0 if low > 0 else 0.0))

    num_seen, num_biases = min(vocab_size, 700), 650
    new_end = 1 + integers(num_inputs, num_rows)
    new_start = (new_end - integers(min(6, num_inputs), num_rows)).clamp(min=0)
    seen_start, seen_end = ranges(num_seen)
    num_words = -(-vocab_size // 32)
    bias_start, bias_end = ranges(num_biases)
    values = torch.randn(num_biases, generator=rng)
    values[integers(num_biases, 40)] = -torch.inf
    return EditTensors(
        rows=torch.randperm(num_logits, generator=rng)[:num_rows],
        repetition=numbers(0.5, 2.0),
        frequency=numbers(-2.0, 2.0),
        presence=numbers(-2.0, 2.0),
        prompt_row=torch.tensor([i // 4 if i % 4 > 1 else -1 for i in range(num_rows)]),
        seen_start=seen_start,
        seen_end=seen_end,
        new_start=new_start,
        new_end=new_end,
        bias_start=bias_start,
        bias_end=bias_end,
        allowed_row=torch.tensor([i // 2 if i % 2 else -1 for i in range(num_rows)]),
        seen_ids=torch.randperm(vocab_size, generator=rng)[:num_seen].int(),
        seen_counts=1 + integers(4, num_seen).int(),
        bias_ids=integers(vocab_size, num_biases).int(),
        bias_values=values,
        allowed=torch.randint(-(2**31), 2**31, (num_rows // 2, num_words), generator=rng).int(),
        prompt_masks=torch.randint(-(2**31), 2**31, (num_rows // 4, num_words), generator=rng).int(),
    )


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_edited_rows_are_those_of_the_plain_function(vocab_size: int, dtype: torch.dtype, device: str) -> None:
    from nanovllm.kernels.logit_edits import edit_logits as kernel

    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[2, ::3] = -torch.inf
    input_ids = torch.randint(8, (11,), generator=torch.Generator().manual_seed(1))
    for seed in range(2 if INTERPRETED and not RUNS_ALL else 4):
        edits = random_edits(vocab_size, num_rows=8, num_logits=9, num_inputs=11, seed=seed)
        expected = edit_logits(logits, edits, input_ids)
        found = kernel(logits.to(device), EditTensors(*(t.to(device) for t in edits)), input_ids.to(device))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-5)
        changed = ~torch.isclose(expected, logits[edits.rows].float())
        assert changed.any(dim=1).all()


@on_device
def test_row_without_edits_is_copied(device: str) -> None:
    from nanovllm.kernels.logit_edits import edit_logits as kernel

    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(0)).to(device)
    none, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
    empty = none[:0]
    masks = torch.zeros(0, 3, dtype=torch.int32, device=device)
    fields = dict.fromkeys(EditTensors._fields, none)
    fields |= {"rows": none + 2, "prompt_row": none - 1, "allowed_row": none - 1, "new_end": none + 1}
    fields |= {"repetition": one, "frequency": one * 0, "presence": one * 0, "bias_values": empty.float()}
    fields |= dict.fromkeys(("seen_ids", "seen_counts", "bias_ids"), empty.int())
    edits = EditTensors(**fields | {"allowed": masks, "prompt_masks": masks})
    assert torch.equal(kernel(logits, edits, none)[0], logits[2])
