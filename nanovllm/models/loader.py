"""Fills a model from safetensors files, or with seeded random weights. Every rank reads only its own slices."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from nanovllm.checkpoint.files import weight_files
from nanovllm.errors import CheckpointError
from nanovllm.layers.weights import WeightShard
from nanovllm.models.decoder import CausalLM

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
_DUMMY_ROWS = 8192  # rows drawn at a time, so that the memory used beside the model stays small


def load_weights(
    model: CausalLM,
    directory: Path | None,
    *,
    load_format: str = "auto",
    seed: int = 0,
    show_progress: bool = False,
) -> None:
    """Fill every parameter of `model`, in place, on its own device and in its own dtype.

    `load_format` "dummy" draws random weights from `seed`, the same model for every number of ranks; anything else
    reads the safetensors files of `directory` that checkpoint.py says are the weights. Raises CheckpointError, with the
    name of the file or tensor, for a file that is missing or damaged, and for a tensor that is missing, not known,
    quantised or of another shape.
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
    """(name, slice) of every tensor of the file; a slice reads nothing until it is indexed."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({error}); download it again") from error


def _fill(shard: WeightShard, source: Any, where: str) -> None:
    shape = tuple(source.get_shape())
    if shape != shard.full_shape:
        raise CheckpointError(f"{where} has shape {list(shape)}, config.json asks for {list(shard.full_shape)}")
    if source.get_dtype() not in _FLOAT_DTYPES:
        raise CheckpointError(f"{where} has dtype {source.get_dtype()}; quantised weights are not supported")
    shard.target.copy_(source[shard.index])


def _may_be_ignored(name: str, model: CausalLM) -> bool:
    """Tensors that some checkpoints hold though the model computes or shares them."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.config.tie_word_embeddings)


def _fill_dummy(name: str, shard: WeightShard, seed: int) -> None:
    """Norms 1, biases 0, matrices normal with variance 1 / input features, so that activations keep their size.

    The whole checkpoint tensor is drawn, some rows at a time, and this rank keeps its slice: every number of ranks
    has the same model.
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
