"""The draft head against a plain one that is built of transformers' layer, norm and rope."""

from pathlib import Path

import pytest
import torch
from dense_model import DenseAttention, load_model, random_prompt, run_logits
from plain_head import PlainHead
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tiny_models import HYBRIDS, write_tiny_model

from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.models.decoder import CausalLM

PROMPT = random_prompt(40)
NUM_GUESSES = 4


def our_guesses(model: CausalLM, chunk: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of the head for every pair of the prompt, run in pieces, and of further guesses; and these."""
    attn = DenseAttention(model, len(PROMPT) + NUM_GUESSES)
    ids = attn.positions = torch.tensor(PROMPT)
    attn.positions = torch.arange(len(ids))
    hidden, logits, guesses = model(ids, attn.positions, attn), [], []
    for start in range(0, len(PROMPT) - 1, chunk):
        attn.positions = torch.arange(start, min(start + chunk, len(PROMPT) - 1))
        out = model.draft(ids[attn.positions + 1], attn.positions, hidden[attn.positions], attn)
        logits.append(model.compute_logits(out))
    for _ in range(NUM_GUESSES):
        token = logits[-1][-1:].argmax(-1)
        guesses.append(int(token))
        attn.positions = attn.positions[-1:] + 1
        out = model.draft(token, attn.positions, out[-1:], attn)
        logits.append(model.compute_logits(out))
    return torch.cat(logits), guesses


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_guesses_are_those_of_the_plain_head(tmp_path: Path, architecture: str) -> None:
    write_tiny_model(tmp_path, architecture, with_mtp=True)
    head = PlainHead(tmp_path)
    guesses, expected = head.guess(PROMPT, head.hidden(PROMPT[:-1]), NUM_GUESSES)

    def check(tp: TPGroup) -> None:
        model = load_model(tmp_path, tp, with_mtp=True)
        for chunk in (100, 7):
            logits, ours = our_guesses(model, chunk)
            assert ours == guesses
            assert (logits - expected).abs().max() < 2e-4

    check(TPGroup())
    run_ranks(2, check)


def test_head_is_loaded_only_if_it_is_wanted_and_has_to_be_complete(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3_5", with_mtp=True)
    with_head = load_model(tmp_path, with_mtp=True)
    assert with_head.config.has_mtp and with_head.mtp is not None and load_model(tmp_path).mtp is None
    assert torch.equal(run_logits(with_head, PROMPT), run_logits(load_model(tmp_path), PROMPT))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.pre_fc_norm_embedding.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"misses weights: mtp\.pre_fc_norm_embedding\.weight.*not complete"):
        load_model(tmp_path, with_mtp=True)
