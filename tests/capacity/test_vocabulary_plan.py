"""Plans with the embedding table in CPU memory, and with a quantized output head."""

from dataclasses import replace
from typing import Any

import pytest

from nanovllm.capacity import costs
from nanovllm.capacity.fit import fits
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.capacity.plan_check import check_plan, check_start
from nanovllm.checkpoint.quantization import GGUFLayer, gguf_quantization
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.entrypoints.planner import fit_table, plan_table
from nanovllm.errors import ConfigError

MIB, GIB = 2**20, 2**30
DESKTOP = Machine.gpu(64 * GIB, find_gpu("RTX 4090"))
VOCABULARY = 151_936 * 4096  # elements of a table of Qwen3-8B
SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 512}


def plan_for(
    model: str = "qwen3-8b", gib: float = 24, machine: Machine = DESKTOP, *, format: str | None = "int4", **options: Any
) -> CapacityPlan:
    """A plan for a GPU with this much memory, all of which may be used."""
    config = Config(model=model, gpu_memory_utilization=1.0, **options)
    stored = config_without_weights(model).quantized(format, config.quantize_head)
    return make_plan(config, stored, replace(machine, gpu_bytes=int(gib * GIB)))


def test_27b_in_4_bits_has_all_kv_of_131k_within_24_2_gib() -> None:
    """Without both options a third of the KV is missing."""
    both = plan_for("qwen3.5-27b", 24.2, quantize_head="int8", max_model_len=131_072, **SMALL)
    check_plan(both)
    assert both.model.embedding_on_cpu and both.num_gpu_blocks == 512
    table = 248_320 * 5120 * 2
    assert both.host_table_bytes == table and f"{table / GIB:.2f} GiB" in plan_table(both)
    with pytest.raises(ConfigError, match="blocks on the GPU allow 0"):
        check_plan(plan_for("qwen3.5-27b", 24.2, embedding_on_cpu=False, max_model_len=131_072, **SMALL))
    options: dict[str, Any] = {"enable_cpu_offload": True, "max_model_len": 131_072, "speculation": "off", **SMALL}
    off, head = plan_for("qwen3.5-27b", 23, embedding_on_cpu=False, **options), plan_for("qwen3.5-27b", 23, **options)
    both = plan_for("qwen3.5-27b", 23, quantize_head="int8", **options)
    assert off.num_missing_blocks > 200 > head.num_missing_blocks > both.num_missing_blocks


def test_9b_in_4_bits_has_32k_within_7_2_gib() -> None:
    plan = plan_for("qwen3.5-9b", 7.2, quantize_head="int8", max_model_len=32_768, **SMALL)
    check_plan(plan)
    assert plan.model.embedding_on_cpu and plan.num_gpu_blocks == 128 and plan.memory.total_bytes < 7.2 * GIB
    with pytest.raises(ConfigError):
        check_plan(plan_for("qwen3.5-9b", 7.2, embedding_on_cpu=False, max_model_len=32_768, **SMALL))


def test_embedding_is_on_the_cpu_only_if_the_kv_of_a_long_sequence_does_not_fit_otherwise() -> None:
    for gib, offload, is_on_cpu in ((24, True, False), (24, False, False), (10, True, True), (10, False, True)):
        plan = plan_for(gib=gib, enable_cpu_offload=offload)
        assert plan.model.embedding_on_cpu == is_on_cpu, gib
        on_gpu = plan_for(gib=gib, enable_cpu_offload=offload, embedding_on_cpu=False)
        assert not on_gpu.model.embedding_on_cpu and not on_gpu.host_table_bytes
        saved = 2 * VOCABULARY if is_on_cpu else 0
        assert on_gpu.memory.weight_bytes - plan.memory.weight_bytes == saved == plan.host_table_bytes
        assert (plan.num_gpu_blocks > on_gpu.num_gpu_blocks) == is_on_cpu
    given = plan_for(gib=24, embedding_on_cpu=True)
    assert given.model.embedding_on_cpu and given.host_table_bytes == 2 * VOCABULARY


def test_embedding_leaves_the_gpu_where_the_weights_do_not_fit_and_not_for_slots_that_are_given() -> None:
    given: dict[str, Any] = {"enable_cpu_offload": True, "num_gpu_blocks": 10, "kvcache_block_size": 256}
    assert not plan_for(gib=24, **given).model.embedding_on_cpu  # slots are missing, but the table makes no room
    plan = plan_for(gib=16, format=None, max_num_batched_tokens=1024, **given)
    check_plan(plan)
    assert plan.model.embedding_on_cpu
    with pytest.raises(ConfigError, match="use embedding_on_cpu=True, or"):
        check_plan(plan_for(gib=16, format=None, max_num_batched_tokens=1024, embedding_on_cpu=False, **given))


def test_a_plan_with_chosen_sizes_keeps_the_place_of_the_embedding() -> None:
    """Start-up plans again with measured rates."""
    plan = plan_for(gib=10, enable_cpu_offload=True)
    sizes = replace(plan_sizes(plan), num_gpu_blocks=1000)
    for is_on_cpu in (True, False):
        model = replace(plan.model, embedding_on_cpu=is_on_cpu)
        assert make_plan(plan.config, model, plan.machine, sizes=sizes).model.embedding_on_cpu == is_on_cpu
    assert make_plan(plan.config, plan.model, replace(plan.machine, gpu_bytes=80 * GIB)).model == replace(
        plan.model, embedding_on_cpu=False
    )


def plan_sizes(plan: CapacityPlan) -> Any:
    from nanovllm.plan.kv_spec import KVCacheSizes

    return KVCacheSizes(plan.num_gpu_blocks, plan.num_cpu_blocks, plan.num_pages, plan.shadow_bits)


def test_host_memory_counts_the_embedding() -> None:
    options: dict[str, Any] = {"enable_cpu_offload": True, "max_model_len": 32_768}
    small = replace(DESKTOP, host_bytes=8 * GIB)
    on_gpu, on_cpu = (plan_for(gib=24, machine=small, embedding_on_cpu=choice, **options) for choice in (False, True))
    block = on_gpu.spec.block_bytes
    assert on_gpu.cpu_pool_bytes == int(0.7 * 8 * GIB) // block * block
    assert on_cpu.cpu_pool_bytes == int(0.7 * (8 * GIB - 2 * VOCABULARY)) // block * block
    # The pool would hold one sequence less, or there is no room for the table at all
    for host_gib in (6.75, 2):
        machine = replace(DESKTOP, host_bytes=int(host_gib * GIB))
        assert not plan_for(
            gib=10.4, machine=machine, max_model_len=32_768, enable_cpu_offload=True
        ).model.embedding_on_cpu
    with pytest.raises(
        ConfigError, match=r"embedding table needs 1\.16 GiB of CPU memory, but only 1\.00 GiB .*=False"
    ):
        check_start(plan_for(machine=replace(DESKTOP, host_bytes=GIB), embedding_on_cpu=True))
    assert not plan_for(gib=6, machine=replace(DESKTOP, host_bytes=GIB)).model.embedding_on_cpu
    pool = plan_for(machine=small, embedding_on_cpu=True, num_cpu_blocks=200, enable_cpu_offload=True)
    with pytest.raises(ConfigError, match=r"only 6\.84 GiB of memory is available besides the embedding table's 1\.16"):
        check_start(pool)


def test_tied_embedding_cannot_leave_the_gpu_unless_the_head_is_quantized() -> None:
    with pytest.raises(
        ConfigError, match=r"embedding_on_cpu=True is not possible with qwen3-4b: .*quantize_head='int8'"
    ):
        plan_for("qwen3-4b", embedding_on_cpu=True)
    # Regression: a GGUF file whose table is quantized was told to add quantize_head, which it was then refused for
    formats = gguf_quantization([GGUFLayer("model.embed_tokens", "Q6_K", False)])
    packed = replace(config_without_weights("qwen3-4b"), quantization=formats)
    with pytest.raises(ConfigError, match=r"embedding_on_cpu=True is not possible .* in each step; leave it out$"):
        make_plan(Config(model="m.gguf", embedding_on_cpu=True), packed, DESKTOP)
    short = plan_for("qwen3-4b", 6, format=None)
    assert not short.model.embedding_on_cpu
    head = plan_for("qwen3-4b", 6, format=None, quantize_head="int8")
    assert head.model.embedding_on_cpu
    table = 151_936 * 2560
    head_bytes = table + table // 64 * 4
    assert short.memory.weight_bytes - head.memory.weight_bytes == 2 * table - head_bytes
    # On the GPU both tables count, so a quantized head alone saves nothing there
    both = plan_for("qwen3-4b", 24, format=None, quantize_head="int8")
    assert not both.model.embedding_on_cpu
    assert both.memory.weight_bytes - short.memory.weight_bytes == head_bytes
    on_cpu = make_plan(Config(model="qwen3-4b", embedding_on_cpu=True), short.model, Machine.cpu(64 * GIB))
    assert not on_cpu.model.embedding_on_cpu  # there, nothing changes and nothing is refused


def test_a_head_that_a_gpu_cannot_pack_is_refused_before_it_is_loaded() -> None:
    """Regression: the plan named fewer ranks, though they share rows alone, and start-up did not check this."""
    odd = replace(config_without_weights("qwen3-8b"), hidden_size=4000).quantized(None, "int8")
    config = Config(model="m", quantize_head="int8")
    for check in (check_start, check_plan):
        check(make_plan(config, odd, Machine.cpu(64 * GIB)))
        with pytest.raises(
            ConfigError, match=r"quantize_head needs .* of 64 columns .* has 4000 columns; leave it out"
        ):
            check(make_plan(config, odd, DESKTOP))


def test_a_step_reads_the_head_in_its_format_and_no_embedding() -> None:
    config, model = Config(model="qwen3-8b"), config_without_weights("qwen3-8b")
    dense, quantized = (costs.decode_bytes(config, model.quantized(None, head), 1, 0, 1) for head in (None, "int8"))
    assert dense - quantized == 2 * VOCABULARY - (VOCABULARY + VOCABULARY // 64 * 4)
    moved = replace(model, embedding_on_cpu=True)
    assert costs.decode_bytes(config, moved, 1, 0, 1) == dense
    for is_packed, saved in ((True, dense - quantized), (False, 0)):  # a CPU holds the values
        sizes = [
            costs.weight_bytes(config, model.quantized(None, head), is_packed=is_packed) for head in (None, "int8")
        ]
        assert sizes[0] - sizes[1] == saved
    two = replace(config, tensor_parallel_size=2)
    assert costs.weight_bytes(two, moved, is_packed=True) == costs.weight_bytes(config, moved, is_packed=True) // 2


def test_table_shows_the_sizes_with_and_without() -> None:
    for options, text in (
        ({}, "output head 1.16 GiB (630.60 MiB in int8), embedding table 1.16 GiB\n"),
        ({"quantize_head": "int8"}, "output head 630.60 MiB instead of 1.16 GiB, embedding table 1.16 GiB\n"),
        ({"embedding_on_cpu": True}, "output head 1.16 GiB (630.60 MiB in int8), embedding table in CPU memory\n"),
    ):
        table = plan_table(plan_for(**options))
        assert text in table and ("in pinned CPU memory" in table) == ("embedding_on_cpu" in options)
    assert "embedding table and output head 741.88 MiB\n" in plan_table(plan_for("qwen3-4b"))
    assert "in fp8, as are activations" in plan_table(plan_for(format="fp8_dynamic", quantization="fp8_dynamic"))
    # Regression: a plan for a CPU said "in fp8" of values in the model's dtype
    config, model = Config(model="m", quantization="fp8_dynamic"), config_without_weights("qwen3-8b")
    of_cpu = make_plan(config, model.quantized("fp8_dynamic"), Machine.cpu(64 * GIB))
    assert "fp8" not in plan_table(of_cpu) and of_cpu.memory.weight_bytes > 15 * GIB


def test_fit_quantizes_the_head_only_where_kv_is_missing_and_it_gains() -> None:
    machine = Machine.gpu(64 * GIB, find_gpu("RTX 4070"))
    heads = {}
    for context in (32_768, 131_072):
        (fit,) = fits(machine, ["qwen3-8b"], "int4", context)
        heads[context] = fit.plan.config.quantize_head
        assert (fit.plan.model.head_quantization is not None) == (fit.plan.config.quantize_head is not None)
    assert heads == {32_768: None, 131_072: "int8"}
    assert all(fit.plan.config.quantize_head is None for fit in fits(DESKTOP, ["qwen3-8b"], "int4", 32_768))
    text = fit_table(machine, fits(machine, ["qwen3-8b"], "int4", 131_072))
    assert "int4    int8" in text and "--quantize-head HEAD" in text
