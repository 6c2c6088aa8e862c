"""Maps architectures to model classes, and builds a model."""

import torch

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.device.tp_group import TPGroup
from nanovllm.models.decoder import CausalLM

# The three differ only in their biases and in the norms of q and k, which ModelConfig describes.
MODEL_CLASSES: dict[str, type[CausalLM]] = {
    "Qwen3ForCausalLM": CausalLM,
    "Qwen2ForCausalLM": CausalLM,
    "LlamaForCausalLM": CausalLM,
}


def build_model(
    config: ModelConfig, tp: TPGroup, *, max_model_len: int, dtype: torch.dtype, device: torch.device | str
) -> CausalLM:
    """Allocate this rank's part of the model on `device` in `dtype`. `load_weights` fills it.

    `max_model_len` is the number of tokens of the longest sequence. Raises ConfigError if the heads or the MLP's
    features are not divisible by the number of ranks.
    """
    with torch.device(device):
        return MODEL_CLASSES[config.architecture](config, tp, max_model_len=max_model_len, dtype=dtype)
