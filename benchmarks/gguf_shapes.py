"""Writes a GGUF file with the shapes and types of Qwen3 or of its mixtures in Q4_K_M, to measure without a download.

    python -m benchmarks.gguf_shapes /tmp/8b.gguf --model qwen3-8b

Without data the file takes no disk space, and `load_format="dummy"` gives a model with random blocks of its types. With
--data the file has random blocks, which can be loaded. There is no tokenizer: use skip_tokenizer_init.
"""

import argparse
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nanovllm.checkpoint.gguf import TYPES, BlockType
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.read_config import config_without_weights

ALIGNMENT = 32
CHUNK_VALUES = 2**20
NUMBERS = {name: number for number, (name, *_) in TYPES.items()}
FIRST_SCALE = {"Q6_K": 208}  # the byte of a block where its scale begins, 0 in Q4_K
SCALE = 0.0001


def tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield the name, the shape and the type of each tensor, as llama.cpp's Q4_K_M has them."""
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    num_layers = config.num_layers
    yield "token_embd.weight", (config.vocab_size, hidden), "Q6_K" if config.tie_word_embeddings else "Q4_K"
    yield "output_norm.weight", (hidden,), "F32"
    if not config.tie_word_embeddings:
        yield "output.weight", (config.vocab_size, hidden), "Q6_K"
    for layer in range(num_layers):
        eighth = num_layers // 8
        has_more_bits = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        finer = "Q6_K" if has_more_bits else "Q4_K"
        for name, shape, block_type in (
            ("attn_norm", (hidden,), "F32"),
            ("ffn_norm", (hidden,), "F32"),
            ("attn_q_norm", (config.head_dim,), "F32"),
            ("attn_k_norm", (config.head_dim,), "F32"),
            ("attn_q", (q, hidden), "Q4_K"),
            ("attn_k", (kv, hidden), "Q4_K"),
            ("attn_v", (kv, hidden), finer),
            ("attn_output", (hidden, q), "Q4_K"),
            *_mlp(config, finer),
        ):
            yield f"blk.{layer}.{name}.weight", shape, block_type


def _mlp(config: ModelConfig, finer: str) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return the tensors of a dense MLP, or of all experts of a layer and their router. `finer`: the type of down."""
    hidden, size, experts = config.hidden_size, config.intermediate_size, config.experts
    if experts is None:
        up = size, hidden
        return ("ffn_gate", up, "Q4_K"), ("ffn_up", up, "Q4_K"), ("ffn_down", (hidden, size), finer)
    num, size = experts.num_experts, experts.intermediate_size
    return (
        ("ffn_gate_inp", (num, hidden), "F32"),
        ("ffn_gate_exps", (num, size, hidden), "Q4_K"),
        ("ffn_up_exps", (num, size, hidden), "Q4_K"),
        ("ffn_down_exps", (num, hidden, size), finer),
    )


def write(path: Path, config: ModelConfig, *, with_data: bool = False) -> None:
    entries: dict[str, int | float] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope.rope_theta),
    }
    architecture = "qwen3"
    if config.experts is not None:
        architecture = "qwen3moe"
        entries |= {
            "expert_count": config.experts.num_experts,
            "expert_used_count": config.experts.num_experts_per_token,
            "expert_feed_forward_length": config.experts.intermediate_size,
        }
    listed = list(tensors(config))
    header = b"GGUF" + struct.pack("<Iqq", 3, len(listed), len(entries) + 1)
    header += _text("general.architecture") + struct.pack("<I", 8) + _text(architecture)
    for name, value in entries.items():
        packed = struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
        header += _text(f"{architecture}.{name}") + packed
    offset, places = 0, []
    for name, shape, block_type in listed:
        kind = TYPES[NUMBERS[block_type]]
        header += _text(name) + struct.pack(f"<I{len(shape)}q", len(shape), *reversed(shape))
        header += struct.pack("<Iq", NUMBERS[block_type], offset)
        places.append((offset, math.prod(shape), kind))
        offset += -(-math.prod(shape) // kind.num_values * kind.num_bytes // ALIGNMENT) * ALIGNMENT
    start = -(-len(header) // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(start + offset)
        for place, num_values, kind in places if with_data else ():
            stream.seek(start + place)
            _write_blocks(stream, num_values, kind)


def _text(text: str) -> bytes:
    return struct.pack("<q", len(text)) + text.encode()


def _write_blocks(stream: BinaryIO, num_values: int, kind: BlockType) -> None:
    """Write random blocks, or in F32 ones."""
    if kind.name == "F32":
        stream.write(np.ones(num_values, "<f4").tobytes())
        return
    num_blocks = min(num_values, CHUNK_VALUES) // kind.num_values
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, kind.num_bytes), dtype=np.uint8)
    first = FIRST_SCALE.get(kind.name, 0)
    blocks[:, first : first + 2] = np.array([SCALE], "<f2").view(np.uint8)
    if kind.name == "Q4_K":
        blocks[:, 2:4] = np.array([7.5 * SCALE], "<f2").view(np.uint8)
    chunk = blocks.tobytes()
    left = num_values // kind.num_values * kind.num_bytes
    while left:
        left -= stream.write(chunk[: min(left, len(chunk))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", default="qwen3-8b", help="a dense preset of Qwen3")
    parser.add_argument("--data", action="store_true", help="write random blocks")
    args = parser.parse_args()
    write(args.path, config_without_weights(args.model), with_data=args.data)


if __name__ == "__main__":
    main()
