"""What an engine finds out or makes once, at its start: the device, the machine, a rank's runner, the tokenizer."""

from pathlib import Path
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.distributed import TPGroup
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.machine import Machine
from nanovllm.model_config import ModelConfig
from nanovllm.utils.memory import available_host_bytes


def make_runner(
    config: Config, model_config: ModelConfig, directory: Path | None, device: torch.device, tp: TPGroup
) -> ModelRunner:
    """One rank's runner; with several ranks on GPUs, rank r has cuda:r."""
    if device.type == "cuda" and tp.size > 1:
        device = torch.device("cuda", tp.rank)
    return ModelRunner(config, model_config, directory, tp, device)


def resolve_device(config: Config) -> torch.device:
    """Rank 0's device."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={config.device!r}: this machine has no usable CUDA GPU; use device='cpu'")
    device = torch.device(name if ":" in name else "cuda:0")
    size, num_gpus = config.tensor_parallel_size, torch.cuda.device_count()
    if size > 1 and device.index:
        raise ValueError(f"device={name!r} with tensor_parallel_size={size}: rank r uses cuda:r; give device='cuda'")
    if max(size, device.index + 1) > num_gpus:
        raise ValueError(f"device={name!r} with tensor_parallel_size={size} needs more than the {num_gpus} GPUs here")
    return device


def find_machine(config: Config) -> Machine:
    """What a plan must know of this machine. A GPU's rates are looked up by its name (gpus.py).

    Where there is no GPU and `config` does not ask for the CPU, an H200 is assumed, so that one can plan ahead.
    """
    if config.device == "cpu":
        return Machine.cpu(available_host_bytes())
    index = int(config.device.split(":")[1]) if ":" in config.device else 0
    if index >= torch.cuda.device_count():
        return Machine.gpu(available_host_bytes(), name="an H200, assumed")
    gpu = torch.cuda.get_device_properties(index)
    return Machine.found_gpu(available_host_bytes(), gpu.name, gpu.total_memory, (gpu.major, gpu.minor))


def load_tokenizer(directory: Path | None) -> Any:
    """The model's tokenizer, or None for a preset and for a directory without one."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if directory is None or not any((directory / name).is_file() for name in names):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))
