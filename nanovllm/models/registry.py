"""Which class runs an architecture, and how a model is built."""

import torch

from nanovllm.distributed import TPGroup
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES: dict[str, type[CausalLM]] = {
    cls.__name__: cls for cls in (Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM)
}


def build_model(
    config: ModelConfig, tp: TPGroup, *, max_model_len: int, dtype: torch.dtype, device: torch.device | str
) -> CausalLM:
    """This rank's part of the model, allocated on `device` in `dtype`; `load_weights` fills it.

    `max_model_len`: tokens of the longest sequence. Raises ValueError when heads or the MLP's features are not
    divisible by the number of ranks.
    """
    with torch.device(device):
        return MODEL_CLASSES[config.architecture](config, tp, max_model_len=max_model_len, dtype=dtype)
