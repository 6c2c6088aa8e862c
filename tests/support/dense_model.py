"""A model run over one sequence with the plainest attention there is: no cache blocks, no engine."""

from pathlib import Path

import torch

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import build_model, load_weights


class DenseAttention:
    """StepAttention over one sequence of up to `num_tokens`; `positions` are those of the tokens being run."""

    def __init__(self, model: CausalLM, num_tokens: int) -> None:
        qkv_proj = model.model.layers[0].self_attn.qkv_proj
        shape = (2, model.config.num_layers, 1, num_tokens, qkv_proj.heads_per_part[1], qkv_proj.head_dim)
        self.k_cache, self.v_cache = torch.zeros(shape, dtype=qkv_proj.weight.dtype)
        self.positions = torch.arange(0)

    def cells(self, layer: int) -> KVCells:
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.positions)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        num_new, num_keys = len(q_THD), int(self.positions[-1]) + 1
        k, v = (cache[layer, 0, :num_keys].transpose(0, 1) for cache in (self.k_cache, self.v_cache))
        mask = torch.ones(num_new, num_keys, dtype=torch.bool).tril(num_keys - num_new)
        out = torch.nn.functional.scaled_dot_product_attention(
            q_THD.transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True
        )
        return out.transpose(0, 1)


def load_model(
    directory: Path,
    tp: TPGroup | None = None,
    *,
    max_model_len: int = 128,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    load_format: str = "auto",
) -> CausalLM:
    stored, path = ModelConfig.from_pretrained(str(directory))
    config = stored.quantized(quantization)
    model = build_model(config, tp or TPGroup(), max_model_len=max_model_len, dtype=dtype, device="cpu")
    load_weights(model, path, load_format=load_format)
    return model


def run_logits(model: CausalLM, token_ids: list[int], chunk: int = 1000) -> torch.Tensor:
    """Logits of every position of a prompt that is run in chunks."""
    attn, hidden = DenseAttention(model, len(token_ids)), []
    for start in range(0, len(token_ids), chunk):
        ids = torch.tensor(token_ids[start : start + chunk])
        positions = attn.positions = torch.arange(start, start + len(ids))
        rope_lens = torch.full((len(ids),), len(token_ids)) if model.needs_rope_lens else None
        hidden.append(model(ids, positions, attn, rope_lens))
    return model.compute_logits(torch.cat(hidden))


def run_greedy(model: CausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    attn = DenseAttention(model, len(prompt) + num_tokens)
    token_ids: torch.Tensor = torch.tensor(prompt)
    generated = []
    position = 0
    for _ in range(num_tokens):
        positions = attn.positions = torch.arange(position, position + len(token_ids))
        rope_lens = (positions + 1).clamp(min=len(prompt))
        hidden = model(token_ids, positions, attn, rope_lens)
        token_ids = model.compute_logits(hidden[-1:]).argmax(-1)
        position += len(positions)
        generated.append(int(token_ids))
    return generated


def random_prompt(num_tokens: int, vocab_size: int = 320, seed: int = 1) -> list[int]:
    return torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
