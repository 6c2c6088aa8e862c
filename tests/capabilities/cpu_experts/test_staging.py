"""The order of copies and products of streamed experts: no race whatever the copies' timing, and each edge is needed.

The layers have several formats, whose weights take turns in two buffers. What the kernels make of the weights is tested
in kernels/test_staged_experts.py.
"""

import ast
import inspect
import random
import re
import weakref

import pytest
import torch
from interpreter import INTERPRETED, needs_triton
from race_detector import Site, StreamRaceError
from simulated_streams import MODES, Edge, Mode, SimulatedStreams
from staged_experts import load_experts, make_staging, pack_on_cpu

from nanovllm.capabilities.cpu_experts import staging as module
from nanovllm.capabilities.cpu_experts.layer import RankExperts
from nanovllm.capabilities.cpu_experts.staging import ExpertStaging
from nanovllm.layers.moe import Experts
from nanovllm.offload.streams import make_streams

pytestmark = [needs_triton, pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")]
NUM_LAYERS = 5
OVERRIDES = {
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "moe_intermediate_size": 128,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "vocab_size": 64,
    "eos_token_id": 0,
}
# Two layers with gate and up in other formats than the rest, one of them of unequal formats
DYNAMIC = {r"+:.*\.1\.mlp.*": {"bits": 8}, r"+:.*\.3\.mlp.*\.up_proj": {"bits": 8}, r"-:.*\.4\.mlp.*down_proj": {}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "dynamic": DYNAMIC}
Weights = dict[str, torch.Tensor]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> RankExperts:
    pack_on_cpu(monkeypatch)
    overrides = OVERRIDES | {"quantization_config": GPTQ}
    return load_experts("qwen3-30b-a3b", overrides=overrides, dtype=torch.bfloat16, load_format="dummy")


def weights_of(staging: ExpertStaging, layer: int) -> Weights:
    """Fetch a layer, with streams that run everything at once."""
    return {name: each.data.clone() for name, each in staging.experts(layer).named_parameters()}


@pytest.fixture
def expected(rank: RankExperts) -> list[Weights]:
    staging = make_staging(rank)
    weights = [weights_of(staging, layer) for layer in range(NUM_LAYERS)]
    assert len({tuple(each.shape for each in of_layer.values()) for of_layer in weights}) == 4, "formats differ"
    for name, weight in weights[0].items():
        assert weight.count_nonzero() > 0.9 * weight.numel() and not torch.equal(weight, weights[2][name])
    return weights


def layers_of_step(rng: random.Random) -> list[int]:
    """Draw the layers that a step streams, in order. Parts of a long step ask for a layer again. The CPU computes the
    last layer of some steps, and some start-up steps skip inner layers.
    """
    kind = rng.choice(["all", "all", "all", "short end", "ends", "last", "twice"])
    layers = list(range(NUM_LAYERS))
    if kind == "short end":
        layers.pop()
    elif kind == "ends":
        layers = [0, NUM_LAYERS - 1]
    elif kind == "last":
        layers = layers[-1:]
    return [layer for layer in layers for _ in range(rng.randint(2, 3) if kind == "twice" else 1)]


class WrongWeightsError(AssertionError):
    pass


def play(
    rank: RankExperts, expected: list[Weights], streams: SimulatedStreams, seed: int, num_steps: int = 6
) -> ExpertStaging:
    staging, rng = make_staging(rank, streams), random.Random(seed)
    for number, arena in enumerate(staging._arenas):
        streams.name_region(f"arena {number}", arena)
    if rng.random() < 0.5:
        staging.fetch_again(0)  # as start-up does
    for _ in range(num_steps):
        for layer in layers_of_step(rng):
            experts = staging.experts(layer)
            for name, each in experts.named_parameters():
                streams.compute.read(_contiguous(each.data))
                if not torch.equal(each.data, expected[layer][name]):
                    raise WrongWeightsError(f"layer {layer}: {name}")
            staging.multiplied(layer)
    return staging


def _contiguous(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.is_contiguous() else weight.transpose(1, 2)  # scales


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_random_steps_have_no_race_and_the_right_weights(
    rank: RankExperts, expected: list[Weights], mode: Mode
) -> None:
    for seed in range(4):
        play(rank, expected, SimulatedStreams(mode, seed), seed)


def wait_lines() -> dict[int, str]:
    """Line number -> text of every wait in the source."""
    source = inspect.getsource(module)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    lines = source.splitlines()
    return {
        call.lineno: lines[call.lineno - 1]
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "wait"
    }


def edges_of(rank: RankExperts, expected: list[Weights], seed: int) -> dict[int, Edge]:
    """Return the edges that order something, by the line."""
    streams = SimulatedStreams("early", seed)
    play(rank, expected, streams, seed)
    return {edge.site.line: edge for edge, count in streams.edges_seen.items() if count}


def test_every_edge_is_documented_and_without_it_a_race_is_found(rank: RankExperts, expected: list[Weights]) -> None:
    lines, edges = wait_lines(), edges_of(rank, expected, seed=0)
    assert {edge.site for edge in edges.values()} == {Site("staging.py", line) for line in lines}
    commented = [re.findall(r"# (E\d+): ", line) for line in lines.values()]
    documented = re.findall(r"^  (E\d+) ", module.__doc__ or "", re.MULTILINE)
    assert sorted(commented) == [[name] for name in documented] == [["E15"], ["E16"]]
    for edge in edges.values():
        for mode in MODES:
            with pytest.raises(StreamRaceError, match="arena"):
                play(rank, expected, SimulatedStreams(mode, drop={edge}), seed=0)


@pytest.mark.slow
def test_without_the_edge_to_products_the_weights_are_wrong(rank: RankExperts, expected: list[Weights]) -> None:
    """Without the race detector. The wait for compute (E16) cannot show here: compute is never late."""
    edges = edges_of(rank, expected, seed=0)
    (edge,) = (edge for edge in edges.values() if edge.recorded_on == "h2d")
    with pytest.raises(WrongWeightsError):
        play(rank, expected, SimulatedStreams("late", drop={edge}, check_races=False), seed=0)


@pytest.mark.slow
def test_weights_are_copied_in_pieces(
    monkeypatch: pytest.MonkeyPatch, rank: RankExperts, expected: list[Weights]
) -> None:
    """One expert at a time, even if it is larger than a piece should be."""
    monkeypatch.setattr(module, "STAGED_PIECE_BYTES", 1)
    play(rank, expected, SimulatedStreams("late"), seed=0)


def test_experts_are_allocated_one_at_a_time(rank: RankExperts) -> None:
    """Regression: those of both buffers and all formats were there at once, in addition to the buffers: with four
    formats five times the memory that a plan has for the buffers.
    """
    made = list[weakref.ref[torch.UntypedStorage]]()

    def make_experts(layer: int) -> Experts:
        assert all(each() is None for each in made), "others have memory outside of the buffers"
        experts = rank._gpu_experts(layer)
        made.extend(weakref.ref(each.untyped_storage()) for each in experts.parameters())
        return experts

    ExpertStaging(rank.store.layers, make_experts, make_streams(rank.device))
    assert len(made) > 4 * 2


def num_copied_bytes(streams: SimulatedStreams) -> list[int]:
    """Count the bytes that h2d copies from now on, in the only entry of the list that is returned."""
    copied, copy = [0], streams.h2d.copy

    def counting_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
        copied[0] += src.nbytes
        copy(dst, src)

    streams.h2d.copy = counting_copy  # type: ignore[method-assign]
    return copied


def test_each_layer_is_copied_once_a_step_and_the_next_one_ahead(rank: RankExperts) -> None:
    streams = SimulatedStreams("early")
    staging = make_staging(rank, streams)
    sizes = [sum(part.nbytes for part in _parts(rank, layer)) for layer in range(NUM_LAYERS)]
    copied = num_copied_bytes(streams)
    for layer in (0, 0, 1, 1, 1, 2, 3, 3, 4):  # parts of a long step ask for a layer again
        staging.experts(layer)
        staging.multiplied(layer)
        assert copied[0] == sum(sizes[: layer + 2]), "the next layer is on its way"


def _parts(rank: RankExperts, layer: int) -> list[torch.Tensor]:
    matrices = rank.store.layers[layer].matrices
    return [part for each in matrices for part in (each.codes, each.scales, each.zeros) if part is not None]
