"""Products with weights in GGUF's blocks: in Triton's interpreter on a CPU, and on a GPU at real sizes.

The reference are the values that models/gguf_values.py computes, which equal those of the package `gguf`.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_model import load_model, run_logits
from gguf_files import write_gguf
from gguf_weights import TYPE_OF, block_weight, packed_with_torch, random_rows
from interpreter import INTERPRETED, needs_triton, on_device
from rounding import assert_close
from tiny_models import write_tiny_model

from nanovllm.checkpoint.quantization import BLOCK_TYPES, Quantization
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers import linear, moe
from nanovllm.layers.linear import GateUpParallelLinear, MergedColumnParallelLinear, StackedWeight, act_and_mul
from nanovllm.layers.packed_weight import PackedWeight, packed, store_blocks, unpacked_linear
from nanovllm.models.gguf_values import dequantize, random_blocks, select_columns

pytestmark = needs_triton
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates to bf16 where a GPU rounds
SIZE = 512 if INTERPRETED else 4096
NAMES = list(BLOCK_TYPES)
MIXED = (("Q4_K", "Q6_K"), ("Q8_0", None), ("Q4_K", "Q4_K"))  # of two layers; None is not quantized


def tiles(name: str) -> list[tuple[int, object]]:
    """Numbers of rows and tiles for a type. None leaves the tile to the default."""
    from nanovllm.kernels.packed_linear import FewRowsTile, ManyRowsTile, OneRowTile

    if INTERPRETED:
        one_row = FewRowsTile(8, 2, 1) if name == "Q8_0" else OneRowTile(2, 1, 1)
        return [(1, one_row), (11, FewRowsTile(16, 4, 3)), (19, ManyRowsTile(16, 16, 4, 2, 2)), (3, None)]
    many = [(rows, None) for rows in (1, 2, 9, 16, 17, 33, 64, 65, 128, 200, 256)]
    return [*many, (8, FewRowsTile(8, 8, 1)), (20, ManyRowsTile(64, 64, 4, 3, 4)), (128, ManyRowsTile(128, 128, 8, 3))]


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_unpacked_values_are_the_rounded_values_of_the_file(device: str, name: str) -> None:
    """Bit for bit: all codes, scales of both signs, and among the scales zero, subnormal and large numbers."""
    from nanovllm.kernels import packed_values

    rows = random_rows(name, 150 if INTERPRETED else 1000, SIZE)
    kind = TYPE_OF[name]
    odd = rows.view(len(rows), -1, kind.num_bytes)[3:9]
    places = (208,) if name == "Q6_K" else (0, 2) if kind.num_bytes in (20, 24, 144, 176) else (0,)
    if name == "MXFP4":
        odd[:, :, 0] = torch.tensor([0, 1, 2, 100, 127, 245])[:, None]
    else:
        for place in places:
            numbers = torch.tensor([0.0, -0.0, 6e-8, -1e-6, 60.0, -60.0]).half().view(torch.uint8)
            odd[:, :, place : place + 2] = numbers.view(6, 1, 2)
    weight, values = block_weight(name, rows, device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = packed_values.unpack(packed(weight), 1, torch.empty(len(rows) - 1, SIZE, dtype=dtype, device=device))
        assert torch.equal(got, values[1:].to(dtype)), dtype


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_kernel_packs_what_torch_packs(device: str, name: str) -> None:
    """Bit for bit: random bytes but for scales, columns that end inside a unit of 256, some columns of longer rows, and
    rows of experts, whose first and last ones are given partly, between rows that must not change.
    """
    from nanovllm.kernels import gguf_pack

    columns = BLOCK_TYPES[name].block[1]
    num_experts, num_rows, num_columns = (4, 150, SIZE + columns) if INTERPRETED else (16, 750, 2048 + columns)
    taken = slice(columns, columns + num_columns)
    rows = random_rows(name, num_experts * num_rows, num_columns + 2 * columns, seed=3)
    blocks = select_columns(rows.to(device), name, taken)
    codes, scales = (words.to(device) for words in packed_with_torch(name, select_columns(rows, name, taken)))
    stride, first, start, end = 2 * num_rows + 3, 5, 30, (num_experts - 1) * num_rows + 11
    with torch.device(device):
        weight = PackedWeight([first + num_experts * stride], num_columns, BLOCK_TYPES[name])
    weight.codes.fill_(-1)
    weight.scales.fill_(-1)
    for some in (slice(start, start + 1), slice(start + 1, end), slice(end, end)):
        part_rows = gguf_pack.PartRows(first, num_rows, stride)
        gguf_pack.pack_blocks(blocks[some], packed(weight), part_rows, some.start)
    expert, row = (
        torch.arange(start, end, device=device) // num_rows,
        torch.arange(start, end, device=device) % num_rows,
    )
    target = first + expert * stride + row
    of_rows = weight.scales.flatten(0, 1)
    assert torch.equal(weight.codes[target], codes[start:end])
    assert torch.equal(of_rows[target], scales[start:end])
    others = torch.ones(len(of_rows), dtype=torch.bool, device=device)
    others[target] = False
    assert (of_rows[others] == -1).all() and (weight.codes[others[: len(weight.codes)]] == -1).all()


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_tokens_are_unpacked_and_those_of_other_ranks_are_zeros(device: str, name: str) -> None:
    from nanovllm.kernels import packed_values

    weight, values = block_weight(name, random_rows(name, 22, SIZE), device)
    tokens = torch.tensor([105, 99, 121, 100, 122, 0, 105, 110] * 20, device=device)  # the weight has tokens 100 to 121
    is_there = (tokens >= 100) & (tokens < 122)
    expected = torch.where(is_there[:, None], values[(tokens - 100).clamp(0, 21)], 0.0).to(DTYPE)
    for num_tokens in (1, 8, 160):
        out = torch.full((num_tokens, SIZE), torch.nan, dtype=DTYPE, device=device)
        assert torch.equal(
            packed_values.unpack_rows(packed(weight), tokens[:num_tokens], 100, out), expected[:num_tokens]
        )


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_products_with_any_number_of_rows(device: str, name: str) -> None:
    from nanovllm.kernels import packed_linear as kernels

    for num_rows, size in ((22, SIZE),) if INTERPRETED else ((1000, 4096), (4096, 1536)):
        weight, values = block_weight(name, random_rows(name, num_rows, size), device)
        for num_inputs, tile in tiles(name):
            x = torch.randn(num_inputs, size + 16, device=device).to(DTYPE)[:, :size]
            bias = torch.randn(num_rows, device=device).to(DTYPE) if num_inputs % 2 else None
            exact = F.linear(x.double(), values) + (0.0 if bias is None else bias.double())
            around = torch.zeros(num_inputs, num_rows + 24, device=device, dtype=DTYPE)
            got = kernels.products(x, packed(weight), bias, tile=tile, out=around[:, 16:-8])
            assert_close(got, x, values, exact)
            assert torch.equal(around[:, 16:-8], got) and not around[:, :16].any() and not around[:, -8:].any()
            if num_inputs not in (11, 19):
                gate, up = exact.chunk(2, dim=-1)
                got = kernels.products(x, packed(weight), bias, gated=True, tile=tile)
                assert_close(got, x, values, F.silu(gate) * up)


@on_device
@pytest.mark.parametrize("name", [name for name in NAMES if TYPE_OF[name].num_values == 32])
def test_rows_that_are_padded_to_whole_blocks(device: str, name: str) -> None:
    """The columns of gpt-oss, 90 blocks of the file, and in the interpreter 5. NaN follows each row of x, and each row
    of blocks is followed by scales that are NaN.
    """
    from nanovllm.kernels import packed_linear as kernels
    from nanovllm.kernels import packed_values
    from nanovllm.kernels.packed_linear import FewRowsTile, ManyRowsTile

    num_rows, size = (22, 160) if INTERPRETED else (2880, 2880)
    rows = random_rows(name, num_rows, size)
    weight, values = block_weight(name, rows, device)
    around = torch.full((num_rows, rows.shape[1] + 200), 0xFF, dtype=torch.uint8, device=device)
    around[:, : rows.shape[1]] = rows.to(device)
    store_blocks(around[:, : rows.shape[1]], [weight.rows(0, num_rows)])
    assert packed(weight).padding in (32, 64, 96) and weight.shape == (num_rows, size)
    got = packed_values.unpack(packed(weight), 3, torch.empty(num_rows - 3, size, device=device))
    assert torch.equal(got, values[3:].float())
    chosen = [(1, None), (3, FewRowsTile(8, 2, 2)), (19, ManyRowsTile(16, 16, 4, 2))]
    for num_inputs, tile in chosen if INTERPRETED else [*chosen, (16, None), (64, None), (300, None)]:
        x = torch.full((num_inputs, size + 256), torch.nan, device=device, dtype=DTYPE)[:, :size]
        x.normal_()
        exact = F.linear(x.double(), values)
        assert_close(kernels.products(x, packed(weight), tile=tile), x, values, exact)
        assert_close(unpacked_linear(x, packed(weight), None), x, values, exact)
    assert_close(weight.linear(x, None), x, values, exact)


@on_device
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_0", "IQ4_XS"])
def test_one_row_with_any_number_of_steps(device: str, name: str) -> None:
    """Fewer blocks than warps, one turn of the loop, several, and a last step in which only some warps have a block."""
    from nanovllm.kernels.packed_linear import OneRowTile, products

    wide = 2560 if INTERPRETED else 12288
    for size, tile in (
        (256, OneRowTile(8, 1, 2)),
        (768, OneRowTile(4, 2, 3)),
        (wide, OneRowTile(2, 1, 3)),
        (wide + 256, OneRowTile(4, 2, 2)),
    ):
        weight, values = block_weight(name, random_rows(name, 22, size), device)
        x = torch.randn(1, size, device=device).to(DTYPE)
        exact = F.linear(x.double(), values)
        assert_close(products(x, packed(weight), tile=tile), x, values, exact)


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_products_in_fp32_have_the_values_of_the_file(device: str, name: str) -> None:
    from nanovllm.kernels import packed_linear as kernels

    weight, values = block_weight(name, random_rows(name, 22, SIZE), device)
    x = torch.randn(3, SIZE, device=device)
    exact = F.linear(x.double(), values)
    torch.testing.assert_close(kernels.products(x, packed(weight)).double(), exact, rtol=1e-5, atol=1e-5)


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_products_with_the_chosen_experts(device: str, name: str) -> None:
    """Each pair alone, pairs sorted by expert, and the sum over the experts of a token."""
    from nanovllm.kernels import packed_linear as kernels

    num_experts, num_rows, num_chosen = (4, 6, 3) if INTERPRETED else (16, 200, 8)
    size = 256 if INTERPRETED else 768
    weight, values = block_weight(name, random_rows(name, num_experts * num_rows, size), device)
    by_expert = values.view(num_experts, num_rows, size)
    experts = torch.rand(4, num_experts, device=device).argsort(1)[:, :num_chosen].contiguous()
    x = torch.randn(4, size, device=device).to(DTYPE)
    exact = torch.einsum("mk,mcnk->mcn", x.double(), by_expert[experts])
    got = kernels.products(x, packed(weight), experts=experts, num_experts=num_experts)
    assert_close(got.view(exact.shape), x, values, exact)
    routing = kernels.route(experts, num_experts, 16)
    assert_close(kernels.products(x, packed(weight), routing=routing).view(exact.shape), x, values, exact)
    pairs, factors = torch.randn(4 * num_chosen, size, device=device).to(DTYPE), torch.rand(4, num_chosen).to(device)
    sums = torch.einsum("mck,mcnk,mc->mn", pairs.double().view(4, -1, size), by_expert[experts], factors.double())
    got = kernels.sum_of_experts(pairs, packed(weight), experts, num_experts, factors)
    assert_close(got, pairs, values, sums)


@on_device
def test_products_with_experts_that_are_unpacked_in_groups(device: str) -> None:
    """Groups of two experts of five, with biases, factors and a gate. With enough pairs `products` does it itself."""
    from nanovllm.kernels import packed_linear as kernels

    num_experts, num_rows, num_chosen, size = (5, 6, 2, 96) if INTERPRETED else (5, 640, 2, 2880)
    num_tokens = 9 if INTERPRETED else 512 * num_experts // num_chosen
    weight, values = block_weight("MXFP4", random_rows("MXFP4", num_experts * num_rows, size), device)
    by_expert, bias = values.view(num_experts, num_rows, size), torch.randn(num_experts, num_rows, device=device)
    bias, x = bias.to(DTYPE), torch.randn(num_tokens, size, device=device).to(DTYPE)
    experts = torch.rand(num_tokens, num_experts, device=device).argsort(1)[:, :num_chosen].contiguous()
    factors, routing = torch.rand(num_tokens * num_chosen, device=device), kernels.route(experts, num_experts, 128)
    exact = torch.stack([F.linear(x.double(), each, own) for each, own in zip(by_expert, bias.double(), strict=True)])
    exact = exact[experts.flatten(), torch.arange(num_tokens, device=device).repeat_interleave(num_chosen)]
    max_bytes, out = 2 * num_rows * size * DTYPE.itemsize, torch.empty(exact.shape, dtype=DTYPE, device=device)
    options = {"factors": factors}
    kernels.unpacked_products(x, packed(weight), bias, routing, out, max_bytes, **options)
    assert_close(out, x, values, exact * factors[:, None].double())
    assert INTERPRETED or torch.equal(kernels.products(x, packed(weight), bias, routing=routing, **options), out)
    gated = {"gated": True, "activation": "clamped_swiglu"}
    out = kernels.unpacked_products(x, packed(weight), bias, routing, out[:, : num_rows // 2].contiguous(), **gated)
    expected = act_and_mul(exact.to(DTYPE).cpu(), "clamped_swiglu").to(device)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.05)


@on_device
def test_many_rows_of_some_columns_of_the_result(device: str) -> None:
    """cuBLAS writes next to other results, also where the weight is unpacked in parts."""
    weight, values = block_weight("Q6_K", random_rows("Q6_K", 300, 256), device)
    x = torch.randn(20, 256, device=device).to(DTYPE)
    bias = torch.randn(300, device=device).to(DTYPE)
    for max_bytes, given in itertools.product((2**26, 128 * 256 * 2), (None, bias)):
        out = torch.zeros(20, 316, device=device, dtype=DTYPE)
        got = unpacked_linear(x, packed(weight), given, max_bytes, out[:, 8:308])
        exact = F.linear(x.double(), values, None if given is None else given.double())
        assert_close(got, x, values, exact)
        assert got.data_ptr() == out[:, 8:].data_ptr() and not out[:, :8].any() and not out[:, 308:].any()


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_columns_of_ranks_are_the_parts_of_the_weight(device: str, name: str) -> None:
    """Rows that begin inside a tile of scales, and the second half of the columns."""
    from nanovllm.kernels import packed_values

    rows, kind = random_rows(name, 40, SIZE), TYPE_OF[name]
    values = dequantize(rows, kind)
    with torch.device(device):
        weight = PackedWeight([13, 14], SIZE // 2, BLOCK_TYPES[name])
    halves = select_columns(rows.to(device), name, slice(SIZE // 2, None))
    store_blocks(halves[20:34], [weight.rows(13, 27)])
    store_blocks(halves[2:15], [weight.rows(8, 13), weight.rows(0, 8)])
    got = packed_values.unpack(packed(weight), 0, torch.empty(27, SIZE // 2, device=device)).cpu()
    assert torch.equal(got, torch.cat((values[7:15], values[2:7], values[20:34]))[:, SIZE // 2 :])


@on_device
@pytest.mark.parametrize("starts", [(5, 12, 19, 26), (26, 12, 19, 5), (26, 19, 12, 5), (0, 7, 14, 30)])
def test_rows_of_experts_are_stored_where_their_targets_are(device: str, starts: tuple[int, ...]) -> None:
    """With a kernel for all, if the distances are equal, or one for each; and the last target has fewer rows."""
    rows = random_rows("Q4_0", 28, 256)
    expected, _ = packed_with_torch("Q4_0", rows)
    for num_last in (7, 6):
        with torch.device(device):
            weight = PackedWeight([40], 256, BLOCK_TYPES["Q4_0"])
        sizes = [7, 7, 7, num_last]
        store_blocks(
            rows[: sum(sizes)].to(device),
            [weight.rows(start, start + size) for start, size in zip(starts, sizes, strict=True)],
        )
        got = torch.cat([weight.codes[start : start + size] for start, size in zip(starts, sizes, strict=True)])
        assert torch.equal(got.cpu(), expected[: sum(sizes)])


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers pack weights in the interpreter, too."""

    def packed_format(quantization: Quantization | None, *sizes: int) -> Quantization | None:
        return quantization if quantization is not None and quantization.stays_packed(*sizes) else None

    for module in (linear, moe):
        monkeypatch.setattr(module, "packed_format", packed_format)


@on_device
@pytest.mark.parametrize("names", MIXED)
def test_layers_of_several_types_are_one_product(
    device: str, monkeypatch: pytest.MonkeyPatch, names: tuple[str | None, str | None]
) -> None:
    """Results of few rows and of many lie next to each other; only equal types are gated by the kernel."""
    on_gpu(monkeypatch)
    formats = [None if name is None else BLOCK_TYPES[name] for name in names]
    for layer_class in (MergedColumnParallelLinear, GateUpParallelLinear):
        with torch.device(device):
            layer = layer_class(256, [32, 32], bias=True, tp=TPGroup(), dtype=DTYPE, formats=formats)
        assert isinstance(layer.weight, StackedWeight) == (names[0] != names[1])
        values = []
        for i, (name, (_, _, shard)) in enumerate(
            zip(names, (each for each in layer.weight_shards() if each.parameter == "weight"), strict=True)
        ):
            rows = random_rows(name or "Q8_0", 32, 256, seed=i).to(device)
            values.append(dequantize(rows, TYPE_OF[name or "Q8_0"]).to(DTYPE).double())
            if name is None:
                shard.target.copy_(values[-1])
            else:
                values[-1] = dequantize(rows, TYPE_OF[name]).double()
                store_blocks(rows, [shard.target])
        layer.bias.normal_()
        for num_rows in (1, 3, 300):
            x = torch.randn(num_rows, 256, device=device).to(DTYPE)
            exact = F.linear(x.double(), torch.cat(values), layer.bias.double())
            if layer_class is GateUpParallelLinear:
                gate, up = exact.chunk(2, dim=-1)
                exact = F.silu(gate) * up
            got = layer(x)
            error = (got.double() - exact).abs().max().item()
            assert error <= 6 * torch.finfo(DTYPE).eps * exact.abs().max().item()


@on_device
@pytest.mark.parametrize("name", NAMES)
def test_random_blocks_keep_the_scale_of_activations(device: str, name: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    values = dequantize(random_blocks(64, 1024, name, generator), TYPE_OF[name])
    assert 0.7 < values.std().item() * 1024**0.5 < 1.4 and abs(values.mean().item()) < 0.1 / 1024**0.5


# -- loading -------------------------------------------------------------------------------------------------------


def values_of(weight: object) -> torch.Tensor:
    """The values of a weight, with the columns in the order of x."""
    from nanovllm.kernels import packed_values

    if isinstance(weight, StackedWeight):
        return torch.cat([values_of(each) for each in weight.weights])
    if not isinstance(weight, PackedWeight):
        assert isinstance(weight, torch.Tensor)
        return weight
    values = packed_values.unpack(packed(weight), 0, torch.empty(*weight.shape, device=weight.codes.device))
    if weight.column_order is None:
        return values
    return torch.empty_like(values).index_copy_(1, weight.column_order.long(), values)


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_5"])
def test_loader_packs_the_values_of_the_file(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str, load_format: str
) -> None:
    """The packed weights of each rank have the values that a CPU holds: types mixed in q, k and v and in experts, rows
    of heads in another order (llama), columns in another order (qwen3_5), and columns of a rank without whole blocks.
    """
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 4, "head_dim": 64}
    sizes |= {"num_kv_heads": 2}
    recurrent = {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_value_head_dim": 32}
    experts = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    directory = write_tiny_model(tmp_path / "model", architecture, **sizes, recurrent=recurrent, experts=experts)
    types = ["Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "F16"]
    file = write_gguf(tmp_path / "model.gguf", directory, types=types)
    if device == "cuda" and load_format == "dummy":
        pytest.skip("devices draw different numbers")
    for tp in (TPGroup(), replace(TPGroup(), rank=1, size=2)):
        expected = load_model(file, tp, load_format=load_format)
        with monkeypatch.context() as patch:
            if device == "cpu":
                on_gpu(patch)
            model = load_model(file, tp, device=device, load_format=load_format)
        of_model, names = dict(expected.named_modules()), ("weight", "gate_up", "down")
        given = [(path, module, name) for path, module in model.named_modules() if path in of_model for name in names]
        num_packed = 0
        for path, module, name in given:
            dense, weight = getattr(of_model[path], name, None), getattr(module, name, None)
            if isinstance(dense, torch.Tensor):
                values = values_of(weight).cpu()
                if name == "gate_up" and isinstance(weight, StackedWeight):
                    values = values.unflatten(0, (2, 2, -1)).transpose(0, 1).flatten(0, 2)
                assert torch.equal(values, dense), (path, name)
                num_packed += isinstance(weight, PackedWeight | StackedWeight)
        assert num_packed >= 4


@pytest.mark.slow
@on_device
def test_model_of_packed_blocks_has_the_logits_of_its_values(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In fp32, with types that differ within q, k and v and within experts, and columns in another order."""
    if device == "cuda":
        pytest.skip("tests/models/test_gguf_models.py runs whole engines")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 4, "head_dim": 64}
    recurrent = {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_value_head_dim": 32}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 256}
    experts |= {"shared_expert_intermediate_size": 256}
    directory = write_tiny_model(tmp_path / "model", "qwen3_5_moe", **sizes, recurrent=recurrent, experts=experts)
    file = write_gguf(tmp_path / "model.gguf", directory, types=["Q4_K", "Q8_0", "Q6_K", "Q5_1", "Q4_1"])
    expected = run_logits(load_model(file), [5, 3, 200])
    on_gpu(monkeypatch)
    monkeypatch.setattr(moe.Experts, "_sum_by_expert", moe.Experts._sum_of_products)
    model = load_model(file)
    modules = list(model.modules())
    assert any(isinstance(each, moe.Experts) and isinstance(each.gate_up, StackedWeight) for each in modules)
    assert any(isinstance(each, PackedWeight) and each.column_order is not None for each in modules)
    torch.testing.assert_close(run_logits(model, [5, 3, 200]), expected, rtol=1e-4, atol=1e-4)
