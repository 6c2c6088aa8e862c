"""A model run over one sequence with the plainest attention there is: no cache blocks, no engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.tp_group import TPGroup
from nanovllm.kernels.state_tensors import HostStateRows, LayerStates, StateRows, StateSave
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import build_model, load_weights
from nanovllm.plan.kv_spec import kv_heads_of_rank


def state_rows(
    num_tokens: Sequence[int],
    source_slots: Sequence[int],
    target_slots: Sequence[int],
    num_replayed: Sequence[int],
    num_guesses: Sequence[int],
    saves: Sequence[StateSave] = (),
    device: torch.device | str | None = None,
) -> StateRows:
    """Rows of these numbers, on the device and on the host."""
    numbers = num_tokens, source_slots, target_slots, num_replayed, num_guesses
    tensors = [torch.tensor(each, dtype=torch.int32, device=device) for each in numbers]
    cu_seqlens = torch.nn.functional.pad(tensors[0].cumsum(0, dtype=torch.int32), (1, 0))
    return StateRows(cu_seqlens, *tensors[1:], max(num_tokens), HostStateRows(*map(tuple, numbers), tuple(saves)))


class DenseAttention:
    """StepAttention over one sequence of up to `num_tokens`; `positions` are those of the tokens being run.

    Recurrent layers have NUM_SLOTS slots for states, whose content is arbitrary at first. By default the sequence keeps
    its state in slot 1; `rows` says what a step does instead.
    """

    NUM_SLOTS, MAX_GUESSES = 4, 5

    def __init__(self, model: CausalLM, num_tokens: int) -> None:
        config, tp = model.config, model.lm_head.tp
        dtype = model.dtype

        def cache(kind: str, num_layers: int) -> torch.Tensor:
            heads = config.attention(kind)
            shape = (2, num_layers, 1, num_tokens, len(kv_heads_of_rank(heads.num_kv_heads, tp.size)), heads.head_dim)
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self.config = config
        self.k_cache, self.v_cache = cache("attention", config.num_attention_layers + 1)
        if config.window is not None:
            self.window_cache = cache("window", config.num_window_layers)
        self.positions = torch.arange(0)
        self.rows: StateRows | None = None
        if config.recurrent is not None:
            r = config.recurrent
            slots, channels, heads = (
                (self.NUM_SLOTS, config.num_recurrent_layers),
                r.conv_channels // tp.size,
                r.num_value_heads // tp.size,
            )
            self.conv = torch.randn(*slots, r.conv_kernel - 1, channels).to(dtype)
            self.matrix = torch.randn(*slots, heads, r.key_head_dim, r.value_head_dim)
            self.pending = torch.randn(*slots, self.MAX_GUESSES, channels + 2 * heads).to(dtype)

    def layer_memory(self, layer: int) -> Any:
        if self.config.window is not None:
            return DenseWindow(self, layer)
        rows = self.rows
        if rows is None:
            rows = state_rows([len(self.positions)], [1 if self.positions[0] else -1], [1], [0], [0])
        return LayerStates(self.conv[:, layer], self.matrix[:, layer], self.pending[:, layer], rows)

    def cells(self, layer: int) -> KVCells:
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.positions)

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        return self.attend_to(self.k_cache[layer], self.v_cache[layer], q_THD, "attention", None, sinks_H)

    def attend_to(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        q_THD: torch.Tensor,
        kind: str,
        window: int | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of the last T tokens, each to the last `window` tokens up to itself, or to all."""
        num_new, num_keys, scale = len(q_THD), int(self.positions[-1]) + 1, self.config.attention(kind).scale
        q, k, v = q_THD.transpose(0, 1), *(cache[0, :num_keys].transpose(0, 1) for cache in (k_cache, v_cache))
        mask = torch.ones(num_new, num_keys, dtype=torch.bool, device=q_THD.device).tril(num_keys - num_new)
        if window is not None:
            mask = mask.triu(num_keys - num_new - window + 1)
        if sinks_H is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True, scale=scale
            )
            return out.transpose(0, 1)
        k, v = (each.repeat_interleave(len(q) // len(each), 0).float() for each in (k, v))
        scores = (q.float() @ k.mT * scale).masked_fill(~mask, float("-inf"))
        sinks = sinks_H.float()[:, None, None].expand(-1, num_new, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return (weights @ v).transpose(0, 1).to(q_THD.dtype)


class DenseWindow:
    """The WindowKeys of a layer, in a cache of all tokens."""

    def __init__(self, attn: DenseAttention, layer: int) -> None:
        self.attn, (self.k_cache, self.v_cache) = attn, attn.window_cache[:, layer]

    @property
    def cells(self) -> KVCells:
        return KVCells(self.k_cache, self.v_cache, self.attn.positions)

    def attend(self, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        window = self.attn.config.window
        assert window is not None
        return self.attn.attend_to(self.k_cache, self.v_cache, q_THD, "window", window.num_tokens, sinks_H)


def load_model(
    directory: Path,
    tp: TPGroup | None = None,
    *,
    max_model_len: int = 128,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    quantize_head: str | None = None,
    load_format: str = "auto",
    device: str = "cpu",
    with_mtp: bool = False,
) -> CausalLM:
    stored, path = load_config(str(directory))
    model = build_model(
        stored.quantized(quantization, quantize_head, tp.size if tp else 1),
        tp or TPGroup(),
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        directory=None if load_format == "dummy" else path,
        with_mtp=with_mtp,
    )
    load_weights(model, path, load_format=load_format)
    return model


def run_logits(model: CausalLM, token_ids: list[int], chunk: int = 1000) -> torch.Tensor:
    """Logits of every position of a prompt that is run in chunks."""
    attn, hidden = DenseAttention(model, len(token_ids)), []
    for start in range(0, len(token_ids), chunk):
        ids = torch.tensor(token_ids[start : start + chunk], device=model.device)
        positions = attn.positions = torch.arange(start, start + len(ids), device=model.device)
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
