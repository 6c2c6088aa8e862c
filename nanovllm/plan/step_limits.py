"""The largest step, sequence and batch that the options and the model allow."""

from typing import NamedTuple

from nanovllm.checkpoint.model_config import ModelConfig, rope_extension
from nanovllm.config import Config
from nanovllm.errors import ConfigError


def max_model_len(config: Config, model: ModelConfig) -> int:
    """Tokens of the longest sequence. Raises ConfigError if the option exceeds what the rope covers."""
    limit = model.max_model_len_limit
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {limit} tokens that the model's rope covers; "
            f"lower it, or {rope_extension(model, config.max_model_len)}"
        )
    return config.max_model_len or limit


def graph_sizes(max_num_rows: int) -> list[int]:
    """Batch sizes to capture decode graphs for: 1, 2, 4, multiples of 8 up to 128, multiples of 16 above that, and
    `max_num_rows` itself. Capturing one takes 30 to 60 ms at start-up.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, max_num_rows + 1, 16), max_num_rows]
    return sorted({size for size in sizes if size <= max_num_rows})


def streamed_graph_sizes(max_num_rows: int) -> list[int]:
    """Batch sizes to capture graphs of streamed decode steps for: 1, 4, 16, 64, 256 ... and `max_num_rows` itself.

    There are few of them because each needs a graph per layer, and because padded rows cost little compared with the
    copies that a streamed step waits for.
    """
    return sorted({4**i for i in range(max_num_rows.bit_length()) if 4**i < max_num_rows} | {max_num_rows})


MAX_VERIFYING_ROWS = 64  # tokens of a step with guesses that only decodes; larger steps gain little by guesses


def verifying_graph_sizes(max_num_rows: int) -> list[int]:
    """Numbers of tokens to capture graphs for steps that verify guesses: 4, 8, 16, 32, 64."""
    return _sizes_up_to((4, 8, 16, 32, MAX_VERIFYING_ROWS), max_num_rows)


def streamed_verifying_graph_sizes(max_num_rows: int) -> list[int]:
    """Numbers of tokens for streamed steps that verify guesses: 16 for a single sequence, and 64."""
    return _sizes_up_to((16, MAX_VERIFYING_ROWS), max_num_rows)


def draft_graph_sizes(max_num_rows: int) -> list[int]:
    """Numbers of sequences to capture graphs of drafts for. Each has a row for its newest token and one for a guess."""
    return _sizes_up_to((1, 2, 4, 8, 16, MAX_VERIFYING_ROWS // 2), max_num_rows)


def head_graph_sizes(max_num_rows: int) -> list[int]:
    """Numbers of tokens to capture graphs of the draft head for: powers of two and `max_num_rows` itself. The head is a
    single layer, in which padding costs little.
    """
    return sorted({2**i for i in range(max_num_rows.bit_length())} | {max_num_rows})


MAX_GRAPH_CHUNKS = 8  # chunks of prompts in a step with answers that a graph can run
MAX_GRAPH_CHUNK_TOKENS = 1024  # in all of these chunks


class MixedSize(NamedTuple):
    """The most answers beside which a graph can run chunks of prompts, and the most tokens of these."""

    num_rows: int
    num_chunk_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.num_chunk_tokens


def mixed_graph_sizes(max_num_tokens: int, max_num_rows: int) -> list[MixedSize]:
    """Sizes to capture graphs for, of steps with short chunks of prompts: up to 4, 32 and `max_num_rows` answers, and
    up to 64, 128, 256, 512 and 1024 tokens of prompts. `max_num_tokens`: per step.
    """
    rows = _sizes_up_to((4, 32, max_num_rows), max_num_rows)
    tokens = _sizes_up_to((64, 128, 256, 512, MAX_GRAPH_CHUNK_TOKENS), max_num_tokens)
    return [MixedSize(some, most) for some in rows for most in tokens]


def _sizes_up_to(sizes: tuple[int, ...], max_num_rows: int) -> list[int]:
    return sorted({min(size, max_num_rows) for size in sizes})


def max_sampled_rows(config: Config, num_gpu_blocks: int) -> int:
    """Most sequences that one step can sample. Each needs its own block on the GPU to write to."""
    return min(config.max_num_seqs, num_gpu_blocks)


def max_step_rows(config: Config, num_gpu_blocks: int) -> int:
    """Most tokens that one step can sample. With speculation, a single sequence can use all of its guesses."""
    return max(max_sampled_rows(config, num_gpu_blocks), 1 + config.max_guesses)


def expected_tokens(acceptance: float, num_guesses: int) -> float:
    """Tokens that a pass with k guesses yields on average, if each is right with probability a when those before it
    are: 1 + a + ... + a^k (Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding, 2023).
    """
    return float(sum(acceptance**i for i in range(num_guesses + 1)))


MIN_CAPABILITY = (8, 0)  # compute capability that the attention kernels need
MAX_DECODE_QUERIES = 16  # per sequence, in the kernel that splits a sequence's keys among programs
