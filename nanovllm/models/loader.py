"""Builds a model, and fills it from safetensors files or with seeded random weights. Every rank reads only the rank's
slices. Quantized weights are unpacked to codes; other weights may be quantized at loading (quantized_weights.py).
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from nanovllm.checkpoint.architectures import ARCHITECTURES
from nanovllm.checkpoint.gguf import is_gguf
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.model_layout import model_layout
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.layers.linear import WeightShard
from nanovllm.layers.moe import CpuExpertLayers
from nanovllm.layers.packed_weight import PackedRows, QuantizedWeight, WeightRows, store_blocks
from nanovllm.models.block_quantizing import quantize_to_blocks
from nanovllm.models.decoder import CausalLM
from nanovllm.models.expert_tensors import with_single_experts
from nanovllm.models.gguf_tensors import BlockWeight, BlockWriter, open_gguf
from nanovllm.models.gguf_values import part_values, random_blocks, read_parts, select_columns
from nanovllm.models.quantized_weights import QuantizedReader, head_format, quantize, stored_parts
from nanovllm.models.stored_tensors import FLOAT_DTYPES, StoredTensor, open_tensors
from nanovllm.utils import progress_bar

_KV_SCALES = (
    *("_proj.k_scale", "_proj.v_scale", "_attn.k_scale", "_attn.v_scale", "_attn.q_scale", "_attn.kv_scale"),
    *("k_proj.output_scale", "v_proj.output_scale"),
)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QUANTIZED_ROWS = 1024  # quantized at a time; a multiple of all common blocks
_DUMMY_ROWS = 8192  # rows drawn at a time, to limit the memory needed in addition to the model


# config, tp, dtype, device, with_mtp -> CpuExpertLayers
CpuExpertsFactory: TypeAlias = Callable[[ModelConfig, TPGroup, torch.dtype, torch.device, bool], CpuExpertLayers]


def build_model(
    config: ModelConfig,
    tp: TPGroup,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device | str,
    directory: Path | None = None,
    with_mtp: bool = False,
    make_cpu_experts: CpuExpertsFactory | None = None,
) -> CausalLM:
    """Allocate this rank's part of the model on `device` in `dtype`. `load_weights` fills it.

    max_model_len: tokens of the longest sequence. directory: the directory of the weights, if `load_weights` will read
    them, or None. The names, shapes and types of the stored tensors are checked before anything is allocated, and
    determine the layers that a quantized checkpoint leaves unquantized. with_mtp: build the draft head, too;
    `config.has_mtp` tells whether the checkpoint has one. make_cpu_experts: makes the layers whose experts are in CPU
    memory, if the model has such layers.

    Raises CheckpointError, with the name of the file or tensor, if one is missing, damaged or unknown, or if a tensor
    has a wrong shape or type. Raises ConfigError if the heads or the MLP's features are not divisible by the number of
    ranks.
    """

    if directory is not None:
        with ExitStack() as files:
            stored = _open(directory, files, config, torch.device("cpu"))
            quantization = config.quantization
            if quantization is not None and not (quantization.is_online or quantization.is_gguf):
                ignored = (*quantization.ignored, *_unquantized_layers(stored))
                config = replace(config, quantization=replace(quantization, ignored=ignored))
            _check(config, directory, stored, with_mtp=with_mtp)
            if config.head_quantization is not None:
                config = replace(config, head_quantization=head_format(stored[_HEAD], config.head_quantization))
    cpu_experts = None
    if config.has_cpu_experts:
        assert make_cpu_experts is not None, "start-up provides experts in CPU memory"
        cpu_experts = make_cpu_experts(config, tp, dtype, torch.device(device), with_mtp)
    with torch.device(device):
        return CausalLM(
            config, tp, max_model_len=max_model_len, dtype=dtype, with_mtp=with_mtp, cpu_experts=cpu_experts
        )


def _open(
    directory: Path | None, files: ExitStack, config: ModelConfig, device: torch.device
) -> dict[str, StoredTensor]:
    """Return the stored tensors by name. A tied model's embedding may be stored under either of its two names, and it
    has both names if the head is quantized. device: see with_single_experts.
    """
    if directory is not None and is_gguf(directory):
        stored = open_gguf(directory)
    else:
        are_interleaved = ARCHITECTURES[config.architecture].interleaves_experts
        tensors = open_tensors(directory, files)
        stored = with_single_experts(tensors, are_interleaved=are_interleaved, device=device)
    if config.tie_word_embeddings and _EMBEDDING not in stored and _HEAD in stored:
        stored[_EMBEDDING] = stored.pop(_HEAD)
    if config.tie_word_embeddings and config.has_own_head and _EMBEDDING in stored:
        stored.setdefault(_HEAD, stored[_EMBEDDING])
    return stored


def _unquantized_layers(stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return the linear layers whose weights are not quantized in a checkpoint."""
    return [
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in FLOAT_DTYPES
    ]


def load_weights(
    model: CausalLM, directory: Path | None, *, load_format: str = "auto", seed: int = 0, show_progress: bool = False
) -> None:
    """Fill every parameter of `model`, in place, on the parameter's device and in its dtype.

    With `load_format` "dummy" the weights are random, drawn from `seed`, and the same for every number of ranks. With
    any other format, the weights are read from the safetensors files in `directory`, which `build_model` has checked.
    Quantized weights are replaced by their values, one tensor at a time. Raises CheckpointError, with the tensor's
    name, for wrong data, such as scales that are not finite.
    """
    shards: dict[str, list[WeightShard]] = {}
    for name, shard in model.weight_shards():
        shards.setdefault(name, []).append(shard)
    with (
        progress_bar(total=len(shards), desc="Loading weights", unit="tensor", is_wanted=show_progress) as progress,
        ExitStack() as files,
    ):
        if load_format == "dummy":
            for name, of_name in shards.items():
                tied = _EMBEDDING if name == _HEAD and model.config.tie_word_embeddings else name
                _fill_dummy(tied, of_name, seed, model.dtype, model.device)
                progress.update()
            return
        stored, blocks = _open(directory, files, model.config, model.device), BlockWriter()
        for name, of_name in shards.items():
            for shard in of_name:
                source = _find(name, shard.full_shape, stored, model.config.quantization, shard.target.device)
                assert source is not None, "a missing tensor has been refused"
                _fill(shard, source, blocks, model.device)
            progress.update()
        blocks.flush()


def _check(config: ModelConfig, directory: Path, stored: Mapping[str, StoredTensor], *, with_mtp: bool) -> None:
    """Compare the checkpoint's tensors with the model's layout.

    Raise CheckpointError if tensors are missing or unknown, or have a wrong shape or type.
    """
    cpu, shapes = torch.device("cpu"), model_layout(config).shapes(with_mtp=with_mtp)
    sources = {name: _find(name, shape, stored, config.quantization, cpu) for name, shape in shapes.items()}
    missing = [name for name, source in sources.items() if source is None]
    if config.head_quantization is not None and isinstance(head := sources[_HEAD], QuantizedReader):
        raise ConfigError(
            f"quantize_head is for output heads in 16 or 32 bits, and {head.main.where} is quantized already; leave it "
            "out"
        )
    used: set[str] = set()
    for name, source in sources.items():
        if isinstance(source, QuantizedReader):
            used |= {name.removesuffix("weight") + part for part in source.parts}
        else:
            used.add(name)
    if config.tie_word_embeddings and stored.get(_HEAD) is not stored.get(_EMBEDDING):
        used.discard(_HEAD)  # it must equal the embedding
    unused = [name for name in stored if name not in used]
    if missing:
        remedy = _remedy(directory)
        if not is_gguf(directory) and (
            beside := [name for name in unused if name.startswith(missing[0].removesuffix("weight"))]
        ):
            remedy = f"the files have {', '.join(beside)} instead; check quantization_config in config.json"
        if all(name.startswith("mtp.") for name in missing):
            remedy = "the draft head in these files is not complete, so use another speculation than mtp or auto"
        raise CheckpointError(f"{directory} misses weights: {_first(missing)}; {remedy}")
    if unknown := [name for name in unused if not _may_be_ignored(name, stored, config, with_mtp)]:
        remedy = _remedy(directory)
        if unknown == [_HEAD]:
            remedy = "it is not the embedding, so remove it, or use hf_overrides={'tie_word_embeddings': False}"
        raise CheckpointError(f"{directory} has weights unknown to the model: {_first(unknown)}; {remedy}")


def _remedy(directory: Path) -> str:
    if is_gguf(directory):
        return "download the file again, or use a file that a current version of llama.cpp has converted"
    return "check that config.json belongs to these files"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _find(
    name: str,
    shape: tuple[int, ...],
    stored: Mapping[str, StoredTensor],
    quantization: Quantization | None,
    device: torch.device,
) -> QuantizedReader | StoredTensor | None:
    """Return the tensors of the weight with this name and shape, or None if there are none. Reads no data.

    device: the device on which quantized weights are unpacked.
    """
    is_matrix = len(shape) == 2
    if quantization is not None:
        quantization = quantization.exception(name.removesuffix(".weight")) or quantization
    parts = stored_parts(quantization, name, stored) if quantization and is_matrix else {}
    if quantization and parts:
        return QuantizedReader(quantization, parts, shape, device)
    if name not in stored:
        return None
    source = stored[name]
    if source.shape != shape:
        raise CheckpointError(f"{source.where} has shape {list(source.shape)}, but config.json asks for {list(shape)}")
    has_blocks = isinstance(source, BlockWeight) and quantization and quantization.block_type == source.type.name
    if source.dtype not in FLOAT_DTYPES and not has_blocks:
        given = f"quant_method={quantization.method!r}" if quantization else "no quantization_config"
        raise CheckpointError(
            f"{source.where} has dtype {source.dtype}, but config.json has {given}; check that both belong together"
        )
    return source


def _fill(
    shard: WeightShard, source: QuantizedReader | StoredTensor, blocks: BlockWriter, device: torch.device
) -> None:
    """Fill a parameter, or part of it. Blocks that stay packed are filled at the latest when `blocks` is flushed."""
    quantization = shard.quantization
    if quantization is not None and quantization.is_online:
        assert not isinstance(source, QuantizedReader), "a quantized checkpoint is not quantized again"
        _fill_quantized(shard, source, quantization, blocks, device)
    elif (
        isinstance(source, BlockWeight) and isinstance(shard.target, PackedRows) and shard.target.block_type is not None
    ):
        blocks.add(source, shard.target, *shard.index)
    elif isinstance(source, QuantizedReader):
        rows, columns = shard.index
        _store(source.read(rows, columns), shard.target, source.main.where)
    else:
        assert isinstance(shard.target, torch.Tensor), "a weight of codes is quantized"
        source.copy_to(shard.target, shard.index)
        if shard.plus:
            shard.target.add_(shard.plus)


def _fill_quantized(
    shard: WeightShard, source: StoredTensor, quantization: Quantization, blocks: BlockWriter, device: torch.device
) -> None:
    """Fill a parameter, or part of it, with the values of a checkpoint, quantized on `device`."""
    (start, end, _), columns = shard.index[0].indices(shard.full_shape[0]), shard.index[1]
    for first in range(start, end, _QUANTIZED_ROWS):
        rows = slice(first, min(first + _QUANTIZED_ROWS, end))
        target = shard.target[rows.start - start : rows.stop - start]
        if quantization.block_type is None:
            values = source.read(rows, slice(None)).to(shard.target.device)  # a row has one scale on all ranks
            if not isinstance(target, torch.Tensor) and target.can_quantize:
                target.quantize(values, columns)
            else:
                _store(quantize(values, quantization).part(slice(None), columns), target, source.where)
        elif isinstance(target, PackedRows):
            blocks.add_values(source.read(rows, columns), target)
        else:
            assert isinstance(target, torch.Tensor), "other weights of codes have no blocks"
            data = quantize_to_blocks(source.read(rows, columns).to(device), quantization.block_type)
            if target.dtype != torch.uint8:
                data = part_values(read_parts(data, quantization.block_type), quantization.block_type)
            target.copy_(data)


def _store(weight: QuantizedWeight, target: torch.Tensor | WeightRows, where: str) -> None:
    if isinstance(target, torch.Tensor):
        weight.copy_values(target)
    else:
        target.store(weight, where)


def _may_be_ignored(name: str, stored: Mapping[str, StoredTensor], config: ModelConfig, with_mtp: bool) -> bool:
    """Return True for a tensor that changes nothing: a tensor that the model computes or shares, a scale of a quantized
    KV cache (the engine's KV cache has the model's dtype), a bias of zeros, which some tools write for every quantized
    weight, or a tensor of the part that reads images and sounds or of an unused draft head.
    """
    unused = ARCHITECTURES[config.architecture].image_tensors
    unused += ("mtp.",) if config.recurrent and not with_mtp else ()
    if name.startswith(unused):
        return True
    if config.quantization and name.endswith(_KV_SCALES):
        return True
    if config.quantization and name.endswith("_proj.bias"):
        return not stored[name].read().any()
    if name == _HEAD and config.tie_word_embeddings:
        embedding = stored.get(_EMBEDDING)
        return embedding is not None and stored[name].equals(embedding)
    return name.endswith("rotary_emb.inv_freq")


def _fill_dummy(name: str, shards: Sequence[WeightShard], seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Fill parameters with random values: norms are 1, biases, sinks and logarithms of decays 0, and matrices are
    normal with variance 1 / input features, so that activations keep their scale. Matrices of quantized layers are
    rounded to the codes of their format, or are random blocks of a GGUF type.

    Every rank draws the whole checkpoint tensor on the model's device, some rows at a time, and keeps the rank's
    slices, so that the model depends neither on the number of ranks nor on the place of its embedding table.
    """
    num_rows, *others = shards[0].full_shape
    if not others:
        for shard in shards:
            assert isinstance(shard.target, torch.Tensor), "only matrices consist of codes"
            shard.target.fill_(0.0 if name.endswith(("bias", "sinks", "A_log")) else 1.0)
        return
    target, quantization = shards[0].target, shards[0].quantization
    if quantization is not None and quantization.is_fp4:
        quantization = None
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    has_one_scale = quantization is not None and not quantization.block[0]
    target_quantizes = (
        quantization is not None
        and quantization.is_online
        and not isinstance(target, torch.Tensor)
        and target.can_quantize
    )
    block_type = None if quantization is None else quantization.block_type
    num_drawn = num_rows if has_one_scale else _DUMMY_ROWS if block_type is None else _QUANTIZED_ROWS
    for start in range(0, num_rows, num_drawn):
        end = min(start + num_drawn, num_rows)
        if block_type is None:
            drawn = torch.empty(end - start, *others, dtype=dtype, device=device)
            drawn.normal_(0, math.prod(others) ** -0.5, generator=generator)
        else:
            drawn = random_blocks(end - start, others[0], block_type, generator)
        is_quantized = quantization is not None and block_type is None and not target_quantizes
        weight = quantize(drawn, quantization) if quantization is not None and is_quantized else None
        for shard in shards:
            rows, *columns = shard.index
            first_row, last_row, _ = rows.indices(num_rows)
            kept = slice(max(start, first_row), min(end, last_row))
            if kept.start >= kept.stop:
                continue
            of_drawn = slice(kept.start - start, kept.stop - start)
            part = shard.target[kept.start - first_row : kept.stop - first_row]
            if weight is not None:
                _store(weight.part(of_drawn, *columns), part, name)
            elif block_type is not None:
                _store_blocks(drawn[of_drawn], part, block_type, *columns)
            elif isinstance(part, torch.Tensor):
                index = of_drawn, *columns
                part.copy_(drawn[index])
            else:
                part.quantize(drawn[of_drawn], *columns)


def _store_blocks(blocks: torch.Tensor, target: torch.Tensor | WeightRows, block_type: str, columns: slice) -> None:
    """Store some columns of rows of blocks, as they are or as values."""
    if isinstance(target, PackedRows):
        store_blocks(select_columns(blocks, block_type, columns), [target])
        return
    assert isinstance(target, torch.Tensor), "other weights of codes have no blocks"
    if target.dtype == torch.uint8:
        target.copy_(select_columns(blocks, block_type, columns))
    else:
        target.copy_(part_values(read_parts(blocks, block_type), block_type)[:, columns])
