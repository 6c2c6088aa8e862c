"""Experts with biases and the clamped gate on a GPU, at the sizes of gpt-oss, and small in Triton's interpreter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dense_model import load_model, random_prompt, run_logits
from gguf_weights import TYPE_OF, random_rows
from interpreter import INTERPRETED, needs_triton, on_device
from mxfp4_files import write_mxfp4
from test_gguf_kernels import on_gpu, values_of
from tiny_models import write_tiny_model

from nanovllm.checkpoint.model_config import ExpertsConfig
from nanovllm.checkpoint.quantization import BLOCK_TYPES
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers import moe
from nanovllm.layers.linear import act_and_mul
from nanovllm.layers.moe import Experts
from nanovllm.layers.packed_weight import PackedRows, PackedWeight, store_blocks
from nanovllm.models.gguf_values import dequantize
from nanovllm.utils.arithmetic import SWIGLU_LIMIT as LIMIT

pytestmark = needs_triton
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates to bf16 where a GPU rounds
NUM_EXPERTS, NUM_CHOSEN, HIDDEN, SIZE = (3, 2, 32, 32) if INTERPRETED else (32, 4, 2880, 2880)
FORMATS = (("MXFP4",) * 3, (None,) * 3, ("Q8_0", "Q5_1", "MXFP4"))


def config(num_experts: int = NUM_EXPERTS) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=NUM_CHOSEN,
        intermediate_size=SIZE,
        norm_topk_prob=True,
        layers=(0,),
        has_bias=True,
        activation="clamped_swiglu",
    )


def filled_experts(
    formats: tuple[str | None, ...], device: str, tp: TPGroup | None = None
) -> tuple[Experts, list[torch.Tensor]]:
    """Experts, and the values of their gates, ups and downs, fp64 [E, N, K]."""
    with torch.device(device):
        given = [None if name is None else BLOCK_TYPES[name] for name in formats]
        experts = Experts(HIDDEN, config(), tp or TPGroup(), DTYPE, given)
    values: list[torch.Tensor] = []
    shapes = ((SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE))
    targets = {shard.parameter: shard.shard.target for shard in experts.weight_shards()}
    for seed, (part, name, shape) in enumerate(
        zip(("gate_proj", "up_proj", "down_proj"), formats, shapes, strict=True)
    ):
        rows = random_rows(name or "Q8_0", NUM_EXPERTS * shape[0], shape[1], seed).to(device)
        blocks = rows.view(NUM_EXPERTS, shape[0], -1)
        of_experts = torch.stack([dequantize(each, TYPE_OF[name or "Q8_0"]).double() for each in blocks])
        values.append(of_experts if name else of_experts.to(DTYPE).double())
        for expert in range(NUM_EXPERTS):
            target = targets[f"{expert}.{part}.weight"]
            if isinstance(target, PackedRows):
                store_blocks(blocks[expert], [target])
            else:
                target.copy_(of_experts[expert])
    assert experts.gate_up_bias is not None and experts.down_bias is not None
    experts.gate_up_bias.normal_(0, 4)  # some gates and ups are beyond the limit
    experts.down_bias.normal_(0, 1)
    return experts, values


def biases(experts: Experts) -> list[torch.Tensor]:
    """The biases of gate, up and down, [E, N]."""
    names = [f"{{}}.{part}.bias" for part in ("gate_proj", "up_proj", "down_proj")]
    targets = {shard.parameter: shard.shard.target for shard in experts.weight_shards()}
    return [torch.stack([targets[name.format(e)] for e in range(NUM_EXPERTS)]) for name in names]  # type: ignore[misc]


def expected_sums(
    values: list[torch.Tensor],
    of_biases: list[torch.Tensor],
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weighted sums, computed in `dtype` one expert after the other."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    gate, up, down = ([each[e].to(dtype) for e in range(NUM_EXPERTS)] for each in values)
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        of_expert = [each[expert].to(dtype) for each in of_biases]
        gates = F.linear(x[token].to(dtype), gate[expert], of_expert[0]).clamp(max=LIMIT)
        ups = F.linear(x[token].to(dtype), up[expert], of_expert[1]).clamp(-LIMIT, LIMIT)
        hidden = (ups + 1) * (gates * torch.sigmoid(1.702 * gates))
        products = F.linear(hidden, down[expert], of_expert[2])
        out.index_add_(0, token, products.double() * weights[token, choice, None].double())
    return out


def draw(num_tokens: int, device: str, dtype: torch.dtype = DTYPE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw x, the chosen experts and their weights."""
    chosen = torch.rand(num_tokens, NUM_EXPERTS, device=device).argsort(1)[:, :NUM_CHOSEN].contiguous()
    return torch.randn(num_tokens, HIDDEN, device=device).to(dtype), chosen, torch.rand(chosen.shape, device=device)


@on_device
@pytest.mark.parametrize("formats", FORMATS)
def test_sums_of_few_tokens_and_of_many(
    device: str, monkeypatch: pytest.MonkeyPatch, formats: tuple[str | None, ...]
) -> None:
    """Pairs alone with and without the sum in the kernel, and pairs sorted by expert."""
    on_gpu(monkeypatch)
    if INTERPRETED:
        monkeypatch.setattr(moe, "MAX_SINGLE_PAIRS", 2)
    experts, values = filled_experts(formats, device)
    of_biases = biases(experts)
    for num_tokens in (1, 4) if INTERPRETED else (1, 3, 8, 9, 40, 300, 3000):
        x, chosen, weights = draw(num_tokens, device)
        exact = expected_sums(values, of_biases, x, chosen, weights, torch.float64)
        plain = expected_sums(values, of_biases, x, chosen, weights, DTYPE)
        got = experts._sum_of_products(x, chosen, weights, experts.biases)
        rounding = torch.finfo(DTYPE).eps * exact.abs().mean()  # of the sum itself, which `plain` does not round
        assert (got.double() - exact).abs().mean() <= 2 * (plain - exact).abs().mean() + rounding, num_tokens


@pytest.mark.slow
@on_device
def test_sums_in_fp32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    monkeypatch.setattr("test_biased_experts.DTYPE", torch.float32)
    monkeypatch.setattr(moe, "MAX_SINGLE_PAIRS", 2)
    for formats in (("MXFP4",) * 3, (None,) * 3):
        experts, values = filled_experts(formats, device)
        for num_tokens in (1, 4):
            x, chosen, weights = draw(num_tokens, device, torch.float32)
            exact = expected_sums(values, biases(experts), x, chosen, weights, torch.float64)
            got = experts._sum_of_products(x, chosen, weights, experts.biases)
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


@on_device
def test_logits_of_the_router_have_its_bias(device: str) -> None:
    from nanovllm.kernels.small_linear import small_linear

    for num_rows in (1, moe.MAX_ROUTER_ROWS):
        x, weight = (torch.randn(n, HIDDEN, device=device).to(DTYPE) for n in (num_rows, NUM_EXPERTS))
        bias = torch.randn(NUM_EXPERTS, device=device).to(DTYPE)
        got = small_linear(x, weight, bias, dtype=torch.float32)
        exact = F.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


@on_device
def test_clamped_gate_alone(device: str) -> None:
    from nanovllm.kernels import fused

    x = torch.randn(5, 2 * SIZE, device=device) * 8
    x[0, ::3], x[1, ::3] = 500.0, -500.0
    torch.testing.assert_close(
        fused.act_and_mul(x, "clamped_swiglu"), act_and_mul(x.cpu(), "clamped_swiglu").to(device)
    )


@pytest.mark.slow
@on_device
def test_model_in_mxfp4_has_the_logits_of_its_values(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The packed experts also have the values of those in 32 bits on the second of two ranks, whose 32 columns are
    padded to 128.
    """
    if device == "cuda":
        pytest.skip("tests/gpu runs whole engines")
    plain = write_tiny_model(tmp_path / "plain", "gpt_oss", rope="yarn", intermediate_size=64, num_layers=2)
    quantized, prompt = write_mxfp4(tmp_path / "quantized", plain, tmp_path / "values"), random_prompt(1)
    second = replace(TPGroup(), rank=1, size=2)
    expected = [load_model(tmp_path / "values", tp) for tp in (TPGroup(), second)]
    logits = run_logits(expected[0], prompt)
    on_gpu(monkeypatch)
    monkeypatch.setattr(Experts, "_sum_by_expert", Experts._sum_of_products)
    for tp, of_values in zip((TPGroup(), second), expected, strict=True):
        model = load_model(quantized, tp)
        for layer, dense in zip(model.model.layers, of_values.model.layers, strict=True):
            for name in ("gate_up", "down"):
                weight = getattr(layer.mlp.experts, name)
                assert isinstance(weight, PackedWeight)
                assert torch.equal(values_of(weight), getattr(dense.mlp.experts, name))
            assert torch.equal(layer.mlp.experts.gate_up_bias, dense.mlp.experts.gate_up_bias)
        if tp.size == 1:
            torch.testing.assert_close(run_logits(model, prompt), logits, rtol=1e-4, atol=1e-4)
