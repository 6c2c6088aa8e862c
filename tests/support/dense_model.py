"""A model run over one sequence with the plainest attention there is: no cache blocks, no engine."""

from collections.abc import Sequence
from pathlib import Path

import torch

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.device.tp_group import TPGroup
from nanovllm.kernels.state_tensors import HostStateRows, LayerStates, StateRows, StateSave
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import build_model, load_weights


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
        config, layers = model.config, model.model.layers
        (qkv_proj, *_) = [layer.self_attn.qkv_proj for layer in layers if layer.self_attn is not None]
        shape = (2, config.num_attention_layers + 1, 1, num_tokens, qkv_proj.heads_per_part[1], qkv_proj.head_dim)
        dtype = model.dtype
        self.k_cache, self.v_cache = torch.zeros(shape, dtype=dtype)
        self.windows = [DenseWindow(self, config) for _ in range(config.num_window_layers)]
        self.positions = torch.arange(0)
        self.rows: StateRows | None = None
        if config.recurrent is not None:
            r, tp = config.recurrent, model.lm_head.tp.size
            slots, channels, heads = (
                (self.NUM_SLOTS, config.num_recurrent_layers),
                r.conv_channels // tp,
                r.num_value_heads // tp,
            )
            self.conv = torch.randn(*slots, r.conv_kernel - 1, channels).to(dtype)
            self.matrix = torch.randn(*slots, heads, r.key_head_dim, r.value_head_dim)
            self.pending = torch.randn(*slots, self.MAX_GUESSES, channels + 2 * heads).to(dtype)

    def layer_memory(self, layer: int) -> "LayerStates | DenseWindow":
        if self.windows:
            return self.windows[layer]
        rows = self.rows
        if rows is None:
            rows = state_rows([len(self.positions)], [1 if self.positions[0] else -1], [1], [0], [0])
        return LayerStates(self.conv[:, layer], self.matrix[:, layer], self.pending[:, layer], rows)

    def cells(self, layer: int) -> KVCells:
        return KVCells(self.k_cache[layer], self.v_cache[layer], self.positions)

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        num_keys = int(self.positions[-1]) + 1
        return attend_densely(q_THD, self.k_cache[layer, 0, :num_keys], self.v_cache[layer, 0, :num_keys], sinks_H)


def attend_densely(
    q_THD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of the last T of N tokens, each to the last `window` tokens up to itself, or to all."""
    num_new, num_keys = len(q_THD), len(k_NKD)
    mask = torch.ones(num_new, num_keys, dtype=torch.bool).tril(num_keys - num_new)
    if window is not None:
        mask = mask.triu(num_keys - num_new - window + 1)
    q_HTD, k_KND, v_KND = (each.transpose(0, 1) for each in (q_THD, k_NKD, v_NKD))
    if sinks_H is None:
        out_HTD = torch.nn.functional.scaled_dot_product_attention(q_HTD, k_KND, v_KND, attn_mask=mask, enable_gqa=True)
        return out_HTD.transpose(0, 1)
    k_HND, v_HND = (each.repeat_interleave(len(q_HTD) // len(each), 0).float() for each in (k_KND, v_KND))
    scores_HTN = (q_HTD.float() @ k_HND.mT * q_HTD.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    sinks_HT1 = sinks_H.float()[:, None, None].expand(-1, num_new, 1)
    weights_HTN = torch.cat((scores_HTN, sinks_HT1), -1).softmax(-1)[..., :-1]
    return (weights_HTN @ v_HND).transpose(0, 1).to(q_THD.dtype)


class DenseWindow:
    """WindowKeys of a layer of a DenseAttention."""

    def __init__(self, attn: DenseAttention, config: ModelConfig) -> None:
        self.attn, self.window = attn, config.window
        self.k_cache, self.v_cache = torch.zeros_like(attn.k_cache[0]), torch.zeros_like(attn.v_cache[0])

    @property
    def cells(self) -> KVCells:
        return KVCells(self.k_cache, self.v_cache, self.attn.positions)

    def attend(self, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        num_keys = int(self.attn.positions[-1]) + 1
        k_NKD, v_NKD = self.k_cache[0, :num_keys], self.v_cache[0, :num_keys]
        return attend_densely(q_THD, k_NKD, v_NKD, sinks_H, self.window.num_tokens)


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
    stored, path = ModelConfig.from_pretrained(str(directory))
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
