"""The decoder that all supported architectures share: embedding, layers of attention to all keys or to a window, or of
a recurrent kind, each with a gated or sparse MLP, head. Gemma's layers are in gemma.py.

Every rank runs the decoder on the rank's heads and features. The argument `attn` attends to the step's keys.
Shapes: T packed tokens, H query heads, K kv heads of this rank, D head dim, S sampled rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from nanovllm.attention.base import StepAttention, WindowKeys
from nanovllm.checkpoint.model_config import MAX_MLP_TOKENS, ModelConfig
from nanovllm.checkpoint.model_layout import Linear, model_layout
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.delta_net import GatedDeltaNet
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    GateUpParallelLinear,
    HasWeightShards,
    NamedShard,
    QKVParallelLinear,
    RowParallelLinear,
    WeightShard,
    divide,
    gate_heads,
    takes_codes,
)
from nanovllm.layers.moe import CpuExpertLayers, Experts, Router, SparseMLP
from nanovllm.layers.packed_weight import Activations, new_parameter
from nanovllm.layers.rotary_embedding import RotaryEmbedding, rotary_order, rotate_and_store
from nanovllm.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from nanovllm.models.gemma import GemmaLayer, GemmaRouter, link_layers


class Builder:
    """Builds the parts of a model on one rank, as the model's layout lists them (checkpoint/model_layout.py)."""

    def __init__(
        self, config: ModelConfig, tp: TPGroup, dtype: torch.dtype, cpu_experts: CpuExpertLayers | None = None
    ) -> None:
        self.config, self.tp, self.dtype, self.cpu_experts = config, tp, dtype, cpu_experts
        self._linears = model_layout(config).linears()

    def linear(self, name: str) -> Linear:
        return self._linears[name]

    def formats(self, name: str) -> tuple[Quantization | None, ...]:
        """Return the format of each layer that is stacked in the weight, or None if it is not quantized."""
        return self._linears[name].formats(self.config)

    def settings(self, name: str) -> dict[str, Any]:
        """Return the arguments of a linear layer that do not depend on its class."""
        return {"bias": self._linears[name].bias, "tp": self.tp, "dtype": self.dtype}

    def row_parallel(self, name: str) -> RowParallelLinear:
        linear, (quantization,) = self._linears[name], self.formats(name)
        return RowParallelLinear(linear.columns, linear.rows[0], quantization=quantization, **self.settings(name))

    def gate_up(self, name: str) -> GateUpParallelLinear:
        linear = self._linears[name]
        layer = GateUpParallelLinear(linear.columns, linear.rows, formats=self.formats(name), **self.settings(name))
        layer.activation = self.config.activation
        return layer

    def norm(self, size: int | None = None, order: Sequence[slice] | None = None) -> RMSNorm:
        """Return a norm of `size` features, by default of the hidden state's size."""
        c = self.config
        return RMSNorm(
            size or c.hidden_size,
            c.rms_norm_eps,
            dtype=self.dtype,
            adds_one=c.norms_add_one,
            in_fp32=c.gemma is not None,
            order=order,
        )


class Attention(nn.Module):
    """An attention layer. name: the name in the checkpoint. kind: attention or window. layer: the number among the
    layers of this kind.
    """

    def __init__(self, build: Builder, name: str, kind: str, layer: int) -> None:
        super().__init__()
        config, heads = build.config, build.config.attention(kind)
        self.layer, self.has_window = layer, kind == "window"
        order = rotary_order(heads.head_dim, heads.rotary_dim)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            heads.head_dim,
            config.num_heads,
            heads.num_kv_heads,
            gated=config.attention_gate,
            head_rows=order,
            v_from_k=config.v_from_k(kind),
            formats=build.formats(f"{name}.qkv_proj"),
            **build.settings(f"{name}.qkv_proj"),
        )
        self.o_proj = build.row_parallel(f"{name}.o_proj")
        self.tp, self.num_heads = build.tp, config.num_heads
        num_local = divide(config.num_heads, build.tp.size, "num_attention_heads")
        self.sinks = new_parameter(num_local, dtype=torch.float32) if config.has_sinks else None
        self.eps = config.rms_norm_eps
        self.qk_norm, self.is_gated = config.qk_norm, config.attention_gate
        self.norms_v = config.gemma is not None and config.gemma.norms_v
        if config.qk_norm:
            self.q_norm = build.norm(heads.head_dim, order)
            self.k_norm = build.norm(heads.head_dim, order)

    def forward(
        self, hidden: Activations, cos_sin: torch.Tensor, attn: StepAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Map [T, hidden_size] -> [T, hidden_size], or [S, hidden_size] if `rows` [S] selects the tokens that attend.

        K and V of all tokens are written to the cache.
        """
        q, k, v, gates = self.qkv_proj.split(self.qkv_proj(hidden))
        q_weight, k_weight = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm else (None, None)
        window: WindowKeys | None = attn.layer_memory(self.layer) if self.has_window else None
        cells = attn.cells(self.layer) if window is None else window.cells
        q = rotate_and_store(q, k, v, q_weight, k_weight, self.eps, cos_sin, cells, norms_v=self.norms_v)
        if rows is not None:
            gates = gates[rows]
            q = q[rows] if window is None else q
        if not self.is_gated:
            del gates
        del k, v  # without gates, this frees the memory of the qkv product during attention
        if window is None:
            out = attn.attend(self.layer, q, self.sinks).flatten(1)
        else:
            out = window.attend(q, self.sinks).flatten(1)
            out = out if rows is None else out[rows]
        return self.o_proj(gate_heads(out, gates.flatten(1)) if self.is_gated else out)

    def skip(self, hidden: torch.Tensor, attn: StepAttention) -> None:
        """Let attention consume the blocks that are streamed for this layer."""
        if not self.has_window:
            attn.cells(self.layer)
            attn.attend(self.layer, hidden.new_empty(0, 1, 1))

    def weight_shards(self) -> Iterator[NamedShard]:
        if self.sinks is not None:
            own = slice(self.tp.rank * len(self.sinks), (self.tp.rank + 1) * len(self.sinks))
            yield NamedShard(0, "sinks", WeightShard(self.sinks, (self.num_heads,), (own,)))


class MLP(nn.Module):
    """A dense MLP. name: the name in the checkpoint."""

    def __init__(self, build: Builder, name: str) -> None:
        super().__init__()
        self.gate_up_proj = build.gate_up(f"{name}.gate_up_proj")
        self.down_proj = build.row_parallel(f"{name}.down_proj")
        self.gate_up_proj.makes_codes = takes_codes(self.gate_up_proj.weight) and takes_codes(self.down_proj.weight)

    def forward(self, hidden: Activations) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(hidden))


class DecoderLayer(nn.Module):
    """A layer. name: the name in the checkpoint. kind: attention, window or recurrent. number: among the layers of this
    kind.
    """

    def __init__(self, build: Builder, name: str, kind: str, number: int, *, is_sparse: bool) -> None:
        super().__init__()
        self.has_window = kind == "window"
        self.input_layernorm = build.norm()
        self.self_attn: Attention | None = None
        self.linear_attn: GatedDeltaNet | None = None
        if kind == "recurrent":
            self.linear_attn = _delta_net(build, f"{name}.linear_attn", number)
        else:
            self.self_attn = Attention(build, f"{name}.self_attn", kind, number)
        self.post_attention_layernorm = build.norm()
        self.mlp = _sparse_mlp(build, f"{name}.mlp") if is_sparse else MLP(build, f"{name}.mlp")
        if self.self_attn is not None:
            self.input_layernorm.makes_codes = takes_codes(self.self_attn.qkv_proj.weight)
        if isinstance(self.mlp, MLP):
            self.post_attention_layernorm.makes_codes = takes_codes(self.mlp.gate_up_proj.weight)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor,
        attn: StepAttention,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's output and the residual. The next norm adds both, in one kernel."""
        hidden, residual = self.input_layernorm(hidden, residual)
        mixer = self.self_attn or self.linear_attn
        assert mixer is not None, "a layer is of one kind"
        hidden = mixer(hidden, cos_sin, attn, rows)
        if rows is not None:
            residual = residual[rows]
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        parts = [self.mlp(part) for part in hidden.split(MAX_MLP_TOKENS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts), residual

    def skip(self, hidden: torch.Tensor, attn: StepAttention) -> None:
        """Let attention consume the blocks that are streamed for this layer."""
        if self.self_attn is not None:
            self.self_attn.skip(hidden, attn)


def _delta_net(build: Builder, name: str, number: int) -> GatedDeltaNet:
    config = build.config
    assert config.recurrent is not None, "the layer is recurrent"
    formats = [build.formats(f"{name}.{each}") for each in ("in_proj_qkvz", "in_proj_ba", "out_proj")]
    return GatedDeltaNet(
        config.hidden_size, config.recurrent, number, config.rms_norm_eps, build.tp, build.dtype, formats
    )


def _gemma_layer(build: Builder, name: str, kind: str, number: int, *, is_sparse: bool) -> GemmaLayer:
    config, router, experts = build.config, None, None
    assert config.gemma is not None, "the layers are Gemma's"
    if is_sparse:
        assert config.experts is not None, "the layer has experts"
        router = GemmaRouter(
            config.hidden_size, config.rms_norm_eps, Router(config.hidden_size, config.experts, build.dtype)
        )
        experts = _experts(build, name)
    scalar = new_parameter(1, dtype=build.dtype) if config.gemma.has_scalars else None
    attention = Attention(build, f"{name}.self_attn", kind, number)
    return GemmaLayer(build.norm, attention, MLP(build, f"{name}.mlp"), router, experts, scalar)


def _sparse_mlp(build: Builder, name: str) -> SparseMLP:
    config, mixture = build.config, build.config.experts
    assert mixture is not None, "the layer has experts"
    shared = MLP(build, f"{name}.shared_expert") if mixture.shared_size else None
    return SparseMLP(config.hidden_size, mixture, build.dtype, _experts(build, name), shared)


def _experts(build: Builder, name: str) -> nn.Module:
    """Return the experts of the sparse MLP `name`, an ExpertSum."""
    config, mixture = build.config, build.config.experts
    assert mixture is not None, "the layer has experts"
    if build.linear(f"{name}.experts.gate_up").on_cpu:
        assert build.cpu_experts is not None, "start-up provides experts in CPU memory"
        return build.cpu_experts.layer(name)
    formats = *build.formats(f"{name}.experts.gate_up"), *build.formats(f"{name}.experts.down")
    return Experts(config.hidden_size, mixture, build.tp, build.dtype, formats)


class Decoder(nn.Module):
    """Everything but the head. The modules have the checkpoint's names."""

    def __init__(self, build: Builder, *, max_model_len: int) -> None:
        super().__init__()
        config = build.config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            tp=build.tp,
            dtype=build.dtype,
            is_on_cpu=config.embedding_on_cpu,
            quantization=config.embedding_format,
            scale=config.embedding_scale,
        )
        self.rotary_emb = _rotary(config, "attention", max_model_len)
        # None if windows have the same rotary embedding as the other layers
        self.window_rotary_emb: RotaryEmbedding | None = None
        if (window := config.window) and (window.rope, window.head_dim) != (config.rope, config.head_dim):
            self.window_rotary_emb = _rotary(config, "window", max_model_len)
        kinds, sparse = config.layer_kinds, config.experts.layers if config.experts else ()
        new_layer = DecoderLayer if config.gemma is None else _gemma_layer
        self.layers = nn.ModuleList(
            new_layer(build, f"model.layers.{i}", kind, kinds[:i].count(kind), is_sparse=i in sparse)
            for i, kind in enumerate(kinds)
        )
        self.norm = build.norm()
        self._norms_at_end = config.gemma is None
        if config.gemma is not None:
            link_layers(self.layers, self.norm)
        self.skips_inner_layers = False
        modules = [tuple(map(_kind, layer.modules())) for layer in self.layers]
        self._first_of_kind = {modules.index(each) for each in modules}

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: StepAttention,
        rope_lens: torch.Tensor | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden = self.embed_tokens(token_ids)
        cos_sin = window_cos_sin = self.rotary_emb.cos_sin(positions, rope_lens)
        if self.window_rotary_emb is not None:
            window_cos_sin = self.window_rotary_emb.cos_sin(positions, rope_lens)
        residual = None
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer | GemmaLayer)
            is_last = number == len(self.layers) - 1
            if self.skips_inner_layers and number not in self._first_of_kind and not is_last:
                layer.skip(hidden, attn)
                continue
            layer_cos_sin = window_cos_sin if layer.has_window else cos_sin
            hidden, residual = layer(hidden, residual, layer_cos_sin, attn, rows if is_last else None)
        return cast(torch.Tensor, self.norm(hidden, residual)[0]) if self._norms_at_end else hidden


def _rotary(config: ModelConfig, kind: str, max_model_len: int) -> RotaryEmbedding:
    heads = config.attention(kind)
    return RotaryEmbedding(heads.rope, heads.head_dim, max_model_len=max_model_len, rotary_dim=heads.rotary_dim)


def _kind(module: nn.Module) -> tuple[type, type, int | None, bool]:
    """Return the class of a module, of its weight, the kind of a packed weight, and whether it has a window. Layers
    whose modules have equal kinds launch the same kernels.
    """
    has_window = getattr(module, "has_window", False)
    return type(module), type(getattr(module, "weight", None)), getattr(module, "kind", None), has_window


class MTPHead(nn.Module):
    """The draft head of some checkpoints, from multi-token prediction in training: one layer of attention.

    The input of the draft head is a pair: the model's hidden state of token t and token t + 1. The output drafts token
    t + 2. Keys and values belong to pairs; the first pair is the hidden state of token 0 with token 1. For further
    draft tokens, the head reads its last output instead of the hidden state, and its last draft token instead of the
    token.

    The modules have the checkpoint's names. The draft head uses the model's embedding and output head.
    """

    def __init__(self, build: Builder) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = build.norm()
        self.pre_fc_norm_hidden = build.norm()
        self.fc = build.row_parallel("mtp.fc")
        is_sparse, number = build.config.experts is not None, build.config.num_attention_layers
        self.layers = nn.ModuleList([DecoderLayer(build, "mtp.layers.0", "attention", number, is_sparse=is_sparse)])
        self.norm = build.norm()

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        attn: StepAttention,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Map embedded tokens [T, hidden_size], and for each token the preceding token's hidden state after the last
        norm -> hidden states [T, hidden_size], or [S, hidden_size] if `rows` [S] selects tokens. Hot: once per draft
        token.

        The draft head's layer number, with which it calls `attn`, is the number of the model's attention layers.
        """
        joined = torch.cat((self.pre_fc_norm_embedding(embedded)[0], self.pre_fc_norm_hidden(hidden)[0]), dim=-1)
        first = self.fc.tp.rank * self.fc.weight.shape[1]
        out = self.fc(joined[:, first : first + self.fc.weight.shape[1]].contiguous())
        out, residual = self.layers[0](out, None, cos_sin, attn, rows)
        return cast(torch.Tensor, self.norm(out, residual)[0])


class CausalLM(nn.Module):
    """A decoder and its head on one rank, and the draft head if `with_mtp`. Parameters are uninitialised until the
    loader has filled them.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TPGroup,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        with_mtp: bool = False,
        cpu_experts: CpuExpertLayers | None = None,
    ) -> None:
        """cpu_experts: the layers whose experts are in CPU memory, if there are any."""
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.get_default_device()
        self.cpu_experts = cpu_experts
        build = Builder(config, tp, dtype, cpu_experts)
        self.model = Decoder(build, max_model_len=max_model_len)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tp=tp,
            dtype=dtype,
            tied_to=None if config.has_own_head else self.model.embed_tokens.weight,
            quantization=config.head_format,
            softcap=config.logit_softcap,
        )
        assert config.has_mtp or not with_mtp, "the checkpoint has no draft head"
        self.mtp = MTPHead(build) if with_mtp else None
        self._stacked = {linear.name: tuple(linear.layers) for linear in model_layout(config).linears().values()}

    def draft(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attn: StepAttention,
        rope_lens: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of the draft head (MTPHead), from which `compute_logits` drafts.

        hidden [T, hidden_size]: for each of `input_ids` [T] the hidden state of the preceding token, from `forward` or
        from this function. positions: the positions of the hidden states. For the other arguments see `forward`.
        """
        assert self.mtp is not None, "the model was built without its draft head"
        cos_sin = self.model.rotary_emb.cos_sin(positions, rope_lens)
        return self.mtp(self.model.embed_tokens(input_ids), hidden, cos_sin, attn, rows)

    @contextmanager
    def skipping_inner_layers(self) -> Iterator[None]:
        """Let `forward` run only the first layer of each kind and the last layer. These layers launch the kernels of
        all layers, so start-up finds and loads the kernels in a fraction of the time. The results are meaningless.
        """
        self.model.skips_inner_layers = True
        try:
            yield
        finally:
            self.model.skips_inner_layers = False

    @contextmanager
    def padded(self, cells: torch.Tensor) -> Iterator[None]:
        """Within, the tokens with negative `cells`, int64 [T], are padding of a graph. The CPU skips their experts."""
        if self.cpu_experts is None:
            yield
            return
        self.cpu_experts.cells = cells
        try:
            yield
        finally:
            self.cpu_experts.cells = None

    @property
    def sinks(self) -> torch.Tensor | None:
        """The sinks of a layer on this rank, fp32 [H], or None if the model has none."""
        found = (module.sinks for module in self.modules() if isinstance(module, Attention))
        return next(found, None)

    @property
    def needs_rope_lens(self) -> bool:
        """True if `forward` needs `rope_lens`, because of dynamic rope beyond the original length."""
        return self.model.rotary_emb.needs_rope_lens

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: StepAttention,
        rope_lens: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map token ids [T] and their positions [T], both int64 -> hidden states [T, hidden_size] after the last norm.

        rows [S]: the tokens whose hidden states are needed, or None for all tokens. With `rows`, the result is
        [S, hidden_size], and the last layer computes only K and V, or the state, for the other tokens.

        `rope_lens` [T] is max(num_prompt_tokens, position + 1) of each token. It is read only if `needs_rope_lens`.
        """
        return self.model(input_ids, positions, attn, rope_lens, rows)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map [S, hidden_size] -> logits [S, vocab_size], equal on every rank, in the model's dtype.

        The logits are written to `out` [S, lm_head.padded_vocab_size] if given, else to a new tensor.
        """
        return self.lm_head(hidden, out)

    def weight_shards(self) -> Iterator[tuple[str, WeightShard]]:
        """Yield, for every tensor that fills this rank's parameters, the name in the checkpoint and the target. A
        tensor whose parts fill several targets is yielded several times.
        """
        for path, module in self.named_modules():
            if module is self or not isinstance(module, HasWeightShards):
                continue
            parent, _, name = path.rpartition(".")
            layers = self._stacked.get(path, (name,))
            for layer, parameter, shard in module.weight_shards():
                yield ".".join(filter(None, (parent, layers[layer], parameter))), shard
