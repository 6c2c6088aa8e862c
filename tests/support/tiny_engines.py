"""Small engines on a tiny model: their caches, and how to run them to the end."""

from pathlib import Path
from typing import Any

from tiny_models import write_tiny_model, write_tiny_tokenizer

from nanovllm import LLM
from nanovllm.plan.outputs import RequestOutput

KINDS: dict[str, dict[str, Any]] = {
    "all GPU": {"num_kvcache_blocks": 20},
    "offload": {
        "enable_cpu_offload": True,
        "num_gpu_blocks": 3,
        "num_cpu_blocks": 20,
        "kvcache_block_size": 256,
        "speculation": "off",
    },
}


def write_model_with_text(directory: Path, max_tokens: int = 2048) -> Path:
    """A checkpoint with a tokenizer."""
    return write_tiny_tokenizer(write_tiny_model(directory, max_position_embeddings=max_tokens))


def finish_all(llm: LLM) -> dict[int, RequestOutput]:
    """Step until no request is left. Returns the outputs by request id."""
    finished: dict[int, RequestOutput] = {}
    while not llm.is_finished():
        finished |= llm.step().finished
    return finished
