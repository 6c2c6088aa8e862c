"""Quantized checkpoints, packed from descriptions of their formats, beside plain ones with the same values."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 32
SKIPPED = "model.layers.1.mlp.down_proj"  # left as it is in every checkpoint
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of 8 that each nibble of a word holds, from the lowest bits up

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]  # name, weight -> stored tensors, its values


def pack(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Non-negative codes as int32 words, along an axis; short rows are filled up with zeros."""
    per_word = 32 // bits
    moved = np.moveaxis(codes.astype(np.uint64), axis, -1)
    moved = np.pad(moved, [(0, 0), (0, -moved.shape[1] % per_word)]).reshape(len(moved), -1, per_word)
    words = np.zeros(moved.shape[:2], np.uint64)
    for place, neighbour in enumerate(order or range(per_word)):
        words |= moved[:, :, neighbour] << np.uint64(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)))


def integers(
    weight: torch.Tensor, bits: int, group: int, groups: np.ndarray, is_symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
    """Codes [N, K], fp16 scales and zeros [N, G], and the values of `weight` rounded to them."""
    w = weight.double().numpy()
    num_groups = w.shape[1] // group
    low, high = (np.stack([pick(w[:, groups == g], 1) for g in range(num_groups)], 1) for pick in (np.min, np.max))
    levels = 2**bits - 1
    if is_symmetric:
        scales = np.maximum(-low, high) / (levels / 2)
        zeros = np.full_like(scales, 2 ** (bits - 1))
    else:
        scales = (high - low) / levels
        zeros = np.clip(np.round(-low / scales), 0, levels)
        zeros[::13] = 0  # the least that a format can store; with more of them, answers repeat one token
    scales = scales.astype(np.float16).astype(np.float64)
    codes = np.clip(np.round(w / scales[:, groups]) + zeros[:, groups], 0, levels)
    values = torch.from_numpy((codes - zeros[:, groups]) * scales[:, groups]).float()
    return codes.astype(np.int64), scales.astype(np.float16), zeros.astype(np.int64), values


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = np.arange(weight.shape[1]) // GROUP
    codes, scales, zeros, values = integers(weight, 4, GROUP, groups, is_symmetric=False)
    stored = {
        "qweight": pack(codes.T, 4, 1, AWQ_NIBBLES),
        "qzeros": pack(zeros.T, 4, 1, AWQ_NIBBLES),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return stored, values


def in_another_order(name: str, groups: np.ndarray) -> np.ndarray:
    """The groups of columns in an order that layers share if they read the same input."""
    parent, _, layer = name.rpartition(".")
    reads = layer if layer in ("o_proj", "down_proj", "out_proj") else "input"
    return np.random.default_rng(zlib.crc32(f"{parent} {reads}".encode())).permutation(groups)


def gptq(bits: int, offset: int, has_order: bool, is_symmetric: bool = False) -> Quantize:
    """`offset`: how much less than they are zeros are stored. `has_order`: columns have another order."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = np.arange(weight.shape[1]) // GROUP
        if has_order:
            groups = in_another_order(name, groups)
        codes, scales, zeros, values = integers(weight, bits, GROUP, groups, is_symmetric)
        stored = {
            "qweight": pack(codes.T, bits, 0),
            "qzeros": pack(zeros.T, bits, 1) - offset * sum(1 << place for place in range(0, 31, bits)),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return stored, values

    return quantize


def packed(bits: int, is_symmetric: bool, is_channel: bool = False, has_order: bool = False) -> Quantize:
    """compressed-tensors, pack-quantized. `has_order` as in `gptq`."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group = weight.shape[1] if is_channel else GROUP
        groups = np.arange(weight.shape[1]) // group
        if has_order:
            groups = in_another_order(name, groups)
        codes, scales, zeros, values = integers(weight, bits, group, groups, is_symmetric=is_symmetric)
        stored = {
            "weight_packed": pack(codes, bits, 1),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_order:
            stored["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        if not is_symmetric:
            stored["weight_zero_point"] = pack(zeros, bits, 0)
        return stored, values

    return quantize


def e4m3(block: tuple[int, int] | None, scale_name: str, shape: tuple[int, ...] | None = None) -> Quantize:
    """`block`: rows and columns that share a scale, None for all. `shape`: of the stored scales, if it is another."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        num_rows, num_columns = weight.shape
        rows, columns = block or (num_rows, num_columns)
        columns = columns or num_columns
        codes, values = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros_like(weight)
        scales = torch.zeros(-(-num_rows // rows), -(-num_columns // columns))
        for i, j in np.ndindex(*scales.shape):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scales[i, j]
        return {"weight": codes, scale_name: scales if shape is None else scales.reshape(shape)}, values

    return quantize


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(kind: str) -> Quantize:
    """FP4. `kind`: nvfp4 of compressed-tensors, whose scale of the weight divides, of modelopt, or mxfp4."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = 32 if kind == "mxfp4" else 16
        blocks = weight.unflatten(1, (-1, size))
        scales, extra = blocks.abs().amax(-1) / 6, dict[str, torch.Tensor]()
        if kind == "mxfp4":
            exponents = scales.log2().ceil()
            stored, scales = (exponents + 127).to(torch.uint8), exponents.exp2()
        elif kind == "nvfp4":
            extra["weight_global_scale"] = 448 / scales.max()[None]
            stored = (scales * extra["weight_global_scale"]).to(torch.float8_e4m3fn)
            scales = stored.float() / extra["weight_global_scale"]
        else:
            extra["weight_scale_2"] = scales.max() / 448
            stored = (scales / extra["weight_scale_2"]).to(torch.float8_e4m3fn)
            scales = stored.float() * extra["weight_scale_2"]
        levels = torch.tensor((*E2M1, *(-level for level in E2M1)))
        codes = (blocks[..., None] / scales[..., None, None] - levels).abs().argmin(-1)
        values = (levels[codes] * scales[..., None]).flatten(1)
        codes = codes.flatten(1).to(torch.uint8)
        main = "weight" if kind == "modelopt" else "weight_packed"
        return {main: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": stored, **extra}, values

    return quantize


def mixed(**kinds: Quantize) -> Quantize:
    """Quantize layers by the part of their name that is a key, and others as `others`."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return next((kind for part, kind in kinds.items() if part in name), kinds["others"])(name, weight)

    return quantize


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    kind = {"type": "float" if "f" in layout else "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": kind, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", SKIPPED],
    }


def two_groups(first: dict[str, Any], second: dict[str, Any], target: str) -> dict[str, Any]:
    """Settings of `first` for all layers except those that `target` matches, which have the settings of `second`."""
    groups = [given["config_groups"]["group_0"] | {"format": given["format"]} for given in (first, second)]
    groups[1] = groups[1] | {"targets": [target]}
    return first | {"format": "mixed-precision", "config_groups": {"group_0": groups[0], "group_1": groups[1]}}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False}
GROUPED = {"strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {  # name -> quantization_config and how it is packed
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        e4m3((128, 128), "weight_scale_inv"),
    ),
    "fp8 small blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 40], "activation_scheme": "dynamic"},
        e4m3((24, 40), "weight_scale_inv"),
    ),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, e4m3(None, "weight_scale", ())),
    "float channel": (compressed("float-quantized", num_bits=8, strategy="channel"), e4m3((1, 0), "weight_scale")),
    "float tensor": (compressed("float-quantized", num_bits=8, strategy="tensor"), e4m3(None, "weight_scale", (1,))),
    "packed 4": (compressed("pack-quantized", num_bits=4, **GROUPED), packed(4, is_symmetric=True)),
    "packed 4 zeros": (
        compressed("pack-quantized", num_bits=4, **GROUPED | {"symmetric": False}),
        packed(4, is_symmetric=False),
    ),
    "packed 4 order": (
        compressed("pack-quantized", num_bits=4, **GROUPED | {"actorder": "group"}),
        packed(4, is_symmetric=True, has_order=True),
    ),
    "packed 8 channel": (
        compressed("pack-quantized", num_bits=8, strategy="channel"),
        packed(8, is_symmetric=True, is_channel=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "awq dynamic": (
        {"quant_method": "awq", "bits": 4, "group_size": 2 * GROUP, "checkpoint_format": "gemm"}
        | {"dynamic": {r"+:.*": {"group_size": GROUP}, f"-:{SKIPPED}": {}}},
        awq,
    ),
    "gptq": (GPTQ | {"bits": 4, "desc_act": False}, gptq(4, 1, has_order=False)),
    "gptq 8 order": (GPTQ | {"bits": 8, "desc_act": True}, gptq(8, 1, has_order=True)),
    "gptq dynamic": (
        GPTQ | {"bits": 4, "desc_act": False, "dynamic": {r"+:.*\.(gate|up)_proj": {"bits": 8}, f"-:{SKIPPED}": {}}},
        mixed(
            gate_proj=gptq(8, 1, has_order=False),
            up_proj=gptq(8, 1, has_order=False),
            others=gptq(4, 1, has_order=False),
        ),
    ),
    "auto-round": (
        GPTQ
        | {"quant_method": "auto-round", "bits": 4, "sym": True, "packing_format": "auto_round:auto_gptq"}
        | {"extra_config": {SKIPPED: {"bits": 16}, ".*v_proj": {"bits": 8}}},
        mixed(
            v_proj=gptq(8, 1, has_order=False, is_symmetric=True), others=gptq(4, 1, has_order=False, is_symmetric=True)
        ),
    ),
    "two groups": (
        two_groups(
            compressed("pack-quantized", num_bits=4, **GROUPED),
            compressed("float-quantized", num_bits=8, strategy="channel"),
            "re:.*o_proj",
        ),
        mixed(o_proj=e4m3((1, 0), "weight_scale"), others=packed(4, is_symmetric=True)),
    ),
    "nvfp4 compressed": (compressed("nvfp4-pack-quantized", num_bits=4, group_size=16), e2m1("nvfp4")),
    "nvfp4 modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.1.mlp.down*"]},
        e2m1("modelopt"),
    ),
    "mxfp4 compressed": (compressed("mxfp4-pack-quantized", num_bits=4, group_size=32), e2m1("mxfp4")),
    "gptq_v2": (GPTQ | {"bits": 4, "desc_act": True, "checkpoint_format": "gptq_v2"}, gptq(4, 0, has_order=True)),
}


def write_quantized(plain: Path, directory: Path, name: str) -> tuple[Path, Path]:
    """Quantize the linear layers of the checkpoint `plain`. Returns it quantized, and a plain one of its values."""
    settings, quantize = FORMATS[name]
    stored: Tensors = {}
    values: Tensors = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        prefix = key.removesuffix(".weight")
        if "_proj" in prefix.rpartition(".")[2] and prefix != SKIPPED and key != prefix:
            parts, values[key] = quantize(prefix, tensor)
            stored |= {f"{prefix}.{part}": each.contiguous() for part, each in parts.items()}
        else:
            stored[key] = values[key] = tensor
    config = json.loads((plain / "config.json").read_text())
    for kind, tensors, more in (("quantized", stored, {"quantization_config": settings}), ("values", values, {})):
        (directory / kind).mkdir()
        save_file(tensors, directory / kind / "model.safetensors", metadata={"format": "pt"})
        (directory / kind / "config.json").write_text(json.dumps(config | more))
    return directory / "quantized", directory / "values"
