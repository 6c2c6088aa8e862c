"""The decoder has the weights of the model's layout; the first and the last layer run on their own at start-up."""

from pathlib import Path

import pytest
import torch
from dense_model import load_model
from tiny_models import ARCHITECTURES, GEMMAS, HYBRIDS, WINDOWED, write_tiny_model

from nanovllm.capacity.costs import weight_bytes
from nanovllm.checkpoint.model_layout import model_layout
from nanovllm.checkpoint.read_config import load_config
from nanovllm.config import Config
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import build_model


def test_decoder_has_the_tensors_of_the_layout_and_the_size_that_the_planner_sums(tmp_path: Path) -> None:
    """For every architecture, tied or not, with and without biases and the draft head."""
    variants = [{}, {"tied": True, "bias": True}]
    cases = [(name, variant) for name in (*ARCHITECTURES, *HYBRIDS, *GEMMAS, *WINDOWED) for variant in variants]
    cases += [(name, {"with_mtp": True}) for name in HYBRIDS]
    for i, (name, variant) in enumerate(cases):
        config, _ = load_config(str(write_tiny_model(tmp_path / str(i), name, **variant)))
        sizes = {"max_model_len": 128, "dtype": torch.float32, "device": "meta", "with_mtp": config.has_mtp}
        model = build_model(config, TPGroup(), **sizes)
        shapes = {name: shard.full_shape for name, shard in model.weight_shards()}
        assert shapes == model_layout(config).shapes(with_mtp=config.has_mtp), (name, variant)
        options = Config(model="m", dtype="float32", speculation="mtp" if config.has_mtp else "off")
        built = sum(parameter.numel() * 4 for parameter in model.parameters())
        assert weight_bytes(options, config, is_packed=False) == built, (name, variant)


class NotingAttention:
    """A StepAttention that returns its queries, and notes how many each layer has."""

    def __init__(self, model: CausalLM, fails: bool = False) -> None:
        qkv_proj = model.model.layers[0].self_attn.qkv_proj
        self.cache = torch.zeros(1, 8, qkv_proj.heads_per_part[1], qkv_proj.head_dim)
        self.fails = fails
        self.num_queries: list[tuple[int, int]] = []
        self.with_cells: list[int] = []

    def cells(self, layer: int) -> KVCells:
        self.with_cells.append(layer)
        return KVCells(self.cache, self.cache, torch.arange(3))

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        self.num_queries.append((layer, len(q_THD)))
        if self.fails:
            raise RuntimeError("no attention")
        return q_THD


def run(model: CausalLM, attn: NotingAttention) -> torch.Tensor:
    """Three tokens, the last of which is asked for."""
    return model(torch.arange(3), torch.arange(3), attn, rows=torch.tensor([2]))


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_inner_layers_are_skipped_but_attention_hears_of_every_layer(tmp_path: Path, num_layers: int) -> None:
    """A step that streams keys must use up those of all layers."""
    model = load_model(write_tiny_model(tmp_path, num_layers=num_layers))
    attn = NotingAttention(model)
    with model.skipping_inner_layers():
        assert run(model, attn).shape == (1, model.config.hidden_size)
    expected = {1: [(0, 1)], 2: [(0, 3), (1, 1)], 4: [(0, 3), (1, 0), (2, 0), (3, 1)]}
    assert attn.num_queries == expected[num_layers]
    assert attn.with_cells == list(range(num_layers))


def test_all_layers_run_again_afterwards_also_after_an_error(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path, num_layers=3))
    before = run(model, NotingAttention(model))
    with model.skipping_inner_layers():
        assert not torch.equal(run(model, NotingAttention(model)), before)
    assert torch.equal(run(model, NotingAttention(model)), before)
    with pytest.raises(RuntimeError, match="no attention"), model.skipping_inner_layers():
        run(model, NotingAttention(model, fails=True))
    assert torch.equal(run(model, NotingAttention(model)), before)
