"""The embedding's rows in pinned memory, and products with a quantized head: in Triton's interpreter, and on a GPU."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dense_model import random_prompt, run_logits
from interpreter import INTERPRETED, needs_triton, on_device
from tiny_models import write_tiny_model

from nanovllm.checkpoint.quantization import HEAD_QUANTIZATIONS, Quantization
from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.cuda import registered_view
from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers import vocabulary
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import build_model, load_weights
from nanovllm.models.quantized_weights import quantize

pytestmark = needs_triton
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates to bf16 where a GPU rounds
SIZES = [(50, 24), (50, 1032)] if INTERPRETED else [(50, 24), (1000, 1032), (151_936, 4096), (248_320, 5120)]


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_embed_reads_the_bits_of_the_rows_of_this_rank(
    device: str, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    """A rank gives zeros for the tokens of other ranks. On a GPU the table is pinned, and pages lie far apart."""
    from nanovllm.kernels.embedding import embed

    buffer = HostBuffer(num_rows * size * dtype.itemsize, torch.device(device) if device == "cuda" else None)
    table = buffer.tensor.view(dtype).view(num_rows, size)
    rows = torch.tensor([0, num_rows - 1, num_rows // 2, 0, 7])
    table[rows] = torch.randn(5, size).to(dtype)
    table[7, :3] = torch.tensor([math.nan, -0.0, math.inf], dtype=dtype)
    on_gpu = registered_view(table, torch.device(device)) if device == "cuda" else table
    expected = F.embedding(rows, table)
    for num_tokens in (0, 1, 5):
        got = embed(rows[:num_tokens].to(device), on_gpu, 0)
        assert got.dtype == dtype and got.cpu().view(torch.uint8).equal(expected[:num_tokens].view(torch.uint8))
    first = 100
    token_ids = torch.tensor([first - 1, first, first + num_rows - 1, first + num_rows, 0])
    got = embed(token_ids.to(device), on_gpu, first).cpu()
    assert torch.equal(got[1:3], table[[0, -1]]) and not got[[0, 3, 4]].any()


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_model_with_its_table_in_cpu_memory_has_the_logits_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, load_format: str
) -> None:
    """In the interpreter, for which memory that is not pinned stands for pinned memory. On a GPU:
    gpu/test_gpu_vocabulary. The ranks do not divide the vocabulary evenly.
    """
    if not INTERPRETED:
        pytest.skip("a GPU reads pinned memory only")
    monkeypatch.setattr(vocabulary, "HostBuffer", lambda num_bytes, pinned_for: HostBuffer(num_bytes, None))
    monkeypatch.setattr(vocabulary, "registered_view", lambda pinned, device: pinned)
    plain = write_tiny_model(tmp_path, vocab_size=321)
    config, directory = load_config(str(plain))
    prompt = random_prompt(20)

    def load(tp: TPGroup, is_on_cpu: bool) -> CausalLM:
        model = build_model(
            replace(config, embedding_on_cpu=is_on_cpu),
            tp,
            max_model_len=64,
            dtype=torch.float32,
            device=device,
            directory=directory if load_format == "auto" else None,
        )
        load_weights(model, directory, load_format=load_format)
        assert (model.model.embed_tokens._pinned is not None) == is_on_cpu
        return model

    plain_model = load(TPGroup(), False)
    assert torch.equal(run_logits(load(TPGroup(), True), prompt), run_logits(plain_model, prompt))
    token_ids = torch.tensor([0, 160, 161, 320, 7])
    parts = [load(TPGroup(rank, 2), True).model.embed_tokens._look_up(token_ids) for rank in range(2)]
    assert torch.equal(sum(parts), plain_model.model.embed_tokens(token_ids)) and not parts[0][2:4].any()


def quantized_head(
    num_rows: int, size: int, group: int, device: str
) -> tuple[PackedWeight, Quantization, torch.Tensor]:
    """A packed head of normal values, its format, and its values in fp32."""
    quantization = Quantization(method="online", bits=8, block=(1, group))
    values, rounded = torch.randn(num_rows, size, device=device) / size**0.5, torch.empty(num_rows, size, device=device)
    with torch.device(device):
        weight = PackedWeight([num_rows], size, quantization)
    weight.rows(0, num_rows).store(quantize(values, quantization), "head")
    quantize(values, quantization).copy_values(rounded)
    return weight, quantization, rounded


@on_device
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(
    ("num_rows", "size"), [(50, 128)] if INTERPRETED else [(50, 128), (151_936, 4096), (124_161, 5120)]
)
def test_product_with_a_quantized_head_is_written_to_its_place(
    device: str, num_rows: int, size: int, group: int
) -> None:
    """An odd number of rows, as a rank may have, and up to 300 tokens, for which values are unpacked."""
    weight, _, values = quantized_head(num_rows, size, group, device)
    assert weight.group_size == group == HEAD_QUANTIZATIONS["int8"].block[1] // (64 // group)
    buffer = torch.full((300, num_rows), math.nan, dtype=DTYPE, device=device)
    for num_tokens in (1, 3, 17) if INTERPRETED else (1, 3, 8, 17, 64, 256, 300):
        x = torch.randn(num_tokens, size, device=device).to(DTYPE)
        out = buffer[:num_tokens]
        got = weight.linear(x, None, out)
        exact = F.linear(x.double(), values.double())
        plain = F.linear(x, values.to(DTYPE))
        assert got.data_ptr() == out.data_ptr() and torch.equal(weight.linear(x, None), got)
        error, plain_error = ((y.double() - exact).abs().max().item() for y in (got, plain))
        assert error <= 2 * max(plain_error, torch.finfo(DTYPE).eps * exact.abs().max().item())
