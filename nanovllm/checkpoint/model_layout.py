"""The table of a model's weights: their names in a checkpoint, their shapes, and their division among ranks.

The decoder builds its modules from this table, the loader compares a checkpoint's tensors with the table, and the
planner sums the table's sizes. No other module lists weights. Importing this module loads no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import Quantization


class Tensor(NamedTuple):
    """A tensor of a checkpoint, by its full name."""

    name: str
    shape: tuple[int, ...]

    def tensors(self) -> "Iterator[Tensor]":
        yield self


@dataclass(frozen=True)
class Linear:
    """Linear layers of a checkpoint that read the same input. The decoder stacks them into one weight.

    name: the decoder's name for the weight, such as model.layers.0.self_attn.qkv_proj. layers: the checkpoint's layers,
    such as q_proj, and the output features of each. columns: the input features.

    split: the features that are divided among ranks, "rows" (output) or "columns" (input), or None if each rank has
    the whole weight. num_experts: the number of experts with these layers, or 0 for a weight that every token uses.
    on_cpu: True if the experts are in CPU memory. num_kv_heads: the heads of all layers but the first, of which ranks
    have copies if there are more ranks, or 0 if all layers have other rows on each rank.
    """

    name: str
    layers: Mapping[str, int]
    columns: int
    _: KW_ONLY
    split: Literal["rows", "columns"] | None
    bias: bool = False
    num_experts: int = 0
    on_cpu: bool = False
    num_kv_heads: int = 0
    may_be_quantized: bool = True
    own_format: Quantization | None = None  # a format that quantization_config does not name

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.layers.values())

    def checkpoint_names(self) -> list[str]:
        """Return the full names of the layers; with experts, first all names of expert 0, then all of expert 1."""
        return self._names(self.num_experts)

    def _names(self, num_experts: int) -> list[str]:
        parent = self.name.rpartition(".")[0]
        parents = [f"{parent}.{expert}" for expert in range(num_experts)] if num_experts else [parent]
        return [f"{each}.{layer}".lstrip(".") for each in parents for layer in self.layers]

    def formats(self, config: ModelConfig) -> tuple[Quantization | None, ...]:
        """Return the format of each of `layers`, or None if it is not quantized.

        Layers that have several formats are not quantized, except if each has a type of GGUF's blocks.
        """
        return self._formats(config, self.checkpoint_names())

    def first_expert_formats(self, config: ModelConfig) -> tuple[Quantization | None, ...]:
        """Return the formats of the first expert's layers, because checking all experts takes half a second."""
        return self._formats(config, self._names(min(1, self.num_experts)))

    def _formats(self, config: ModelConfig, names: list[str]) -> tuple[Quantization | None, ...]:
        num_layers = len(self.layers)
        if config.quantization is None or not self.may_be_quantized:
            return (self.own_format,) * num_layers
        if config.quantization.has_equal_experts:
            num_columns = self.columns // (config.quantization.num_ranks if self.split == "columns" else 1)
            formats = (config.quantization.format_of(name) for name in names[:num_layers])
            return tuple(each and each.for_columns(num_columns) for each in formats)
        first, *others = (config.quantization.format_of(name) for name in names)
        return (first if all(each == first for each in others) else None,) * num_layers

    def tensors(self) -> Iterator[Tensor]:
        for i, name in enumerate(self.checkpoint_names()):
            rows = self.rows[i % len(self.layers)]
            yield Tensor(f"{name}.weight", (rows, self.columns))
            if self.bias:
                yield Tensor(f"{name}.bias", (rows,))


LayoutEntry: TypeAlias = Linear | Tensor


class ModelLayout(NamedTuple):
    """The weights of a model."""

    embedding: tuple[LayoutEntry, ...]
    head: tuple[LayoutEntry, ...]  # the last norm, and the output head unless it uses the embedding
    layers: tuple[LayoutEntry, ...]  # of all layers, first to last
    mtp: tuple[LayoutEntry, ...]  # of the draft head; empty if the checkpoint has no draft head

    def linears(self) -> dict[str, Linear]:
        """Return the linear weights by the names in the decoder."""
        return {weight.name: weight for part in self for weight in part if isinstance(weight, Linear)}

    def shapes(self, *, with_mtp: bool) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of the checkpoint by name."""
        weights = (*self.embedding, *self.head, *self.layers, *(self.mtp if with_mtp else ()))
        return dict(tensor for weight in weights for tensor in weight.tensors())


def model_layout(c: ModelConfig) -> ModelLayout:
    """List the weights of a model."""
    sparse, on_cpu = (c.experts.layers, c.experts.cpu_layers) if c.experts else ((), ())
    head: list[LayoutEntry] = [Tensor("model.norm.weight", (c.hidden_size,))]
    head += [_vocabulary(c, "lm_head", c.head_format)] if c.has_own_head else []
    layer = _layer if c.gemma is None else _gemma_layer
    layers = (
        layer(c, f"model.layers.{i}", kind, is_sparse=i in sparse, on_cpu=i in on_cpu)
        for i, kind in enumerate(c.layer_kinds)
    )
    mtp = tuple(_mtp(c)) if c.has_mtp else ()
    embedding = (_vocabulary(c, "model.embed_tokens", c.embedding_format),)
    return ModelLayout(embedding, tuple(head), tuple(weight for weights in layers for weight in weights), mtp)


def _vocabulary(c: ModelConfig, name: str, own_format: Quantization | None) -> Linear:
    layers = {name.rpartition(".")[2]: c.vocab_size}
    return Linear(name, layers, c.hidden_size, split="rows", may_be_quantized=False, own_format=own_format)


def _mtp(c: ModelConfig) -> Iterator[LayoutEntry]:
    """Yield the draft head: a weight that joins the two inputs, and one layer of attention."""
    yield Tensor("mtp.pre_fc_norm_embedding.weight", (c.hidden_size,))
    yield Tensor("mtp.pre_fc_norm_hidden.weight", (c.hidden_size,))
    yield Linear("mtp.fc", {"fc": c.hidden_size}, 2 * c.hidden_size, split="columns")
    is_sparse, on_cpu = c.experts is not None, c.experts is not None and c.experts.mtp_is_on_cpu
    yield from _layer(c, "mtp.layers.0", "attention", is_sparse=is_sparse, on_cpu=on_cpu)
    yield Tensor("mtp.norm.weight", (c.hidden_size,))


def _layer(c: ModelConfig, name: str, kind: str, *, is_sparse: bool, on_cpu: bool) -> Iterator[LayoutEntry]:
    yield Tensor(f"{name}.input_layernorm.weight", (c.hidden_size,))
    if kind == "recurrent":
        yield from _delta_net(c, f"{name}.linear_attn")
    else:
        yield from _attention(c, f"{name}.self_attn", kind)
    yield Tensor(f"{name}.post_attention_layernorm.weight", (c.hidden_size,))
    if is_sparse:
        yield from _experts(c, f"{name}.mlp", on_cpu)
    else:
        yield from _mlp(c, f"{name}.mlp")


def _gemma_layer(c: ModelConfig, name: str, kind: str, *, is_sparse: bool, on_cpu: bool) -> Iterator[LayoutEntry]:
    assert c.gemma is not None, "the layers are Gemma's"
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield from _attention(c, f"{name}.self_attn", kind)
    yield from _mlp(c, f"{name}.mlp")
    if is_sparse:
        assert c.experts is not None, "the layer has experts"
        norms += ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
        num_experts = c.experts.num_experts
        yield Linear(f"{name}.router.proj", {"proj": num_experts}, c.hidden_size, split=None, may_be_quantized=False)
        yield Tensor(f"{name}.router.scale", (c.hidden_size,))
        yield Tensor(f"{name}.router.per_expert_scale", (num_experts,))
        yield from _routed_experts(c, name, on_cpu)
    for norm in norms:
        yield Tensor(f"{name}.{norm}.weight", (c.hidden_size,))
    if c.gemma.has_scalars:
        yield Tensor(f"{name}.layer_scalar", (1,))


def _attention(c: ModelConfig, name: str, kind: str) -> Iterator[LayoutEntry]:
    """Yield the weights of attention. With gates, q_proj has for each head the head's rows, then the gate's rows."""
    heads = c.attention(kind)
    q, kv = c.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    qkv = {"q_proj": q * (2 if c.attention_gate else 1), "k_proj": kv}
    qkv |= {} if c.v_from_k(kind) else {"v_proj": kv}
    yield Linear(f"{name}.qkv_proj", qkv, c.hidden_size, split="rows", bias=c.qkv_bias, num_kv_heads=heads.num_kv_heads)
    yield Linear(f"{name}.o_proj", {"o_proj": c.hidden_size}, q, split="columns", bias=c.o_bias)
    if c.has_sinks:
        yield Tensor(f"{name}.sinks", (c.num_heads,))
    if c.qk_norm:
        yield Tensor(f"{name}.q_norm.weight", (heads.head_dim,))
        yield Tensor(f"{name}.k_norm.weight", (heads.head_dim,))


def _delta_net(c: ModelConfig, name: str) -> Iterator[LayoutEntry]:
    assert c.recurrent is not None, "the layer is recurrent"
    r, heads = c.recurrent, c.recurrent.num_value_heads
    values = heads * r.value_head_dim
    yield Tensor(f"{name}.conv1d.weight", (r.conv_channels, 1, r.conv_kernel))
    yield Tensor(f"{name}.A_log", (heads,))
    yield Tensor(f"{name}.dt_bias", (heads,))
    yield Tensor(f"{name}.norm.weight", (r.value_head_dim,))
    qkvz = {"in_proj_qkv": r.conv_channels, "in_proj_z": values}
    yield Linear(f"{name}.in_proj_qkvz", qkvz, c.hidden_size, split="rows")
    yield Linear(f"{name}.in_proj_ba", {"in_proj_b": heads, "in_proj_a": heads}, c.hidden_size, split="rows")
    yield Linear(f"{name}.out_proj", {"out_proj": c.hidden_size}, values, split="columns")


def _mlp(c: ModelConfig, name: str) -> Iterator[LayoutEntry]:
    size = c.intermediate_size
    yield Linear(
        f"{name}.gate_up_proj", {"gate_proj": size, "up_proj": size}, c.hidden_size, split="rows", bias=c.mlp_bias
    )
    yield Linear(f"{name}.down_proj", {"down_proj": c.hidden_size}, size, split="columns", bias=c.mlp_bias)


def _experts(c: ModelConfig, name: str, on_cpu: bool) -> Iterator[LayoutEntry]:
    """Yield a sparse MLP: the router, the experts, and the expert that every token uses if there is one."""
    assert c.experts is not None, "the layer has experts"
    gates = {"gate": c.experts.num_experts} | ({"shared_expert_gate": 1} if c.experts.shared_size else {})
    bias = c.experts.has_bias
    yield Linear(f"{name}.gate", gates, c.hidden_size, split=None, bias=bias, may_be_quantized=False)
    yield from _routed_experts(c, name, on_cpu)
    if c.experts.shared_size:
        yield from _mlp(c, f"{name}.shared_expert")


def _routed_experts(c: ModelConfig, name: str, on_cpu: bool) -> Iterator[LayoutEntry]:
    """Yield the experts from which the router of the sparse MLP `name` chooses."""
    assert c.experts is not None, "the layer has experts"
    size = c.experts.intermediate_size
    of_experts: dict[str, Any] = {"num_experts": c.experts.num_experts, "on_cpu": on_cpu, "bias": c.experts.has_bias}
    gate_up, down = {"gate_proj": size, "up_proj": size}, {"down_proj": c.hidden_size}
    yield Linear(f"{name}.experts.gate_up", gate_up, c.hidden_size, split="rows", **of_experts)
    yield Linear(f"{name}.experts.down", down, size, split="columns", **of_experts)
