"""What is asked before an engine starts: whether a backend can run it, and what machine it is on."""

import torch

from nanovllm.attention.backends.selection import find_backend
from nanovllm.capacity.machine import Machine
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.core.kv_spec import dtype_name
from nanovllm.device.devices import installed_gpu
from nanovllm.utils.memory import available_host_bytes


def check_backend(config: Config, model_config: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError, before anything is spawned or loaded, when no attention backend can run what is asked for."""
    dtype = getattr(torch, dtype_name(config, model_config))
    find_backend(config.attn_backend, device, dtype, model_config.head_dim, enforce_eager=config.enforce_eager)


def find_machine(config: Config) -> Machine:
    """What a plan must know of this machine. A GPU's rates are looked up by its name (gpus.py).

    Where there is no GPU and `config` does not ask for the CPU, an H200 is assumed, so that one can plan ahead.
    """
    if config.device == "cpu":
        return Machine.cpu(available_host_bytes())
    gpu = installed_gpu(config)
    if gpu is None:
        return Machine.gpu(available_host_bytes(), name="an H200, assumed")
    return Machine.found_gpu(available_host_bytes(), gpu.name, gpu.total_memory, (gpu.major, gpu.minor))
