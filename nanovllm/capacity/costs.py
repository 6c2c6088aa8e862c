"""What a model costs, computed from its shapes: bytes of weights and activations, arithmetic, blocks moved.

Everything is per GPU unless its docstring says otherwise. This is arithmetic only: it loads neither torch nor weights.
"""

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.core.kv_spec import kv_cache_spec
from nanovllm.utils.arithmetic import ceil_div


def itemsize(config: Config, model: ModelConfig) -> int:
    """Bytes of one weight, or of one element of K or V."""
    return kv_cache_spec(config, model, tp_size=1).itemsize


def layer_params(model: ModelConfig) -> int:
    """Number of weights in one layer, over all GPUs: q, k, v, o, gate, up, down, norms and biases."""
    c = model
    qkv, attention = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.num_heads * c.head_dim
    params = c.hidden_size * (qkv + attention + 3 * c.intermediate_size + 2)
    params += 2 * c.head_dim * c.qk_norm + qkv * c.qkv_bias + c.hidden_size * c.o_bias
    return params + (2 * c.intermediate_size + c.hidden_size) * c.mlp_bias


def weight_bytes(config: Config, model: ModelConfig) -> int:
    """Size of all weights, split evenly over the GPUs. A tied head needs no weights of its own."""
    num_embeddings = 1 if model.tie_word_embeddings else 2
    params = model.num_layers * layer_params(model) + model.hidden_size
    params += num_embeddings * model.vocab_size * model.hidden_size
    return params * itemsize(config, model) // config.tensor_parallel_size


def activation_bytes(config: Config, model: ModelConfig, max_model_len: int, max_num_rows: int) -> int:
    """Estimate of the activations that the largest step holds at its peak, which is in a layer or at the head.

    - In attention: q, two parts and a piece of a third, and in fp32 the merged result and three log-sum-exps.
    - In the MLP: gate, up and their product.
    - In both: two hidden states and two residuals, of this layer and of the previous one, and the cosines and sines of
      the rotation in fp32.
    - At the head: one row of logits for each of the `max_num_rows` sequences that one step can sample.
    """
    tp, size = config.tensor_parallel_size, itemsize(config, model)
    num_tokens = min(config.max_num_batched_tokens, max_num_rows * max_model_len)
    attention = ((4 * size + max(4, size)) * model.head_dim + 3 * 4) * model.num_heads // tp
    mlp = size * 3 * model.intermediate_size // tp
    in_layer = num_tokens * (size * 4 * model.hidden_size + max(attention, mlp) + 4 * model.head_dim)
    at_head = size * (2 * num_tokens * model.hidden_size + min(max_num_rows, num_tokens) * model.vocab_size)
    return max(in_layer, at_head)


def prefill_flop(config: Config, model: ModelConfig, num_tokens: int) -> float:
    """Floating-point operations of one prompt of T tokens.

    That is 2 per weight and token, 2 products of T^2 / 2 in causal attention, and one row of the head. The last layer
    computes K and V for all tokens, but everything else only for the last token; this remainder is not counted.
    """
    num_layers = model.num_layers - 1
    attention = 2 * num_tokens**2 * num_layers * model.num_heads * model.head_dim
    last_kv = 2 * model.hidden_size * model.num_kv_heads * model.head_dim
    weights = 2 * num_tokens * (num_layers * layer_params(model) + last_kv)
    return (weights + attention + 2 * model.hidden_size * model.vocab_size) / config.tensor_parallel_size


def token_keys(model: ModelConfig) -> int:
    """How many keys a token attends to in the time of its linear layers, if both run at the same rate.

    A layer does 2 operations per weight and token, and 4 per head, element of the head dim, token and key.
    """
    return layer_params(model) // (2 * model.num_heads * model.head_dim)


def decode_bytes(config: Config, model: ModelConfig, num_keys: int, kv_bytes_per_token: int) -> float:
    """Bytes read from GPU memory in one step: every weight except the embedding, and all keys and values, once each."""
    params = model.num_layers * layer_params(model) + model.hidden_size * model.vocab_size
    return params * itemsize(config, model) / config.tensor_parallel_size + num_keys * kv_bytes_per_token


def num_full_blocks(context: int, block_size: int) -> int:
    """How many of a sequence's blocks precede the one that holds the newest of its `context` tokens."""
    return (context - 1) // block_size


def num_missing_blocks(context: int, block_size: int, num_slots: int, num_sequences: int = 1) -> int:
    """The fewest blocks that must cross the link to compute one token of each sequence.

    That is the number of full blocks minus the number of slots that are not write slots.
    """
    return max(0, num_sequences * num_full_blocks(context, block_size) - (num_slots - num_sequences))


def num_prefill_loaded_blocks(context: int, block_size: int, num_slots: int, chunk_tokens: int) -> int:
    """The fewest blocks that must cross the link for one prompt.

    For each chunk that is the number of blocks before it, minus the number of slots that the chunk does not write.
    """
    start = num_loaded = 0
    while start < context:
        first = start // block_size
        end = min(start + chunk_tokens, context, (first + num_slots) * block_size)
        num_written = ceil_div(end, block_size) - first
        num_loaded += max(0, first - (num_slots - num_written))
        start = end
    return num_loaded
