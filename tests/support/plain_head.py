"""The draft head in plain torch, of transformers' layer, norm and rope; and a model whose head is often right."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import reference_model


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

    @torch.no_grad()
    def hidden(self, text: list[int]) -> torch.Tensor:
        """The model's hidden states of a text."""
        return self.decoder(torch.tensor([text])).last_hidden_state[0]

    @torch.no_grad()
    def guess(self, text: list[int], hidden: torch.Tensor, num_guesses: int) -> tuple[list[int], torch.Tensor]:
        """The greedy guesses of what follows a text, one after another, and the logits of all pairs and guesses.

        `hidden`: of all tokens but the last.
        """
        token_ids, guesses = torch.tensor(text[1:]), []
        while True:
            out = self(token_ids, hidden)
            if len(guesses) == num_guesses:
                return guesses, self.model.lm_head(out)
            guesses.append(int(self.model.lm_head(out[-1]).argmax()))
            hidden = torch.cat((hidden, out[-1:]))
            token_ids = torch.cat((token_ids, torch.tensor(guesses[-1:])))


def let_head_agree(directory: Path, scale: float) -> Path:
    """Change a tiny model so that a token depends mostly on the one before it, and the head on its token.

    `scale`: of what all layers add. With 0, every guess is right. The head's layer adds more, since what it adds to is
    larger than embeddings are.
    """
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensor *= scale * 30 if name.startswith("mtp.") else scale
    size = tensors["mtp.fc.weight"].shape[0]
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(size), tensors["mtp.fc.weight"][:, size:] * scale * 30), 1)
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()  # to which the norm adds one
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return directory
