"""The draft head against a plain one that is built of transformers' layer, norm and rope."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import DenseAttention, load_model, random_prompt, run_logits
from safetensors.torch import load_file
from thread_ranks import run_ranks
from tiny_models import HYBRIDS, reference_model, write_tiny_model

from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.models.decoder import CausalLM

PROMPT = random_prompt(40)
NUM_GUESSES = 4


class PlainHead:
    """fc(norm(embedding), norm(hidden)), a layer over all pairs so far, norm: without a cache."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = reference_model(directory)
        self.decoder = self.model.model
        self.config = self.decoder.config
        self.config._attn_implementation = "eager"
        number = self.config.layer_types.index("full_attention")
        norm_class, layer_class = type(self.decoder.norm), type(self.decoder.layers[number])
        weights = load_file(directory / "model.safetensors")
        self.fc = weights["mtp.fc.weight"]
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = norm_class(self.config.hidden_size, eps=self.config.rms_norm_eps)
            self.norms[name].weight.data = weights[f"mtp.{name}.weight"]
        self.layer = layer_class(self.config, number)
        given = {n.removeprefix("mtp.layers.0."): each for n, each in weights.items() if n.startswith("mtp.layers.0.")}
        if "mlp.experts.0.up_proj.weight" in given:
            numbers = range(self.config.num_experts)
            gate, up, down = (
                torch.stack([given.pop(f"mlp.experts.{expert}.{kind}_proj.weight") for expert in numbers])
                for kind in ("gate", "up", "down")
            )
            given |= {"mlp.experts.gate_up_proj": torch.cat((gate, up), 1), "mlp.experts.down_proj": down}
        self.layer.load_state_dict(given)

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.norms["pre_fc_norm_embedding"](self.decoder.embed_tokens(token_ids))
        x = torch.cat((embedded, self.norms["pre_fc_norm_hidden"](hidden)), -1) @ self.fc.t()
        positions = torch.arange(len(token_ids))[None]
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        cos_sin = self.decoder.rotary_emb(x[None], positions[None].expand(3, 1, -1))
        out = self.layer(x[None], position_embeddings=cos_sin, attention_mask=mask, position_ids=positions)
        return self.norms["norm"](out[0])  # type: ignore[no-any-return]


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
    with torch.no_grad():
        hidden = head.decoder(torch.tensor([PROMPT])).last_hidden_state[0, :-1]
        token_ids, guesses = torch.tensor(PROMPT[1:]), []
        for _ in range(NUM_GUESSES):
            out = head(token_ids, hidden)
            guesses.append(int(head.model.lm_head(out[-1]).argmax()))
            hidden = torch.cat((hidden, out[-1:]))
            token_ids = torch.cat((token_ids, torch.tensor(guesses[-1:])))
        expected = head.model.lm_head(head(token_ids, hidden))

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
    write_tiny_model(tmp_path / "without", "qwen3_5")
    (tmp_path / "without" / "config.json").write_text((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"misses weights: mtp\.pre_fc_norm_embedding\.weight"):
        load_model(tmp_path / "without", with_mtp=True)
