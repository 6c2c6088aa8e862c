"""Experts that are streamed to a GPU have the values that are in CPU memory: in Triton's interpreter, and on a GPU."""

from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from interpreter import INTERPRETED, needs_triton, on_device
from quantized_models import FORMATS, write_quantized
from staged_experts import load_experts, make_staging, pack_on_cpu, staged_values, stored_values
from tiny_models import write_tiny_model

from nanovllm.capabilities.cpu_experts import staging as staging_module
from nanovllm.checkpoint.quantization import QUANTIZATIONS
from nanovllm.device.tp_group import TPGroup

pytestmark = needs_triton
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
CHECKPOINTS = ("awq", "packed 4", "packed 8 channel", "gptq dynamic", "fp8 blocks", "fp8 tensor", "float channel")
MIXED = ("Q4_K Q6_K Q8_0", "Q6_K F16 Q4_K Q8_0", "BF16 Q4_0")  # types of matrices, in turn
WIDE = ("fp8 blocks", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", *MIXED)  # the blocks have up to 256 columns
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True}


@on_device
@pytest.mark.parametrize("name", ["int4", "", "fp8", "fp8_dynamic", *CHECKPOINTS, *BLOCKS, *MIXED])
def test_staged_experts_have_the_values_in_cpu_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    """Regression: scales that a row, or a block of rows, shares on the GPU had no place there. Types that differ
    between layers take turns in two buffers.
    """
    monkeypatch.setattr(staging_module, "STAGED_PIECE_BYTES", 15_000)  # pieces end inside an expert
    if INTERPRETED:
        pack_on_cpu(monkeypatch)
    num_layers, size = 3 if name in MIXED else 1, 256 if name in WIDE else 128
    sizes = {"hidden_size": size, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "vocab_size": 64}
    experts = EXPERTS | {"moe_intermediate_size": 256 if name == "int4" else size}
    path = write_tiny_model(tmp_path / "x", "qwen3_moe", num_layers=num_layers, experts=experts, **sizes)  # type: ignore[arg-type]
    if name in FORMATS:
        path, _ = write_quantized(path, tmp_path, name)
    elif name in (*BLOCKS, *MIXED):
        path = write_gguf(tmp_path / "x.gguf", path, types=name.split())
    tp = TPGroup(1, 2) if name == "int4" else TPGroup()
    quantization = name if name in QUANTIZATIONS else None
    rank = load_experts(path, tp=tp, dtype=DTYPE, device=device, quantization=quantization)
    staging = make_staging(rank)
    for number in range(num_layers):
        staged = staged_values(staging.experts(number))
        for values, matrix in zip(staged, rank.store.layers[number].matrices, strict=True):
            assert torch.equal(values, stored_values(matrix)) and values.std() > 0.01
        staging.multiplied(number)
