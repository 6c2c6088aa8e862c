"""Layers of a checkpoint whose experts are in CPU memory, and the buffers that they are streamed to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.capabilities.cpu_experts.layer import RankExperts
from nanovllm.capabilities.cpu_experts.staging import ExpertStaging
from nanovllm.capabilities.cpu_experts.store import ExpertMatrix
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers import linear, moe
from nanovllm.layers.moe import Experts
from nanovllm.layers.packed_weight import PackedWeight, packed
from nanovllm.models.loader import build_model, load_weights
from nanovllm.offload.streams import Streams, make_streams


def pack_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers on the CPU pack quantized weights, as on a GPU."""

    def packed_format(quantization: Quantization | None, *sizes: int, **others: int) -> Quantization | None:
        return quantization if quantization is not None and quantization.stays_packed(*sizes, **others) else None

    for module in (linear, moe):
        monkeypatch.setattr(module, "packed_format", packed_format)


def load_experts(
    path: Path | str,
    *,
    overrides: dict[str, Any] | None = None,
    tp: TPGroup | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quantization: str | None = None,
    load_format: str = "auto",
) -> RankExperts:
    """Load a checkpoint, with the experts of all layers in CPU memory. Starts no threads."""
    config, directory = load_config(str(path), overrides)
    config = config.quantized(quantization, None, tp.size if tp else 1)
    assert config.experts is not None
    config = replace(config, experts=config.experts.on_gpu(0))
    files = None if load_format == "dummy" else directory
    model = build_model(
        config,
        tp or TPGroup(),
        max_model_len=64,
        dtype=dtype,
        device=device,
        directory=files,
        make_cpu_experts=RankExperts,
    )
    load_weights(model, files, load_format=load_format)
    assert isinstance(model.cpu_experts, RankExperts)
    return model.cpu_experts


def make_staging(rank: RankExperts, streams: Streams | None = None) -> ExpertStaging:
    return ExpertStaging(rank.store.layers, rank._gpu_experts, streams or make_streams(rank.device))


def staged_values(experts: Experts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values of gate, up and down that the GPU's kernels read, fp32 [E, N, K]."""
    gate_up, down = experts.gate_up, _values(experts.down)
    if isinstance(gate_up, linear.StackedWeight):
        gate, up = map(_values, gate_up.weights)
    else:
        gate, up = _values(gate_up).unflatten(0, (experts.num_experts, 2, -1)).unbind(1)
    return (*(each.reshape(experts.num_experts, -1, each.shape[-1]) for each in (gate, up, down)),)


def _values(weight: torch.Tensor | PackedWeight | linear.StackedWeight) -> torch.Tensor:
    from nanovllm.kernels import packed_values

    assert not isinstance(weight, linear.StackedWeight)
    if not isinstance(weight, PackedWeight):
        return weight.float().cpu()
    return packed_values.unpack(packed(weight), 0, torch.empty(weight.shape, device=weight.codes.device)).cpu()


def stored_values(matrix: ExpertMatrix) -> torch.Tensor:
    """Return the values of a matrix in CPU memory, fp32 [E, N, K]."""
    return torch.stack([matrix.values(place) for place in range(matrix.num_places)])
