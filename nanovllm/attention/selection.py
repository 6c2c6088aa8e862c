"""Which attention backend runs here."""

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.torch_backend import TorchBackend


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    return TorchBackend()
