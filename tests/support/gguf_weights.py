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
    store_blocks(rows.to(device), [weight.rows(0, len(rows))])
    return weight, dequantize(rows.to(device), kind).double()


def packed_with_torch(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of the codes and of the scales of rows, int32 [n, words], computed step by step."""
    from nanovllm.kernels import gguf_words

    parts = read_parts(rows, name)
    codes = _pack_codes(parts.codes, gguf_words.kind_of(name), BLOCK_TYPES[name].bits)
    return codes, _pack_scales(*parts[1:])


def _pack_codes(codes: torch.Tensor, kind: int, bits: int) -> torch.Tensor:
    """Pack codes uint8 [n, K] of `bits` bits -> words int32 [n, K * bits / 32]."""
    from nanovllm.kernels import packed_values, packed_words

    if kind == packed_words.Q6_K.value:  # [.., group, pair, 2] -> [.., pair, group, 2]
        codes = codes.reshape(len(codes), -1, 2, 8, 2).transpose(2, 3).flatten(1)
    if bits in (4, 8):
        return packed_values.pack_codes(codes, bits)
    upper_bits = bits - 4
    # Dimensions: blocks, slices s, upper words j, words i of an upper word, halves h
    upper = (codes >> 4).view(len(codes), -1, 4, 4 * upper_bits, 4 // upper_bits, 2).int()
    places = torch.arange(0, 4 * upper_bits, upper_bits, dtype=torch.int32, device=codes.device).view(4, 1, 1, 1)
    places = places + torch.arange(0, 16, 4 * upper_bits, dtype=torch.int32, device=codes.device).view(1, 1, -1, 1)
    places = places + torch.arange(0, 32, 16, dtype=torch.int32, device=codes.device)
    words = (upper << places).sum((2, 4, 5), dtype=torch.int32)
    return torch.cat([packed_values.pack_codes(codes & 15, 4), words.flatten(1)], 1)


def _pack_scales(
    scales: torch.Tensor,
    leasts: torch.Tensor | None,
    group_scales: torch.Tensor | None,
    group_leasts: torch.Tensor | None,
) -> torch.Tensor:
    """Pack the scales of rows as kernels/gguf_words.py describes -> words int32 [n, words].

    scales, leasts: fp16 [n, blocks of the file], or in MXFP4 exponents uint8. group_scales, group_leasts: uint8
    [n, groups].
    """
    if leasts is not None:
        heads = (scales.view(torch.int16).int() & 0xFFFF) | (leasts.view(torch.int16).int() << 16)
    elif group_scales is not None:
        heads = scales.float().view(torch.int32)
    else:
        return scales.contiguous().view(torch.int32)
    if group_scales is None:
        return heads
    parts = [group_scales, group_leasts] if group_leasts is not None else [group_scales]
    of_blocks = [part.contiguous().view(torch.int32).unflatten(1, (heads.shape[1], 2, -1)) for part in parts]
    return torch.cat([heads[..., None], torch.cat(of_blocks, 3).flatten(2)], 2).flatten(1)
