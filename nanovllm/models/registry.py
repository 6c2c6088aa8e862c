"""Which model class runs an architecture, and how a model is built."""

import torch

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.device.tp_group import TPGroup
from nanovllm.models.decoder import CausalLM

# The three differ in their biases and in the norms of q and k alone, which ModelConfig describes
MODEL_CLASSES: dict[str, type[CausalLM]] = {
    "Qwen3ForCausalLM": CausalLM,
    "Qwen2ForCausalLM": CausalLM,
    "LlamaForCausalLM": CausalLM,
}


def build_model(
    config: ModelConfig, tp: TPGroup, *, max_model_len: int, dtype: torch.dtype, device: torch.device | str
) -> CausalLM:
    """This rank's part of the model, allocated on `device` in `dtype`; `load_weights` fills it.

    `max_model_len`: tokens of the longest sequence. Raises ConfigError when heads or the MLP's features are not
    divisible by the number of ranks.
    """
    with torch.device(device):
        return MODEL_CLASSES[config.architecture](config, tp, max_model_len=max_model_len, dtype=dtype)
