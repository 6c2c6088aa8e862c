"""The layers against plain torch and transformers, on one rank and on several."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thread_ranks import ThreadGroup, run_ranks
from torch._subclasses import FakeTensorMode

from nanovllm.checkpoint.model_config import ExpertsConfig
from nanovllm.checkpoint.quantization import QUANTIZATIONS, Quantization
from nanovllm.device import kernel_target
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    HasWeightShards,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    act_and_mul,
)
from nanovllm.layers.moe import Experts
from nanovllm.layers.packed_weight import PackedWeight, can_multiply_codes
from nanovllm.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding

FP32 = torch.float32


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def fill(module: HasWeightShards, tensors: dict[tuple[int, str], torch.Tensor]) -> None:
    for layer, parameter, shard in module.weight_shards():
        full = tensors[layer, parameter]
        assert tuple(full.shape) == shard.full_shape
        shard.target.copy_(full[shard.index])


def test_column_row_pair_any_ranks_equals_dense_with_one_all_reduce() -> None:
    x, w1, b1, w2, b2 = (torch.randn(shape) for shape in ((5, 12), (8, 12), (8,), (6, 8), (6,)))
    expected = F.linear(F.linear(x, w1, b1), w2, b2)

    def work(tp: ThreadGroup) -> torch.Tensor:
        column = MergedColumnParallelLinear(12, [8], bias=True, tp=tp, dtype=FP32)
        row = RowParallelLinear(8, 6, bias=True, tp=tp, dtype=FP32)
        fill(column, {(0, "weight"): w1, (0, "bias"): b1})
        fill(row, {(0, "weight"): w2, (0, "bias"): b2})
        assert (row.bias is not None) == (tp.rank == 0)
        out = row(column(x))
        assert tp.calls == ["all_reduce"]
        return out

    for size in (1, 2, 4):
        for out in run_ranks(size, work):
            torch.testing.assert_close(out, expected)


def test_merged_column_two_ranks_holds_a_part_of_each_layer() -> None:
    x, first, second = torch.randn(3, 4), torch.randn(6, 4), torch.randn(2, 4)

    def work(tp: ThreadGroup) -> torch.Tensor:
        merged = MergedColumnParallelLinear(4, [6, 2], bias=False, tp=tp, dtype=FP32)
        fill(merged, {(0, "weight"): first, (1, "weight"): second})
        return merged(x)

    for rank, out in enumerate(run_ranks(2, work)):
        expected = torch.cat((F.linear(x, first).chunk(2, -1)[rank], F.linear(x, second).chunk(2, -1)[rank]), -1)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("head_dim", "gated", "rows"), [(2, False, None), (8, True, [slice(0, 2), slice(4, 6), slice(2, 4), slice(6, 8)])]
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_qkv_of_ranks_is_whole_heads_with_their_gates(head_dim: int, gated: bool, rows: Any, num_ranks: int) -> None:
    """q_proj has a head's rows before those of its gate. `rows`: the order of the rows of q and k in a head. Of the two
    heads of k and v, two of four ranks have a copy.
    """
    x, order = torch.randn(3, 8), [*range(head_dim)] if rows is None else [0, 1, 4, 5, 2, 3, 6, 7]
    weights = [torch.randn(heads * head_dim, 8) for heads in (4 * (1 + gated), 2, 2)]

    def work(tp: ThreadGroup) -> tuple[torch.Tensor, ...]:
        qkv = QKVParallelLinear(8, head_dim, 4, 2, bias=False, tp=tp, dtype=FP32, gated=gated, head_rows=rows)
        fill(qkv, {(i, "weight"): weight for i, weight in enumerate(weights)})
        return qkv.split(qkv(x))

    q_gates, k, v = (F.linear(x, weight).view(3, -1, head_dim) for weight in weights)
    expected = [q_gates[:, :: 1 + gated, order], k[:, :, order], v, *([q_gates[:, 1::2]] if gated else [])]
    for rank, (*parts, gates) in enumerate(run_ranks(num_ranks, work)):
        assert gated or not gates.numel()
        for part, whole in zip([*parts, gates][: len(expected)], expected, strict=True):
            num_parts = min(num_ranks, whole.shape[1])
            torch.testing.assert_close(part, whole.chunk(num_parts, 1)[rank * num_parts // num_ranks])


@pytest.mark.parametrize("vocab_size", [2, 11, 12, 13])
@pytest.mark.parametrize("size", [1, 3])
def test_embedding_and_head_padded_vocabulary_equal_dense(size: int, vocab_size: int) -> None:
    weight, token_ids = torch.randn(vocab_size, 4), torch.arange(vocab_size)

    def work(tp: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = VocabParallelEmbedding(vocab_size, 4, tp=tp, dtype=FP32)
        embedding.weight.fill_(float("nan"))  # nothing may be read from the padding
        fill(embedding, {(0, "weight"): weight})
        head = ParallelLMHead(vocab_size, 4, tp=tp, dtype=FP32, tied_to=embedding.weight)
        assert not list(head.weight_shards())
        embedded = embedding(token_ids)
        return embedded, head(embedded)

    for embedded, logits in run_ranks(size, work):
        torch.testing.assert_close(embedded, weight)
        torch.testing.assert_close(logits, weight @ weight.T)


def test_sizes_not_divisible_by_ranks_raise() -> None:
    tp = TPGroup(0, 4)
    with pytest.raises(ConfigError, match="num_attention_heads=14 is not divisible by tensor_parallel_size=4"):
        QKVParallelLinear(8, 2, 14, 2, bias=False, tp=tp, dtype=FP32)
    with pytest.raises(ConfigError, match="num_key_value_heads=6 cannot be shared by tensor_parallel_size=4 ranks"):
        QKVParallelLinear(8, 2, 24, 6, bias=False, tp=tp, dtype=FP32)
    with pytest.raises(ConfigError, match="output features=6"):
        MergedColumnParallelLinear(8, [6], bias=False, tp=tp, dtype=FP32)
    with pytest.raises(ConfigError, match="input features=6"):
        RowParallelLinear(6, 8, bias=False, tp=tp, dtype=FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((7, 33), (7, 33), (33,)))
    norm = RMSNorm(33, 1e-5, dtype=dtype)
    norm.weight.copy_(weight)
    reference = LlamaRMSNorm(33, eps=1e-5).to(dtype)
    reference.weight.data.copy_(weight)

    normed, started = norm(x)
    assert torch.equal(normed, reference(x)) and torch.equal(started, x)
    normed, summed = norm(x, residual)
    assert torch.equal(normed, reference(x + residual)) and torch.equal(summed, x + residual)


def test_act_and_mul_gates_with_the_first_half() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(act_and_mul(torch.cat((gate, up), -1)), gate * torch.sigmoid(gate) * up)


def test_activations_in_fp8_are_for_weights_that_cublas_can_multiply() -> None:
    """It needs a GPU with fp8, bf16, a format that asks for it, and parts that consist of whole blocks."""
    blocks = Quantization(method="fp8", bits=8, is_float=True, block=(128, 128), has_fp8_activations=True)
    rows, tensor = replace(blocks, block=(1, 0)), replace(blocks, block=(0, 0))
    for part_sizes, size, quantization, dtype, capability, expected in (
        ([256, 128], 640, blocks, torch.bfloat16, (9, 0), True),
        ([256, 128], 640, blocks, torch.float16, (9, 0), False),
        ([256, 128], 640, blocks, FP32, (9, 0), False),
        ([256, 128], 640, blocks, torch.bfloat16, (8, 9), False),
        ([256, 128], 640, blocks, torch.bfloat16, (10, 0), False),
        ([256, 64], 640, blocks, torch.bfloat16, (9, 0), False),
        ([256, 128], 576, blocks, torch.bfloat16, (9, 0), False),
        ([256, 128], 640, replace(blocks, block=(64, 128)), torch.bfloat16, (9, 0), False),
        ([256, 128], 640, replace(blocks, has_fp8_activations=False), torch.bfloat16, (9, 0), False),
        ([48, 16], 576, rows, torch.bfloat16, (9, 0), True),
        ([48, 16], 576, tensor, torch.bfloat16, (9, 0), True),
        ([48, 8], 576, rows, torch.bfloat16, (9, 0), False),
        *(([48, 16], 576, rows, torch.bfloat16, each, True) for each in ((8, 9), (10, 0), (12, 0))),
        *(([48, 16], 576, rows, torch.bfloat16, each, False) for each in ((8, 0), (8, 6))),
        ([48, 16], 576, QUANTIZATIONS["fp8"], torch.bfloat16, (9, 0), False),
        ([48, 16], 576, QUANTIZATIONS["fp8_dynamic"], torch.bfloat16, (8, 9), True),
    ):
        given = part_sizes, size, quantization, dtype, capability
        assert can_multiply_codes(*given) == expected, given


def test_layers_choose_products_for_the_device_and_experts_keep_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(kernel_target, "target_of", lambda device: kernel_target.KNOWN_TARGETS["9.0"])
    blocks = Quantization(method="fp8", bits=8, is_float=True, block=(128, 128), has_fp8_activations=True)
    config = ExpertsConfig(
        num_experts=2, num_experts_per_token=1, intermediate_size=128, norm_topk_prob=True, layers=(0,)
    )
    with FakeTensorMode(), torch.device("cuda"):
        given = {"tp": TPGroup(), "dtype": torch.bfloat16}
        row = RowParallelLinear(256, 384, bias=False, quantization=blocks, **given)
        column = MergedColumnParallelLinear(256, [384, 128], bias=True, formats=[blocks] * 2, **given)
        experts = Experts(128, config, formats=[blocks] * 3, **given)
    for weight, expected in ((row.weight, True), (column.weight, True), (experts.down, False)):
        assert isinstance(weight, PackedWeight) and weight.multiplies_codes == expected
    assert isinstance(row.weight, PackedWeight) and row.weight.scales.shape == (1, 8, 4)  # 2 groups and padding
