"""Which kernels start-up finds, and in which order. Nothing is compiled: launches on CPU tensors are only noted."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_runner import BLOCK, NUM_SEQS, NUM_TOKENS, make_runner
from gguf_files import write_gguf
from staged_experts import pack_on_cpu
from tiny_models import write_tiny_model

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.capabilities.cpu_experts.job import EXCHANGE_SIZE
from nanovllm.capabilities.cpu_experts.layer import RankExperts
from nanovllm.capabilities.cpu_experts.link import ExpertLink
from nanovllm.capabilities.cpu_experts.staging import ExpertStaging
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.config import Config
from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KNOWN_TARGETS
from nanovllm.engine.startup import companion_setups
from nanovllm.kernels import gguf_pack, launch, quantizing
from nanovllm.kernels.expert_exchange import ExchangedRows
from nanovllm.layers import linear
from nanovllm.layers.packed_weight import MAX_BLOCK_ROWS, PackedWeight
from nanovllm.offload.streams import make_streams
from nanovllm.plan.kv_spec import KVCacheSizes
from nanovllm.plan.step_plan import KVMoves, StepPlan
from nanovllm.runner import measure
from nanovllm.runner.measure import largest_steps, short_steps
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.arithmetic import ceil_div


@pytest.fixture(autouse=True)
def memory_that_no_kernel_writes_is_filled() -> Iterator[None]:
    """Fill new memory with NaN and the largest integers, because on a GPU it may contain anything."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(directory, num_layers=4, head_dim=64, max_position_embeddings=2048)


@pytest.fixture(params=[0, 20], ids=["all-GPU", "offload"])
def runner(request: pytest.FixtureRequest, model: Path) -> Iterator[ModelRunner]:
    with launching_runner(model, KVCacheSizes(1, request.param)) as runner:
        yield runner


@contextmanager
def launching_runner(model: Path, sizes: KVCacheSizes, **options: Any) -> Iterator[ModelRunner]:
    """Its layers believe that the tensors are on a GPU, and launch kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_pack, "pack_blocks", lambda *_: None)  # launched while the weights are loaded
        runner = make_runner(model, sizes.num_cpu_blocks, dtype="bfloat16", cpu_attention="off", **options)
    runner.backend = TritonBackend()
    runner.allocate_kv_cache(sizes, companion_setups(runner.spec, sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: _caller().startswith("nanovllm.layers.")))
        patch.setattr(kernel_target, "target_of", lambda device: KNOWN_TARGETS["9.0"])
        patch.setattr(torch, "mm", partial(_mm, torch.mm))
        with torch.inference_mode():
            yield runner
    runner.close()


def _mm(mm: Any, x: torch.Tensor, weight: torch.Tensor, out_dtype: Any = None, **options: Any) -> torch.Tensor:
    """torch.mm, which has no `out_dtype` on a CPU."""
    result: torch.Tensor = mm(x, weight, **options)
    return result if out_dtype is None else result.to(out_dtype)


def _caller() -> str:
    """The name of the module that reads the property."""
    return str(sys._getframe(2).f_globals["__name__"])


def kind_of(arg: Any, param: Any) -> Any:
    """What Triton specialises on, of an argument of a kernel."""
    if param.do_not_specialize or (param.do_not_specialize_on_alignment and isinstance(arg, torch.Tensor)):
        return arg.dtype if isinstance(arg, torch.Tensor) else type(arg)
    return float if isinstance(arg, float) else launch._kind(arg)


def launched(run: Callable[[], object]) -> list[Any]:
    """The kernels that `run` launches, each with what Triton specialises on, in the order of their first launches."""
    kernels: dict[Any, None] = {}

    def note(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        kinds = (kind_of(arg, param) for arg, param in zip(args, kernel.params, strict=False))
        kernels[(kernel.fn.__name__, *kinds, *sorted(options.items()))] = None

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(JITFunction, "warmup", note)
        with launch.compiling_in(threads, None):
            run()
    return list(kernels)


def steps_of(runner: ModelRunner) -> list[StepPlan]:
    limits = {
        "max_num_seqs": NUM_SEQS,
        "max_model_len": runner.max_model_len,
        "block_size": BLOCK,
        "group_blocks": runner.spec.staging_group_blocks if runner.offload is not None else 0,
    }
    return [*largest_steps(num_tokens=NUM_TOKENS, **limits), *short_steps(**limits)]


@pytest.mark.parametrize("num_cpu_blocks", [0, 20])
def test_the_draft_head_launches_only_kernels_that_start_up_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cpu_blocks: int
) -> None:
    """While nothing is computed, it reads arbitrary token ids."""
    model = write_tiny_model(tmp_path, "qwen3_5", head_dim=64, max_position_embeddings=2048, with_mtp=True)
    sizes, options = KVCacheSizes(1, num_cpu_blocks, num_state_slots=1), {"speculation": "mtp"}
    with launching_runner(model, sizes, **options) as runner:
        monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
        found = launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
        runner.steps._sampled_ids = torch.full((8,), 2**40)
        needed = launched(lambda: measure.measure_drafts(runner))
        assert len(needed) > 5 and set(needed) <= set(found)


def test_experts_of_any_number_of_tokens_launch_only_kernels_that_start_up_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: prompts of a length between those of start-up's steps waited for tiles of another size."""
    model = write_tiny_model(tmp_path, "qwen3_5_moe", head_dim=64, max_position_embeddings=2048)
    with launching_runner(model, KVCacheSizes(1, num_state_slots=1)) as runner:
        monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
        found = launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
        for num_tokens in (20, 47, 100, 299):
            (step,) = measure._sequences((num_tokens,), runner.max_model_len, BLOCK)
            assert set(launched(lambda step=step: runner.launch(StepPlan((step,), KVMoves())))) <= set(found)


@pytest.mark.parametrize(("name", "max_model_len"), [("int4", 2048), ("int4", 100), ("fp8", 2048)])
def test_packed_weights_launch_only_kernels_that_start_up_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, max_model_len: int
) -> None:
    """Some are narrow and have enough columns for parts. In fp8, cuBLAS multiplies the codes of many rows; in int4, v
    has 6 bits, which are unpacked for fewer rows. Short prompts make a step together.
    """

    def new_weight(
        part_sizes: Sequence[int], num_columns: int, *, quantization: Quantization, **_: Any
    ) -> PackedWeight:
        return PackedWeight(part_sizes, num_columns, quantization, multiplies_codes=name == "fp8")

    def product_of_codes(weight: PackedWeight, codes: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros(len(codes), weight.shape[0], dtype=torch.bfloat16)

    monkeypatch.setattr(linear, "new_weight", new_weight)
    monkeypatch.setattr(linear, "packed_format", lambda quantization, *_: quantization)
    monkeypatch.setattr(PackedWeight, "product_of_codes", product_of_codes)
    monkeypatch.setattr(quantizing, "quantize_weight", lambda *_: None)  # launched while the weights are loaded
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 1024, "head_dim": 64}
    model = write_tiny_model(tmp_path, max_position_embeddings=2048, **sizes)
    with launching_runner(model, KVCacheSizes(1), quantization=name, max_model_len=max_model_len) as runner:
        monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
        found = launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
        assert "sum_parts_kernel" in {kernel[0] for kernel in found}
        for num_tokens in (10, 20, 47, 100, 200, 300):
            lengths = measure._lengths(num_tokens, ceil_div(num_tokens, max_model_len), max_model_len)
            plan = StepPlan(measure._sequences(lengths, max_model_len, BLOCK), KVMoves())
            needed = launched(lambda plan=plan: runner.launch(plan))
            many = "_quantize_kernel" if name == "fp8" else "_unpack_kernel"
            names = {kernel[0] for kernel in needed}
            assert (many in names) == (num_tokens > (64 if name == "fp8" else MAX_BLOCK_ROWS[6]))
            fused = {"_rms_norm_and_quantize_kernel", "_act_and_quantize_kernel"}
            assert fused & names == (fused if name == "fp8" and num_tokens > 64 else set())
            assert set(needed) <= set(found)


def test_layers_of_several_types_launch_only_kernels_that_start_up_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start-up runs one layer of each kind. Here four layers in a row have the types of a GGUF file in other places."""

    def packed_format(quantization: Quantization | None, *sizes: int) -> Quantization | None:
        return quantization if quantization is not None and quantization.stays_packed(*sizes) else None

    monkeypatch.setattr(linear, "packed_format", packed_format)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 64, "num_layers": 5}
    directory = write_tiny_model(tmp_path / "model", max_position_embeddings=2048, **sizes)
    model = write_gguf(tmp_path / "model.gguf", directory, types=["Q4_K", "Q6_K", "Q8_0"])
    with launching_runner(model, KVCacheSizes(1)) as runner:
        monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
        found = launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
        for num_tokens in (1, 20, 47, 100, 200, 300):
            plan = StepPlan(measure._sequences((num_tokens,), 2048, BLOCK), KVMoves())
            needed = launched(lambda plan=plan: runner.launch(plan))
            assert "_unpack_kernel" in {kernel[0] for kernel in needed}  # which also reads the embedding table
            assert set(needed) <= set(found)


def test_any_number_of_sampled_rows_launches_a_kernel_of_the_quantized_head_that_start_up_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs, no step of start-up samples a few rows only."""

    monkeypatch.setattr(linear, "packed_format", lambda quantization, *sizes: quantization)
    model = write_tiny_model(tmp_path, hidden_size=128, head_dim=64, max_position_embeddings=2048)
    options: dict[str, Any] = {"quantize_head": "int8", "enforce_eager": True}
    with launching_runner(model, KVCacheSizes(1), **options) as runner:
        monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
        found = launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
        found_for_all = launched(lambda: measure.launch_head(runner.model, 512))
        for num_rows in (*range(1, 35), 63, 64, 65, 100, 128, 129, 200, 256):
            hidden = torch.zeros(num_rows, 128, dtype=torch.bfloat16)
            needed = launched(lambda hidden=hidden: runner.model.compute_logits(hidden))
            assert len(needed) == 1 and set(needed) <= set(found if num_rows <= NUM_SEQS else found_for_all)


def test_any_number_of_rows_is_quantized_by_the_same_kernel() -> None:
    """The stride of their scales depends on it, and no request must wait for another kernel."""
    rows = (torch.zeros(num_rows, 256, dtype=torch.bfloat16) for num_rows in (1, 65, 80, 299))
    found = [launched(lambda x=x: quantizing.quantize_rows(x, 128)) for x in rows]
    assert len(found[0]) == 1 and all(each == found[0] for each in found)


def launch_steps_and_graphs(runner: ModelRunner) -> None:
    for plan in steps_of(runner):
        runner.launch(plan)
    graphs = runner.make_graphs(NUM_SEQS)
    graphs.launch_kernels()
    for size in graphs.mixed.sizes:
        graphs.mixed.launch_kernels(runner.model, size)
    runner.reset_graphs()


def test_first_and_last_layer_launch_the_kernels_of_all_layers(runner: ModelRunner) -> None:
    whole = launched(lambda: launch_steps_and_graphs(runner))
    with runner.model.skipping_inner_layers():
        some = launched(lambda: launch_steps_and_graphs(runner))
    assert len(whole) > 15 and set(some) == set(whole)


def test_kernels_that_take_longest_to_compile_are_launched_first(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the variants for prefill came last, so that nothing else was left to compile beside them."""
    monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
    found = launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
    names = [kernel[0] for kernel in found]
    assert len(names) > 15
    assert {"_redraw_kernel", "_prefill_kernel"} <= set(names[: names.index("_rms_norm_kernel")])
    assert not {"_redraw_kernel", "_prefill_kernel"} & set(names[names.index("_rms_norm_kernel") :])


def test_short_steps_are_launched_before_long_ones(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: most kernels were known only once cuDNN, which long steps need, had been initialised for a second."""
    steps = steps_of(runner)
    longest = [plan for plan in steps if plan.has_scores]
    lens: list[int] = []

    def note(plan: StepPlan) -> Any:
        lens.append(plan.sequences[-1].num_tokens)
        return run(plan)

    run = runner.launch
    monkeypatch.setattr(runner, "launch", note)
    monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
    launched(lambda: measure._compile_kernels(runner, longest, NUM_SEQS))
    assert longest and lens[-1] == NUM_TOKENS and set(lens[:-1]) >= {2, 4, 8, 16}


@pytest.mark.parametrize("is_compiling", [False, True])
def test_plans_are_built_for_the_longest_chunks_while_kernels_are_compiled(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, is_compiling: bool
) -> None:
    asked: list[tuple[int, int, bool]] = []

    def build_plans(query: torch.Tensor, num_kv_heads: int, *lens: int, has_time: Callable[[], bool]) -> None:
        asked.append((*lens, has_time()))

    monkeypatch.setattr(runner.backend, "build_plans", build_plans)
    monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: is_compiling))
    launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
    assert asked == [(NUM_TOKENS, runner.max_model_len, is_compiling)]


def test_nothing_is_launched_before_triton_is_prepared(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    prepared: Any = SimpleNamespace(wait=lambda: events.append("prepared"))
    monkeypatch.setattr(runner, "triton_start", prepared)
    monkeypatch.setattr(measure, "launch_sampler", lambda model: events.append("launched"))
    monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
    launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
    assert events == ["prepared", "launched"]


class ExchangingExperts(RankExperts):
    """Experts that rows are sent to and received from, and that are streamed, as on a GPU."""

    def start(self, config: Config) -> None:
        super().start(config)
        job, numbers = self.job, torch.zeros(EXCHANGE_SIZE, dtype=torch.int32)
        self._exchange = numbers
        self._rows = ExchangedRows(job.x, job.experts, job.weights, job.out, numbers, numbers)
        self.staging = ExpertStaging(self.store.layers, self._gpu_experts, make_streams(self.device))
        self.link = ExpertLink(self.store.layers, self._gpu_experts, make_streams(self.device), share=128)
        self.is_gpu, self.max_rows = True, 4


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param("qwen3_moe", "", marks=pytest.mark.slow), ("qwen3_moe", "Q4_K Q6_K Q8_0"), ("gpt_oss", "")],
)
def test_experts_in_cpu_memory_launch_only_kernels_that_start_up_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """Start-up runs one layer of each kind, and the last one. The formats of the other layers are other ones."""
    pack_on_cpu(monkeypatch)
    few_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    experts = few_experts if kind == "qwen3_moe" else None
    sizes: dict[str, Any] = {"num_layers": 5, "hidden_size": 256, "head_dim": 64, "max_position_embeddings": 2048}
    model = write_tiny_model(tmp_path / "x", kind, experts=experts, **sizes)
    if name:
        model = write_gguf(tmp_path / "x.gguf", model, types=name.split())
    options = {"enable_expert_offload": True, "num_gpu_expert_layers": 1, "make_cpu_experts": ExchangingExperts}
    slots = KVCacheSizes(1, num_state_slots=int(kind == "gpt_oss"))  # one for the windows
    with launching_runner(model, slots, **options) as runner:
        monkeypatch.setattr(launch, "compile_only", lambda server: nullcontext(lambda: False))
        found = launched(lambda: measure._compile_kernels(runner, steps_of(runner), NUM_SEQS))
        for num_tokens in (1, 2, 3, 4, 5, 8, 20, 47, 64, 100, 200, 300):
            plan = StepPlan(measure._sequences((num_tokens,), 2048, BLOCK), KVMoves())
            needed = launched(lambda plan=plan: runner.launch(plan))
            exchanges = {"_send_kernel", "_receive_kernel", "_divide_kernel"} & {kernel[0] for kernel in needed}
            assert len(exchanges) == (3 if num_tokens <= 4 else 0)  # more tokens stream experts
            assert set(needed) <= set(found)
