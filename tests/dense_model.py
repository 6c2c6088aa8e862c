"""A model run over one sequence with the plainest attention there is: no cache blocks, no engine."""

from pathlib import Path

import torch

from nanovllm.distributed import TPGroup
from nanovllm.loader import load_weights
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.registry import build_model


class DenseAttention:
    """StepAttention over one sequence, keeping every key and value."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        if layer in self.cache:
            k_TKD = torch.cat((self.cache[layer][0], k_TKD))
            v_TKD = torch.cat((self.cache[layer][1], v_TKD))
        self.cache[layer] = (k_TKD, v_TKD)
        num_new, num_keys = len(q_THD), len(k_TKD)
        mask = torch.ones(num_new, num_keys, dtype=torch.bool).tril(num_keys - num_new)
        out = torch.nn.functional.scaled_dot_product_attention(
            q_THD.transpose(0, 1), k_TKD.transpose(0, 1), v_TKD.transpose(0, 1), attn_mask=mask, enable_gqa=True
        )
        return out.transpose(0, 1)


def load_model(
    directory: Path, tp: TPGroup | None = None, *, max_model_len: int = 128, dtype: torch.dtype = torch.float32
) -> CausalLM:
    config, path = ModelConfig.from_pretrained(str(directory))
    model = build_model(config, tp or TPGroup(), max_model_len=max_model_len, dtype=dtype, device="cpu")
    load_weights(model, path)
    return model


def run_logits(model: CausalLM, token_ids: list[int], chunk: int = 1000) -> torch.Tensor:
    """Logits of every position of a prompt that is run in chunks."""
    attn, hidden = DenseAttention(), []
    for start in range(0, len(token_ids), chunk):
        ids = torch.tensor(token_ids[start : start + chunk])
        positions = torch.arange(start, start + len(ids))
        rope_lens = torch.full((len(ids),), len(token_ids)) if model.needs_rope_lens else None
        hidden.append(model(ids, positions, attn, rope_lens))
    return model.compute_logits(torch.cat(hidden))


def run_greedy(model: CausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    attn, token_ids, generated = DenseAttention(), torch.tensor(prompt), []
    position = 0
    for _ in range(num_tokens):
        positions = torch.arange(position, position + len(token_ids))
        rope_lens = (positions + 1).clamp(min=len(prompt))
        hidden = model(token_ids, positions, attn, rope_lens)
        token_ids = model.compute_logits(hidden[-1:]).argmax(-1)
        position += len(positions)
        generated.append(int(token_ids))
    return generated


def random_prompt(num_tokens: int, vocab_size: int = 320, seed: int = 1) -> list[int]:
    return torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
