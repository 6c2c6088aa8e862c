"""The values that quantizing at loading makes of a checkpoint's weights."""

import torch

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.model_layout import model_layout
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.models.block_quantizing import quantize_to_blocks
from nanovllm.models.gguf_values import part_values, read_parts
from nanovllm.models.quantized_weights import quantize


def rounded(values: torch.Tensor, quantization: Quantization | None) -> torch.Tensor:
    """Round a weight to a layer's format."""
    if quantization is None:
        return values
    if quantization.block_type is not None:
        return part_values(
            read_parts(quantize_to_blocks(values, quantization.block_type), quantization.block_type),
            quantization.block_type,
        ).to(values.dtype)
    quantize(values, quantization).copy_values(out := torch.empty_like(values))
    return out


def round_weights(tensors: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Round the tensors of a checkpoint as `config` asks. Experts have names of their own in the checkpoint."""
    changed = dict(tensors)
    for linear in model_layout(config).linears().values():
        formats = linear.formats(config)
        for i, name in enumerate(linear.checkpoint_names()):
            key = f"{name}.weight"
            if key in tensors:
                changed[key] = rounded(tensors[key], formats[i % len(formats)])
    return changed
