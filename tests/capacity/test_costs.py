"""The GPU memory of an engine: part by part by hand, and on a GPU against what a process holds."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm.capacity import costs as parts
from nanovllm.capacity.device_memory import (
    GRAPH_LAYER_BYTES,
    GRAPH_POOL_BYTES,
    NCCL_BYTES,
    DeviceMemory,
    device_memory,
)
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.checkpoint.gguf import TYPES
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.model_layout import model_layout
from nanovllm.checkpoint.quantization import BLOCK_TYPES, QUANTIZATIONS, GGUFLayer, Quantization, gguf_quantization
from nanovllm.checkpoint.quantization_config import parse_quantization
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.plan.kv_spec import kv_cache_spec
from nanovllm.plan.step_limits import graph_sizes, max_sampled_rows

MIB, GIB = 2**20, 2**30
MODEL = config_without_weights("qwen3-0.6b")
H200 = Machine.gpu(100 * GIB)


def memory(machine: Machine = H200, num_gpu_blocks: int = 8, **options: Any) -> DeviceMemory:
    config = Config(model="qwen3-0.6b", **options)
    spec = kv_cache_spec(config, MODEL, config.tensor_parallel_size)
    return device_memory(config, MODEL, machine, spec, config.max_model_len or 40960, num_gpu_blocks)


def offload(num_gpu_blocks: int = 8, **options: Any) -> DeviceMemory:
    """Slots of 4096 tokens, as where their number is given, without speculation."""
    options = {"enable_cpu_offload": True, "kvcache_block_size": 4096, "speculation": "off"} | options
    return memory(num_gpu_blocks=num_gpu_blocks, **options)


def test_memory_of_readmes_example_by_hand() -> None:
    got = offload()
    assert got.kv_bytes == 8 * 448 * MIB and got.staging_bytes == 96 * MIB
    assert got.logits_bytes == 8 * 151936 * 2
    assert got.workspace_bytes == 2 * 32 * MIB
    num_graphs = (
        4 + 3 + 10
    )  # 1, 2, 4, 8 sequences; 1, 4, 8 in pieces; 64 to 1024 tokens of chunks beside 4 or 8 answers
    in_layer = (1024 + 3 * 8) * (4 * 2 * 1024 + (6 * 2 * 128 + 12) * 16 + 4 * 128)  # 16 heads of 128, in 3 pools
    assert got.graph_bytes == num_graphs * 28 * GRAPH_LAYER_BYTES + 4 * GRAPH_POOL_BYTES + in_layer
    assert got.total_bytes == got.exact_bytes + got.estimated_bytes
    assert got.exact_bytes == got.weight_bytes + got.kv_bytes + got.staging_bytes + got.logits_bytes


def test_of_a_mixture_of_experts_a_step_reads_those_that_are_hit() -> None:
    model = config_without_weights("qwen3-30b-a3b")
    config = Config(model="qwen3-30b-a3b")
    expert, others = 3 * 2048 * 768, 30_532_122_624 - 48 * 128 * 3 * 2048 * 768  # the whole is that of the model card
    assert parts.weight_bytes(config, model, is_packed=True) == 2 * 30_532_122_624
    others -= 151936 * 2048 + 2048  # the embedding and the last norm, which are not counted
    for num_sequences, num_experts in ((1, 8), (2, 8 + 8 * (1 - 8 / 128)), (10_000, 128)):
        read = parts.decode_bytes(config, model, num_sequences, num_keys=0, kv_bytes_per_token=1)
        assert read == pytest.approx(2 * (others + 48 * num_experts * expert))
    flop = parts.prefill_flop(config, model, 1000) - parts.prefill_flop(config, model, 0)
    attention = 2 * 1000**2 * 47 * 32 * 128
    assert flop == pytest.approx(attention + 2 * 1000 * 47 / 48 * (others - 151936 * 2048 + 48 * 8 * expert), rel=0.01)


def test_weight_bytes_of_packed_formats_by_hand() -> None:
    """Qwen3-8B: 4096 features, 32 and 8 heads of 128, 12,288 in the MLP, 36 layers; all are multiples of 128."""
    model, config = config_without_weights("qwen3-8b"), Config(model="qwen3-8b")
    linear = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    others = 2 * 151936 * 4096 + 4096 + 36 * (2 * 4096 + 2 * 128)
    formats: tuple[tuple[Quantization | None, float], ...] = (
        (None, 2 * linear),
        (QUANTIZATIONS["fp8"], linear + 4 * 36 * (4 * 4096 - 2048 + 2 * 12288)),  # a scale for each row
        # A head of 4 bytes, and 16 bytes of scales for 256 columns; v, 2 more bits
        (QUANTIZATIONS["int4"], (4 / 8 + 20 / 256) * linear + 36 * 4096 * 1024 * 2 / 8),
        (QUANTIZATIONS["int8"], (1 + 2 / 32) * linear),
        (parse_quantization({"quant_method": "awq", "bits": 4, "group_size": 64}), linear / 2 + 4 * linear / 64),
        (parse_quantization({"quant_method": "fp8"}), linear + 4 * 36 * 7),  # a scale for each tensor
    )
    for quantization, num_bytes in formats:
        stored = replace(model, quantization=quantization)
        assert parts.weight_bytes(config, stored, is_packed=True) == num_bytes + 2 * others
        assert parts.weight_bytes(config, stored, is_packed=False) == 2 * (linear + others)
        read = parts.decode_bytes(config, stored, num_sequences=1, num_keys=10, kv_bytes_per_token=7)
        assert read == num_bytes + 2 * (others - 151936 * 4096) + 70


def test_weight_bytes_of_padded_rows_and_biases_by_hand() -> None:
    """gpt-oss-20b: 2,880 columns are padded to 2,944, and the 1,440 of the down of two ranks to 1,536."""
    model = config_without_weights("gpt-oss-20b")
    attention = 2880 * 64 * (64 + 2 * 8 + 64) + 64 * (64 + 2 * 8) + 2880 + 64  # biases and sinks
    others = 24 * (attention + 32 * (2881 + 3 * 2880) + 2 * 2880) + 2880 + 2 * 201088 * 2880
    for num_ranks, gate_up, down in ((1, 2944, 2944), (2, 2944, 2 * 1536)):
        config = Config(model="m", tensor_parallel_size=num_ranks)
        experts = 24 * 32 * 2880 * (2 * gate_up + down) * 17 // 32
        assert parts.weight_bytes(config, model, is_packed=True) == (experts + 2 * others) // num_ranks


def test_operations_in_fp8_count_as_half_of_one_but_not_those_of_experts() -> None:
    """So no prompt exceeds the plan's bound of prefill, which divides the rate of operations in bf16."""
    for name, share in (("qwen3-8b", 1.0), ("qwen3-30b-a3b", 48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128))):
        model, config = config_without_weights(name), Config(model="m")
        plain, alone, dynamic = (
            parts.prefill_flop(config, model.quantized(format), 1000) for format in (None, "fp8", "fp8_dynamic")
        )
        attention = 2 * 1000**2 * (model.num_layers - 1) * 32 * 128
        linear = plain - attention - 2 * model.hidden_size * model.vocab_size
        if model.experts is not None:
            linear = 2 * 1000 * 47 / 48 * share
        assert plain == alone
        assert plain - dynamic == pytest.approx(linear / 2, rel=0.01)


def test_operations_in_fp8_count_as_half_only_where_the_gpu_has_them() -> None:
    """Regression: the bound of prompts of a checkpoint in fp8 was twice what an RTX 3090 can do, which multiplies its
    values in bf16.
    """
    model = config_without_weights("qwen3-8b")
    plain = parts.prefill_flop(Config(model="m"), model, 1000)
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for given, dtype, capability, is_half in (
        ({"quant_method": "fp8"}, "auto", (8, 9), True),
        ({"quant_method": "fp8"}, "auto", (8, 6), False),
        ({"quant_method": "fp8"}, "float16", (8, 9), False),
        (blocks, "auto", (9, 0), True),
        (blocks, "auto", (8, 9), False),
        (blocks, "auto", (12, 0), False),
    ):
        stored = replace(model, quantization=parse_quantization(given))
        flop = parts.prefill_flop(Config(model="m", dtype=dtype), stored, 1000, capability)
        assert flop < 0.6 * plain if is_half else flop == plain, (given, dtype, capability)


def test_packed_weights_of_a_gguf_file_take_at_most_a_twentieth_more_than_the_file() -> None:
    """Of each type, and of types that differ within a stacked weight."""
    config, model = Config(model="m"), config_without_weights("qwen3-8b")
    sizes = {
        name.removesuffix(".weight"): rows * columns
        for name, (rows, columns) in (
            each for each in model_layout(model).shapes(with_mtp=False).items() if each[0].endswith("proj.weight")
        )
    }
    others = parts.weight_bytes(config, model, is_packed=True) - 2 * sum(sizes.values())
    types = {each.name: each.num_bytes / each.num_values for each in TYPES.values() if each.is_quantized}
    assert types.keys() == BLOCK_TYPES.keys()
    for names in ([name] for name in types):
        check_gguf_bytes(config, model, dict(zip(sizes, itertools.cycle(names))), sizes, types, others)
    check_gguf_bytes(config, model, dict(zip(sizes, itertools.cycle(types))), sizes, types, others)


def check_gguf_bytes(
    config: Config,
    model: ModelConfig,
    names: dict[str, str],
    sizes: dict[str, int],
    types: dict[str, float],
    others: int,
) -> None:
    stored = replace(model, quantization=gguf_quantization(GGUFLayer(*each, False) for each in names.items()))
    of_file = sum(size * types[names[name]] for name, size in sizes.items())
    packed = parts.weight_bytes(config, stored, is_packed=True) - others
    assert 0.999 * of_file <= packed <= 1.05 * of_file, names
    assert parts.weight_bytes(config, stored, is_packed=False) == others + 2 * sum(sizes.values())


def test_columns_of_ranks_without_whole_blocks_count_in_16_bits() -> None:
    """12,288 columns are 48 blocks of 256, which 32 ranks cannot share; and a rank has no whole blocks of columns that
    are in another order.
    """
    model, down = config_without_weights("qwen3-8b"), "model.layers.0.mlp.down_proj"
    for num_ranks, has_order, is_packed in ((1, False, True), (1, True, True), (2, False, True), (2, True, False)):
        config = Config(model="m", tensor_parallel_size=num_ranks)
        stored = replace(model, quantization=gguf_quantization([GGUFLayer(down, "Q4_K", has_order)]))
        saved = parts.weight_bytes(config, model, is_packed=True) - parts.weight_bytes(config, stored, is_packed=True)
        assert saved == pytest.approx(is_packed * 4096 * 12288 * (16 - 4.625) / 8 / num_ranks, abs=2)
    assert not BLOCK_TYPES["Q4_K"].stays_packed(12288 // 32) and BLOCK_TYPES["Q8_0"].stays_packed(12288 // 32)


def test_weights_that_config_json_leaves_unquantized_count_as_they_are() -> None:
    """Regression: the plan of a checkpoint whose attention is in bf16 had all of it in 4 bits, 10 GiB too little for
    Qwen3.5-27B-GPTQ-Int4.
    """
    config, settings = Config(model="m"), {"quant_method": "gptq", "bits": 4, "group_size": 128}

    def num_bytes(model: ModelConfig, *patterns: str) -> int:
        quantization = parse_quantization(settings | {"dynamic": {f"-:{each}": {} for each in patterns}})
        return parts.weight_bytes(config, replace(model, quantization=quantization), is_packed=True)

    more = 2 - (1 / 2 + 4 / 128)  # bytes of a weight that is not quantized
    model = config_without_weights("qwen3-8b")
    attention, mlp = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 12288
    o_proj, qkv = 4096 * 4096, attention - 4096 * 4096
    for patterns, num_weights in (
        ([r".*self_attn"], 36 * attention),
        ([r"model\.layers\.[02]\.self_attn", r"model\.layers\.2\.mlp"], 2 * attention + mlp),
        ([r".*o_proj"], 36 * o_proj),
        ([r".*\.5\..*k_proj"], qkv),  # a GPU has q, k and v in one weight
        (["lm_head"], 0),
    ):
        assert num_bytes(model, *patterns) - num_bytes(model) == num_weights * more, patterns
    model = config_without_weights("qwen3.5-35b-a3b")
    shared, values = 3 * 2048 * 512, 32 * 128
    attention = 10 * 2048 * (3 * 16 * 256 + 2 * 2 * 256) + 30 * 2048 * (2 * 16 * 128 + 3 * values + 2 * 32)
    for patterns, num_weights in (
        ([r".*attn.*"], attention),
        ([r".*attn.*", r".*shared_expert.*"], attention + 40 * shared),
        ([r"model\.layers\.7\.mlp\.experts"], 256 * 3 * 2048 * 512),
    ):
        assert num_bytes(model, *patterns) - num_bytes(model) == num_weights * more, patterns


def test_of_quantized_experts_only_those_that_are_hit_are_read_packed() -> None:
    model = config_without_weights("qwen3-30b-a3b")
    config, int4 = Config(model="m"), replace(model, quantization=QUANTIZATIONS["int4"])
    assert parts.weight_bytes(config, int4, is_packed=True) == pytest.approx(17.3 * GIB, rel=0.05)
    expert_bytes = 3 * 2048 * 768 * (1 / 2 + 20 / 256)
    one, two = (parts.decode_bytes(config, int4, n, num_keys=0, kv_bytes_per_token=1) for n in (1, 2))
    assert two - one == pytest.approx(48 * 8 * (1 - 8 / 128) * expert_bytes)


def test_max_sampled_rows_are_no_more_than_blocks_to_write_to() -> None:
    """Regression: 67 graphs and 4.7 GiB of logits for 8 sequences that could run."""
    for offload in (True, False):
        for num_gpu_blocks, rows in ((8, 8), (1000, 512)):
            options: dict[str, Any] = {"enable_cpu_offload": offload, "speculation": "off"}
            assert max_sampled_rows(Config(model="m", **options), num_gpu_blocks) == rows
            assert memory(num_gpu_blocks=num_gpu_blocks, **options).logits_bytes == rows * 151936 * 2
    assert len(graph_sizes(2048)) == 139  # they share one buffer
    assert memory(num_gpu_blocks=4096, max_num_seqs=2048).logits_bytes == 2048 * 151936 * 2


def test_memory_each_option_changes_its_parts() -> None:
    plain, on_cpu = offload(), memory(Machine.cpu(GIB), enable_cpu_offload=True)
    eager, two = offload(enforce_eager=True), offload(tensor_parallel_size=2)
    assert eager.graph_bytes == eager.logits_bytes == eager.input_bytes == 0
    assert eager.context_bytes == plain.context_bytes > 0
    assert on_cpu.graph_bytes == on_cpu.logits_bytes == on_cpu.context_bytes == on_cpu.workspace_bytes == 0
    assert 0 < on_cpu.activation_bytes < plain.activation_bytes
    assert two.weight_bytes == plain.weight_bytes // 2 and two.kv_bytes == plain.kv_bytes // 2
    assert two.context_bytes == plain.context_bytes + NCCL_BYTES
    assert two.logits_bytes == plain.logits_bytes  # every rank gathers them all
    for is_offload in (True, False):  # with speculation: more graphs, and 16 rows instead of 8
        off, on = (memory(speculation=name, enable_cpu_offload=is_offload) for name in ("off", "prompt_lookup"))
        assert on.graph_bytes > off.graph_bytes and on.logits_bytes == 2 * off.logits_bytes
    # torch 2.11 has two workspaces, of 32 MiB from Hopper on, and before that of 8 MiB and 128 KiB
    for name, num_bytes in (("H200", 64 * MIB), ("RTX 5090", 64 * MIB), ("RTX 4090", 16640 * 1024)):
        assert memory(Machine.gpu(GIB, find_gpu(name))).workspace_bytes == num_bytes


def test_activation_bytes_of_a_large_mlp_are_shared_by_ranks() -> None:
    """By hand for Qwen3-8B, whose MLP holds more than its attention: 12,288 features against 32 heads of 128. Of 16,384
    tokens attention holds more, since the MLP takes half of them at a time.
    """
    model, num_tokens = config_without_weights("qwen3-8b"), 8192
    for ranks in (1, 2):
        config = Config(model="qwen3-8b", tensor_parallel_size=ranks, max_num_batched_tokens=num_tokens)
        hidden, mlp, rotation = 4 * 2 * 4096, 3 * 2 * 12288 // ranks, 4 * 128
        assert parts.activation_bytes(config, model, 40960, max_num_rows=4) == num_tokens * (hidden + mlp + rotation)


def test_activation_bytes_are_what_torch_allocated_on_an_h100() -> None:
    """Peak of the largest steps of a start, beyond what was allocated before them."""
    for name, gib in (("qwen3-8b", 1.267), ("qwen3-0.6b", 0.512)):
        model = config_without_weights(name)
        for num_rows in (8, 320):
            got = parts.activation_bytes(Config(model=name), model, 40960, num_rows)
            assert got / GIB == pytest.approx(gib, rel=0.005)


def test_memory_never_falls_with_more_blocks() -> None:
    """The planner finds the number that fits by bisection."""
    for options in ({}, {"enable_cpu_offload": True}, {"max_num_seqs": 7, "enable_cpu_offload": True}):
        totals = [memory(num_gpu_blocks=n, **options).total_bytes for n in range(0, 600, 3)]
        assert totals == sorted(totals)


README = {"enable_cpu_offload": True, "kvcache_block_size": 4096, "max_model_len": 40960}


def test_memory_is_what_engines_held() -> None:
    """By `python -m benchmarks.device_memory`: Qwen3-0.6B on an H200, to which the constants were fitted
    (docs/log/2026-11-21.md), and Qwen3-8B on an H100 (docs/log/2026-11-26.md).
    """
    cases: tuple[tuple[Any, ...], ...] = (
        ("qwen3-0.6b", README, 8, 6449.6),
        ("qwen3-0.6b", README | {"enforce_eager": True}, 8, 6387.6),
        ("qwen3-0.6b", README | {"max_num_batched_tokens": 4096}, 2, 3165.6),
        ("qwen3-0.6b", {"max_model_len": 40960}, 200, 8523.6),
        ("qwen3-8b", {"enable_cpu_offload": True}, 76, 21372.0),
        ("qwen3-8b", {"enable_cpu_offload": True}, 74, 21311.0),
    )
    for model, options, num_gpu_blocks, held_mib in cases:
        config, shapes = Config(model=model, speculation="off", **options), config_without_weights(model)
        spec, limit = kv_cache_spec(config, shapes, tp_size=1), config.max_model_len or shapes.max_model_len_limit
        got = device_memory(config, shapes, H200, spec, limit, num_gpu_blocks)
        assert got.total_bytes == pytest.approx(held_mib * MIB, rel=0.03)


def test_memory_of_a_mixture_with_windows_is_what_an_engine_held() -> None:
    """By `python -m benchmarks.device_memory gpt-oss-20b` on an H200 (docs/log/2026-11-28-windows.md). Its steps held
    1.13 GiB, where experts and attention do not have their activations at the same time.
    """
    config, shapes = Config(model="gpt-oss-20b", max_num_seqs=64), config_without_weights("gpt-oss-20b")
    spec = kv_cache_spec(config, shapes, tp_size=1)
    assert parts.activation_bytes(config, shapes, 40960, 64) / GIB == pytest.approx(1.13, rel=0.05)
    got = device_memory(config, shapes, H200, spec, 40960, 400, state_bytes=384 * MIB)
    assert got.total_bytes == pytest.approx(18.265 * GIB, rel=0.01)


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["readme", "2slots", "all-gpu", "8b-24gib", "8b-24gib-all-gpu"])
def test_plan_memory_is_within_5_percent_of_what_a_process_holds(case: str) -> None:
    """README's example was planned at 6.49 GiB and held 11.2."""
    from benchmarks.device_memory import measure

    torch.cuda.empty_cache()
    result = measure(case)
    assert abs(result["plan_error"]) < 0.05, json.dumps(result)  # pytest shortens a dict
    # Where the blocks fill what is left, the totals agree by themselves
    assert abs(result["plan_kv_bytes"] - result["kv_bytes"]) < 0.05 * result["served_bytes"], json.dumps(result)
