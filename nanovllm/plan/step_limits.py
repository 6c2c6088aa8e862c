"""The largest step, sequence and batch that the options and the model allow."""

from typing import NamedTuple

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.rope import rope_extension
from nanovllm.config import Config
from nanovllm.errors import ConfigError


def max_model_len(config: Config, model: ModelConfig) -> int:
    """Return the most tokens of a sequence. Raises ConfigError if the option exceeds what the rope covers."""
    limit = model.max_model_len_limit
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {limit} tokens that the model's rope covers; "
            f"lower it, or {rope_extension(model, config.max_model_len)}"
        )
    return config.max_model_len or limit


# On large GPUs, experts in GGUF's blocks that have as many tokens each, on average, are unpacked before they are
# multiplied, as many experts at a time as take these bytes (kernels/packed_linear.py)
MIN_UNPACKED_PAIRS, UNPACKED_EXPERT_BYTES = 512, 128 * 2**20
MAX_CPU_EXPERT_ROWS = 64  # most tokens of a step for which the CPU computes experts; in longer steps the GPU does


def max_graph_rows(model: ModelConfig, max_num_rows: int) -> int:
    """Return the most tokens of a step in a CUDA graph. With experts in CPU memory, longer steps stream experts, and
    their kernels are launched one by one.
    """
    return min(max_num_rows, MAX_CPU_EXPERT_ROWS) if model.has_cpu_experts else max_num_rows


def has_mixed_graphs(model: ModelConfig) -> bool:
    """Return True if graphs can run steps with chunks of prompts: all layers attend to all keys, and no experts are in
    CPU memory.
    """
    return model.num_attention_layers == model.num_layers and not model.has_cpu_experts


def graph_sizes(max_num_rows: int) -> list[int]:
    """Return the batch sizes to capture decode graphs for: 1, 2, 4, multiples of 8 up to 128, multiples of 16 above
    128, and `max_num_rows` itself. Capturing one graph takes 30 to 60 ms at start-up.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, max_num_rows + 1, 16), max_num_rows]
    return sorted({size for size in sizes if size <= max_num_rows})


def streamed_graph_sizes(max_num_rows: int) -> list[int]:
    """Return the batch sizes to capture graphs of streamed decode steps for: powers of 4, and `max_num_rows` itself.

    There are few sizes because each size needs a graph per layer, and because padded rows cost little compared with the
    copies that a streamed step waits for.
    """
    return sorted({4**i for i in range(max_num_rows.bit_length()) if 4**i < max_num_rows} | {max_num_rows})


MAX_VERIFYING_ROWS = 64  # most tokens of a decode step with draft tokens; speculation gains little in larger steps


def verifying_graph_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of tokens to capture graphs of verification steps for: 4, 8, 16, 32, 64."""
    return _sizes_up_to((4, 8, 16, 32, MAX_VERIFYING_ROWS), max_num_rows)


def streamed_verifying_graph_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of tokens for streamed verification steps: 16 for a single sequence, and 64."""
    return _sizes_up_to((16, MAX_VERIFYING_ROWS), max_num_rows)


def draft_graph_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of sequences to capture graphs of drafts for.

    Each sequence has a row for its newest token and a row for a draft token.
    """
    return _sizes_up_to((1, 2, 4, 8, 16, MAX_VERIFYING_ROWS // 2), max_num_rows)


def head_graph_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of tokens to capture graphs of the draft head for: powers of two, and `max_num_rows` itself.

    Padding costs little because the draft head is a single layer.
    """
    return sorted({2**i for i in range(max_num_rows.bit_length())} | {max_num_rows})


MAX_GRAPH_CHUNKS = 8  # most prompt chunks of a mixed step that a graph can run
MAX_GRAPH_CHUNK_TOKENS = 1024  # most tokens of all prompt chunks together in such a step


class MixedSize(NamedTuple):
    """Capacity of a graph for mixed steps: most decode rows, and most tokens of prompt chunks."""

    num_rows: int
    num_chunk_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.num_chunk_tokens


def mixed_graph_sizes(max_num_tokens: int, max_num_rows: int) -> list[MixedSize]:
    """Return the sizes to capture graphs of mixed steps for: up to 4, 32 and `max_num_rows` decode rows, and up to 64,
    128, 256, 512 and 1024 prompt tokens. max_num_tokens: the most prompt tokens of a step.
    """
    rows = _sizes_up_to((4, 32, max_num_rows), max_num_rows)
    tokens = _sizes_up_to((64, 128, 256, 512, MAX_GRAPH_CHUNK_TOKENS), max_num_tokens)
    return [MixedSize(some, most) for some in rows for most in tokens]


def _sizes_up_to(sizes: tuple[int, ...], max_num_rows: int) -> list[int]:
    return sorted({min(size, max_num_rows) for size in sizes})


def max_sampled_rows(config: Config, num_gpu_blocks: int) -> int:
    """Return the most sequences that one step can sample. Each sequence needs a private GPU block to write to."""
    return min(config.max_num_seqs, num_gpu_blocks)


def max_step_rows(config: Config, num_gpu_blocks: int) -> int:
    """Return the most tokens that one step can sample. A single sequence can always use all its draft tokens."""
    return max(max_sampled_rows(config, num_gpu_blocks), 1 + config.max_guesses)


def expected_tokens(acceptance: float, num_guesses: int) -> float:
    """Return the expected number of tokens of a verification step with k draft tokens: 1 + a + ... + a^k.

    `a` is the acceptance rate: the probability that a draft token is accepted if all draft tokens before it are
    (Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding, 2023).
    """
    return float(sum(acceptance**i for i in range(num_guesses + 1)))


MIN_CAPABILITY = (8, 0)  # compute capability that the attention kernels need
MAX_DECODE_QUERIES = 16  # most queries per sequence in the kernel that splits a sequence's keys among programs
