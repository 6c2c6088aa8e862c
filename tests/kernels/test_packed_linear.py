"""Products with packed weights: in Triton's interpreter on a CPU, and on a GPU at real sizes.

The reference is the product in fp64 with the values that the codes, scales and zeros stand for.
"""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cpu_experts_cases import matrix_format
from interpreter import INTERPRETED, needs_triton, on_device
from rounding import assert_close
from safetensors.torch import save_file

from nanovllm.capabilities.cpu_experts.store import ExpertMatrix, ExpertRows
from nanovllm.checkpoint.model_config import ExpertsConfig
from nanovllm.checkpoint.quantization import BLOCK_TYPES, HEAD_QUANTIZATIONS, QUANTIZATIONS, Quantization
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.layers import layernorm, moe
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import GateUpParallelLinear, RowParallelLinear, WeightShard, takes_codes
from nanovllm.layers.moe import Experts
from nanovllm.layers.packed_weight import (
    CodedRows,
    PackedWeight,
    QuantizedWeight,
    can_multiply_codes,
    packed,
    unpacked_linear,
)
from nanovllm.models.loader import load_weights
from nanovllm.models.quantized_weights import quantize

pytestmark = needs_triton
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates to bf16 where a GPU rounds
SIZES = [(6, 512), (17, 128)] if INTERPRETED else [(6, 256), (1024, 4096), (4100, 1536)]
KINDS = ("dense", "int4", "int8", "e4m3", "e4m3 in blocks")


# Rows, warps and blocks ahead; or rows, features, warps, stages and splits; None: the default
TILES = [None, (8, 2, 1), (16, 4, 3), (16, 16, 4, 2), (16, 16, 4, 2, 2), (16, 16, 4, 2, 2, 2)]
if not INTERPRETED:
    TILES = [None, (8, 8, 1), (16, 4, 3), (16, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 3, 4), (128, 128, 8, 3, 1, 2)]


def as_tile(sizes: tuple[int, ...] | None):  # type: ignore[no-untyped-def]
    from nanovllm.kernels import packed_linear as kernels

    return sizes and (kernels.FewRowsTile(*sizes) if len(sizes) == 3 else kernels.ManyRowsTile(*sizes))


def in_tiles(scales: torch.Tensor, device: str) -> torch.Tensor:
    """Scales [rows, groups] as the kernels take them."""
    from nanovllm.kernels import packed_values

    with torch.device(device):
        tiles = packed_values.new_scales(*scales.shape, scales.dtype)
    packed_values.store_scales(tiles, torch.arange(len(scales), device=device), scales)
    return tiles


def make_weight(  # type: ignore[no-untyped-def]
    kind: str, num_rows: int, size: int, group: int, device: str
):
    """A packed weight and its values in fp64; outputs are near 1."""
    from nanovllm.kernels import packed_values, packed_words

    if kind == "dense":
        values = (torch.randn(num_rows, size) / size**0.5).to(DTYPE)
        return packed_values.Packed(values.to(device)), values.double().to(device)
    if "e4m3" in kind:
        codes = torch.randn(num_rows, size).to(torch.float8_e4m3fn)
        codes.view(torch.uint8)[0, :8] = torch.arange(8, dtype=torch.uint8) + 0x80  # subnormal, and -0
        scale_rows = 2 if "blocks" in kind and num_rows % 2 == 0 else 1
        scales = torch.rand(num_rows // scale_rows, size // group) / size**0.5
        values = codes.double() * scales.double().repeat_interleave(group, 1).repeat_interleave(scale_rows, 0)
        packed = packed_values.pack_codes(codes.view(torch.uint8), 8)
        tensors = packed.to(device), in_tiles(scales, device), packed_words.E4M3.value
        return packed_values.Packed(*tensors, None, scale_rows, group), values.to(device)
    bits, dtype = (8, torch.bfloat16) if "int8" in kind else (4, torch.float16)
    codes = torch.randint(2**bits, (num_rows, size), dtype=torch.uint8)
    scales = (torch.rand(num_rows, size // group) * 4 / 2**bits / size**0.5).to(dtype)
    zeros = torch.randint(2**bits, (num_rows, size // group))
    values = codes.double() - zeros.double().repeat_interleave(group, 1)
    values *= scales.double().repeat_interleave(group, 1)
    words, scales = packed_values.pack_codes(codes, bits), packed_values.pack_scales(scales, zeros, bits)
    kind = packed_words.INT4 if bits == 4 else packed_words.INT8
    weight = packed_values.Packed(words.to(device), in_tiles(scales, device), kind.value, dtype, 1, group)
    return weight, values.to(device)


@on_device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_products_with_any_number_of_rows(device: str, kind: str, num_rows: int, size: int) -> None:
    """One row, several, more than a tile, and the values themselves; groups of 32, 64 and 128 columns and of all."""
    from nanovllm.kernels import packed_linear as kernels
    from nanovllm.kernels import packed_values

    for i, group in enumerate((32, 64, 128, size)):
        weight, values = make_weight(kind, num_rows, size, group, device)
        bias = torch.randn(num_rows, device=device).to(DTYPE) if group == 64 else None
        exact_bias = 0.0 if bias is None else bias.double()
        choices = list(itertools.product((1, 3, 19), TILES))
        if INTERPRETED and kind != "dense":
            choices = choices[i % 3 :: 3]  # three groups have them all
        for num_inputs, tile in choices:
            x = torch.randn(num_inputs, size + 16, device=device).to(DTYPE)[:, :size]
            exact = F.linear(x.double(), values) + exact_bias
            assert_close(kernels.products(x, weight, bias, tile=as_tile(tile)), x, values, exact)
        if kind != "dense":
            some = torch.empty(min(5, num_rows), size, dtype=torch.float32, device=device)
            torch.testing.assert_close(packed_values.unpack(weight, 1, some).double(), values[1 : 1 + len(some)])
        if kind == "dense":
            break


@on_device
def test_products_with_numbers_in_e4m3_that_are_all_subnormal(device: str) -> None:
    """They read as subnormal 16-bit numbers, which a matrix unit might take for 0."""
    from nanovllm.kernels import packed_linear as kernels
    from nanovllm.kernels import packed_values, packed_words

    codes = torch.randint(1, 8, (16, 256), dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double().to(device)
    scales, words = in_tiles(torch.ones(16, 1), device), packed_values.pack_codes(codes, 8).to(device)
    weight = packed_values.Packed(words, scales, packed_words.E4M3.value, None, 1, 256)
    x = torch.randn(3, 256, device=device).to(DTYPE)
    for tile in TILES:
        got = kernels.products(x, weight, tile=as_tile(tile))
        assert_close(got, x, values, F.linear(x.double(), values))


@on_device
@pytest.mark.parametrize("kind", KINDS)
def test_gated_products(device: str, kind: str) -> None:
    from nanovllm.kernels import packed_linear as kernels

    weight, values = make_weight(kind, 10, 256, 128, device)
    bias = torch.randn(10, device=device).to(DTYPE)
    for tile, given in itertools.product(TILES, (None, bias)):
        x = torch.randn(2, 256, device=device).to(DTYPE)
        gate, up = (F.linear(x.double(), values) + (0.0 if given is None else given.double())).chunk(2, dim=-1)
        got = kernels.products(x, weight, given, gated=True, tile=as_tile(tile))
        assert_close(got, x, values, F.silu(gate) * up)
    got = kernels.products(x, weight, bias, gated=True, activation="gelu_tanh", tile=as_tile(TILES[0]))
    assert_close(got, x, values, F.gelu(gate, approximate="tanh") * up)


@on_device
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_the_chosen_experts(device: str, kind: str) -> None:
    """Any routing: all rows to one expert, an expert without rows, and rows that share some."""
    from nanovllm.kernels import packed_linear as kernels

    num_experts, num_rows, size = (5, 6, 128) if INTERPRETED else (5, 200, 1024)
    weight, values = make_weight(kind, num_experts * num_rows, size, 64, device)
    by_expert = values.view(num_experts, num_rows, size)
    most = 9 if INTERPRETED else 20
    choices = [torch.zeros(5, 1), torch.rand(4, 5).argsort(1)[:, :3], torch.rand(most, 5).argsort(1)[:, :2]]
    for chosen in choices:
        experts = chosen.long().contiguous().to(device)
        num_inputs, num_chosen = experts.shape
        x = torch.randn(num_inputs, size, device=device).to(DTYPE)
        exact = torch.einsum("mk,mcnk->mcn", x.double(), by_expert[experts])
        got = kernels.products(x, weight, experts=experts, num_experts=num_experts)
        assert_close(got.view(exact.shape), x, values, exact)
        factors = torch.rand(num_inputs * num_chosen, device=device)
        one_each = x.repeat_interleave(num_chosen, 0)  # as in the second product of an MLP
        for block_m in (16,) if INTERPRETED else (16, 64, 128):
            routing = kernels.route(experts, num_experts, block_m)
            tiles = kernels.products(x, weight, routing=routing)
            assert_close(tiles.view(exact.shape), x, values, exact)
            tiles = kernels.products(one_each, weight, routing=routing, factors=factors)
            assert_close(tiles.view(exact.shape), x, values, exact * factors.view(num_inputs, num_chosen, 1).double())


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_the_chosen_experts(device: str, kind: str) -> None:
    """As many experts as warps and fewer, each with a block of columns and with several, and two warps that share the
    columns of an expert.
    """
    from nanovllm.kernels import packed_linear as kernels

    num_experts, num_rows, size = (5, 24, 384) if INTERPRETED else (20, 200, 768)
    weight, values = make_weight(kind, num_experts * num_rows, size, 64, device)
    for num_chosen in (1, 3, 4) if INTERPRETED else (1, 6, 8, 16):
        experts = torch.rand(3, num_experts, device=device).argsort(1)[:, :num_chosen].contiguous()
        x = torch.randn(3 * num_chosen, size, device=device).to(DTYPE)
        factors = torch.rand(3, num_chosen, device=device)
        chosen = values.view(num_experts, num_rows, size)[experts]
        exact = torch.einsum("mck,mcnk,mc->mn", x.double().view(3, num_chosen, size), chosen, factors.double())
        got = kernels.sum_of_experts(x, weight, experts, num_experts, factors)
        assert_close(got, x, values, exact)
        bias = torch.randn(num_experts, num_rows, device=device).to(DTYPE)
        exact += torch.einsum("mcn,mc->mn", bias[experts].double(), factors.double())
        for sharing in (1, 2) if num_chosen <= 8 else (1,):
            tile = kernels.FewRowsTile(8, sharing * 2 ** math.ceil(math.log2(num_chosen)), 2)
            got = kernels.sum_of_experts(x, weight, experts, num_experts, factors, bias, tile)
            assert_close(got, x, values, exact)


def test_few_experts_with_long_rows_have_two_warps_each() -> None:
    from nanovllm.kernels import packed_linear as kernels

    with torch.device("cpu"):
        of_gpt_oss, of_qwen = (packed(PackedWeight([16], size, BLOCK_TYPES["MXFP4"])) for size in (2880, 768))
    assert kernels._choose_tile_of_sums(4, of_gpt_oss).num_warps == 8
    assert kernels._choose_tile_of_sums(4, of_qwen).num_warps == 4
    assert kernels._choose_tile_of_sums(8, of_gpt_oss).num_warps == 8


@on_device
@pytest.mark.parametrize(("num_experts", "num_chosen", "norms"), [(128, 8, True), (60, 6, False), (4, 1, True)])
def test_choose_experts_has_the_numbers_of_torch(device: str, num_experts: int, num_chosen: int, norms: bool) -> None:
    from nanovllm.kernels import fused

    logits = 3 * torch.randn(7, num_experts, device=device)
    experts, weights = fused.choose_experts(logits, num_chosen, norms)
    expected, best = logits.softmax(-1).topk(num_chosen, dim=-1)
    assert torch.equal(experts, best)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) if norms else expected)
    factors = torch.rand(num_experts, device=device)  # Gemma 4 scales logits and the weights of experts
    experts, weights = fused.choose_experts(logits, num_chosen, norms, 0.3, factors)
    expected = (0.3 * logits).softmax(-1).gather(1, best)
    expected = expected / expected.sum(-1, keepdim=True) if norms else expected
    assert torch.equal(experts, best)
    torch.testing.assert_close(weights, expected * factors[best])


@on_device
def test_choose_experts_among_logits_that_are_nan(device: str) -> None:
    """Whatever is chosen exists, so that no memory of others is read."""
    from nanovllm.kernels import fused

    experts, _ = fused.choose_experts(torch.full((2, 60), float("nan"), device=device), 6, norms=True)
    assert experts.min() >= 0 and experts.max() < 60


def test_blocks_of_routed_pairs_double_at_most_when_rows_do() -> None:
    """Regression: rounded down, 16.5 pairs for each of 31 experts had blocks of 16 and 33 had blocks of 64. Start-up
    launches powers of two, so a prompt of a length between them waited for blocks of 32.
    """
    from nanovllm.kernels import packed_linear as kernels

    assert [kernels.choose_block_m(4 * num_rows, 31) for num_rows in (128, 200, 256)] == [32, 32, 64]


@on_device
def test_route_accepts_any_numbers(device: str) -> None:
    """Numbers outside the range of experts are clamped to it, so the kernel writes nothing outside its tensors."""
    from nanovllm.kernels import packed_linear as kernels

    anything = torch.tensor([[2**40, -7, 3], [5, 0, -(2**50)]], device=device)
    pairs, block_experts, *_ = kernels.route(anything, 5, 16)
    assert block_experts.tolist() == [0, 3, 4, 5, 5, 5]
    assert [sorted(each) for each in pairs[:48].view(3, 16).tolist()] == [
        sorted(own + [6] * (16 - len(own))) for own in ([1, 4, 5], [2], [0, 3])
    ]


@on_device
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 2), (9, 5), (40, 5), (60, 128), (700, 4), (5000, 32)])
def test_blocks_have_the_pairs_of_one_expert_in_order(device: str, num_tokens: int, num_experts: int) -> None:
    """Experts of no pair, of several blocks, and one that all tokens choose."""
    from nanovllm.kernels import packed_linear as kernels

    for skewed in (False, True):
        experts = torch.rand(num_tokens, num_experts).argsort(1)[:, :2].contiguous()
        if skewed:
            experts[:, 0] = num_experts - 1
        pairs, block_experts, block_m, *_ = kernels.route(experts.to(device), num_experts, 16)
        expected, of_blocks = [], []
        for expert in range(num_experts):
            own = (experts.flatten() == expert).nonzero().flatten().tolist()
            for start in range(0, len(own), block_m):
                block = own[start : start + block_m]
                expected.append(block + [2 * num_tokens] * (block_m - len(block)))
                of_blocks.append(expert)
        missing = len(block_experts) - len(of_blocks)
        assert missing >= 0 and block_experts.tolist() == of_blocks + [num_experts] * missing
        assert pairs.view(-1, block_m)[: len(expected)].tolist() == expected


@on_device
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_experts_of_few_tokens_and_of_many_yield_the_same(
    monkeypatch: pytest.MonkeyPatch, device: str, num_tokens: int
) -> None:
    """Regression: no tokens at all, as in the last layer of a chunk that samples nothing, could not be reshaped."""
    config = ExpertsConfig(
        num_experts=5, num_experts_per_token=2, intermediate_size=32, norm_topk_prob=True, layers=(0,)
    )
    with torch.device(device):
        experts = Experts(64, config, TPGroup(), torch.float32)
        x, weights = torch.randn(num_tokens, 64), torch.rand(num_tokens, 2)
        chosen = torch.rand(num_tokens, 5).argsort(1)[:, :2].contiguous()
    for each in experts.parameters():
        each.data.normal_(0, 0.1)
    exact = experts._sum_by_expert(x, chosen, weights)
    for most in (0, 100):
        monkeypatch.setattr(moe, "MAX_SINGLE_PAIRS", most)
        if num_tokens or most:
            torch.testing.assert_close(experts._sum_of_products(x, chosen, weights), exact, rtol=1e-4, atol=1e-5)


@on_device
@pytest.mark.parametrize("has_bias", [False, True])
def test_unpacked_in_several_parts(device: str, has_bias: bool) -> None:
    weight, values = make_weight("int4", 300, 128, 128, device)
    x, bias = torch.randn(3, 128, device=device).to(DTYPE), torch.randn(300, device=device).to(DTYPE)
    got = unpacked_linear(x, weight, bias if has_bias else None, max_bytes=1)  # parts of 128 rows
    exact = F.linear(x.double(), values) + (bias.double() if has_bias else 0.0)
    assert_close(got, x, values, exact)


@on_device
def test_no_rows(device: str) -> None:
    from nanovllm.kernels import packed_linear as kernels

    weight, _ = make_weight("int4", 6, 128, 128, device)
    x = torch.empty(0, 128, device=device, dtype=DTYPE)
    assert kernels.products(x, weight).shape == (0, 6)


ONLINE = {name: QUANTIZATIONS[name] for name in ("fp8", "fp8_dynamic")}  # what `quantize_weight` writes
FORMATS = {
    **ONLINE,
    "int4": Quantization(method="gptq", bits=4, block=(1, 128)),
    "fp8 blocks": Quantization(method="fp8", bits=8, is_float=True, block=(128, 128)),
    "fp8 tensor": Quantization(method="fp8", bits=8, is_float=True, block=(0, 0)),
    "8 bits": Quantization(method="gptq", bits=8, block=(1, 32)),
    "whole rows": Quantization(method="awq", bits=4, block=(1, 0)),
}


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weight_has_the_values_that_were_stored(device: str, name: str) -> None:
    """Three parts, each in two pieces, of a weight whose columns are the second half of those of the checkpoint."""
    from nanovllm.kernels import packed_values

    sizes = (32, 16, 16) if INTERPRETED and "blocks" not in name else (256, 128, 128)
    weight, start, values = PackedWeight(sizes, 128, FORMATS[name]).to(device), 0, []
    for size in sizes:
        given = quantize(torch.randn(size, 256) / 16, FORMATS[name])
        for rows in (slice(0, size // 2), slice(size // 2, size)):
            rows = slice(0, size) if "blocks" in name or "tensor" in name else rows
            weight.rows(start, start + size)[rows].store(given.part(rows, slice(128, 256)), "this one")
        values.append(torch.empty(size, 128))
        given.part(slice(None), slice(128, 256)).copy_values(values[-1])
        start += size
    expected = torch.cat(values).to(device)
    got = packed_values.unpack(packed(weight), 0, torch.empty_like(expected))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    for num_inputs in (1, 3, 600) if not INTERPRETED else (1, 3):
        x = torch.randn(num_inputs, 128, device=device).to(DTYPE)
        assert_close(weight.linear(x, None), x, expected.double(), F.linear(x.double(), expected.double()))
        gate, up = F.linear(x.double(), expected.double()).chunk(2, dim=-1)
        assert_close(weight.gate_up(x, None), x, expected.double(), F.silu(gate) * up)


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
@pytest.mark.parametrize("name", ["int4", "8 bits", "fp8 blocks"])
def test_second_shard_in_pieces_has_its_own_scales(name: str) -> None:
    """It is stored like a checkpoint that has only the shard's columns and is stored at once."""
    in_pieces, at_once = (PackedWeight([128, 128], 128, FORMATS[name]) for _ in range(2))
    given = quantize(torch.randn(256, 256) / 16, FORMATS[name])
    shard = given.part(slice(None), slice(128, 256))
    first = int(shard.groups[0])
    zeros = None if shard.zeros is None else shard.zeros[:, first:]
    alone = QuantizedWeight(shard.codes, shard.scales[:, first:], zeros, shard.groups - first)
    at_once.rows(0, 256).store(alone, "this one")
    for start in (0, 128):
        target = in_pieces.rows(start, start + 128)
        for rows in (slice(0, 128),) if name == "fp8 blocks" else (slice(0, 40), slice(40, 128)):
            target[rows].store(shard.part(slice(start + rows.start, start + rows.stop), slice(None)), "this one")
    assert torch.equal(in_pieces.codes, at_once.codes) and torch.equal(in_pieces.scales, at_once.scales)


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
def test_weights_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"192 columns on each rank, in groups of 64; .* multiple of 128"):
        PackedWeight([16], 192, FORMATS["int4"])
    weight = PackedWeight([16], 256, FORMATS["int4"])
    given = quantize(torch.randn(16, 256), FORMATS["int4"])
    with pytest.raises(
        CheckpointError, match=r"^here has columns .* on this rank only some .*tensor_parallel_size=1, a"
    ):
        weight.rows(0, 16).store(given._replace(groups=(given.groups + torch.arange(256) % 2)), "here")
    weight.rows(0, 8).store(given.part(slice(0, 8), slice(None)), "here")
    other = given.part(slice(8, 16), slice(None))
    with pytest.raises(CheckpointError, match=r"^there has scales in torch.float16, but .* torch.bfloat16"):
        weight.rows(8, 16).store(other._replace(scales=other.scales.half()), "there")


@on_device
@pytest.mark.parametrize("bits", [4, 8])
def test_columns_in_another_order_have_their_values(device: str, bits: int) -> None:
    """As GPTQ stores them with desc_act: two parts whose columns have the same order, for few rows and for many."""
    size, group, num_rows = 512, 128 if bits == 4 else 32, 16 if INTERPRETED else 256
    format = Quantization(method="gptq", bits=bits, block=(1, group), has_order=True)
    order = torch.randperm(size)
    with torch.device(device):
        weight = PackedWeight([num_rows, num_rows], size, format)
    values = torch.empty(2 * num_rows, size)
    for start in (0, num_rows):
        sorted_given = quantize(torch.randn(num_rows, size) * torch.randn(size).exp() / size**0.5, format)
        given = sorted_given._replace(codes=sorted_given.codes[:, order], groups=sorted_given.groups[order])
        given.copy_values(values[start : start + num_rows])
        weight.rows(start, start + num_rows).store(given, "this one")
    assert "column_order" in weight.state_dict(), "the identity of weights on disk misses the order"
    values = values.double().to(device)
    for num_inputs, weight.max_packed_rows in ((1, 256), (3, 256), (19, 256), (20, 4)):
        x = torch.randn(num_inputs, size + 8, device=device).to(DTYPE)[:, :size]
        exact = F.linear(x.double(), values)
        assert_close(weight.linear(x, None), x, values, exact)
        gate, up = exact.chunk(2, dim=-1)
        assert_close(weight.gate_up(x, None), x, values, F.silu(gate) * up)
        shuffled = F.linear(x[:, torch.randperm(size)].double(), values)
        assert (shuffled - exact).abs().max() > 0.5, "this test cannot tell orders apart"


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
def test_columns_in_another_order_than_the_first_shard_or_of_experts_are_refused() -> None:
    format = Quantization(method="gptq", bits=4, block=(1, 128), has_order=True)
    given = quantize(torch.randn(16, 256), format)
    orders = [given._replace(groups=given.groups[torch.randperm(256)]) for _ in range(2)]
    for first, second in (orders, (given, orders[0]), (orders[0], given)):
        weight = PackedWeight([16, 16], 256, format)
        weight.rows(0, 16).store(first, "first")
        with pytest.raises(CheckpointError, match=r"^second has columns .* than the layers that read .*device='cpu'"):
            weight.rows(16, 32).store(second, "second")
    experts = PackedWeight([16, 16], 256, format, sorts_columns=False)
    experts.rows(0, 16).store(given, "first")
    for weight in (experts, PackedWeight([16], 256, format, sorts_columns=False)):
        with pytest.raises(CheckpointError, match=r"^second has columns in another order \(desc_act\)"):
            weight.rows(0, 16).store(orders[0], "second")


# -- quantized while loading -------------------------------------------------------------------------------------


def quantized_at_once_and_by_torch(
    values: torch.Tensor, name: str, columns: slice, device: str, torch_device: str
) -> tuple[PackedWeight, PackedWeight]:
    """Two weights whose first three rows are zeros, and whose other rows are `values`."""
    num_rows, size = len(values), len(range(values.shape[1])[columns])
    with torch.device(device):
        at_once, by_torch = (PackedWeight([3, num_rows], size, ONLINE[name]) for _ in range(2))
    for parameter in (*at_once.parameters(), *by_torch.parameters()):
        parameter.zero_()
    at_once.rows(3, 3 + num_rows).quantize(values.to(device), columns)
    given = quantize(values.to(torch_device), ONLINE[name]).part(slice(None), columns)
    by_torch.rows(3, 3 + num_rows).store(given, "this one")
    assert torch.equal(at_once.codes, by_torch.codes) and at_once.scale_dtype == by_torch.scale_dtype
    return at_once, by_torch


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ONLINE)
def test_weight_is_quantized_at_once_as_by_torch(device: str, name: str, dtype: torch.dtype) -> None:
    """All columns, and those of the second rank; rows of zeros, subnormal and largest numbers, and ties."""
    values = torch.randn(21, 1152) * torch.randn(21, 1152).exp()
    values[1:3] *= torch.finfo(dtype).tiny / torch.tensor([[1.0], [32.0]])
    values[3] *= torch.finfo(dtype).max / values[3].abs().max()
    values[4:7] = torch.arange(1152) / 2 % 16 - 8
    values[5] *= 2.0**-9
    values[5, ::128] = 448.0  # a scale of 1
    values[7:9] = torch.tensor([[0.0], [-0.0]])
    values[9, :128] = 0
    for columns, torch_device in itertools.product((slice(None), slice(128, 256)), {device, "cpu"}):
        at_once, by_torch = quantized_at_once_and_by_torch(values.to(dtype), name, columns, device, torch_device)
        assert torch.equal(at_once.scales, by_torch.scales)


@on_device
@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_experts_in_cpu_memory_are_filled_from_a_device_as_by_torch(device: str, name: str) -> None:
    """Some rows of an expert, and the columns of the second rank. The codes of others are not written."""
    values = torch.randn(40, 1152) * torch.randn(40, 1152).exp()
    for columns in (slice(None), slice(512, 1024)):
        num_columns = len(range(1152)[columns])
        given = matrix_format("INT4" if name == "int4" else "E4M3", 64, num_columns, 128)
        memory = torch.zeros(2, given.num_bytes(2) + 64, dtype=torch.uint8)
        from_device, by_torch = (
            ExpertMatrix(given, 2, each[-each.data_ptr() % 64 :][: given.num_bytes(2)]) for each in memory
        )
        part = quantize(values, FORMATS[name]).part(slice(None), columns)
        by_torch.rows(1, torch.device("cpu"))[16:56].store(part, "this one")  # type: ignore[union-attr]
        rows = from_device.rows(1, torch.device(device))
        assert isinstance(rows, ExpertRows) and rows.can_quantize == (device == "cuda" and name == "fp8")
        moved = QuantizedWeight(*(each if each is None else each.to(device) for each in part[:3]), part.groups)
        rows[16:][:40].store(moved, "this one")
        assert torch.equal(from_device.codes, by_torch.codes) and torch.equal(from_device.scales, by_torch.scales)
        if name == "fp8":
            memory[0].zero_()
            rows[16:][:40].quantize(values.to(device), columns)
            assert torch.equal(from_device.codes, by_torch.codes) and torch.equal(from_device.scales, by_torch.scales)


@on_device
@pytest.mark.parametrize("name", ONLINE)
def test_infinities_and_nan_are_quantized_at_once_as_by_torch(device: str, name: str) -> None:
    """A row with NaN has NaN as its scale, which may have any bits."""
    values = torch.randn(4, 256)
    values[0, 3], values[1, 100], values[2, 7], values[2, 200] = torch.nan, torch.inf, -torch.inf, -torch.nan
    values[3] *= 2.0**120  # the scale is finite
    at_once, by_torch = (
        each.scales for each in quantized_at_once_and_by_torch(values, name, slice(None), device, device)
    )
    torch.testing.assert_close(at_once, by_torch, rtol=0, atol=0, equal_nan=True)
    assert at_once.isnan().any() and at_once.isinf().any()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large")
@pytest.mark.parametrize("size", [(768, 2048), (2048, 768), (1000, 12288)])  # experts of Qwen3-30B-A3B, and another
@pytest.mark.parametrize("name", ONLINE)
def test_whole_matrices_are_quantized_at_once_as_by_torch(name: str, size: tuple[int, int]) -> None:
    values = (torch.randn(size) / size[1] ** 0.5).bfloat16()
    at_once, by_torch = quantized_at_once_and_by_torch(values, name, slice(None), "cuda", "cuda")
    assert torch.equal(at_once.scales, by_torch.scales)


LOADED = ONLINE | {"int8 head": HEAD_QUANTIZATIONS["int8"]}
LOADED |= {name: format for name in ("int4", "int5", "int8") if (format := QUANTIZATIONS[name].for_columns(128))}


@on_device
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", LOADED)
def test_loader_quantizes_packed_weights(tmp_path: Path, device: str, name: str, load_format: str) -> None:
    """They have the values of weights that are not packed. Two shards take the second rank's columns; the rows of the
    first are quantized in pieces.
    """
    from nanovllm.kernels import packed_values

    (first, num_rows), size = (40, 48) if INTERPRETED else (1100, 1200), 128
    quantization = LOADED[name]
    save_file({"layer.weight": torch.randn(num_rows, 2 * size)}, tmp_path / "model.safetensors")
    with torch.device(device):
        weight, values = PackedWeight([first, num_rows - first], size, quantization), torch.empty(num_rows, size)
    for target_of in (weight.rows, lambda start, end: values[start:end]):
        shards = [
            WeightShard(target_of(*rows), (num_rows, 2 * size), (slice(*rows), slice(size, None)), quantization)
            for rows in ((0, first), (first, num_rows))
        ]
        layer: Any = SimpleNamespace(
            weight_shards=lambda shards=shards: [("layer.weight", shard) for shard in shards],
            config=SimpleNamespace(
                architecture="Qwen3ForCausalLM", quantization=quantization, tie_word_embeddings=False
            ),
            dtype=values.dtype,
            device=values.device,
        )
        load_weights(layer, tmp_path, load_format=load_format)
    got = packed_values.unpack(packed(weight), 0, torch.empty_like(values))
    assert torch.equal(got, values) and values.std() > 0.01


# -- activations in fp8 ------------------------------------------------------------------------------------------

WITH_FP8 = {
    "blocks": Quantization(method="fp8", bits=8, is_float=True, block=(128, 128), has_fp8_activations=True),
    "rows": Quantization(method="fp8", bits=8, is_float=True, block=(1, 0), has_fp8_activations=True),
    "tensor": Quantization(method="fp8", bits=8, is_float=True, block=(0, 0), has_fp8_activations=True),
}
E4M3 = torch.float8_e4m3fn


def quantized_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [M, K] in e4m3 and scales [M, K / group]: the largest of a group becomes 448."""
    groups = x.float().unflatten(1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2**-100)
    most = torch.full_like(largest, 448)  # torch would multiply by the reciprocal of a number
    codes = (groups * (most / largest)).clamp(-448, 448).to(E4M3)
    return codes.flatten(1), (largest / most)[..., 0]


def stored_weight(
    part_sizes: list[int], size: int, name: str, device: str
) -> tuple[PackedWeight, torch.Tensor, torch.Tensor]:
    """A rank's weight, its codes, and its values in fp64. It has the second half of the checkpoint's columns, and each
    part has another range.
    """
    with torch.device(device):
        weight = PackedWeight(part_sizes, size, WITH_FP8[name], multiplies_codes=True)
    codes, values, start = [], [], 0
    for part, num_rows in enumerate(part_sizes):
        whole = quantize(torch.randn(num_rows, 2 * size) * 2.0**part / size**0.5, WITH_FP8[name])
        given = whole.part(slice(None), slice(size, 2 * size))
        weight.rows(start, start + num_rows).store(given, "this one")
        values.append(torch.empty(num_rows, size, dtype=torch.float64))
        given.copy_values(values[-1])
        codes.append(given.codes)
        start += num_rows
    return weight, torch.cat(codes), torch.cat(values).to(device)


@on_device
@pytest.mark.parametrize("group", [64, 128, 4480])
def test_rows_are_quantized_as_in_torch(device: str, group: int) -> None:
    """Rows of zeros, of numbers near both ends of bf16's range, and in memory with gaps between them."""
    from nanovllm.kernels import packed_values, quantizing

    size = group if group > 128 else 3 * 128
    for num_rows in (1, 4, 18):
        x = (torch.randn(num_rows, size + 8) * torch.randn(num_rows, size + 8).mul(3).exp()).bfloat16()[:, :size]
        for row, factor in ((0, 0.0), (1, 1e-38), (2, 1e-29), (3, 3e38 / x.abs().max().item())):
            x[row : row + 1] *= factor
        codes, scales = (each[:num_rows].cpu() for each in quantizing.quantize_rows(x.to(device), group))
        expected_codes, expected_scales = quantized_rows(x, group)
        assert torch.equal(scales, expected_scales)
        in_order = packed_values.pack_codes(expected_codes.view(torch.uint8), 8).view(torch.uint8)
        assert torch.equal(codes.view(torch.uint8), in_order)


@on_device
def test_rows_with_infinities_and_nan_have_nan(device: str) -> None:
    from nanovllm.kernels import quantizing

    x = torch.randn(4, 256).bfloat16()
    x[1, 3], x[2, 200], x[2, 201] = float("nan"), float("inf"), float("-inf")
    codes, scales = quantizing.quantize_rows(x.to(device), 128)
    values = codes.float() * scales.repeat_interleave(128, 1)
    assert values.isnan().any(1).tolist() == [False, True, True, False]


@on_device
@pytest.mark.parametrize("size", [64, 192, 4480])
def test_norm_and_quantize_is_quantize_of_the_norm(device: str, size: int) -> None:
    """With and without a residual, and with the weight in fp32 of norms that add one. The numbers are integers, whose
    squares have the same sum in any order.
    """
    from nanovllm.kernels import fused, quantizing

    for num_rows, has_residual, weight_dtype in ((1, False, DTYPE), (5, True, DTYPE), (18, True, torch.float32)):
        x = torch.randint(-16, 17, (num_rows, size + 8), device=device).to(DTYPE)[:, :size]
        residual = torch.randint(-16, 17, (num_rows, size), device=device).to(DTYPE) if has_residual else None
        weight = torch.randn(size, device=device).to(weight_dtype)
        if residual is None:
            expected_total, normed = x, fused.rms_norm(x, weight, 1e-6)
        else:
            normed, expected_total = fused.add_rms_norm(x, residual, weight, 1e-6)
        expected_codes, expected_scales = quantizing.quantize_rows(normed, size)
        codes, scales, total = quantizing.rms_norm_and_quantize(x, residual, weight, 1e-6)
        assert codes.shape == expected_codes.shape and torch.equal(total, expected_total)
        assert torch.equal(scales[:num_rows], expected_scales[:num_rows])
        assert torch.equal(codes[:num_rows].view(torch.uint8), expected_codes[:num_rows].view(torch.uint8))
        assert len(codes[:num_rows].view(torch.uint8).unique()) > 20


@on_device
@pytest.mark.parametrize("size", [64, 192, 4480])
def test_act_and_quantize_is_quantize_of_the_gated_numbers(device: str, size: int) -> None:
    from nanovllm.kernels import fused, quantizing

    for num_rows in (1, 5, 18):
        x = (torch.randn(num_rows, 2 * size + 8, device=device) * 3).to(DTYPE)[:, : 2 * size]
        activation = "gelu_tanh" if num_rows == 5 else "silu"
        expected_codes, expected_scales = quantizing.quantize_rows(fused.act_and_mul(x, activation), size)
        codes, scales = quantizing.act_and_quantize(x, activation)
        assert codes.shape == expected_codes.shape and torch.equal(scales[:num_rows], expected_scales[:num_rows])
        assert torch.equal(codes[:num_rows].view(torch.uint8), expected_codes[:num_rows].view(torch.uint8))


@pytest.mark.slow
@on_device
def test_norm_and_mlp_pass_codes_on_and_compute_the_same(device: str) -> None:
    """From 65 rows on. A layer splits them into parts; the last part, of 71 rows, has one more as padding."""
    dtype, hidden_size, size = torch.bfloat16, 128, 192
    given: Any = {"bias": False, "tp": TPGroup(), "dtype": dtype}
    gate_up, down = (
        GateUpParallelLinear(hidden_size, [size, size], **given),
        RowParallelLinear(size, hidden_size, **given),
    )
    del gate_up.weight, down.weight
    gate_up.weight = stored_weight([size, size], hidden_size, "rows", device)[0]
    down.weight = stored_weight([hidden_size], size, "rows", device)[0]
    norm = RMSNorm(hidden_size, 1e-6, dtype=dtype).to(device)
    norm.weight.fill_(1)
    assert takes_codes(gate_up.weight) and takes_codes(down.weight)
    x, residual = (torch.randint(-16, 17, (num, hidden_size), device=device).to(dtype) for num in (199, 199))
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:  # the functions of layers use kernels for tensors on a GPU only
            patch.setattr(layernorm, "add_rms_norm", fused_kernels().add_rms_norm)
        outs = []
        for makes_codes in (False, True):
            norm.makes_codes = gate_up.makes_codes = makes_codes
            hidden, total = norm(x, residual)
            assert isinstance(hidden, CodedRows) == makes_codes and torch.equal(total, x + residual)
            parts = [gate_up(part) for part in hidden.split(128)]
            assert [isinstance(part, CodedRows) for part in parts] == [makes_codes] * 2
            outs.append(torch.cat([down(part) for part in parts]))
        few, _ = norm(x[:64], residual[:64])
        assert isinstance(few, torch.Tensor), "few rows stay in 16 bits"
    assert outs[0].shape == (199, hidden_size) and outs[0].std() > 0.1
    assert torch.equal(outs[0], outs[1])


def fused_kernels() -> Any:
    from nanovllm.kernels import fused

    return fused


@pytest.mark.parametrize("name", WITH_FP8)
def test_codes_of_rows_and_of_a_weight_are_in_the_same_order(name: str) -> None:
    """The product of the codes as they are stored, group by group, is that of the codes in order. Sums in fp64 are
    exact. The weight has an odd number of groups, so cuBLAS gets scales that are padded.
    """
    from nanovllm.kernels import packed_values

    weight, codes, values = stored_weight([256, 128], 384, name, "cpu")
    group = weight.group_size
    x_codes, x_scales = quantized_rows(torch.randn(5, 384).bfloat16(), group)
    x_in_order = packed_values.pack_codes(x_codes.view(torch.uint8), 8).view(E4M3)
    scales = weight.scales.flatten(0, 1).double().repeat_interleave(weight.scale_rows, 0)[:384]
    total = torch.zeros(5, 384, dtype=torch.float64)
    for i, start in enumerate(range(0, 384, group)):
        columns = slice(start, start + group)
        sums = x_in_order[:, columns].double() @ weight.codes.view(E4M3)[:, columns].double().t()
        assert torch.equal(sums, x_codes[:, columns].double() @ codes[:, columns].double().t())
        total += sums * x_scales[:, i : i + 1].double() * scales[:, i]
    exact = (x_codes.double() * x_scales.double().repeat_interleave(group, 1)) @ values.t()
    torch.testing.assert_close(total, exact, rtol=1e-5, atol=1e-5)  # values are rounded to fp32


@on_device
@pytest.mark.parametrize("name", WITH_FP8)
def test_few_rows_read_scales_in_the_order_of_cublas(device: str, name: str) -> None:
    from nanovllm.kernels import packed_linear as kernels
    from nanovllm.kernels import packed_values

    weight, _, values = stored_weight([128, 128], 256, name, device)
    for num_rows, tile in ((1, None), (5, (16, 64, 4, 2))):
        x = torch.randn(num_rows, 256, device=device).to(DTYPE)
        got = kernels.products(x, packed(weight), tile=as_tile(tile))
        assert_close(got, x, values, F.linear(x.double(), values))
    some = torch.empty(64, 256, device=device)
    torch.testing.assert_close(packed_values.unpack(packed(weight), 160, some).double(), values[160:224])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs cuBLAS")
@pytest.mark.parametrize("name", WITH_FP8)
def test_products_of_codes_are_what_the_format_implies(name: str) -> None:
    """The error against the product of the quantized rows with the values of the weight is that of a result in bf16.
    Rows that are no multiple of 4, groups whose number is none, parts with ranges of their own, a bias, no bias.
    """
    if not can_multiply_codes([128], 128, WITH_FP8[name], torch.bfloat16, torch.cuda.get_device_capability()):
        pytest.skip("this GPU does not multiply such codes")
    for part_sizes, size in (([256, 128, 128], 640), ([128], 128), ([4096, 1024, 1024], 4096), ([4096], 12288)):
        weight, _, values = stored_weight(part_sizes, size, name, "cuda")
        assert can_multiply_codes(part_sizes, size, WITH_FP8[name], torch.bfloat16, (9, 0))
        for num_rows, has_bias in ((65, False), (66, True), (300, False), (2051, True)):
            x = torch.randn(num_rows, size, device="cuda").bfloat16()
            bias = torch.randn(len(values), device="cuda").bfloat16() if has_bias else None
            codes, scales = quantized_rows(x, weight.group_size)
            quantized = codes.double() * scales.double().repeat_interleave(weight.group_size, 1)
            exact = F.linear(quantized, values, None if bias is None else bias.double())
            got = weight.linear(x, bias)
            assert_close(got, quantized.bfloat16(), values, exact)
            of_format = exact - F.linear(x.double(), values, None if bias is None else bias.double())
            assert of_format.norm() > 4 * (got.double() - exact).norm(), "this test cannot tell fp8 from 16 bits"
            if not has_bias and len(part_sizes) == 1:
                gate, up = exact.chunk(2, dim=-1)
                gated, activated = weight.gate_up(x, None), F.silu(gate) * up
                assert (gated.double() - activated).abs().max() <= 4 * torch.finfo(DTYPE).eps * activated.abs().max()
        empty = weight.linear(torch.empty(0, size, device="cuda", dtype=torch.bfloat16), None)
        assert empty.shape == (0, len(values))


def test_planner_knows_which_weights_the_kernels_can_pack() -> None:
    from nanovllm.kernels import packed_values

    for name, num_columns in itertools.product(("int4", "fp8"), (32, 64, 96, 128, 192, 256, 384, 768, 1000)):
        quantization = FORMATS[name]
        group_size = math.gcd(quantization.block[1], num_columns)
        can_pack = packed_values.can_pack(num_columns, quantization.bits, group_size)
        assert can_pack == (quantization.packing_problem(num_columns) is None), (name, num_columns)
