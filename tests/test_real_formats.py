"""What formats of weights lose on a real model, on a small part of the texts of benchmarks/real_formats.py."""

import pytest
import torch

from benchmarks.real_formats import load_reference, measure
from benchmarks.real_model import model_file
from nanovllm.checkpoint.quantization import KL_ON_SMOLLM2, QUANTIZATIONS

NUM_TOKENS = 64  # of each of eight texts
LOSSES = {"int8": 0.0016, "int6": 0.0153, "int5": 0.0598, "int4": 0.1692, "fp8": 0.0215}


def test_every_format_of_weights_alone_has_a_loss() -> None:
    assert set(KL_ON_SMOLLM2) == set(QUANTIZATIONS) - {"fp8_dynamic"}


@pytest.mark.slow
def test_losses_on_a_real_model_are_as_documented() -> None:
    for row in measure(list(LOSSES), model_file(), NUM_TOKENS):
        assert row["kl"] == pytest.approx(LOSSES[row["format"]], rel=0.1), row
        assert row["format"] != "int4" or row["bits"] <= 4.6


@pytest.mark.slow
def test_shuffled_features_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong order would make every format look bad."""
    ids = torch.arange(1000, 1032)[None]
    shuffled, _ = load_reference(model_file())
    monkeypatch.setattr("benchmarks.real_formats._shuffle", lambda model: None)
    plain, _ = load_reference(model_file())
    with torch.inference_mode():
        expected, got = (model(ids).logits for model in (plain, shuffled))
    assert not torch.equal(plain.model.embed_tokens.weight, shuffled.model.embed_tokens.weight)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
