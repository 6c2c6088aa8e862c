"""Builds a model, and fills it from safetensors files or with seeded random weights. Every rank reads only its own
slices. Quantized weights are unpacked to their codes, or quantized while they are loaded.
"""

import functools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from nanovllm.checkpoint.files import weight_files
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.layers.linear import WeightShard
from nanovllm.layers.packed_weight import PackedRows, QuantizedWeight
from nanovllm.models.decoder import CausalLM, MTPHead
from nanovllm.utils.arithmetic import ceil_div
from nanovllm.utils.progress import progress_bar

_KV_SCALES = (
    *("_proj.k_scale", "_proj.v_scale", "_attn.k_scale", "_attn.v_scale", "_attn.q_scale", "_attn.kv_scale"),
    *("k_proj.output_scale", "v_proj.output_scale"),
)
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them
_SCALE_DTYPES = ("F32", "F16", "BF16")
_QUANTIZED_ROWS = 1024  # quantized at a time; a multiple of all common blocks
_COMPARED_ROWS = 8192  # at a time
_DUMMY_ROWS = 8192  # rows drawn at a time, to limit the memory needed in addition to the model


def build_model(
    config: ModelConfig,
    tp: TPGroup,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device | str,
    directory: Path | None = None,
    with_mtp: bool = False,
) -> CausalLM:
    """Allocate this rank's part of the model on `device` in `dtype`. `load_weights` fills it.

    max_model_len: tokens of the longest sequence. directory: where the weights are, if `load_weights` will read them.
    Their names, shapes and types are checked before anything is allocated, and they tell what a quantized checkpoint
    leaves unquantized. with_mtp: with the head that drafts; `config.has_mtp` tells whether there is one.

    Raises CheckpointError, with the name of the file or tensor, if one is missing, damaged or unknown, or if a tensor
    has a wrong shape or type. Raises ConfigError if the heads or the MLP's features are not divisible by the number of
    ranks.
    """

    def build(device: torch.device | str) -> CausalLM:
        with torch.device(device):
            model = CausalLM(config, tp, max_model_len=max_model_len, dtype=dtype)
            if with_mtp:
                assert config.has_mtp, "the checkpoint has no draft head"
                model.mtp = MTPHead(config, tp, dtype)
        return model

    if directory is not None:
        with ExitStack() as files:
            stored = _open(weight_files(directory), files)
            quantization = config.quantization
            if quantization is not None and not quantization.is_online:
                ignored = (*quantization.ignored, *_unquantized_layers(stored))
                config = replace(config, quantization=replace(quantization, ignored=ignored))
            _check(build("meta"), directory, stored)
    return build(device)


def _unquantized_layers(stored: Mapping[str, "StoredTensor"]) -> list[str]:
    """The linear layers whose weights a checkpoint has as they are."""
    return [
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in _FLOAT_DTYPES
    ]


def load_weights(
    model: CausalLM, directory: Path | None, *, load_format: str = "auto", seed: int = 0, show_progress: bool = False
) -> None:
    """Fill every parameter of `model`, in place, on its own device and in its own dtype.

    With `load_format` "dummy" the weights are random, drawn from `seed`, and the same for every number of ranks. With
    any other, they are read from the safetensors files in `directory`, which `build_model` has checked. Quantized
    weights are replaced by their values, one tensor at a time. Raises CheckpointError, with the tensor's name, for what
    is wrong in its data, such as scales that are not finite.
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
                _fill_dummy(name, of_name, seed, model.lm_head.weight.dtype)
                progress.update()
            return
        stored = _open(weight_files(directory), files)
        for name, of_name in shards.items():
            for shard in of_name:
                source = _find(name, shard, stored, model.config.quantization)
                assert source is not None, "a missing tensor has been refused"
                _fill(shard, source)
            progress.update()


def _check(model: CausalLM, directory: Path, stored: Mapping[str, "StoredTensor"]) -> None:
    """Raise CheckpointError if tensors are missing or unknown, or have a wrong shape or type."""
    sources = {name: _find(name, shard, stored, model.config.quantization) for name, shard in model.weight_shards()}
    missing = [name for name, source in sources.items() if source is None]
    used: set[str] = set()
    for name, source in sources.items():
        if isinstance(source, QuantizedReader):
            used |= {name.removesuffix("weight") + part for part in source.parts}
        else:
            used.add(name)
    unused = [name for name in stored if name not in used]
    if missing:
        remedy = "check that config.json belongs to these files"
        if beside := [name for name in unused if name.startswith(missing[0].removesuffix("weight"))]:
            remedy = f"the files have {', '.join(beside)} instead; check quantization_config in config.json"
        if all(name.startswith("mtp.") for name in missing):
            remedy = "the draft head in these files is not complete, so use another speculation than mtp or auto"
        raise CheckpointError(f"{directory} misses weights: {_first(missing)}; {remedy}")
    if unknown := [name for name in unused if not _may_be_ignored(name, stored, model)]:
        remedy = "check that config.json belongs to these files"
        if unknown == ["lm_head.weight"]:
            remedy = "it is not the embedding, so remove it, or use hf_overrides={'tie_word_embeddings': False}"
        raise CheckpointError(f"{directory} has weights unknown to the model: {_first(unknown)}; {remedy}")


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class StoredTensor:
    """A tensor of a checkpoint, of which nothing is read until it is asked for."""

    def __init__(self, name: str, file: Path, tensors: Any) -> None:
        self.name, self.where = name, f"{name} in {file}"  # the latter for error messages
        self._tensors, self._slice = tensors, tensors.get_slice(name)
        self.shape = tuple(self._slice.get_shape())
        self.dtype = str(self._slice.get_dtype())  # as safetensors names it

    def read(self, *index: slice) -> torch.Tensor:
        tensor: torch.Tensor = self._slice[index] if index else self._tensors.get_tensor(self.name)
        return tensor


def _open(paths: Sequence[Path], files: ExitStack) -> dict[str, StoredTensor]:
    """The tensors of all files by name. Nothing is read yet."""
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            tensors = files.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            found = {name: StoredTensor(name, path, tensors) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}); download it again"
            ) from error
        if twice := sorted(stored.keys() & found.keys()):
            raise CheckpointError(
                f"{found[twice[0]].where} is also in {stored[twice[0]].where}; keep the files of one download"
            )
        stored |= found
    return {name: tensor for each in stored.values() for name, tensor in _as_named_here(each)}


def _as_named_here(tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensor by its name in a checkpoint that has only a text part, and each expert by itself."""
    name = tensor.name.replace("model.language_model.", "model.", 1)
    parent, _, last = name.rpartition(".")
    kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
    if kinds is None or not parent.endswith(".experts") or len(tensor.shape) != 3:
        yield name, tensor
        return
    if tensor.dtype not in _FLOAT_DTYPES:
        raise CheckpointError(
            f"{tensor.where} has dtype {tensor.dtype}, and quantized experts in one tensor are not supported; use a "
            "checkpoint with tensors for each expert"
        )
    num_experts, num_rows, _ = tensor.shape
    size = num_rows // len(kinds)
    if not size or num_rows % size:  # it cannot be divided, so its experts are missing
        yield name, tensor
        return
    for expert in range(num_experts):
        for start, kind in zip(range(0, num_rows, size), kinds, strict=True):
            yield f"{parent}.{expert}.{kind}.weight", _OfExpert(tensor, expert, slice(start, start + size))


class _OfExpert(StoredTensor):
    """Some rows of one expert, in a tensor of all experts."""

    def __init__(self, experts: StoredTensor, expert: int, rows: slice) -> None:
        self.name, self.where, self.dtype = experts.name, experts.where, experts.dtype
        self._experts, self._expert, self._rows = experts, slice(expert, expert + 1), rows
        self.shape = (rows.stop - rows.start, experts.shape[2])

    def read(self, *index: slice) -> torch.Tensor:
        rows, columns = index or (slice(None), slice(None))
        start, end, _ = rows.indices(self.shape[0])
        first = self._rows.start
        return self._experts.read(self._expert, slice(first + start, first + end), columns)[0]


def _find(
    name: str, shard: WeightShard, stored: Mapping[str, StoredTensor], quantization: Quantization | None
) -> "QuantizedReader | StoredTensor | None":
    """The checkpoint's tensors for a parameter, or for part of it; None if there are none. Reads nothing."""
    parts = stored_parts(quantization, name, stored) if quantization else {}
    if quantization and parts:
        num_rows, num_columns = shard.full_shape
        return QuantizedReader(quantization, parts, num_rows, num_columns, shard.target.device)
    if name not in stored:
        return None
    source = stored[name]
    if source.shape != shard.full_shape:
        raise CheckpointError(
            f"{source.where} has shape {list(source.shape)}, but config.json asks for {list(shard.full_shape)}"
        )
    if source.dtype not in _FLOAT_DTYPES:
        given = f"quant_method={quantization.method!r}" if quantization else "no quantization_config"
        raise CheckpointError(
            f"{source.where} has dtype {source.dtype}, but config.json has {given}; check that both belong together"
        )
    return source


def _fill(shard: WeightShard, source: "QuantizedReader | StoredTensor") -> None:
    """Fill a parameter, or part of it."""
    if isinstance(source, QuantizedReader):
        rows, columns = shard.index
        _store(source.read(rows, columns), shard.target, source.main.where)
    elif shard.quantization is not None and shard.quantization.is_online:
        start, end, _ = shard.index[0].indices(shard.full_shape[0])
        for first in range(start, end, _QUANTIZED_ROWS):
            rows = slice(first, min(first + _QUANTIZED_ROWS, end))
            values = source.read(rows, slice(None)).to(shard.target.device)
            target = shard.target[rows.start - start : rows.stop - start]
            if isinstance(target, PackedRows):
                target.quantize(values, shard.index[1])
            else:
                quantize(values, shard.quantization).part(slice(None), shard.index[1]).copy_values(target)
    else:
        assert isinstance(shard.target, torch.Tensor), "a packed weight is quantized"
        shard.target.copy_(source.read(*shard.index))
        if shard.plus:
            shard.target.add_(shard.plus)


def _store(weight: QuantizedWeight, target: torch.Tensor | PackedRows, where: str) -> None:
    if isinstance(target, PackedRows):
        target.store(weight, where)
    else:
        weight.copy_values(target)


def _may_be_ignored(name: str, stored: Mapping[str, StoredTensor], model: CausalLM) -> bool:
    """Return True for a tensor that some checkpoints contain although it changes nothing: the model computes or shares
    it, or it belongs to a quantized KV cache, where ours has the model's dtype, or it is a bias of zeros, which some
    tools write beside every quantized weight, or part of the model that reads images or drafts.
    """
    unused = ("model.visual.",) if model.mtp is not None else ("model.visual.", "mtp.")
    if model.config.recurrent and name.startswith(unused):
        return True
    if model.config.quantization and name.endswith(_KV_SCALES):
        return True
    if model.config.quantization and name.endswith("_proj.bias"):
        return not stored[name].read().any()
    if name == "lm_head.weight" and model.config.tie_word_embeddings:
        return _are_equal(stored[name], stored.get("model.embed_tokens.weight"))
    return name.endswith("rotary_emb.inv_freq")


def _are_equal(tensor: StoredTensor, other: StoredTensor | None) -> bool:
    """Compare two matrices, some rows at a time."""
    if other is None or tensor.shape != other.shape:
        return False
    starts = range(0, tensor.shape[0], _COMPARED_ROWS)
    parts = ((slice(start, start + _COMPARED_ROWS), slice(None)) for start in starts)
    return all(torch.equal(tensor.read(*part), other.read(*part)) for part in parts)


def _fill_dummy(name: str, shards: Sequence[WeightShard], seed: int, dtype: torch.dtype) -> None:
    """Norms are 1, biases and logarithms of decays 0, matrices normal with variance 1 / input features, so that
    activations keep their scale. Those of quantized layers are rounded to the codes of their format.

    Every rank draws the whole checkpoint tensor, some rows at a time, and keeps its slices, so that the model does not
    depend on the number of ranks.
    """
    num_rows, *others = shards[0].full_shape
    if not others:
        for shard in shards:
            assert isinstance(shard.target, torch.Tensor), "only matrices are packed"
            shard.target.fill_(0.0 if name.endswith(("bias", "A_log")) else 1.0)
        return
    device, quantization = shards[0].target.device, shards[0].quantization
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    has_one_scale = quantization is not None and not quantization.block[0]
    target_quantizes = quantization is not None and quantization.is_online and isinstance(shards[0].target, PackedRows)
    num_drawn = num_rows if has_one_scale else _DUMMY_ROWS
    for start in range(0, num_rows, num_drawn):
        end = min(start + num_drawn, num_rows)
        drawn = torch.empty(end - start, *others, dtype=dtype, device=device)
        drawn.normal_(0, math.prod(others) ** -0.5, generator=generator)
        weight = None if quantization is None or target_quantizes else quantize(drawn, quantization)
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
            elif isinstance(part, PackedRows):
                part.quantize(drawn[of_drawn], *columns)
            else:
                index = of_drawn, *columns
                part.copy_(drawn[index])


# -- quantized weights (checkpoint/quantization.py) --------------------------------------------------------------------
#
# N output features, K input features, G groups of columns that share a scale. The layouts, from the sources of
# transformers, compressed-tensors, AutoAWQ and AutoGPTQ:
#
# | method | codes | scales | zeros |
# |---|---|---|---|
# | e4m3 | weight e4m3 [N, K] | weight_scale_inv or weight_scale, per block | |
# | pack-quantized | weight_packed [N, K words] | weight_scale [N, G] | weight_zero_point [N words, G] |
# | awq | qweight [K, N words] | scales [G, N] | qzeros [G, N words] |
# | gptq | qweight [K words, N] | scales [G, N] | qzeros [G, N words] |
#
# A word is an int32 with the codes of neighbours, the first in its lowest bits; awq has an order of its own.

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of 8 neighbours is


def quantize(values: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """Quantize `values` [n, K], which begin at a row where a block of scales begins. Each block's largest value becomes
    the largest code, and zeros are the middle of the codes (round to nearest, as compressed-tensors does).

    On a GPU, `quantize_weight` in kernels/packed_values.py does the same for QUANTIZATIONS.
    """
    (n, k), (block_rows, block_columns) = values.shape, quantization.block
    block_rows, block_columns = block_rows or n, block_columns or k
    most = torch.finfo(torch.float8_e4m3fn).max if quantization.is_float else quantization.middle - 0.5
    magnitudes = values.abs()
    if k % block_columns or n % block_rows:
        magnitudes = F.pad(magnitudes, (0, -k % block_columns, 0, -n % block_rows))
    largest = magnitudes.unflatten(1, (-1, block_columns)).amax(2)
    if block_rows > 1:
        largest = largest.unflatten(0, (-1, block_rows)).amax(1).repeat_interleave(block_rows, 0)[:n]
    # The product with the reciprocal is what torch computes on a GPU for a quotient, and the same on all devices
    scales = (largest.float() * (1 / most)).clamp_(min=torch.finfo(torch.float32).tiny)
    if not quantization.is_float:
        scales = scales.to(torch.bfloat16)
    codes = values.float() / scales.float().repeat_interleave(block_columns, 1)[:, :k]
    groups = regular_groups(k, block_columns)
    if quantization.is_float:
        return QuantizedWeight(codes.clamp_(-most, most).to(torch.float8_e4m3fn), scales, None, groups)
    codes = codes.round_().add_(quantization.middle).clamp_(0, 2 * quantization.middle - 1).to(torch.uint8)
    zeros = torch.full(scales.shape, quantization.middle, dtype=torch.int16, device=scales.device)
    return QuantizedWeight(codes, scales, zeros, groups)


@functools.cache
def regular_groups(num_columns: int, block_columns: int) -> torch.Tensor:
    """The group of each column if `block_columns` neighbours are one; nothing may write to it."""
    return torch.arange(num_columns) // block_columns


_MAIN = {"awq": "qweight", "gptq": "qweight"}
_OTHERS = {  # a checkpoint may lack some of these
    "fp8": ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
    "compressed-tensors": ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale"),
    "awq": ("scales", "qzeros"),
    "gptq": ("scales", "qzeros", "g_idx"),
}


def stored_parts(quantization: Quantization, name: str, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the weight `name`, by the last part of their names, if the checkpoint has it quantized; else none.

    A module whose weight is stored as it is, is one that the checkpoint leaves unquantized.
    """
    prefix, _, last = name.rpartition(".")
    main = _MAIN.get(quantization.method, "weight" if quantization.is_float else "weight_packed")
    if quantization.is_online or last != "weight" or f"{prefix}.{main}" not in stored:
        return {}
    parts = {
        part: stored[f"{prefix}.{part}"]
        for part in (main, *_OTHERS[quantization.method])
        if f"{prefix}.{part}" in stored
    }
    return {} if quantization.is_float and parts[main].dtype != "F8_E4M3" else parts


class QuantizedReader:
    """Reads parts of a weight [num_rows, num_columns], and unpacks them on `device`.

    Raises CheckpointError, with the tensor's name: at first, if one is missing or has a wrong shape or type; while it
    reads, for scales that are not finite, and for a column of a group that does not exist.
    """

    def __init__(
        self,
        quantization: Quantization,
        parts: Mapping[str, StoredTensor],
        num_rows: int,
        num_columns: int,
        device: torch.device,
    ) -> None:
        self.format, self.parts, self.num_rows, self.num_columns = quantization, parts, num_rows, num_columns
        self.device = device
        self.main = next(iter(parts.values()))
        block_columns = quantization.block[1] or self.num_columns
        if not quantization.is_float and self.num_columns % block_columns:
            raise CheckpointError(
                f"{self.main.where} has {self.num_columns} columns, which groups of {block_columns} do not divide; use "
                "a checkpoint with another group_size"
            )
        self.block_columns, self.num_groups = block_columns, ceil_div(self.num_columns, block_columns)
        n, k, g = num_rows, num_columns, self.num_groups
        n_words, k_words = ceil_div(n, quantization.codes_per_word), ceil_div(k, quantization.codes_per_word)
        self._zeros: StoredTensor | None = None
        self._order: StoredTensor | None = None
        if quantization.is_float:
            self._check(self.main, (n, k), "F8_E4M3")
            stored = parts.get("weight_scale_inv") or self._get("weight_scale")
            blocks = ceil_div(n, quantization.block[0] or n), g
            shapes: list[tuple[int, ...]] = [blocks]
            if g == 1:  # dimensions of size 1 may be missing
                shapes += [blocks[:1], ()] if blocks[0] == 1 else [blocks[:1]]
            self._scales = self._check(stored, stored.shape if stored.shape in shapes else blocks, *_SCALE_DTYPES)
            return
        scales, zeros, order = "scales", "qzeros", "g_idx"
        shapes = [(k, n_words) if quantization.method == "awq" else (k_words, n), (g, n), (g, n_words)]
        if quantization.method == "compressed-tensors":
            scales, zeros, order = "weight_scale", "weight_zero_point", "weight_g_idx"
            shapes = [(n, k_words), (n, g), (n_words, g)]
        self._check(self.main, shapes[0], "I32")
        self._scales = self._check(self._get(scales), shapes[1], *_SCALE_DTYPES)
        if quantization.has_zeros:
            self._zeros = self._check(self._get(zeros), shapes[2], "I32")
        if order in parts or (quantization.has_order and g > 1):
            self._order = self._check(self._get(order), (k,), "I32", "I64")

    def read(self, rows: slice, columns: slice) -> QuantizedWeight:
        groups, unused = self._groups()[columns], self.parts.get("weight_zero_point")
        if unused is not None and not self.format.has_zeros and unused.read().float().any():
            raise CheckpointError(
                f"{unused.where} is not 0, but quantization_config has symmetric=true; check that config.json belongs "
                "to these files"
            )
        if self.format.is_float:
            codes = self.main.read(rows, columns).to(self.device)
            if (codes.view(torch.uint8) & 0x7F == 0x7F).any():
                raise CheckpointError(f"{self.main.where} has codes that are NaN; download the model again")
            return QuantizedWeight(codes, self._block_scales()[rows], None, groups)
        if self.format.method == "compressed-tensors":
            words = self.main.read(rows, slice(None)).to(self.device)
            codes, scales = self._unpack(words, 1)[:, : self.num_columns][:, columns], self._finite_scales()
        else:
            codes, scales = self._transposed_codes()[columns, rows].t(), self._finite_scales().t()
        zeros = self._read_zeros() if self.format.has_zeros else torch.full_like(scales, self.format.middle).short()
        return QuantizedWeight(codes, scales[rows], zeros[rows], groups)

    def _transposed_codes(self) -> torch.Tensor:
        """uint8 [K, N], all of them."""
        words = self.main.read().to(self.device)
        if self.format.method == "awq":
            return self._unpack(words, 1, _AWQ_ORDER)[:, : self.num_rows]
        return self._unpack(words, 0)[: self.num_columns]

    def _read_zeros(self) -> torch.Tensor:
        """int16 [N, G], all of them."""
        assert self._zeros is not None, "the format has zeros"
        words = self._zeros.read().to(self.device)
        if self.format.method == "compressed-tensors":
            zeros = self._unpack(words, 0)
        else:
            if self.format.stores_less_one:  # one was subtracted from words as a whole, so a zero of 0 has borrowed
                words = words + sum(1 << place for place in range(0, 31, self.format.bits))
            zeros = self._unpack(words, 1, _AWQ_ORDER if self.format.method == "awq" else None).t()
        return zeros[: self.num_rows].short()

    def _block_scales(self) -> torch.Tensor:
        """[N, G] of codes in e4m3."""
        block_rows = self.format.block[0] or self.num_rows
        scales = self._finite_scales().reshape(ceil_div(self.num_rows, block_rows), self.num_groups)
        return scales[torch.arange(self.num_rows, device=self.device) // block_rows]

    def _finite_scales(self) -> torch.Tensor:
        """In the shape and the type that they have in the checkpoint."""
        scales = self._scales.read().to(self.device)
        if not scales.isfinite().all():
            raise CheckpointError(f"{self._scales.where} has scales that are not finite; download the model again")
        return scales

    def _groups(self) -> torch.Tensor:
        """int64 [K] on the CPU: the group of each column. An order of -1 throughout says nothing."""
        groups = regular_groups(self.num_columns, self.block_columns)
        if self._order is None:
            return groups
        order = self._order.read().long()
        if bool((order == -1).all()):
            return groups
        if len(order) and not 0 <= int(order.min()) <= int(order.max()) < self.num_groups:
            raise CheckpointError(
                f"{self._order.where} has groups {int(order.min())} to {int(order.max())}, but there are "
                f"{self.num_groups}, of {self.block_columns} columns each; download the model again"
            )
        return order

    # -- checks of names, shapes and types ---------------------------------------------------------------------------

    def _get(self, part: str) -> StoredTensor:
        if part not in self.parts:
            raise CheckpointError(
                f"{self.main.where} has no {part} beside it, which quant_method={self.format.method!r} needs; download "
                "the model again"
            )
        return self.parts[part]

    def _check(self, stored: StoredTensor, shape: tuple[int, ...], *dtypes: str) -> StoredTensor:
        if stored.shape != shape or stored.dtype not in dtypes:
            raise CheckpointError(
                f"{stored.where} has shape {list(stored.shape)} and dtype {stored.dtype}, but config.json asks for "
                f"{list(shape)} and {' or '.join(dtypes)}; check that config.json belongs to these files"
            )
        return stored

    def _unpack(self, words: torch.Tensor, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
        """The codes of int32 words [A, B] as uint8, in the place of `dim`."""
        bits, per_word = self.format.bits, self.format.codes_per_word
        places = [bits * i for i in order or range(per_word)]
        codes = [((words >> place) & ((1 << bits) - 1)).to(torch.uint8) for place in places]
        return torch.stack(codes, dim=dim + 1).flatten(dim, dim + 1)
