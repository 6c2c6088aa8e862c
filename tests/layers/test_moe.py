"""A mixture of experts against loops over tokens, for any routing, and as transformers has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_model import load_model, random_prompt, run_logits
from thread_ranks import run_ranks
from tiny_models import EXPERTS, reference_model, write_tiny_model

from nanovllm.checkpoint.model_config import ExpertsConfig
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.layers.moe import Experts, SparseMLP

HIDDEN, SIZE, NUM_EXPERTS, NUM_TOKENS = 24, 12, 6, 9
PROMPT = random_prompt(40)
ROUTES: dict[str, Callable[[], torch.Tensor]] = {
    "all to one": lambda: torch.full((NUM_TOKENS, 1), 4),
    "one expert has none": lambda: torch.arange(NUM_TOKENS * 2).reshape(-1, 2) % (NUM_EXPERTS - 1),
    "all to all": lambda: torch.arange(NUM_EXPERTS).repeat(NUM_TOKENS, 1),
    "no token": lambda: torch.zeros(0, 2, dtype=torch.int64),
}


def config(num_chosen: int = 2, norm_topk_prob: bool = True) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=NUM_EXPERTS,
        num_experts_per_token=num_chosen,
        intermediate_size=SIZE,
        norm_topk_prob=norm_topk_prob,
        layers=(0,),
    )


def fill(module: torch.nn.Module, tp: TPGroup) -> torch.nn.Module:
    """The same weights for any number of ranks."""
    for i, (_, parameter, shard) in enumerate(module.weight_shards()):  # type: ignore[operator]
        full = torch.randn(shard.full_shape, generator=torch.Generator().manual_seed(i)) / 4
        shard.target.copy_(full[shard.index])
        assert parameter.endswith(".weight")
    return module


@pytest.mark.parametrize("route", ROUTES)
def test_experts_yield_what_a_loop_over_tokens_does(route: str) -> None:
    experts = ROUTES[route]()
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(len(experts), HIDDEN, generator=generator), torch.rand(experts.shape, generator=generator)
    module: Any = fill(Experts(HIDDEN, config(), TPGroup(), torch.float32), TPGroup())
    gate_up, down = (each.unflatten(0, (NUM_EXPERTS, -1)) for each in (module.gate_up, module.down))
    expected = torch.zeros_like(x)
    for token, choice in torch.cartesian_prod(*map(torch.arange, experts.shape)).tolist() if len(experts) else ():
        expert = int(experts[token, choice])
        gate, up = (gate_up[expert] @ x[token]).chunk(2)
        expected[token] += weights[token, choice] * (down[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(module(x, experts, weights), expected)
    for num_ranks in (2, 3):
        made = run_ranks(
            num_ranks, lambda tp: fill(Experts(HIDDEN, config(), tp, torch.float32), tp)(x, experts, weights)
        )
        for out in made:
            torch.testing.assert_close(out, expected)


def test_features_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="moe_intermediate_size=12 is not divisible by tensor_parallel_size=5"):
        run_ranks(5, lambda tp: Experts(HIDDEN, config(), tp, torch.float32))


def test_router_works_in_fp32() -> None:
    """Two experts whose logits, 24 and 24 + 2^-7, differ by less than bf16 can tell."""
    mlp = SparseMLP(
        HIDDEN, config(num_chosen=1), torch.bfloat16, Experts(HIDDEN, config(num_chosen=1), TPGroup(), torch.bfloat16)
    )
    mlp.gate.weight.zero_()
    mlp.gate.weight[3:5] = 1.0
    mlp.gate.weight[4, 0] += 2.0**-7
    experts, weights, _ = mlp.gate(torch.ones(2, HIDDEN, dtype=torch.bfloat16))
    assert experts.tolist() == [[4], [4]] and weights.dtype == torch.float32


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("step", "dense"), [(1, []), (2, []), (1, [1, 2])])
def test_layers_of_both_kinds_match_transformers(
    tmp_path: Path, norm_topk_prob: bool, step: int, dense: list[int]
) -> None:
    changes = {**EXPERTS, "norm_topk_prob": norm_topk_prob, "decoder_sparse_step": step, "mlp_only_layers": dense}
    write_tiny_model(tmp_path, "qwen3_moe", num_layers=4, experts=changes)
    with torch.no_grad():
        expected = reference_model(tmp_path)(torch.tensor([PROMPT])).logits[0]
    assert (run_logits(load_model(tmp_path), PROMPT) - expected).abs().max() < 1e-4
