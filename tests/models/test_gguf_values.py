"""The values of GGUF's types: exactly those of the package `gguf`, for any bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import TYPES, write_gguf
from tiny_models import write_tiny_model

from nanovllm.checkpoint import gguf as gguf_reader
from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.models.gguf_tensors import open_gguf
from nanovllm.models.gguf_values import dequantize
from nanovllm.models.loader import build_model

ARGUMENTS: dict[str, Any] = {"max_model_len": 64, "dtype": torch.float32, "device": "meta"}


def test_types_have_the_numbers_and_sizes_of_the_package() -> None:
    found = {number: (each.name, each.num_values, each.num_bytes) for number, each in gguf_reader.TYPES.items()}
    assert found == {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in TYPES.values()}
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: known.get(number) for number in gguf_reader.OTHER_TYPES} == gguf_reader.OTHER_TYPES


@pytest.mark.parametrize("kind", TYPES)
def test_values_equal_those_of_the_package(kind: str) -> None:
    block_type = gguf_reader.TYPES[int(TYPES[kind])]
    row_bytes = 3 * block_type.num_bytes * (1 if block_type.is_quantized else 32)
    blocks = np.random.default_rng(0).integers(0, 256, (1000, row_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales may be infinite
        expected = gguf.dequantize(blocks, TYPES[kind]).astype(np.float32)
    found = dequantize(torch.from_numpy(blocks), block_type).numpy()
    assert found.shape == expected.shape and np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    "index", [(slice(3, 9), slice(None)), (slice(None), slice(32, 96)), (slice(5, 6), slice(0, 32))]
)
def test_parts_of_a_weight_are_parts_of_its_values(index: tuple[slice, ...], tmp_path) -> None:
    """What a rank reads: some rows, or some columns, of rows in another order."""
    directory = write_tiny_model(tmp_path / "model", "llama", hidden_size=128)
    stored = open_gguf(write_gguf(tmp_path / "x.gguf", directory, types=["Q5_1"]))
    weight = stored["model.layers.0.self_attn.q_proj.weight"]
    whole = weight.read()
    assert torch.equal(weight.read(*index), whole[index])
    target = torch.zeros_like(whole[index])
    weight.copy_to(target, index)
    assert torch.equal(target, whole[index])


def test_weight_with_values_that_are_not_finite_is_refused(tmp_path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    path = write_gguf(tmp_path / "x.gguf", directory, types=["Q8_0"])
    tensor = gguf_reader.read_model(path).tensors["blk.1.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 2] = np.array([np.nan], np.float16).tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up.weight in .*x.gguf has values that are not finite"):
        open_gguf(path)["model.layers.1.mlp.up_proj.weight"].read()


def test_two_tensors_of_one_weight_are_refused(tmp_path: Path) -> None:
    """Bug: the second tensor replaced the first, and the model ran with the wrong one."""
    directory = write_tiny_model(tmp_path / "model", "qwen3")
    for other in ("blk.00.ffn_norm.weight", "blk.0.post_attention_norm.weight", "model.norm.weight"):
        path = write_gguf(
            tmp_path / f"{other}.gguf",
            directory,
            metadata=lambda writer, name=other: writer.add_tensor(name, np.ones(64, np.float32)),  # type: ignore[misc]
        )
        with pytest.raises(CheckpointError, match=r"norm.weight in .* are the same weight"):
            open_gguf(path)


def test_missing_and_unknown_tensors_are_refused_without_a_word_of_config_json(tmp_path: Path) -> None:
    """Bug: the remedy was to check config.json, which a GGUF file does not have."""
    directory = write_tiny_model(tmp_path / "model", "qwen3")
    path = write_gguf(
        tmp_path / "x.gguf", directory, metadata=lambda writer: writer.add_tensor("more.weight", np.ones(4, np.float32))
    )
    config, _ = load_config(str(path))
    with pytest.raises(CheckpointError, match=r"x.gguf has weights unknown to the model: more.weight; download"):
        build_model(config, TPGroup(), **ARGUMENTS, directory=path)
    with pytest.raises(CheckpointError, match=r"x.gguf misses weights: model.layers.2.*; download the file again"):
        longer = replace(config, num_layers=3, layer_kinds=("attention",) * 3)
        build_model(longer, TPGroup(), **ARGUMENTS, directory=path)
