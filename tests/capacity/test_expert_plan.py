"""Plans with experts in CPU memory: bytes by hand, what stays on the GPU, bounds and refusals."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from tiny_models import write_tiny_model

from nanovllm.capacity import costs
from nanovllm.capacity.device_memory import GRAPH_LAYER_BYTES, GRAPH_POOL_BYTES
from nanovllm.capacity.division import divide_memory
from nanovllm.capacity.fit import expert_prefill_tok_per_s, fits, flop_prefill_tok_per_s, link_prefill_tok_per_s
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.placement import NUM_PLACED_SEQS, PLACEMENT_RESERVE_BYTES
from nanovllm.capacity.plan import HOST_RESERVE_BYTES, CapacityPlan, plan_summary
from nanovllm.capacity.plan_check import check_plan, check_start
from nanovllm.checkpoint.gguf import TYPES
from nanovllm.checkpoint.quantization import GGUFLayer, gguf_quantization
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.engine.setup import prepare
from nanovllm.entrypoints.planner import plan_table
from nanovllm.errors import ConfigError
from nanovllm.plan.expert_formats import STAGED_PIECE_BYTES
from nanovllm.plan.kv_spec import max_stateful_seqs
from nanovllm.plan.step_limits import MAX_CPU_EXPERT_ROWS

MIB, GIB = 2**20, 2**30
MATRIX_30B = 768 * 2048  # weights of a matrix of an expert of Qwen3-30B-A3B
LAYER_30B = 128 * 3 * MATRIX_30B  # of the experts of a layer; the model has 48 such layers
LAYER_35B = 256 * 3 * 512 * 2048  # of Qwen3.5-35B-A3B, which has 40, and a draft head with as many
INT4_ON_CPU, INT4_ON_GPU = 144 / 256, 0.5 + 20 / 256  # bytes of a weight in Q4_K: as in a file, and for the kernels
SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 512}
ALL_OUT: dict[str, Any] = {"enable_expert_offload": True, "num_gpu_expert_layers": 0}


def plan_for(
    model: str = "qwen3-30b-a3b",
    gib: float = 16,
    *,
    format: str | None = "int4",
    gpu: str = "RTX 4090",
    host_gib: float = 64,
    context: int | None = None,
    num_sequences: int = 1,
    **options: Any,
) -> CapacityPlan:
    """A plan for a GPU with this much memory, all of which may be used."""
    config = Config(model=model, **{"gpu_memory_utilization": 1.0} | options)
    stored = config_without_weights(model).quantized(format, config.quantize_head, config.tensor_parallel_size)
    machine = replace(Machine.gpu(int(host_gib * GIB), find_gpu(gpu)), gpu_bytes=int(gib * GIB))
    return make_plan(config, stored, machine, context=context, num_sequences=num_sequences)


def num_cpu_layers(plan: CapacityPlan) -> int:
    return len(plan.model.experts.cpu_layers) if plan.model.experts else 0


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_of_experts_by_hand() -> None:
    on_gpu = plan_for(gib=80)
    # Slots for single experts, in int4 also for the blocks of a matrix of each
    for format, on_cpu, of_gpu, num_slots in (
        *(("int4", INT4_ON_CPU, INT4_ON_GPU, 24), ("fp8", 1 + 4 / 128, 0, 13), (None, 2, 2, 7)),
    ):
        plan = plan_for(gib=80, format=format, **ALL_OUT)
        assert plan.host_expert_bytes == 48 * LAYER_30B * on_cpu
        if of_gpu:
            experts = (2 * 128 + num_slots) * (LAYER_30B // 128) * of_gpu
            blocks = num_slots * MATRIX_30B * on_cpu if format == "int4" else 0
            assert plan.memory.expert_staging_bytes == experts + blocks + STAGED_PIECE_BYTES
    plan = plan_for(gib=80, **ALL_OUT)
    assert on_gpu.memory.weight_bytes - plan.memory.weight_bytes == 48 * LAYER_30B * INT4_ON_GPU
    assert on_gpu.host_expert_bytes == on_gpu.memory.expert_staging_bytes == 0 and on_gpu == plan_for(
        gib=80, enable_expert_offload=False
    )
    # A scale in fp8 is for a whole row on the GPU, and for 128 columns in CPU memory
    rows = 128 * (2 * 768 + 2048)
    staging_bytes = plan_for(gib=80, format="fp8", **ALL_OUT).memory.expert_staging_bytes
    assert staging_bytes == (2 + 13 / 128) * (LAYER_30B + 4 * rows) + STAGED_PIECE_BYTES
    for num_layers in (1, 47):
        some = plan_for(gib=80, enable_expert_offload=True, num_gpu_expert_layers=num_layers)
        assert some.host_expert_bytes == (48 - num_layers) * LAYER_30B * INT4_ON_CPU
        assert on_gpu.memory.weight_bytes - some.memory.weight_bytes == (48 - num_layers) * LAYER_30B * INT4_ON_GPU
    given = plan_for(gib=80, enable_expert_offload=True, num_gpu_expert_layers=48)
    assert replace(given, config=on_gpu.config) == on_gpu


def test_each_rank_has_a_part_of_every_expert() -> None:
    for num_layers in (0, 20):
        options = {"enable_expert_offload": True, "num_gpu_expert_layers": num_layers}
        one, two = (plan_for(gib=80, tensor_parallel_size=size, **options) for size in (1, 2))
        # Half of the 768 columns of down, a third of the weights, are not whole blocks of 256: Q4_1 instead of Q4_K
        more = (48 - num_layers) * LAYER_30B / 3
        assert two.host_expert_bytes == one.host_expert_bytes + more * (20 / 32 - INT4_ON_CPU)
        one_bytes, two_bytes = (each.memory.expert_staging_bytes - STAGED_PIECE_BYTES for each in (one, two))
        more_blocks = 24 * MATRIX_30B * (20 / 32 - INT4_ON_CPU)
        assert 2 * two_bytes == one_bytes + (2 * 128 + 24) * MATRIX_30B * (20 / 32 - INT4_ON_GPU) + more_blocks


def test_experts_of_the_draft_head_leave_the_gpu_with_the_others() -> None:
    options: dict[str, Any] = {"speculation": "mtp", "enable_expert_offload": True}
    for num_layers, num_out in ((40, 0), (39, 2), (0, 41)):
        plan = plan_for("qwen3.5-35b-a3b", 80, num_gpu_expert_layers=num_layers, **options)
        assert plan.host_expert_bytes == num_out * LAYER_35B * INT4_ON_CPU, num_layers
    head_tok_per_s = plan.guessing_decode_tok_per_s(0.9)
    assert head_tok_per_s and plan_for("qwen3.5-35b-a3b", 80).guessing_decode_tok_per_s(0.9) is None


def test_staging_has_room_for_the_largest_layer_of_a_gguf_file() -> None:
    """Q4_K_M has down in Q6_K in some layers. What a GPU would unpack is in 16 bits."""
    model = replace(config_without_weights("qwen3-30b-a3b"), num_layers=4, layer_kinds=("attention",) * 4)
    assert model.experts is not None
    model = replace(model, experts=replace(model.experts, layers=(0, 1, 2, 3)))
    names = [f"model.layers.{i}.mlp.experts.{name}" for i in range(4) for name in ("gate_proj", "up_proj", "down_proj")]
    types = 3 * ["Q4_K", "Q4_K", "Q4_K"] + ["Q4_K", "Q4_K", "Q6_K"]
    file = replace(model, quantization=gguf_quantization(map(GGUFLayer, names, types, [False] * 12)))
    machine = Machine.gpu(64 * GIB, find_gpu("RTX 4090"))
    *_, small, large = costs.expert_layer_bytes(Config(model="m"), file)
    assert large > 1.1 * small
    for num_layers in range(4):
        config = Config(model="m", enable_expert_offload=True, num_gpu_expert_layers=num_layers)
        plan = make_plan(config, file, machine)
        assert plan.model.experts
        matrix = LAYER_30B // 3
        of_layers = [types[3 * layer : 3 * layer + 3] for layer in plan.model.experts.cpu_layers]
        assert plan.host_expert_bytes == sum(matrix * VALUE_BYTES[name] for layer in of_layers for name in layer)
        kinds = {large if layer == 3 else small for layer in plan.model.experts.cpu_layers}
        # Two buffers, and slots of each kind and for blocks, of up to 64 MiB in CPU memory
        num_slots = 21 if large in kinds else 24
        blocks = max((MATRIX_30B * VALUE_BYTES[name] for layer in of_layers for name in layer), default=0)
        slots = num_slots * (sum(kinds) // 128 + blocks)
        assert plan.memory.expert_staging_bytes == 2 * max(kinds) + STAGED_PIECE_BYTES + slots


VALUE_BYTES = {each.name: each.num_bytes / each.num_values for each in TYPES.values()}


def test_graphs_have_at_most_64_rows_and_no_chunks() -> None:
    options: dict[str, Any] = {"max_num_seqs": 512, "gib": 80}
    inside, outside = plan_for(**options), plan_for(**options, **ALL_OUT)
    assert inside.memory.logits_bytes == 512 * 151_936 * 2
    assert outside.memory.logits_bytes == MAX_CPU_EXPERT_ROWS * 151_936 * 2
    # 1, 2, 4, multiples of 8 up to 64
    of_row = 4 * 2 * 128 * 32 + 4 * 2 * 2048
    assert outside.memory.graph_bytes - 11 * 48 * GRAPH_LAYER_BYTES - GRAPH_POOL_BYTES < 64 * 16 * of_row
    assert inside.memory.graph_bytes > 2 * outside.memory.graph_bytes
    assert inside.memory.activation_bytes == outside.memory.activation_bytes  # longer steps run without graphs


def test_the_place_of_experts_does_not_change_what_kv_on_disk_is_known_by() -> None:
    assert repr(plan_for(gib=80, **ALL_OUT).model.experts) == repr(plan_for(gib=80).model.experts)


# -- what stays on the GPU -------------------------------------------------------------------------------------------


def test_35b_has_the_kv_of_131k_within_7_3_gib() -> None:
    model, options = "qwen3.5-35b-a3b", {"max_model_len": 131_072, "quantize_head": "int8", **SMALL}
    for more in ({}, {"enable_cpu_offload": True}, {"max_num_batched_tokens": 4096}):
        plan = plan_for(model, 7.3, **ALL_OUT, **options | more)
        check_plan(plan)
        assert num_cpu_layers(plan) == 40 and plan.num_gpu_blocks * plan.spec.block_size >= 131_072
        assert plan.memory.total_bytes < 7.3 * GIB and not plan.num_missing_blocks
        assert plan.memory.kv_bytes >= 131_072 * 20 * 1024 and plan.kv_bytes_per_token == 20 * 1024
    with pytest.raises(ConfigError, match=r"the weights \(1\d\.\d+ GiB\).*; use enable_expert_offload"):
        check_start(plan_for(model, 7.3, **options))
    at_262k = plan_for(model, 23, enable_expert_offload=True, max_model_len=262_144)
    check_plan(at_262k)
    assert 0 < num_cpu_layers(at_262k) < 20


@pytest.mark.parametrize("offload", [False, True])
def test_the_most_layers_stay_that_leave_room_for_the_kv_of_a_sequence(offload: bool) -> None:
    before = 48
    for gib in (7, 8, 10, 12, 14.5, 16, 20, 24, 40):
        options: dict[str, Any] = {"gib": gib, "enable_cpu_offload": offload, "max_num_batched_tokens": 2048}
        plan = plan_for(enable_expert_offload=True, **options)
        check_start(plan)
        assert plan.fits_gpu and plan.fits_host and num_cpu_layers(plan) <= before
        before, num_layers = num_cpu_layers(plan), plan.num_gpu_expert_layers
        if num_layers < 48:
            assert plan.model.embedding_on_cpu
            has_all = plan.num_gpu_blocks * plan.spec.block_size >= 40_960
            assert has_all or num_layers == 0, gib
            assert not plan.num_missing_blocks or num_layers == 0
            more = plan_for(enable_expert_offload=True, num_gpu_expert_layers=num_layers + 1, **options)
            assert (
                not more.fits_gpu
                or more.num_gpu_blocks < 160
                or more.memory.total_bytes
                > (
                    gib * GIB
                    - PLACEMENT_RESERVE_BYTES
                    - (more.num_gpu_blocks - 160) * more.spec.block_bytes
                    - 256 * MIB
                )
            )
    assert before == 0


def test_kv_is_missing_only_once_all_experts_are_in_cpu_memory() -> None:
    options: dict[str, Any] = {"enable_cpu_offload": True, "speculation": "off", **SMALL}
    plan = plan_for("qwen3.5-35b-a3b", 5.5, enable_expert_offload=True, max_model_len=262_144, **options)
    assert num_cpu_layers(plan) == 40 and plan.num_missing_blocks
    check_plan(plan)
    # Slots that the user sets take no room from experts
    given = plan_for(gib=16, enable_expert_offload=True, **options, num_gpu_blocks=8)
    assert given.num_missing_blocks and 0 < num_cpu_layers(given) < 48
    fewer = plan_for(gib=24, enable_expert_offload=True, **options, num_gpu_blocks=8)
    assert num_cpu_layers(fewer) == 0 and fewer.num_missing_blocks


def test_states_leave_room_for_the_kv_and_experts_leave_room_for_a_few_states() -> None:
    """By default states of many sequences take half of the room, for which experts would have to leave the GPU."""
    plan = plan_for("qwen3.5-35b-a3b", 16, enable_expert_offload=True, max_model_len=131_072)
    states = plan.spec.states
    assert 0 < num_cpu_layers(plan) < 40 and plan.num_gpu_blocks >= 512
    assert NUM_PLACED_SEQS <= max_stateful_seqs(plan.config, states, plan.num_state_slots) < 5 * NUM_PLACED_SEQS
    # Start-up divides what it measures in the same way
    room = plan.memory.kv_bytes + plan.state_bytes
    counts = {"given": 0, "useful": 10_000, "num_cpu_blocks": 0}
    sizes = divide_memory(plan.config, plan.spec, room, **counts, kept=512)
    assert sizes.num_gpu_blocks >= 512 > divide_memory(plan.config, plan.spec, room, **counts).num_gpu_blocks
    assert max_stateful_seqs(plan.config, states, sizes.num_state_slots) >= NUM_PLACED_SEQS
    short = divide_memory(plan.config, plan.spec, 400 * plan.spec.block_bytes, **counts, kept=512)
    assert short == divide_memory(plan.config, plan.spec, 400 * plan.spec.block_bytes, **counts)


def test_memory_for_experts_is_a_number_of_layers() -> None:
    layer = LAYER_30B * INT4_ON_GPU / GIB
    for memory_gb, num_layers in ((0, 0), (0.99 * layer, 0), (1.01 * layer, 1), (10.5 * layer, 10), (100, 48)):
        plan = plan_for(gib=80, enable_expert_offload=True, gpu_expert_memory_gb=memory_gb)
        assert plan.num_gpu_expert_layers == num_layers
    half = plan_for(gib=80, enable_expert_offload=True, gpu_expert_memory_gb=5.7 * layer, tensor_parallel_size=2)
    assert half.num_gpu_expert_layers == 11  # of each GPU


def test_a_plan_with_chosen_sizes_keeps_the_place_of_the_experts() -> None:
    from nanovllm.plan.kv_spec import KVCacheSizes

    plan = plan_for(gib=16, enable_expert_offload=True)
    again = make_plan(plan.config, plan.model, plan.machine, sizes=KVCacheSizes(100))
    assert again.model == plan.model and again.num_gpu_blocks == 100


def test_auto_moves_experts_only_where_the_model_does_not_fit_otherwise() -> None:
    for gib, offload in product((8, 16, 24, 40), (False, True)):
        options: dict[str, Any] = {"gib": gib, "enable_cpu_offload": offload, "max_num_batched_tokens": 2048}
        auto, off, on = (plan_for(enable_expert_offload=choice, **options) for choice in (None, False, True))
        assert num_cpu_layers(off) == 0
        assert auto.model == (on if gib < 24 else off).model, (gib, offload)
    # More slots are not wanted, or CPU memory has no room
    for options in ({"num_gpu_blocks": 8, "enable_cpu_offload": True, "gib": 24}, {"host_gib": 10, "gib": 12}):
        assert num_cpu_layers(plan_for(enable_expert_offload=None, **options)) == 0
    # The largest step does not fit by estimate. The engine starts, or says what to lower
    assert num_cpu_layers(plan_for("qwen3.5-35b-a3b", 7, enable_expert_offload=None)) == 40
    dense = plan_for("qwen3-8b", 8, enable_expert_offload=None)
    assert replace(dense, config=plan_for("qwen3-8b", 8).config) == plan_for("qwen3-8b", 8)


def test_on_a_cpu_experts_are_stored_in_their_format_if_the_user_wants_it(tmp_path: Any) -> None:
    model = config_without_weights("qwen3-30b-a3b").quantized("int4")
    cpu, options = Machine.cpu(24 * GIB), {"model": "m", "device": "cpu", "max_model_len": 8192}
    with pytest.raises(ConfigError, match=r"weights 56\.\d+ GiB, .*; use enable_expert_offload$"):
        check_start(make_plan(Config(**options), model, cpu))
    assert num_cpu_layers(make_plan(Config(**options, enable_expert_offload=None), model, cpu)) == 0
    plan = make_plan(Config(**options, enable_expert_offload=True), model, cpu)
    check_plan(plan)
    assert num_cpu_layers(plan) == 48 and not plan.memory.expert_staging_bytes
    assert "15.19 GiB  of 48 of 48 layers, in the checkpoint's format" in plan_table(plan)
    with pytest.raises(ConfigError, match=r"the experts \(15\.19 GiB of 48 of 48 layers\) and the process"):
        check_start(replace(plan, machine=Machine.cpu(16 * GIB)))
    # The engine builds what the plan has chosen
    tiny = write_tiny_model(tmp_path, "qwen3_moe", hidden_size=64)
    for given, cpu_layers in (({}, ()), ({"enable_expert_offload": True}, None)):
        setup = prepare(tiny, {"device": "cpu", **given})
        experts = setup.model_config.experts
        assert experts and experts.cpu_layers == (experts.layers if cpu_layers is None else cpu_layers)


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_decode_bound_is_the_sum_of_the_cpus_and_the_gpus_time() -> None:
    cpu_rate, gpu_rate, link_rate = 60e9, 1008e9, 31.5e9 * 54.6 / 63
    for num_sequences in (1, 4):
        share = 1 - (1 - 8 / 128) ** num_sequences
        plan = plan_for(gib=24, num_sequences=num_sequences, context=4096, **ALL_OUT)
        resident = plan_for(gib=24, num_sequences=num_sequences, context=4096)
        cpu_bytes = share * 48 * LAYER_30B * INT4_ON_CPU
        saved = share * 48 * LAYER_30B * INT4_ON_GPU
        assert plan.memory_decode_tok_per_s and resident.memory_decode_tok_per_s
        gpu_s = num_sequences / resident.memory_decode_tok_per_s - saved / gpu_rate
        assert num_sequences / plan.memory_decode_tok_per_s == pytest.approx(gpu_s)
        assert plan.decode_tok_per_s == pytest.approx(num_sequences / (cpu_bytes / cpu_rate + gpu_s))
        assert resident.expert_decode_tok_per_s() is None
    # Every draft token hits more experts, so verification takes longer
    plain = plan_for(gib=24, context=4096, **ALL_OUT)
    drafts = plan_for(gib=24, context=4096, speculation="prompt_lookup", **ALL_OUT)
    assert drafts.decode_tok_per_s == plain.decode_tok_per_s
    rate = drafts.guessing_decode_tok_per_s(0.95)
    assert plain.decode_tok_per_s and rate and plain.decode_tok_per_s < rate < 2.5 * plain.decode_tok_per_s
    # In prefill the experts of all layers but the last cross the link for each chunk
    for step_tokens in (2048, 8192):
        plan = plan_for(gib=24, context=32_768, max_num_batched_tokens=step_tokens, **ALL_OUT)
        link_s = 32_768 / step_tokens * 47 * LAYER_30B * INT4_ON_CPU / link_rate
        by_link, by_flop, by_both = (
            each(plan) for each in (link_prefill_tok_per_s, flop_prefill_tok_per_s, expert_prefill_tok_per_s)
        )
        assert by_link == pytest.approx(32_768 / link_s) and by_link and by_flop and by_both
        assert by_both <= 1.0001 * min(by_link, by_flop)
        assert (by_link < by_flop) == (step_tokens == 2048)
    assert link_prefill_tok_per_s(plan_for(gib=24, context=MAX_CPU_EXPERT_ROWS, **ALL_OUT)) is None


def test_table_and_summary_say_what_is_where_and_why() -> None:
    plan = plan_for(gib=16, enable_expert_offload=True)
    table, cpu, gpu = plan_table(plan), num_cpu_layers(plan), plan.num_gpu_expert_layers
    size = f"{cpu * LAYER_30B * INT4_ON_CPU / GIB:.2f} GiB"
    assert f"  experts {size:>15}  in pinned CPU memory, of {cpu} of 48 layers; the GPU has room for {gpu} " in table
    assert f" {gpu} and the KV of 40,960 tokens" in table and "by the CPU's experts and the GPU in turn" in table
    assert "780.69 MiB  for experts that cross the link: two layers, and single ones" in table
    assert f"of experts by the CPU\n  link{'27.3 GB/s':>19}  PCIe 4 x16, projected\n" in table
    assert f"; experts in CPU memory: {size} of {cpu} of 48 layers; " in plan_summary(plan)
    assert "; KV cache: " in plan_summary(plan) and "CPU pool" not in plan_summary(plan)
    assert "0 are on the GPU, as given" in plan_table(plan_for(gib=16, **ALL_OUT))
    text = plan_table(plan_for(gib=80))
    assert not any(word in text for word in ("experts", "reads", "staging", "CPU memory"))
    assert "0 B  in CPU memory, because all experts fit the GPU" in plan_table(
        plan_for(gib=80, enable_expert_offload=True)
    )


def test_fit_lists_plans_with_experts_in_cpu_memory() -> None:
    (fit,) = fits(Machine.gpu(32 * GIB, find_gpu("RTX 4060")), ["qwen3.5-35b-a3b"], "int4", 32_768)
    assert fit.where == "experts" and not fit.is_resident and fit.plan.model.has_cpu_experts
    check_plan(fit.plan)
    (fit,) = fits(Machine.gpu(32 * GIB, find_gpu("H200")), ["qwen3.5-35b-a3b"], "int4", 32_768)
    assert fit.where == "GPU" and fit.is_resident and not fit.plan.config.enable_expert_offload


# -- what is refused -------------------------------------------------------------------------------------------------


def test_too_little_cpu_memory_is_refused_with_the_numbers() -> None:
    options: dict[str, Any] = {"gib": 24, "enable_expert_offload": True, "format": None}
    with pytest.raises(ConfigError) as error:
        check_start(plan_for(host_gib=40, **options, num_gpu_expert_layers=0))
    assert str(error.value) == (
        "the experts (54.00 GiB of 48 of 48 layers) and the process (2.00 GiB) need 56.00 GiB of CPU memory, but only "
        "40.00 GiB is available; use quantization=int4"
    )
    # More layers fit the GPU than the user asks for
    refused = plan_for(gib=24, host_gib=12, **ALL_OUT)
    with pytest.raises(
        ConfigError, match=r"only 12\.00 GiB is available; raise num_gpu_expert_layers to (\d+)$"
    ) as error:
        check_start(refused)
    number = int(str(error.value).rsplit(" ", 1)[1])
    check_start(plan_for(gib=24, host_gib=12, enable_expert_offload=True, num_gpu_expert_layers=number))
    with pytest.raises(ConfigError, match="leave gpu_expert_memory_gb unset"):
        check_start(plan_for(gib=24, host_gib=12, enable_expert_offload=True, gpu_expert_memory_gb=0))
    # With the pool and the table
    exact = HOST_RESERVE_BYTES + 48 * LAYER_30B * INT4_ON_CPU
    check_start(plan_for(gib=24, host_gib=exact / GIB, **ALL_OUT))
    with pytest.raises(ConfigError, match="the experts"):
        check_start(plan_for(gib=24, host_gib=(exact - 1) / GIB, **ALL_OUT))
    pool: dict[str, Any] = {"enable_cpu_offload": True, "cpu_memory_gb": 4, "embedding_on_cpu": True}
    table = 151_936 * 2048 * 2
    assert plan_for(gib=24, host_gib=64, **pool, **ALL_OUT).host_weight_bytes == exact + table
    with pytest.raises(
        ConfigError, match=r"a CPU pool of .* besides the 17\.\d+ GiB that the experts .*, the embedding"
    ):
        check_start(plan_for(gib=24, host_gib=20, **pool, **ALL_OUT))
    left_open = plan_for(gib=24, host_gib=20, enable_cpu_offload=True, **ALL_OUT)
    check_start(left_open)  # the pool is smaller
    assert left_open.cpu_pool_bytes <= 0.7 * (20 * GIB - exact)


def test_a_gpu_that_is_too_small_for_the_experts_given_is_refused_with_a_number_that_fits() -> None:
    options: dict[str, Any] = {"gib": 12, "enable_expert_offload": True, "max_num_batched_tokens": 2048}
    with pytest.raises(ConfigError, match=r"; lower num_gpu_expert_layers to (\d+), or") as error:
        check_start(plan_for(**options, num_gpu_expert_layers=40))
    number = int(str(error.value).split("num_gpu_expert_layers to ")[1].split(",")[0])
    check_plan(plan_for(**options, num_gpu_expert_layers=number))
    assert number == plan_for(**options).num_gpu_expert_layers


def test_bad_options_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"=True is for mixtures of experts, and qwen3-8b has no"):
        plan_for("qwen3-8b", enable_expert_offload=True)
    with pytest.raises(ConfigError, match=r"num_gpu_expert_layers=49 is more than the 48 layers .*; lower it to 48"):
        plan_for(enable_expert_offload=True, num_gpu_expert_layers=49)
    # Columns that the CPU's kernels cannot read are a reason to leave the experts where they are
    odd = replace(config_without_weights("qwen3-30b-a3b"), hidden_size=2064)
    machine = Machine.gpu(64 * GIB, find_gpu("RTX 4060"))
    with pytest.raises(ConfigError, match=r"(rows|columns) must be a multiple of 32"):
        make_plan(Config(model="m", enable_expert_offload=True), odd, machine)
    assert num_cpu_layers(make_plan(Config(model="m", enable_expert_offload=None), odd, machine)) == 0
    with pytest.raises(ConfigError, match=r"more than the 6\.84 GiB that .*; use quantization=int4|smaller model"):
        check_start(make_plan(Config(model="m"), odd, machine))


def test_memory_that_other_programs_use_is_left_to_them() -> None:
    """Regression: on a GPU that also draws a desktop, a plan placed more than fits, and start-up found few blocks."""
    plain = plan_for(gib=10, enable_expert_offload=True, max_model_len=8192, **SMALL)
    machine = replace(plain.machine, used_gpu_bytes=2 * GIB)
    shared = make_plan(plain.config, config_without_weights("qwen3-30b-a3b").quantized("int4"), machine)
    assert plain.gpu_limit_bytes == 10 * GIB and shared.gpu_limit_bytes == 8 * GIB
    assert shared.fits_gpu and shared.num_gpu_blocks >= 32
    assert num_cpu_layers(shared) >= num_cpu_layers(plain) + 4  # a layer takes 0.3 GiB
    assert "of 8.00 GiB that may be used; 2.00 GiB are in use now" in plan_table(shared)
