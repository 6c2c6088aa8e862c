"""The planner's numbers, worked out by hand for Qwen3-0.6B, and what it refuses; the link's meter."""

import logging
import sys
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dense_model import random_prompt
from tiers import tiered
from tiny_models import write_tiny_model
from torch._subclasses import FakeTensorMode

from nanovllm import LLM, SamplingParams
from nanovllm.capacity.costs import (
    activation_bytes,
    decode_bytes,
    num_missing_blocks,
    num_prefill_loaded_blocks,
    weight_bytes,
)
from nanovllm.capacity.fit import first_token_s, flop_prefill_tok_per_s, link_prefill_tok_per_s
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.capacity.plan_check import check_start
from nanovllm.checkpoint.quantization import QUANTIZATIONS
from nanovllm.checkpoint.quantization_config import parse_quantization
from nanovllm.checkpoint.read_config import config_without_weights, load_config
from nanovllm.config import GPU_RESERVE_BYTES, Config
from nanovllm.device import kernel_target
from nanovllm.device.tp_group import TPGroup
from nanovllm.engine.setup import measure_cpu_memory
from nanovllm.engine.step_loop import LinkMeter
from nanovllm.entrypoints.planner import PlanOptions, plan_table
from nanovllm.errors import ConfigError
from nanovllm.models.decoder import Attention
from nanovllm.models.loader import build_model
from nanovllm.offload.offload_engine import measure_link
from nanovllm.offload.streams import ImmediateStreams, make_streams
from nanovllm.plan.kv_spec import KVCacheSizes, with_watermark
from nanovllm.plan.step_plan import CpuSpan, KVMoves, SamplingRow, SequenceStep, SlotLoad, StepPlan, StreamedGroup

MIB, GIB = 2**20, 2**30
MODEL, _ = load_config("qwen3-0.6b")
H200 = Machine.gpu(100 * GIB)
OFFLOAD: dict[str, Any] = {"enable_cpu_offload": True, "num_gpu_blocks": 8}


def plan_for(
    machine: Machine = H200, *, context: int | None = None, num_sequences: int = 1, **options: Any
) -> CapacityPlan:
    config = Config(model="qwen3-0.6b", **options)
    return make_plan(config, MODEL, machine, context=context, num_sequences=num_sequences)


# -- memory ------------------------------------------------------------------------------------------------------


def test_plan_memory_of_qwen3() -> None:
    """2 x 28 layers x 8 kv heads x 128 x 2 bytes = 112 KiB a token."""
    all_gpu, plan = plan_for(), plan_for(**OFFLOAD)
    assert all_gpu.kv_bytes_per_token == plan.kv_bytes_per_token == 112 * 1024
    assert (all_gpu.spec.block_bytes, plan.spec.block_bytes) == (28 * MIB, 448 * MIB)
    assert plan_for(**OFFLOAD, tensor_parallel_size=2).spec.block_bytes == 224 * MIB
    assert plan.memory.kv_bytes == 8 * 448 * MIB
    assert plan.memory.staging_bytes == 3 * 2 * 16 * MIB  # 3 groups of 2 blocks of one layer
    assert (plan.num_cpu_blocks, plan.cpu_pool_bytes) == (20, 20 * 448 * MIB)
    embedding, layer = 151936 * 1024, 1024 * (4096 + 2048 + 3 * 3072 + 2) + 2 * 128
    assert plan.memory.weight_bytes == 2 * (embedding + 28 * layer + 1024)
    assert plan.gpu_limit_bytes == int(139 * GIB * 0.9)
    assert plan.fits_gpu and plan.fits_host


def test_activation_bytes_of_qwen3_are_those_measured() -> None:
    """The memory that a prompt of 40,952 tokens allocated at its peak, in the MLP, on an H200 with 8 slots, at commit
    ab3877c, and what a chunk that merges four parts or more takes beyond that.
    """
    config = Config(model="qwen3-0.6b", **OFFLOAD, max_num_seqs=4)
    measured = 5_567_396_864 - 5_122_275_328
    mlp, attention = 3 * 3072 * 2, 16 * (128 * (4 * 2 + 4) + 3 * 4)
    expected = measured + 16384 * (attention - mlp)
    assert activation_bytes(config, MODEL, 40960, max_num_rows=4) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "name", tiered(("qwen3-8b", "qwen3-30b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b"), ("qwen3-8b", "qwen3.5-35b-a3b"))
)
def test_weight_bytes_of_packed_weights_are_those_of_the_built_model(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Regression: the scales of integers counted as 3 bytes each, but the kernels read 4. For groups of 32 the plan
    had 1% too little.
    """
    monkeypatch.setattr(kernel_target, "target_of", lambda device: kernel_target.KNOWN_TARGETS["9.0"])
    whole = config_without_weights(name)
    experts = whole.experts and replace(whole.experts, layers=(0, 1, 2, 3))
    model = replace(whole, num_layers=4, layer_kinds=whole.layer_kinds[:4], experts=experts)
    gptq = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "dynamic": {r"-:.*(k_proj|shared_expert|\.2\.mlp)": {}},
    }
    for quantization in (*QUANTIZATIONS.values(), parse_quantization(gptq)):
        config = replace(model, quantization=quantization)
        with FakeTensorMode():
            built = build_model(config, TPGroup(), max_model_len=128, dtype=torch.bfloat16, device="cuda")
            size = sum(parameter.nbytes for parameter in built.parameters())
        assert weight_bytes(Config(model="m"), config, is_packed=True) == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_scales_of_ranks_that_share_columns_count_on_each(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Regression: each of 4 ranks has scales for its columns of a row or a group, but the plan counted those of the
    whole. It had 0.7% too little for experts in fp8.
    """
    monkeypatch.setattr(kernel_target, "target_of", lambda device: kernel_target.KNOWN_TARGETS["9.0"])
    whole = config_without_weights(name)
    model = replace(whole, num_layers=1, layer_kinds=whole.layer_kinds[:1])
    model = replace(model, experts=whole.experts and replace(whole.experts, layers=(0,)))
    config, sizes, planned = Config(model="m", tensor_parallel_size=4), [], []
    long_groups = parse_quantization({"quant_method": "gptq", "bits": 8, "group_size": 2048})
    for quantization in (None, QUANTIZATIONS["fp8"], long_groups):
        stored = replace(model, quantization=quantization)
        with FakeTensorMode():
            built = build_model(stored, TPGroup(1, 4), max_model_len=128, dtype=torch.bfloat16, device="cuda")
            sizes.append(sum(parameter.nbytes for parameter in built.parameters()))
        planned.append(weight_bytes(config, stored, is_packed=True))
    saved = [sizes[0] - size for size in sizes[1:]]  # without what all ranks have
    assert [planned[0] - size for size in planned[1:]] == pytest.approx(saved, rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3.5-9b", "gemma-4-12b"])
def test_copies_of_kv_heads_count_on_each_rank(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Qwen3.5-9B has 4 KV heads, Gemma 4 12B 8 in layers with a window and 1 in the others."""
    monkeypatch.setattr(kernel_target, "target_of", lambda device: kernel_target.KNOWN_TARGETS["9.0"])
    whole = config_without_weights(name)
    model, sizes, planned = replace(whole, num_layers=6, layer_kinds=whole.layer_kinds[:6]), [], []
    for num_ranks in (1, 8):
        config = Config(model="m", tensor_parallel_size=num_ranks)
        with FakeTensorMode():
            tp = TPGroup(num_ranks - 1, num_ranks)
            built = build_model(model, tp, max_model_len=128, dtype=torch.bfloat16, device="cuda")
            size = sum(module.qkv_proj.weight.nbytes for module in built.modules() if isinstance(module, Attention))
        sizes.append(size * num_ranks)
        planned.append(weight_bytes(config, model, is_packed=True) * num_ranks)
    assert 0 < sizes[1] - sizes[0] == pytest.approx(planned[1] - planned[0], abs=8)


def hybrid_plan(name: str = "qwen3.5-9b", machine: Machine = H200, **options: Any) -> CapacityPlan:
    return make_plan(Config(model=name, **options), config_without_weights(name), machine)


def test_plan_states_of_qwen35_by_hand() -> None:
    """24 of 32 layers keep 32 matrices of 128 x 128 in fp32 and three inputs of a convolution over 8192 channels."""
    state = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    plan = hybrid_plan(max_num_seqs=8)
    assert plan.kv_bytes_per_token == 2 * 8 * 4 * 256 * 2
    assert plan.state_bytes == plan.memory.state_bytes == (1 + 8 + 2) * state  # nobody's, and two to save from
    assert plan.num_snapshots == 4 * GIB // state and plan.snapshot_bytes <= 4 * GIB
    assert hybrid_plan(max_num_seqs=8, enable_prefix_caching=False).num_snapshots == 0
    pending = 24 * 15 * (8192 + 2 * 32) * 2
    assert hybrid_plan(max_num_seqs=8, speculation="prompt_lookup").state_bytes == (1 + 8 + 2) * (state + pending)
    drafting = hybrid_plan(max_num_seqs=8, speculation="resident", enable_cpu_offload=True)
    assert drafting.state_bytes == (1 + 8 + 3) * (state + pending) and drafting.capacity(256).num_sequences == 8
    few, many = (hybrid_plan(speculation="prompt_lookup", num_speculative_tokens=n).memory for n in (3, 7))
    assert many.graph_bytes - few.graph_bytes == (512 * 4 + 64 * 8) * (8192 + 2 * 32) * 2  # more may be replayed
    halves = hybrid_plan(max_num_seqs=8, tensor_parallel_size=2)
    assert (halves.state_bytes, halves.snapshot_bytes) == (11 * state // 2, 2 * halves.num_snapshots * state // 2)
    few_keys, many_keys = (hybrid_plan(max_model_len=n).memory_decode_tok_per_s for n in (1, 100_000))
    assert few_keys and many_keys and few_keys > many_keys
    config, model = Config(model="m"), config_without_weights("qwen3.5-9b")
    assert decode_bytes(config, model, 3, 0, 0) == decode_bytes(config, model, 1, 0, 0) + 2 * 2 * state


def test_plan_draft_head_of_qwen35_by_hand() -> None:
    """Its K and V are one more layer of the pool or, with offload, a page on the GPU for each block in CPU memory."""
    plain, plan = hybrid_plan(max_num_seqs=8), hybrid_plan(max_num_seqs=8, speculation="mtp")
    assert plan.kv_bytes_per_token == 2 * 9 * 4 * 256 * 2 and plan.memory.draft_bytes == 0
    layer = 4096 * (2 * 16 * 256 + 2 * 4 * 256 + 16 * 256) + 3 * 4096 * 12288
    assert plan.memory.weight_bytes - plain.memory.weight_bytes == 2 * (layer + 2 * 4096**2 + (2 + 3) * 4096 + 2 * 256)
    kept = (1 + 15) * 4096 * 2
    guessing = hybrid_plan(max_num_seqs=8, speculation="prompt_lookup")
    assert plan.state_bytes - guessing.state_bytes == plan.num_state_slots * kept
    assert plan.num_state_slots == 1 + 8 + 2  # its drafts need none
    assert plan.num_snapshots == guessing.num_snapshots
    offload: dict[str, Any] = {"enable_cpu_offload": True, "num_cpu_blocks": 1000, "num_gpu_blocks": 8}
    for speculation in ("mtp", "auto"):
        plan = hybrid_plan(max_num_seqs=8, speculation=speculation, **offload)
        assert plan.kv_bytes_per_token == plain.kv_bytes_per_token and plan.num_pages == 0
        assert plan.memory.draft_bytes == 1000 * 4096 * 2 * 4 * 256 * 2
        assert "its K and V, for all blocks of the CPU pool" in plan_table(plan)
    with pytest.raises(ConfigError, match=r"shadow_bits has no effect.*draft head of qwen3\.5-9b"):
        hybrid_plan(speculation="auto", shadow_bits=3, **offload)
    card = replace(H200, gpu_bytes=28 * GIB)
    with pytest.raises(
        ConfigError, match=r"K and V of the draft head \(10\.94 GiB\).*; .*use speculation=prompt_lookup"
    ):
        check_start(hybrid_plan(machine=card, max_num_seqs=8, speculation="mtp", **offload | {"num_cpu_blocks": 700}))
    slow, fast = (plan.guessing_decode_tok_per_s(acceptance) for acceptance in (0.0, 0.9))
    assert slow and fast and slow < fast


def test_plan_has_no_shadow_of_head_dim_512() -> None:
    model = replace(MODEL, head_dim=512)
    card = replace(H200, gpu_bytes=8 * GIB)
    offload: dict[str, Any] = {"model": "big", "enable_cpu_offload": True, "num_cpu_blocks": 1000}

    def plan(**options: Any) -> CapacityPlan:
        return make_plan(Config(**offload, **options), model, card, context=None, num_sequences=1)

    assert plan(speculation="auto").num_pages == 0
    with pytest.raises(ConfigError, match="shadow' has kernels for head dims up to 256, and big has 512; use another"):
        plan(speculation="shadow")
    with pytest.raises(ConfigError, match="shadow_bits has no effect: a shadow has head dims up to 256"):
        plan(speculation="auto", shadow_bits=3)


def test_plan_refuses_float16_for_activations_that_exceed_it() -> None:
    model = replace(MODEL, exceeds_float16=True)
    with pytest.raises(ConfigError, match="activations of big are larger; use dtype='bfloat16'"):
        make_plan(Config(model="big", dtype="float16"), model, H200, context=None, num_sequences=1)


def test_plan_auto_leaves_out_a_draft_head_that_takes_more_than_a_quarter() -> None:
    """Regression: an engine with speculation="auto" did not start, since the head's K and V grow with the CPU pool."""
    offload: dict[str, Any] = {"enable_cpu_offload": True, "num_gpu_blocks": 8, "max_num_seqs": 8}
    card, page = replace(H200, gpu_bytes=28 * GIB), 4096 * 2 * 4 * 256 * 2

    def auto(num_cpu_blocks: int, **others: Any) -> CapacityPlan:
        return hybrid_plan(machine=card, speculation="auto", num_cpu_blocks=num_cpu_blocks, **offload | others)

    fitting = bisect_left(range(700), True, key=lambda n: auto(n).unused_draft_bytes > 0) - 1
    with_head, without = auto(fitting), auto(fitting + 1)
    assert with_head.memory.draft_bytes == fitting * page and without.unused_draft_bytes == (fitting + 1) * page
    others = with_head.memory.total_bytes - with_head.state_bytes - fitting * page
    assert 1 <= (with_head.gpu_limit_bytes - GPU_RESERVE_BYTES - others) / (4 * fitting * page) < 1 + 1 / fitting
    stored = config_without_weights("qwen3.5-9b")
    assert without == replace(
        make_plan(without.config, replace(stored, has_mtp=False), card), unused_draft_bytes=(fitting + 1) * page
    )
    assert "left out" in plan_table(without) and "left out" not in plan_table(with_head)
    check_start(auto(700, shadow_bits=3))  # a shadow may take its place


def test_plan_states_limit_the_sequences_where_memory_is_short() -> None:
    """They take half of what the weights and the largest step leave."""
    plan = hybrid_plan(machine=replace(H200, gpu_bytes=32 * GIB))
    assert plan.capacity(256) == (plan.num_state_slots - 3, "the state slots") and plan.fits_gpu
    assert 0.8 < plan.state_bytes / plan.memory.kv_bytes < 1.2
    tiny = hybrid_plan(machine=replace(H200, gpu_bytes=20 * GIB))
    assert tiny.capacity(256).num_sequences == 1 and not tiny.fits_gpu
    given = hybrid_plan(machine=replace(H200, gpu_bytes=32 * GIB), num_kvcache_blocks=100)
    assert given.fits_gpu and given.num_state_slots > plan.num_state_slots


def test_plan_blocks_are_the_numbers_given_or_what_two_long_and_many_short_sequences_use() -> None:
    """Regression: by default 20 slots of 4096 tokens, so at most 20 sequences at once on an H200.

    The CPU pool takes at most 70% of the memory. If the user left it open, it has a block for every slot. With two
    ranks, a block has the heads of both, so the same memory holds as many blocks.
    """
    default, few = with_watermark(2 * 160 + 512 * 4), with_watermark(2 * 160 + 8 * 4)
    assert (default, few, with_watermark(2 * 160)) == (2441, 362, 329)
    offload: dict[str, Any] = {"enable_cpu_offload": True}
    cases: tuple[tuple[float, float, dict[str, Any], int | None, int | None], ...] = (
        # GPU and host in GiB, options, slots and blocks of the CPU pool
        (139, 100, offload, default, default),
        (139, 100, offload | {"max_num_seqs": 8}, few, few),
        (139, 50, offload, None, 35 * GIB // (28 * MIB)),
        (139, 100, offload | {"num_cpu_blocks": 20}, 20, 20),  # a slot more would stay empty
        (139, 100, OFFLOAD | {"num_gpu_blocks": 80}, 80, 80),
        (139, 100, OFFLOAD | {"num_gpu_blocks": 2}, 2, 20),
        *((139, 10, OFFLOAD | {"tensor_parallel_size": ranks}, 8, 16) for ranks in (1, 2)),  # 7 GiB
        *((139, 100, OFFLOAD | {"tensor_parallel_size": n, "num_cpu_blocks": 11}, 8, 11) for n in (1, 2)),
        *((139, 100, OFFLOAD | {"tensor_parallel_size": n, "cpu_memory_gb": 4}, 8, 9) for n in (1, 2)),
    )
    for gpu_gib, host_gib, options, num_gpu_blocks, num_cpu_blocks in cases:
        plan = plan_for(replace(H200, gpu_bytes=gpu_gib * GIB, host_bytes=host_gib * GIB), **options)
        assert num_gpu_blocks in (plan.num_gpu_blocks, None) and plan.num_cpu_blocks == num_cpu_blocks, options
        assert plan.cpu_pool_bytes == num_cpu_blocks * (448 if "num_gpu_blocks" in options else 28) * MIB
    tiny, small = (plan_for(replace(H200, gpu_bytes=gib * GIB), enable_cpu_offload=True) for gib in (8, 24))
    assert tiny.num_gpu_blocks < tiny.num_cpu_blocks == 329 < small.num_gpu_blocks == small.num_cpu_blocks < default


def test_plan_slots_left_open_are_what_fits() -> None:
    small = plan_for(replace(H200, gpu_bytes=10 * GIB), enable_cpu_offload=True, speculation="off")
    assert small.gpu_limit_bytes is not None and small.num_gpu_blocks > 2
    room = small.gpu_limit_bytes - GPU_RESERVE_BYTES
    assert small.memory.total_bytes <= room < small.memory.total_bytes + small.spec.block_bytes


def test_plan_has_a_shadow_with_offload_where_its_memory_gains_more_than_slots() -> None:
    """With 8 slots of 4,096 tokens, 2 of 9 blocks are missing at 40,960 tokens; a shadow frees decode from the link."""
    long: dict[str, Any] = {"max_model_len": 131072}
    model = replace(MODEL, max_position_embeddings=131072)

    def plan(gpu_gib: float = 141, **options: Any) -> CapacityPlan:
        machine = replace(H200, gpu_bytes=int(gpu_gib * GIB))
        options = {"enable_cpu_offload": True, "max_model_len": 40960} | options
        return make_plan(Config(model="qwen3-0.6b", **options), model, machine)

    cases: tuple[tuple[dict[str, Any], tuple[int, int]], ...] = (
        (OFFLOAD, (20, 4)),  # two sequences, which the CPU pool holds
        (OFFLOAD | long, (64, 4)),
        (OFFLOAD | long | {"num_cpu_blocks": 200}, (64, 4)),  # more cannot run at once
        (OFFLOAD | {"speculation": "off"}, (0, 0)),
        (OFFLOAD | long | {"shadow_bits": 3}, (64, 3)),
        (OFFLOAD | long | {"shadow_memory_gb": 5}, (32, 4)),  # one sequence
        (OFFLOAD | long | {"shadow_memory_gb": 1}, (0, 0)),
        ({"max_model_len": 2048, "max_num_seqs": 8}, (0, 0)),  # the weights outweigh the keys
    )
    for options, shadow in cases:
        made = plan(**options)
        assert (made.num_pages, made.shadow_bits) == shadow, options
    small, without = plan(12, **long), plan(12, **long, speculation="off")
    assert small.num_pages >= 512 and small.num_gpu_blocks < without.num_gpu_blocks
    drafted, plain = small.guessing_decode_tok_per_s(0.95), without.decode_tok_per_s
    assert drafted and plain and drafted > 1.5 * plain
    assert "for drafts" in plan_table(small) and small.fits_gpu
    unknown = replace(H200, link_byte_per_s=None, memory_byte_per_s=None)
    assert plan_for(unknown, **OFFLOAD).num_pages == 20


# -- blocks and bounds -------------------------------------------------------------------------------------------


def test_num_missing_blocks_are_the_full_ones_less_the_slots() -> None:
    cases: tuple[tuple[int, ...], ...] = (
        (40960, 8, 1, 2),  # 9 full blocks, 7 slots beside the write slot
        (40960, 4, 1, 6),
        (40960, 10, 1, 0),
        (40961, 8, 1, 3),  # the newest token begins a block
        (131072, 8, 1, 24),
        (32768, 12, 4, 20),  # 4 x 7 full blocks, 8 slots beside the write slots
        (1, 2, 1, 0),
    )
    for context, num_slots, num_sequences, missing in cases:
        assert num_missing_blocks(context, 4096, num_slots, num_sequences) == missing


def test_plan_decode_bound_is_the_link_over_the_missing_bytes() -> None:
    plan = plan_for(H200.with_link(50e9, "given"), context=40960, **OFFLOAD)
    assert plan.num_missing_blocks == 2
    assert plan.link_decode_tok_per_s == pytest.approx(50e9 / (2 * 448 * MIB))
    four = plan_for(H200.with_link(50e9, "given"), context=32768, num_sequences=4, **OFFLOAD | {"num_gpu_blocks": 12})
    assert four.link_decode_tok_per_s == pytest.approx(4 * 50e9 / (20 * 448 * MIB))
    for nothing_missing in (OFFLOAD | {"num_gpu_blocks": 10}, {}):
        assert plan_for(context=40960, **nothing_missing).link_decode_tok_per_s is None
    on_cpu = plan_for(Machine.cpu(100 * GIB), context=40960, **OFFLOAD)
    assert on_cpu.link_decode_tok_per_s is None and on_cpu.num_missing_blocks == 2
    assert on_cpu.memory_decode_tok_per_s is None and flop_prefill_tok_per_s(on_cpu) is None


def test_plan_link_and_cpu_together_are_bounded_by_cpu_memory() -> None:
    """Regression: 14.1 tok/s for a million tokens on an RTX 4090; a desktop's memory allows 1."""
    model = config_without_weights("qwen2.5-7b-1m")
    config = Config(model="m", enable_cpu_offload=True)
    desktop = Machine.gpu(128 * GIB, find_gpu("RTX 4090"))
    plan = make_plan(config, model, desktop, context=1_000_000)
    missing_bytes = plan.num_missing_blocks * plan.spec.block_bytes
    assert desktop.cpu_byte_per_s == 60e9 and plan.memory_decode_tok_per_s == pytest.approx(14.1, rel=0.01)
    assert plan.decode_tok_per_s == plan.link_and_cpu_decode_tok_per_s == pytest.approx(60e9 / missing_bytes)
    assert 0.9 < plan.decode_tok_per_s < 1.3
    assert plan.link_decode_tok_per_s == pytest.approx(27.3e9 / missing_bytes)
    slow = make_plan(config, model, desktop.with_cpu(20e9, "given"), context=1_000_000)  # slower than the link
    assert slow.link_decode_tok_per_s == slow.decode_tok_per_s == pytest.approx(20e9 / missing_bytes)
    alone = make_plan(replace(config, cpu_attention="off"), model, desktop, context=1_000_000)
    assert alone.decode_tok_per_s == alone.link_decode_tok_per_s and alone.link_and_cpu_decode_tok_per_s is None
    two = KVCacheSizes(2, plan.num_cpu_blocks)
    ranks = make_plan(replace(config, tensor_parallel_size=2), model, desktop, context=1_000_000, sizes=two)
    assert ranks.link_and_cpu_decode_tok_per_s == pytest.approx(60e9 / (3905 * plan.spec.block_bytes), rel=1e-3)


def test_plan_first_token_is_the_slower_of_link_and_arithmetic() -> None:
    plan = plan_for(context=40960)
    assert first_token_s(plan) == pytest.approx(40960 / 128_000, rel=0.01)
    slow_link = plan_for(H200.with_link(1e9, "given"), context=40960, **OFFLOAD | {"num_gpu_blocks": 2})
    assert link_prefill_tok_per_s(slow_link) and first_token_s(slow_link) is not None
    assert first_token_s(slow_link) == pytest.approx(40960 / link_prefill_tok_per_s(slow_link))
    assert first_token_s(slow_link) > 9
    assert first_token_s(plan_for(Machine.cpu(GIB), context=40960)) is None


def test_measured_rate_of_cpu_memory_is_plausible() -> None:
    assert 1e6 < measure_cpu_memory(2**26) < 5e12  # above, however little of the time this process gets


def test_plan_bounds_all_gpu_are_those_known_of_the_h200() -> None:
    """124,000 tok/s of prefill where every layer computes every token; of the last one K and V do."""
    plan = plan_for(context=40960)
    assert flop_prefill_tok_per_s(plan) == pytest.approx(124_000 * 28 / 27, rel=0.01)
    assert plan.memory_decode_tok_per_s == pytest.approx(730, rel=0.01)


def test_num_prefill_loaded_blocks_by_hand() -> None:
    """Chunks of 4 blocks, 8 slots: the third chunk has 8 blocks behind it and 4 slots for them, and so on."""
    assert num_prefill_loaded_blocks(8 * 4096, 4096, num_slots=8, chunk_tokens=16384) == 0
    assert num_prefill_loaded_blocks(12 * 4096, 4096, num_slots=8, chunk_tokens=16384) == 4
    assert num_prefill_loaded_blocks(16 * 4096, 4096, num_slots=8, chunk_tokens=16384) == 4 + 8
    assert num_prefill_loaded_blocks(4 * 4096, 4096, num_slots=2, chunk_tokens=16384) == 2  # the slots cut the chunks


# -- sequences ---------------------------------------------------------------------------------------------------


def test_plan_capacity_is_the_nearest_limit_by_name() -> None:
    cases: tuple[tuple[Any, ...], ...] = (
        (OFFLOAD, 40960, (2, "the CPU pool")),  # 20 blocks, 10 each
        (OFFLOAD, 40961, (1, "the CPU pool")),
        (OFFLOAD, 4096, (8, "the slots")),
        (OFFLOAD | {"max_num_seqs": 4}, 4096, (4, "max_num_seqs")),
        (OFFLOAD | {"num_cpu_blocks": 9}, 40960, (0, "the CPU pool")),
        ({"num_kvcache_blocks": 161}, 40960, (1, "the KV cache")),
        ({"num_kvcache_blocks": 161}, 256, (157, "the KV cache")),  # 4 stay free
        ({"num_kvcache_blocks": 161}, 257, (78, "the KV cache")),
        ({"num_kvcache_blocks": 320}, 40960, (1, "the KV cache")),
        ({"num_kvcache_blocks": 329}, 40960, (2, "the KV cache")),
        ({"num_kvcache_blocks": 5000}, 1, (512, "max_num_seqs")),
    )
    for options, num_tokens, capacity in cases:
        assert plan_for(**options).capacity(num_tokens) == capacity


@pytest.mark.parametrize("options", [OFFLOAD | {"num_gpu_blocks": 3, "num_cpu_blocks": 10}, {"num_kvcache_blocks": 7}])
def test_plan_capacity_is_what_the_engine_runs_at_once(tiny: str, options: dict[str, Any]) -> None:
    options = options | {"device": "cpu", "kvcache_block_size": 256}
    with LLM(tiny, **options, enable_prefix_caching=False) as llm:
        for num_tokens in (256, 300, 700):
            for seed in range(12):
                params = SamplingParams(max_tokens=10, ignore_eos=True)
                llm.add_request(random_prompt(num_tokens - 10, seed=seed), params)
            most = 0
            while not llm.is_finished():
                llm.step()
                most = max(most, llm.stats()["num_running"])
            assert llm.stats()["num_preemptions"] == 0
            assert most == llm.plan.capacity(num_tokens).num_sequences < 12


# -- what is asked -----------------------------------------------------------------------------------------------


def test_make_plan_bad_shapes_raise() -> None:
    with pytest.raises(ConfigError, match="more than the 40960 tokens"):
        plan_for(max_model_len=50000)
    with pytest.raises(ConfigError, match="num_attention_heads=16 is not divisible by tensor_parallel_size=3"):
        plan_for(tensor_parallel_size=3)


def test_plan_options_replace_what_the_machine_says() -> None:
    machine = PlanOptions(gpu_memory_gb=24, host_memory_gb=32, link_gb_per_s=25).apply(H200)
    assert (machine.gpu_bytes, machine.host_bytes, machine.link_byte_per_s) == (24 * GIB, 32 * GIB, 25e9)
    assert PlanOptions().apply(H200) == H200
    machine = PlanOptions(gpu="rtx 4090").apply(H200)
    assert (machine.name, machine.flop_per_s, machine.host_bytes) == ("RTX 4090", 165.2e12, 100 * GIB)
    machine = PlanOptions(gpu="rtx 4090", gpu_memory_gb=48, link_gb_per_s=12).apply(H200)
    assert (machine.gpu_bytes, machine.link_byte_per_s, machine.link_source) == (48 * GIB, 12e9, "given")
    assert machine.memory_byte_per_s == 1008e9
    for name, value, message in (("sequences", 0, "=0 must be above 0"), ("gpu", "RTX 9999", "='RTX 9999' is unknown")):
        with pytest.raises(ConfigError, match=name + message):
            PlanOptions(**{name: value})
    assert PlanOptions(cpu_gb_per_s=50).apply(H200).cpu_byte_per_s == 50e9
    with pytest.raises(
        ConfigError, match=r"quantization='fp8' is for checkpoints that are not quantized, .*'online'; lea"
    ):
        MODEL.quantized("fp8").quantized("fp8")
    for name, value in (
        ("gpu", "L4"),
        ("gpu_memory_gb", 24),
        ("link_gb_per_s", 25),
        ("cpu_gb_per_s", 25),
    ):  # were ignored in silence
        with pytest.raises(ConfigError, match=f"{name} describe a GPU, but device='cpu'"):
            PlanOptions(**{name: value}).apply(Machine.cpu(GIB))


# -- in the engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096))


def test_engine_with_offload_logs_its_plan_and_counts_the_link(
    tiny: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options = OFFLOAD | {"num_gpu_blocks": 3, "kvcache_block_size": 256, "num_cpu_blocks": 10, "cpu_attention": "off"}
    with caplog.at_level(logging.INFO, "nanovllm"), LLM(tiny, device="cpu", **options) as llm:
        assert "plan for 1 x 4,096 tokens" in caplog.text and "slots: 3 of 256 tokens" in caplog.text
        before = llm.stats()
        assert before["load_byte_per_s"] is before["link_share"] is before["link_byte_per_s"] is None
        llm.generate([random_prompt(2000, seed=1)], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        stats = llm.stats()
    assert stats["num_missed_blocks"] > 0 and stats["num_hit_blocks"] > 0
    assert stats["load_byte_per_s"] > 0
    assert stats["link_byte_per_s"] is stats["link_share"] is None  # no link on a CPU
    bar = capsys.readouterr().err
    assert "GB/s" in bar and f"{stats['num_hit_blocks']}/{stats['num_missed_blocks']}" in bar


def test_engine_without_offload_has_no_link_figures(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with LLM(tiny, device="cpu", num_kvcache_blocks=4) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        assert not {"link_byte_per_s", "load_byte_per_s", "link_share"} & llm.stats().keys()
    bar = capsys.readouterr().err
    assert "Generating" in bar and "GB/s" not in bar


# -- the link ----------------------------------------------------------------------------------------------------


def step_plan(num_tokens: int, *, streamed: int = 0, loads: int = 0, num_cpu_tokens: int = 0) -> StepPlan:
    """`num_cpu_tokens`, all of one block, are cut from the last streamed one."""
    sampling = SamplingRow()
    sequence = SequenceStep(0, np.zeros(num_tokens, dtype=np.int64), 0, num_tokens, (0,), num_tokens, sampling)
    groups = (StreamedGroup(tuple(range(streamed)), (), num_cpu_tokens),) if streamed else ()
    spans = ((CpuSpan(9, 256 - num_cpu_tokens, 256),),) if num_cpu_tokens else ()
    slot_loads = tuple(SlotLoad(i, i, 256) for i in range(loads))
    return StepPlan((sequence,), KVMoves(loads=slot_loads, streamed=groups, cpu_spans=spans))


def test_link_meter_counts_time_between_streamed_decode_steps_only() -> None:
    meter = LinkMeter(block_bytes=1000, block_size=256)
    streamed, prefill, resident = step_plan(1, streamed=3), step_plan(50, streamed=3), step_plan(1)
    for plan, seconds in (
        (prefill, 10.0),
        (streamed, 1.0),  # a prefill ran before it
        (streamed, 1.0),  # 3 blocks
        (step_plan(1, streamed=3, loads=2), 2.0),  # 5 blocks
        (resident, 0.1),
        (streamed, 6.0),
        (streamed, None),  # after a pause
        (prefill, 10.0),
    ):
        meter.step_ended(plan, seconds)
    expected = {"load_byte_per_s": 8000 / 3, "cpu_load_byte_per_s": 0.0, "link_share": 0.5}
    assert meter.stats(16_000 / 3) == expected
    assert meter.stats(None) == expected | {"link_share": None}


def test_link_meter_counts_what_the_cpu_attends_to_apart() -> None:
    meter = LinkMeter(block_bytes=1024, block_size=256)
    assert meter.stats(1.0) == {"load_byte_per_s": None, "cpu_load_byte_per_s": None, "link_share": None}
    for plan in (step_plan(1, streamed=3, num_cpu_tokens=64), step_plan(1, streamed=3, num_cpu_tokens=64)):
        meter.step_ended(plan, 0.5)
    for plan in [step_plan(1, num_cpu_tokens=128)] * 2:  # nothing is streamed
        meter.step_ended(plan, 0.25)
    assert meter.stats(5632.0) == {"load_byte_per_s": 2816.0, "cpu_load_byte_per_s": 1280.0, "link_share": 0.5}


def test_measure_link_on_the_cpu_there_is_none() -> None:
    assert measure_link(ImmediateStreams(), torch.zeros(8), torch.zeros(8)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [100, 9 * MIB, 64 * MIB])
def test_measure_link_of_a_gpu_is_a_plausible_rate(num_bytes: int) -> None:
    pool = torch.zeros(num_bytes // 2, dtype=torch.bfloat16).pin_memory()
    staging = torch.zeros(2**24, dtype=torch.bfloat16, device="cuda")
    rate = measure_link(make_streams(staging.device), pool, staging)
    assert rate is not None and (1e9 if num_bytes > MIB else 1e4) < rate < 1e12
