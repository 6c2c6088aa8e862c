"""MTPHead: the head with which some checkpoints draft, from multi-token prediction in training. One layer of attention.

It guesses the token after the next one, from the model's hidden state of a token and the token that came after it. Its
keys and values belong to such pairs; the first is the hidden state of token 0 with token 1. For a further guess its
own output takes the place of the hidden state, and its guess that of the token.
"""

from typing import cast

import torch
from torch import nn

from nanovllm.attention.base import StepAttention
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.models.decoder import DecoderLayer, new_norm, quantization_of


class MTPHead(nn.Module):
    """Its modules have the names that they have in the checkpoint. Embedding and output head are the model's."""

    def __init__(self, config: ModelConfig, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = new_norm(config, dtype)
        self.pre_fc_norm_hidden = new_norm(config, dtype)
        self.fc = RowParallelLinear(
            2 * config.hidden_size,
            config.hidden_size,
            bias=False,
            tp=tp,
            dtype=dtype,
            quantization=quantization_of(config, "mtp", "fc"),
        )
        is_sparse, number = config.experts is not None, config.num_attention_layers
        self.layers = nn.ModuleList([DecoderLayer(config, "mtp.layers.0", "attention", number, is_sparse, tp, dtype)])
        self.norm = new_norm(config, dtype)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        attn: StepAttention,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Embedded tokens [T, hidden_size], and for each the hidden state of the token before it, after the last norm
        -> hidden states [T, hidden_size], or [S, hidden_size] if `rows` [S] selects tokens. Hot: once per guess.

        It calls `attn` with the number of the model's attention layers.
        """
        joined = torch.cat((self.pre_fc_norm_embedding(embedded)[0], self.pre_fc_norm_hidden(hidden)[0]), dim=-1)
        first = self.fc.tp.rank * self.fc.weight.shape[1]
        out = self.fc(joined[:, first : first + self.fc.weight.shape[1]].contiguous())
        out, residual = self.layers[0](out, None, cos_sin, attn, rows)
        return cast(torch.Tensor, self.norm(out, residual)[0])
