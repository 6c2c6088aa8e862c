"""What an engine determines or creates once, at start: the device, the machine, a rank's runner, the tokenizer."""

import os
import traceback
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.selection import find_backend
from nanovllm.checkpoint import TOKENIZER_FILES, read_json
from nanovllm.config import Config, dtype_name
from nanovllm.distributed import TPGroup
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.machine import Machine
from nanovllm.model_config import ModelConfig
from nanovllm.utils.memory import available_host_bytes

# Any of these says that a directory has a tokenizer
_TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def make_runner(
    config: Config, model_config: ModelConfig, directory: Path | None, device: torch.device, tp: TPGroup
) -> ModelRunner:
    """One rank's runner; with several ranks on GPUs, rank r has cuda:r."""
    if device.type == "cuda":
        use_expandable_segments()
        device = torch.device("cuda", tp.rank) if tp.size > 1 else device
    return ModelRunner(config, model_config, directory, tp, device)


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments, unless the user has configured the allocator.

    Its own default is segments of fixed sizes. Steps come in all sizes, and the gaps that none of them fit took 0.2 GiB
    more than the largest step needs.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


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


def check_backend(config: Config, model_config: ModelConfig, device: torch.device) -> None:
    """Raise ValueError, before anything is spawned or loaded, when no attention backend can run what is asked for."""
    dtype = getattr(torch, dtype_name(config, model_config))
    find_backend(config.attn_backend, device, dtype, model_config.head_dim, enforce_eager=config.enforce_eager)


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
    """The model's tokenizer, or None for a preset and for a directory without one.

    Raises ValueError, with the file, for one that cannot be read. Code in the checkpoint is never run.
    """
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()] if directory else []
    if not any(file.name in _TOKENIZER_MARKS for file in files):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # transformers raises what its parsers raise, and that does not name the file
        for file in files:
            if file.suffix == ".json":
                read_json(file)
        raise ValueError(
            f"the tokenizer in {directory} cannot be read ({type(error).__name__}: {error}); download its files again: "
            f"{', '.join(file.name for file in files)}"
        ) from error


def end_token_ids(model_config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of config.json and generation_config.json, and the tokenizer's eos token.

    vLLM uses the tokenizer's too. There are chat models whose configs name only the base model's end token.
    """
    token_ids = list(model_config.eos_token_ids)
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    if of_tokenizer is not None and of_tokenizer < model_config.vocab_size and of_tokenizer not in token_ids:
        token_ids.append(of_tokenizer)
    return tuple(token_ids)


def release_failed_start(error: BaseException, device: torch.device) -> None:
    """Give back what a failed start holds on the GPU, while the caller keeps the exception.

    The frames of its traceback hold tensors: the half-built model, the activations of the largest step.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    if device.type == "cuda":
        torch.cuda.empty_cache()
