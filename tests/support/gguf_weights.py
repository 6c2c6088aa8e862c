"""Weights in GGUF's blocks as the GPU packs them, in Triton's interpreter or on a GPU."""

from typing import Any

import numpy as np
import torch

from nanovllm.checkpoint.gguf import TYPES, BlockType
from nanovllm.checkpoint.quantization import BLOCK_TYPES
from nanovllm.layers.packed_weight import PackedWeight, store_blocks
from nanovllm.models.gguf_values import dequantize, read_parts

TYPE_OF = {each.name: each for each in TYPES.values()}
_FIRST_SCALE = {"Q6_K": 208}  # byte of a block; 0 in other types
_WITH_LEAST = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_rows(name: str, num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    """Rows of blocks with random bytes, and scales of all signs such that rows of the values have a length near 1."""
    kind = TYPE_OF[name]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_rows, num_columns // kind.num_values, kind.num_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(116, 122, blocks.shape[:2])
        return torch.from_numpy(blocks).flatten(1)
    unit, first = rng.standard_normal(blocks.shape[:2]), _FIRST_SCALE.get(name, 0)
    blocks[..., first : first + 2] = unit.astype("<f2")[..., None].view(np.uint8)
    if name in _WITH_LEAST:
        blocks[..., 2:4] = (-5 * rng.standard_normal(blocks.shape[:2])).astype("<f2")[..., None].view(np.uint8)
    values = dequantize(torch.from_numpy(blocks).flatten(1), kind)
    factor = 1 / values.norm(dim=1).mean().item()
    for place in (first, 2) if name in _WITH_LEAST else (first,):
        scales = np.ascontiguousarray(blocks[..., place : place + 2]).view("<f2") * np.float16(factor)
        blocks[..., place : place + 2] = scales.astype("<f2").view(np.uint8)
    return torch.from_numpy(blocks).flatten(1)


def block_weight(name: str, rows: torch.Tensor, device: str) -> tuple[Any, torch.Tensor]:
    """Return a packed weight with these rows of blocks, and its values in fp64."""
    kind: BlockType = TYPE_OF[name]
    num_columns = rows.shape[1] // kind.num_bytes * kind.num_values
    with torch.device(device):
        weight = PackedWeight([len(rows)], num_columns, BLOCK_TYPES[name])
    store_blocks(read_parts(rows.to(device), name), [weight.rows(0, len(rows))])
    return weight, dequantize(rows.to(device), kind).double()


def packed_with_torch(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of the codes and of the scales of rows, int32 [n, words], computed step by step."""
    from nanovllm.kernels import gguf_words, packed_values

    parts = read_parts(rows, name)
    codes = packed_values.pack_block_codes(parts.codes, gguf_words.kind_of(name), BLOCK_TYPES[name].bits)
    return codes, packed_values.pack_block_scales(*parts[1:])
