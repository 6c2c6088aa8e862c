"""Checkpoints that hold the values of an output head that is quantized while it is loaded."""

import shutil
from pathlib import Path

import torch
from model_files import edit_json
from safetensors.torch import load_file, save_file

from nanovllm.checkpoint.quantization import HEAD_QUANTIZATIONS
from nanovllm.models.quantized_weights import quantize

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_values(plain: Path, directory: Path) -> Path:
    """Write the same model with the values of the head in int8, in groups of 64. Tied tables become two."""
    shutil.copytree(plain, directory)
    tensors = load_file(plain / "model.safetensors")
    head = tensors.get(HEAD, tensors[EMBEDDING])
    tensors[HEAD] = torch.empty_like(head)
    quantize(head, HEAD_QUANTIZATIONS["int8"]).copy_values(tensors[HEAD])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_json(directory / "config.json", tie_word_embeddings=False)
    return directory
