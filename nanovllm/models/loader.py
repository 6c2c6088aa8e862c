"""Builds a model, and fills it from safetensors files or with seeded random weights.

Every rank reads only its own slices.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from nanovllm.checkpoint.files import weight_files
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.layers.linear import WeightShard
from nanovllm.models.decoder import CausalLM

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
_DUMMY_ROWS = 8192  # rows drawn at a time, to limit the memory needed in addition to the model


def build_model(
    config: ModelConfig, tp: TPGroup, *, max_model_len: int, dtype: torch.dtype, device: torch.device | str
) -> CausalLM:
    """Allocate this rank's part of the model on `device` in `dtype`. `load_weights` fills it.

    max_model_len: tokens of the longest sequence. Raises ConfigError if the heads or the MLP's features are not
    divisible by the number of ranks.
    """
    with torch.device(device):
        return CausalLM(config, tp, max_model_len=max_model_len, dtype=dtype)


def load_weights(
    model: CausalLM,
    directory: Path | None,
    *,
    load_format: str = "auto",
    seed: int = 0,
    show_progress: bool = False,
) -> None:
    """Fill every parameter of `model`, in place, on its own device and in its own dtype.

    With `load_format` "dummy" the weights are random, drawn from `seed`, and the same for every number of ranks. With
    any other, they are read from the safetensors files in `directory` (checkpoint/files.py finds them). Raises
    CheckpointError with the name of the file or tensor if a file is missing or damaged, or if a tensor is missing,
    unknown, quantised or has the wrong shape.
    """
    shards = dict(model.weight_shards())
    with tqdm(total=len(shards), desc="Loading weights", unit="tensor", disable=not show_progress) as progress:
        if load_format == "dummy":
            for name, shard in shards.items():
                _fill_dummy(name, shard, seed)
                progress.update()
            return
        unused: list[str] = []
        for file in weight_files(directory):
            for name, source in _open(file):
                if name in shards:
                    _fill(shards.pop(name), source, f"{name} in {file}")
                    progress.update()
                elif not _may_be_ignored(name, model):
                    unused.append(name)
    for kind, names in (("misses weights", list(shards)), ("has weights unknown to the model", unused)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(f"{directory} {kind}: {shown}; check that config.json belongs to these files")


def _open(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, slice) for every tensor in the file. A slice reads nothing until it is indexed."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({error}); download it again") from error


def _fill(shard: WeightShard, source: Any, where: str) -> None:
    shape = tuple(source.get_shape())
    if shape != shard.full_shape:
        raise CheckpointError(f"{where} has shape {list(shape)}, but config.json asks for {list(shard.full_shape)}")
    if source.get_dtype() not in _FLOAT_DTYPES:
        raise CheckpointError(f"{where} has dtype {source.get_dtype()}; quantised weights are not supported")
    shard.target.copy_(source[shard.index])


def _may_be_ignored(name: str, model: CausalLM) -> bool:
    """Return True if the model computes or shares this tensor instead of loading it. Some checkpoints contain it."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.config.tie_word_embeddings)


def _fill_dummy(name: str, shard: WeightShard, seed: int) -> None:
    """Norms are 1, biases 0, matrices normal with variance 1 / input features, so that activations keep their scale.

    Every rank draws the whole checkpoint tensor, some rows at a time, and keeps its slice, so that the model does not
    depend on the number of ranks.
    """
    if len(shard.full_shape) == 1:
        shard.target.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    num_rows, num_columns = shard.full_shape
    generator = torch.Generator(shard.target.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    rows, columns = shard.index
    first_row, last_row, _ = rows.indices(num_rows)
    for start in range(0, num_rows, _DUMMY_ROWS):
        end = min(start + _DUMMY_ROWS, num_rows)
        drawn = shard.target.new_empty(end - start, num_columns).normal_(0, num_columns**-0.5, generator=generator)
        kept_start, kept_end = max(start, first_row), min(end, last_row)
        if kept_start < kept_end:
            kept = drawn[kept_start - start : kept_end - start, columns]
            shard.target[kept_start - first_row : kept_end - first_row].copy_(kept)
