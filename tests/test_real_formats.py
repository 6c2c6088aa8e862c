"""What formats of weights lose on a real model, on a small part of the texts of benchmarks/real_formats.py."""

import pytest
import torch

from benchmarks.real_formats import load_reference, measure, shuffle
from benchmarks.real_model import model_file
from nanovllm.checkpoint.quantization import KL_ON_SMOLLM2, QUANTIZATIONS

NUM_TOKENS = 64  # of each of eight texts
LOSSES = {"int8": 0.0016, "int6": 0.0153, "int5": 0.0598, "int4": 0.1692, "fp8": 0.0215}


def test_every_format_of_weights_alone_has_a_loss() -> None:
    assert set(KL_ON_SMOLLM2) == set(QUANTIZATIONS) - {"fp8_dynamic"}


@pytest.mark.slow
def test_losses_on_a_real_model_are_as_documented() -> None:
    """Shuffled features change no result: a wrong order would make every format look bad."""
    model, tokenizer = load_reference(model_file())
    ids, plain = torch.arange(1000, 1032)[None], model.model.embed_tokens.weight.clone()
    with torch.inference_mode():
        expected = model(ids).logits
        shuffle(model)
        got = model(ids).logits
    assert not torch.equal(model.model.embed_tokens.weight, plain)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    for row in measure(list(LOSSES), model, tokenizer, NUM_TOKENS):
        assert row["kl"] == pytest.approx(LOSSES[row["format"]], rel=0.1), row
        assert row["format"] != "int4" or row["bits"] <= 4.6
