"""Costs of a model, computed from its shapes: memory, arithmetic, and blocks that cross the link.

All figures are per GPU unless a docstring says otherwise. This module is arithmetic only and loads neither torch nor
weights.
"""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

from nanovllm.checkpoint.model_config import MAX_MLP_TOKENS, ModelConfig
from nanovllm.checkpoint.model_layout import Linear, model_layout
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.config import Config
from nanovllm.plan.expert_formats import STAGED_PIECE_BYTES, LayerFormat, layer_bytes, layer_format, num_link_slots
from nanovllm.plan.kv_spec import (
    KVCacheSpec,
    dtype_name,
    kv_cache_spec,
    kv_heads_of_rank,
    uses_draft_head,
    value_bytes,
)
from nanovllm.plan.step_limits import MAX_CPU_EXPERT_ROWS, MIN_UNPACKED_PAIRS, UNPACKED_EXPERT_BYTES
from nanovllm.utils.arithmetic import ceil_div

NUM_EXPERT_BUFFERS = 2  # experts of a layer arrive in one while the GPU computes with the other


def itemsize(config: Config, model: ModelConfig) -> int:
    """Return the bytes of one weight, or of one element of K or V."""
    return value_bytes(dtype_name(config, model))


class _Size(NamedTuple):
    """The size and the format of a linear weight."""

    rows: tuple[int, ...]  # output features of each layer that is stacked in the weight
    columns: int
    split: str | None  # the features that ranks share, as in Linear
    num_experts: int  # number of experts with this weight, or 0 if every token uses the weight
    formats: tuple[Quantization | None, ...]  # of each layer
    has_bias: bool
    num_kv_heads: int  # as in Linear

    @property
    def num_params(self) -> int:
        return sum(self.rows) * self.columns

    def has_fp8_products(self, capability: tuple[int, int]) -> bool:
        """Return True if a GPU of this compute capability multiplies many rows in fp8."""
        is_fp8 = all(each is not None and each.has_fp8_products(capability) for each in self.formats)
        return is_fp8 and not self.num_experts

    def num_bytes(self, itemsize: int, num_ranks: int) -> float:
        """Return the size of the weight on the GPUs of all ranks.

        A quantized layer has packed codes, and 4 bytes for each block that shares a scale: an fp32 scale (e4m3), or a
        scale and a zero of 16 bits each (integers). GGUF's blocks have several such words, and rows are padded to
        whole blocks. In other formats, ranks that share columns have smaller blocks where whole ones do not fit, and
        each has its own scales.
        """
        total, (num_columns, num_sharing) = 0.0, self.shared_columns(num_ranks)
        num_copies = max(1, num_ranks // self.num_kv_heads) if self.num_kv_heads else 1
        for i, (rows, format) in enumerate(zip(self.rows, self.formats, strict=True)):
            rows *= num_copies if i else 1
            if format is None or not format.stays_packed(num_columns, num_sharing):
                total += rows * self.columns * itemsize
                continue
            block_rows, block_columns = format.block
            columns, block_columns = self.columns, gcd(block_columns, num_columns)
            if format.block_type is not None:  # rows are padded
                block_columns = format.block[1]
                columns = num_sharing * ceil_div(num_columns, block_columns) * block_columns
            num_blocks = ceil_div(rows, block_rows or rows) * columns // block_columns
            total += rows * columns * format.bits / 8 + 4 * num_blocks * max(1, format.scale_words)
        return total

    def shared_columns(self, num_ranks: int) -> tuple[int, int]:
        """Return the number of columns of each rank, and the number of ranks that share the columns."""
        num_ranks = num_ranks if self.split == "columns" else 1
        return self.columns // num_ranks, num_ranks


class _ExpertSizes(NamedTuple):
    """The sizes and formats of the experts of a layer."""

    gate_up: _Size
    down: _Size

    def layer_format(self, dtype: str, num_ranks: int) -> LayerFormat:
        """Return how the experts are stored in CPU memory. Raises ConfigError if they cannot be."""
        formats = *self.gate_up.formats, *self.down.formats
        sizes = {"hidden_size": self.gate_up.columns, "size": self.down.columns, "num_ranks": num_ranks}
        return layer_format(formats, dtype, **sizes, has_bias=self.down.has_bias)


class _Weights(NamedTuple):
    """Some of a model's weights."""

    sizes: Mapping[_Size, int]  # size -> number of linear weights with this size
    num_others: int  # number of elements in norms, biases and other small tensors, which are never quantized
    cpu_layers: Mapping[_ExpertSizes, int]  # number of layers whose experts are in CPU memory, which `sizes` leaves out

    @property
    def all_sizes(self) -> Mapping[_Size, int]:
        """The numbers of linear weights, wherever they are."""
        total = Counter(self.sizes)
        for experts, count in self.cpu_layers.items():
            total.update(dict.fromkeys(experts, count))
        return total


@lru_cache(maxsize=1024)  # a plan asks thousands of times, for many numbers of layers in CPU memory
def _weights(model: ModelConfig, part: str) -> _Weights:
    """Return the weights of a part of ModelLayout. The first expert stands for all experts."""
    sizes: Counter[_Size] = Counter()
    on_cpu: list[_Size] = []
    num_others = 0
    for weight in getattr(model_layout(model), part):
        if isinstance(weight, Linear):
            if weight.on_cpu:
                on_cpu.append(_size_of(weight, model))
            else:
                sizes[_size_of(weight, model)] += 1
            num_others += sum(weight.rows) * weight.bias * max(1, weight.num_experts)
        else:
            num_others += prod(weight.shape)
    return _Weights(sizes, num_others, Counter(map(_ExpertSizes, on_cpu[::2], on_cpu[1::2])))


def _size_of(weight: Linear, model: ModelConfig) -> _Size:
    formats = weight.first_expert_formats(model)
    return _Size(
        weight.rows, weight.columns, weight.split, weight.num_experts, formats, weight.bias, weight.num_kv_heads
    )


def packing_problem(config: Config, model: ModelConfig) -> str | None:
    """Return the reason why a GPU cannot keep a quantized weight of a layer packed, or None if all can be packed."""
    for size in _weights(model, "layers").all_sizes:
        num_columns, _ = size.shared_columns(config.tensor_parallel_size)
        for each in size.formats:
            if each is not None and (problem := each.packing_problem(num_columns)):
                return problem
    return None


def head_problem(model: ModelConfig) -> str | None:
    """Return the reason why a GPU cannot quantize the output head, or None if it can. Ranks share its rows alone."""
    format = model.head_quantization
    if format is None or not format.packing_problem(model.hidden_size):
        return None
    return (
        f"quantize_head needs rows in whole groups of {format.block[1]} columns on a GPU, and the output head has "
        f"{model.hidden_size} columns; leave it out, or use device='cpu'"
    )


def order_problem(config: Config, model: ModelConfig) -> str | None:
    """Return the reason why a GPU cannot sort the columns of a quantized weight by group (desc_act), or None if it
    can.
    """
    for size in _weights(model, "layers").all_sizes:
        format = size.formats[0]  # formats that differ are GGUF's
        if format is None or format.is_gguf or not (format.has_order and format.block[1]):
            continue
        what = f"quant_method={format.method!r} has columns in another order (desc_act),"
        remedy = "a checkpoint with desc_act=false, or device='cpu'"
        if size.num_experts:
            return f"{what} which is supported for experts on a CPU only; use {remedy}"
        if size.split == "columns" and config.tensor_parallel_size > 1:
            cut = "and a rank would have only some columns of each group"
            return f"{what} {cut}; use tensor_parallel_size=1, {remedy}"
    return None


def _num_used(model: ModelConfig, size: _Size, num_tokens: int | None) -> float:
    """Return how many weights of this size in a layer a step of `num_tokens` tokens uses, or all if `num_tokens` is
    None.
    """
    if not size.num_experts:
        return 1
    return size.num_experts if num_tokens is None else size.num_experts * expert_share(model, num_tokens)


def _token_params(model: ModelConfig, fp8_capability: tuple[int, int] = (0, 0)) -> float:
    """Return the number of weight elements in all layers that one token uses, over all GPUs. Elements that a GPU of
    this compute capability multiplies by activations in fp8 count as half.
    """
    weights = _weights(model, "layers")
    return weights.num_others + sum(
        count * _num_used(model, size, 1) * size.num_params * (0.5 if size.has_fp8_products(fp8_capability) else 1)
        for size, count in weights.all_sizes.items()
    )


def _weight_bytes(
    config: Config, model: ModelConfig, part: str, num_tokens: int | None = None, *, is_packed: bool = True
) -> float:
    """Return the size of the weights of a part of ModelLayout that a step of `num_tokens` tokens uses, or of all the
    part's weights if `num_tokens` is None, over all GPUs. Experts in CPU memory are not counted.
    """
    return _stored_bytes(model, part, itemsize(config, model), config.tensor_parallel_size, num_tokens, is_packed)


@lru_cache(maxsize=1024)
def _stored_bytes(
    model: ModelConfig, part: str, size_of_value: int, num_ranks: int, num_tokens: int | None, is_packed: bool
) -> float:
    """Return what `_weight_bytes` returns. The options of Config that it depends on can be hashed."""
    sizes, num_others, _ = _weights(model, part)
    total: float = num_others * size_of_value
    for size, count in sizes.items():
        stored = size if is_packed else size._replace(formats=(None,) * len(size.rows))
        total += count * _num_used(model, size, num_tokens) * stored.num_bytes(size_of_value, num_ranks)
    return total


def _layers_bytes(config: Config, model: ModelConfig, num_tokens: int | None = None, *, is_packed: bool) -> float:
    """Return the size of the weights in all layers, and in the draft head if it is used, over all GPUs. Experts in CPU
    memory are not counted.
    """
    parts = _layer_parts(config, model)
    return sum(_weight_bytes(config, model, part, num_tokens, is_packed=is_packed) for part in parts)


def _layer_parts(config: Config, model: ModelConfig) -> tuple[str, ...]:
    """Return the parts of ModelLayout that have layers."""
    return ("layers", "mtp") if uses_draft_head(config, model) else ("layers",)


def expert_share(model: ModelConfig, num_tokens: int) -> float:
    """Return the share of a layer's experts that a step of `num_tokens` tokens uses, or 0 in a model without experts.

    If each token has C of E experts, and all experts are equally likely, the share is 1 - (1 - C / E)^T on average.
    """
    if model.experts is None:
        return 0.0
    return 1 - (1 - model.experts.num_experts_per_token / model.experts.num_experts) ** num_tokens


def cpu_expert_bytes(config: Config, model: ModelConfig) -> float:
    """Return the size of the experts in CPU memory, on each rank. Raises ConfigError if they cannot be stored there."""
    return sum(_cpu_expert_bytes(config, model, part) for part in _layer_parts(config, model))


def _cpu_expert_bytes(config: Config, model: ModelConfig, part: str) -> int:
    return _stored_expert_bytes(model, part, dtype_name(config, model), config.tensor_parallel_size)


@lru_cache(maxsize=1024)
def _stored_expert_bytes(model: ModelConfig, part: str, dtype: str, num_ranks: int) -> int:
    return sum(
        count * layer_bytes(experts.layer_format(dtype, num_ranks), experts.down.num_experts)
        for experts, count in _weights(model, part).cpu_layers.items()
    )


def expert_layer_bytes(config: Config, model: ModelConfig) -> tuple[int, ...]:
    """Return the size of the experts of each layer that has some, as each GPU stores them."""
    return _expert_layer_bytes(model, itemsize(config, model), config.tensor_parallel_size)


@lru_cache(maxsize=256)
def _expert_layer_bytes(model: ModelConfig, size_of_value: int, num_ranks: int) -> tuple[int, ...]:
    on_gpu = (weight for weight in model_layout(model).layers if isinstance(weight, Linear) and weight.num_experts)
    sizes = [_size_of(weight, model) for weight in on_gpu]
    pairs = zip(sizes[::2], sizes[1::2], strict=True)
    return tuple(_gpu_bytes(_ExpertSizes(*pair), size_of_value, num_ranks) for pair in pairs)


def _gpu_bytes(experts: _ExpertSizes, size_of_value: int, num_ranks: int) -> int:
    return int(sum(size.num_experts * size.num_bytes(size_of_value, num_ranks) for size in experts)) // num_ranks


def expert_staging_bytes(config: Config, model: ModelConfig) -> int:
    """Return the size on each GPU of the two buffers for experts that cross the link, and of the memory in which pieces
    arrive. Each buffer has room for the experts of any layer in CPU memory, as a GPU stores them. Without KV offload,
    there are also slots for single experts of each kind of layer, and memory for their blocks in GGUF.
    """
    layers = [layer for part in _layer_parts(config, model) for layer in _weights(model, part).cpu_layers]
    if not layers:
        return 0
    assert model.experts is not None, "only mixtures have experts"
    size_of_value, num_ranks = itemsize(config, model), config.tensor_parallel_size
    sizes = [_gpu_bytes(layer, size_of_value, num_ranks) for layer in layers]
    slots = 0
    if not config.enable_cpu_offload:
        num_experts = model.experts.num_experts
        dtype = dtype_name(config, model)
        formats = [layer.layer_format(dtype, num_ranks) for layer in layers]
        matrices = (each for of_layer in formats for each in of_layer if each.is_of_blocks)
        of_blocks = max((each.num_rows * each.row_bytes for each in matrices), default=0)
        stored = (layer_bytes(each, num_experts) for each in formats)
        slots = num_link_slots(stored, num_experts) * (sum(sizes) // num_experts + of_blocks)
    return NUM_EXPERT_BUFFERS * max(sizes) + STAGED_PIECE_BYTES + slots


def embedding_bytes(config: Config, model: ModelConfig, *, is_packed: bool = True) -> int:
    """Return the size of the embedding table, over all GPUs."""
    return int(_weight_bytes(config, model, "embedding", is_packed=is_packed))


def head_bytes(config: Config, model: ModelConfig, *, is_packed: bool = True) -> int:
    """Return the size of the weight that the output head multiplies by, over all GPUs, and of the norm before it. A
    quantized head takes 6% more if loading halves its groups.
    """
    head = int(_weight_bytes(config, model, "head", is_packed=is_packed))
    return head if model.has_own_head else head + embedding_bytes(config, model, is_packed=is_packed)


def weight_bytes(config: Config, model: ModelConfig, *, is_packed: bool) -> int:
    """Return the size of all weights, split evenly over the GPUs, without experts or an embedding table in CPU memory.

    is_packed: whether linear weights stay quantized, as on a GPU. On a CPU, quantized weights are loaded as values in
    the model's dtype.
    """
    total = _layers_bytes(config, model, is_packed=is_packed) + head_bytes(config, model, is_packed=is_packed)
    if model.has_own_head and not model.embedding_on_cpu:
        total += embedding_bytes(config, model, is_packed=is_packed)
    return int(total) // config.tensor_parallel_size


def layer_activation_bytes(config: Config, model: ModelConfig, num_tokens: int) -> int:
    """Return the size of the activations of a step of `num_tokens` tokens at the peak of a layer.

    - In attention: q, two parts and a piece of a third, and in fp32 the merged result and three log-sum-exps. With
      windows also K and V of a layer, twice.
    - In a recurrent layer: input and output of the convolution, the output in fp32, too, the gate and the result.
    - In the MLP of MAX_MLP_TOKENS tokens at a time: gate, up and their product. With experts, the product of gate and
      up and the output of each expert, and in Gemma the inputs of the dense MLP and of the experts; on a CPU, where one
      expert may have all tokens, the input, gate, up, product and output of one expert, and the sum in fp32.
    - In both: two hidden states and two residuals, of this layer and of the previous one, and the cosines and sines of
      the rotation in fp32.
    """
    tp, size = config.tensor_parallel_size, itemsize(config, model)
    num_in_mlp = min(num_tokens, MAX_MLP_TOKENS)
    head_dims = model.head_dim, *([model.window.head_dim] if model.window is not None else [])
    attention = ((4 * size + max(4, size)) * max(head_dims) + 3 * 4) * model.num_heads // tp
    if model.window is not None:
        # A chunk's K and V, and the same with the preceding window (capabilities/windows)
        kv_heads = len(kv_heads_of_rank(model.window.num_kv_heads, tp))
        attention += 2 * 2 * size * kv_heads * model.window.head_dim
    mlp = size * 3 * model.intermediate_size // tp
    if model.recurrent is not None:
        r = model.recurrent
        values = r.num_value_heads * r.value_head_dim
        attention = max(attention, ((2 * size + 4) * r.conv_channels + (2 * size + 4) * values) // tp)
    mlp *= num_in_mlp
    if model.experts is not None:
        features = model.experts.intermediate_size // tp
        num_pairs = num_in_mlp * model.experts.num_experts_per_token
        routed = num_pairs * size * (features + model.hidden_size)
        if model.quantization is not None and num_pairs >= MIN_UNPACKED_PAIRS * model.experts.num_experts:
            routed += UNPACKED_EXPERT_BYTES
        routed += 2 * num_in_mlp * size * model.hidden_size if model.gemma is not None else 0
        on_cpu = num_in_mlp * (size * (3 * features + 2 * model.hidden_size) + 4 * model.hidden_size)
        mlp = max(mlp, routed, on_cpu)
    hidden = num_tokens * (size * 4 * model.hidden_size + 4 * model.head_dim)
    return hidden + max(num_tokens * attention, mlp)


def activation_bytes(config: Config, model: ModelConfig, max_model_len: int, max_num_rows: int) -> int:
    """Return the size of the activations of the largest step at its peak, which is in a layer or at the head. At the
    head, each of the `max_num_rows` sequences that one step can sample has a row of logits.
    """
    num_tokens = min(config.max_num_batched_tokens, max_num_rows * max_model_len)
    at_head = itemsize(config, model) * (
        2 * num_tokens * model.hidden_size + min(max_num_rows, num_tokens) * model.vocab_size
    )
    return max(layer_activation_bytes(config, model, num_tokens), at_head)


def prefill_flop(
    config: Config, model: ModelConfig, num_tokens: int, capability: tuple[int, int] | None = None
) -> float:
    """Return the floating-point operations of one prompt of T tokens. An operation in fp8 counts as half of one, since
    GPUs do twice as many in a second. Without a `capability`, the GPU has all products in fp8.

    The sum has 2 operations per weight and token, 2 products of T^2 / 2 in causal attention, of T * W - W^2 / 2 in
    attention with a window W, in each recurrent layer 3 products of a token with the matrix of each head, which is
    read, updated and read again, and one row of the head. The last layer computes K and V for all tokens, but
    everything else only for the last token, which is not counted. With a draft head, the last layer computes everything
    for all tokens, and the draft head computes only its joined inputs, K and V for all tokens.
    """
    has_head = uses_draft_head(config, model)
    num_layers = model.num_layers - 1 + has_head
    fp8_capability = (capability or (9, 0)) if dtype_name(config, model) == "bfloat16" else (0, 0)
    token_params = _token_params(model, fp8_capability) / model.num_layers
    num_attention_layers = model.num_attention_layers - 1 + has_head
    attention = 2.0 * num_tokens**2 * num_attention_layers * model.num_heads * model.head_dim
    if model.window is not None:
        seen = min(num_tokens, model.window.num_tokens)
        keys = num_tokens * seen - seen**2 / 2  # of all tokens together
        attention += 4.0 * keys * model.num_window_layers * model.num_heads * model.window.head_dim
    if model.recurrent is not None:
        r = model.recurrent
        matrix = r.num_value_heads * r.key_head_dim * r.value_head_dim
        attention += 6 * num_tokens * model.num_recurrent_layers * matrix
    last_kv = 2.0 * model.hidden_size * model.num_kv_heads * model.head_dim + has_head * 2 * model.hidden_size**2
    if model.quantization is not None and model.quantization.has_fp8_products(fp8_capability):
        last_kv /= 2
    weights = 2 * num_tokens * (num_layers * token_params + last_kv)
    return (weights + attention + 2 * model.hidden_size * model.vocab_size) / config.tensor_parallel_size


def token_keys(model: ModelConfig) -> int:
    """Return the number of keys for which attention takes a token as many operations as the linear layers.

    A layer has 2 operations per weight and token. Attention has 4 operations per head, element of the head dim, token
    and key.
    """
    token_params = _token_params(model) / model.num_attention_layers
    return int(token_params // (2 * model.num_heads * model.head_dim))


def decode_bytes(
    config: Config, model: ModelConfig, num_sequences: int, num_keys: int, kv_bytes_per_token: int
) -> float:
    """Return the bytes that one step reads from GPU memory: every weight that the step uses, except the embedding, and
    all keys and values, once each, but in layers with a window only the keys that the window shows. Quantized weights
    are read packed. States of recurrent layers are read and written. A draft head runs once. Experts in CPU memory are
    not counted, because the CPU reads them.

    num_keys: the number of keys of all sequences together.
    """
    weights = _layers_bytes(config, model, num_sequences, is_packed=True) + head_bytes(config, model)
    states = kv_cache_spec(config, model, config.tensor_parallel_size).states
    state_bytes = num_sequences * states.read_bytes(num_keys // num_sequences)
    return weights / config.tensor_parallel_size + num_keys * kv_bytes_per_token + state_bytes


def head_draft_bytes(config: Config, model: ModelConfig, spec: KVCacheSpec, num_sequences: int, num_keys: int) -> float:
    """Return the bytes that the draft head reads from GPU memory for one draft token per sequence: the weights of the
    draft head, the output head, and the keys of one layer.
    """
    weights = _weight_bytes(config, model, "mtp", num_sequences) + head_bytes(config, model)
    return weights / config.tensor_parallel_size + num_keys * spec.layer_block_bytes / spec.block_size


def head_draft_expert_bytes(config: Config, model: ModelConfig, num_sequences: int) -> float:
    """Return the bytes of experts that the CPU reads on each rank for one token of each sequence by the draft head."""
    return _cpu_expert_bytes(config, model, "mtp") * expert_share(model, num_sequences)


def prefill_expert_bytes(config: Config, model: ModelConfig, num_tokens: int) -> float:
    """Return the bytes of experts that cross the link for a chunk of a prompt: all experts in CPU memory, except in the
    last layer and in the draft head, which compute few tokens.
    """
    if not model.has_cpu_experts or num_tokens <= MAX_CPU_EXPERT_ROWS:
        return 0.0
    assert model.experts is not None, "the model has experts"
    layers, last = model.experts.cpu_layers, model.num_layers - 1
    share = 1 - (last in layers and not uses_draft_head(config, model)) / len(layers)
    return share * _cpu_expert_bytes(config, model, "layers")


def num_full_blocks(context: int, block_size: int) -> int:
    """Return the number of blocks before the block that holds the newest of a sequence's `context` tokens."""
    return (context - 1) // block_size


def num_missing_blocks(context: int, block_size: int, num_slots: int, num_sequences: int = 1) -> int:
    """Return the fewest blocks that must cross the link to compute one token of each sequence: the number of full
    blocks minus the number of slots that are not write slots.
    """
    return max(0, num_sequences * num_full_blocks(context, block_size) - (num_slots - num_sequences))


def num_prefill_loaded_blocks(context: int, block_size: int, num_slots: int, chunk_tokens: int) -> int:
    """Return the fewest blocks that must cross the link for one prompt: the sum over all chunks of the number of
    blocks before the chunk minus the number of slots that the chunk does not write.
    """
    start = num_loaded = 0
    while start < context:
        first = start // block_size
        end = min(start + chunk_tokens, context, (first + num_slots) * block_size)
        num_written = ceil_div(end, block_size) - first
        num_loaded += max(0, first - (num_slots - num_written))
        start = end
    return num_loaded
