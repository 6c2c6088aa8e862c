"""What start-up does on a GPU, gone through on the CPU. CUDA's part is played by fakes that run everything at once."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cpu_runner import NUM_SEQS, HostlessTorch, make_runner
from tiers import tiered
from tiny_models import write_tiny_model
from waiting import wait_until

from nanovllm.attention.base import HostTables, PagedBatch
from nanovllm.capabilities.shadow.memory import Shadow
from nanovllm.checkpoint.model_config import ExpertsConfig
from nanovllm.device import devices
from nanovllm.engine.startup import companion_setups, smallest_sizes
from nanovllm.kernels.state_tensors import LayerStates
from nanovllm.layers import delta_net
from nanovllm.layers.moe import Router
from nanovllm.plan.kv_spec import KVCacheSizes
from nanovllm.plan.step_plan import KVMoves, SamplingRow, SequenceStep, StepPlan, StreamedGroup
from nanovllm.runner import cuda_graphs, measure
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.seams import RankStore

GREEDY = SamplingRow()


class FakeGraph:
    """What is launched in its capture runs at once; a replay runs nothing."""

    def __init__(self) -> None:
        self.num_replays, self.is_reset = 0, False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self.num_replays += 1

    def reset(self) -> None:
        self.is_reset = True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=4, max_position_embeddings=2048)


@pytest.fixture(params=[0, 20], ids=["all-GPU", "offload"])
def num_cpu_blocks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: dict[str, Any] = {
        "CUDAGraph": FakeGraph,
        "graph_pool_handle": object,
        "synchronize": lambda: None,
        "stream": nullcontext,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (79 * 2**30, 80 * 2**30),
        "reset_peak_memory_stats": lambda: None,
        "memory_reserved": lambda: 2**20,
        "max_memory_reserved": lambda: 2 * 2**20,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda_graphs, "capture_stream", lambda device: None)


@pytest.fixture
def runner(model: Path, num_cpu_blocks: int, fake_cuda: None) -> ModelRunner:
    runner = make_runner(model, num_cpu_blocks, dtype="float32")
    runner.backend = HostlessTorch()
    return runner


class NotingTorch(HostlessTorch):
    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def attend(self, *args: Any) -> Any:
        self.notes.append("attention")
        return super().attend(*args)


def decode_plan(streamed: tuple[StreamedGroup, ...], num_rows: int = 3) -> StepPlan:
    steps = tuple(
        SequenceStep(
            seq_id=row,
            token_ids=np.ones(1, dtype=np.int64),
            position=9,
            num_prompt_tokens=9,
            block_table=(row,),
            num_paged_keys=10,
            sampling=GREEDY,
        )
        for row in range(num_rows)
    )
    return StepPlan(steps, KVMoves(streamed=streamed))


def test_profile_memory_runs_everything_and_leaves_nothing(
    runner: ModelRunner, num_cpu_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("nanovllm.kernels.launch.compile_only", lambda server: nullcontext(lambda: False))
    profile = measure.profile_memory(runner, num_cpu_blocks, NUM_SEQS, [])
    assert profile.used_bytes == 2**30 and profile.step_bytes == 2**20 and profile.graph_bytes > 0
    assert list(runner.phases.seconds) == ["weights", "KV cache", "kernels", "largest step", "graphs"]
    assert not runner.graphs.kinds
    if num_cpu_blocks:
        assert not hasattr(runner.offload, "k_cache_gpu")
    else:
        assert runner.memory.cache[0].numel() == 0
    runner.allocate_kv_cache(KVCacheSizes(NUM_SEQS, num_cpu_blocks))
    assert runner.memory.cache[0].shape[1] == NUM_SEQS
    runner.close()


COMPANIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the model and of the engine
    "states": ({"architecture": "qwen3_5"}, {}),
    "states and a draft head": ({"architecture": "qwen3_5", "with_mtp": True}, {"speculation": "mtp"}),
    "shadow": ({}, {"speculation": "shadow"}),
}


def attend_to_static_pages(shadow: Shadow, layer: int, q_BHD: torch.Tensor, batch: PagedBatch, *args: Any) -> Any:
    """On a CPU the shadow needs sizes that the host knows."""
    tables = HostTables([1] * len(q_BHD), batch.context_lens.tolist(), batch.block_tables.tolist())
    return SHADOW_ATTEND(shadow, layer, q_BHD, replace(batch, host=tables), *args)


def pass_of_static_rows(qkv: torch.Tensor, z: torch.Tensor, ba: torch.Tensor, states: LayerStates, *args: Any) -> Any:
    """Likewise the recurrent layers, whose values do not matter here."""
    return DELTA_NET(qkv, z, ba, states, *args) if states.rows.host is not None else torch.zeros_like(z)


SHADOW_ATTEND, DELTA_NET = Shadow.attend, delta_net.delta_net


@pytest.mark.parametrize("kind", tiered(COMPANIONS, ("states and a draft head", "shadow")))
def test_profile_memory_releases_companions_and_their_drafts_by_counting_references(
    kind: str, num_cpu_blocks: int, fake_cuda: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that something still refers to would count as used, and the KV cache would be smaller by as much."""
    pytest.importorskip("triton")
    if kind == "shadow" and not num_cpu_blocks:
        pytest.skip("a shadow needs offload")
    model_options, options = COMPANIONS[kind]
    model = write_tiny_model(tmp_path, num_layers=4, max_position_embeddings=2048, **model_options)
    monkeypatch.setattr("nanovllm.kernels.launch.compile_only", lambda server: nullcontext(lambda: False))
    monkeypatch.setattr(Shadow, "launch_kernels", lambda *args: None)
    monkeypatch.setattr(Shadow, "attend", attend_to_static_pages)
    monkeypatch.setattr(delta_net, "delta_net", pass_of_static_rows)
    runner = make_runner(model, num_cpu_blocks, dtype="float32", **options)
    runner.backend = HostlessTorch()
    sizes = smallest_sizes(runner.spec, num_cpu_blocks, shadow_bits=4 if kind == "shadow" else 0)
    allocated: list[weakref.ref[Any]] = []
    make_graphs = runner.make_graphs

    def noting_make_graphs(num_gpu_blocks: int) -> Any:
        graphs = make_graphs(num_gpu_blocks)
        drafts = runner.steps.drafts
        allocated.extend(map(weakref.ref, (*runner.memory.companions, drafts, graphs, graphs.buffers)))
        return graphs

    monkeypatch.setattr(runner, "make_graphs", noting_make_graphs)
    gc.collect()
    gc.disable()
    try:
        profile = measure.profile_memory(runner, num_cpu_blocks, NUM_SEQS, companion_setups(runner.spec, sizes))
        assert profile.graph_bytes > 0 and len(allocated) >= 8
        assert [each() for each in allocated] == [None] * len(allocated)
    finally:
        gc.enable()
    runner.close()


def test_moves_of_a_store_begin_on_the_device_of_the_rank(
    runner: ModelRunner, num_cpu_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store waits for the stream that is current. A thread may have made another one current, or another GPU."""
    current: list[torch.device] = []
    submitted: list[str] = []

    @contextmanager
    def noting(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Store(RankStore):
        def submit(self, moves: Any) -> None:
            assert current == [runner.device]
            submitted.append(moves)

    monkeypatch.setattr(devices, "current_device", noting)
    runner.store = Store()
    runner.move("moves")
    assert submitted == ["moves"] and not current


def test_product_rows_go_from_the_longest_step_down_to_two() -> None:
    assert measure.product_rows(16) == [16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2]
    assert measure.product_rows(1) == []
    rows = measure.product_rows(16_384)
    assert rows[0] == 16_384 and rows[-1] == 2 and max(a / b for a, b in pairwise(rows[:-8])) <= 1.25


def test_graphs_hold_all_layers_and_only_two_are_launched_before(
    runner: ModelRunner, num_cpu_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: all layers were launched before each capture, which took half of the time of the captures."""
    notes: list[str] = []
    monkeypatch.setattr(FakeGraph, "capture_begin", lambda graph, **options: notes.append("begin"))
    monkeypatch.setattr(FakeGraph, "capture_end", lambda graph: notes.append("end"))
    runner.backend = NotingTorch(notes)
    runner.allocate_kv_cache(KVCacheSizes(NUM_SEQS, num_cpu_blocks))
    graphs = runner.make_graphs(NUM_SEQS)
    num_layers = runner.spec.num_layers
    num_groups = runner.spec.staging.num_groups
    for kind in graphs.kinds:
        notes.clear()
        with torch.inference_mode():
            kind.capture(runner.model, kind.sizes[-1:], show_progress=False)
        before = notes[: notes.index("begin")].count("attention")
        num_calls = 2 if kind is graphs.mixed else 1  # in each layer: mixed graphs attend to rows and to chunks
        others = num_groups if kind.name == "streamed" else 0
        assert before == 2 * num_calls + others
        assert notes.count("attention") == before + num_layers * num_calls + others
    runner.close()


def test_captured_graphs_are_replayed_and_reset(runner: ModelRunner, num_cpu_blocks: int) -> None:
    """A streamed size has a piece for each layer and one more, a graph for each staging buffer, and one for the CPU's
    part.
    """
    runner.allocate_kv_cache(KVCacheSizes(NUM_SEQS, num_cpu_blocks))
    with torch.inference_mode():
        runner.capture_graphs(NUM_SEQS)
    graphs: Any = runner.graphs
    num_pieces = runner.spec.num_layers + 1
    captured = {kind.name: {size: len(some) for size, some in kind._graphs.items()} for kind in graphs.kinds}
    expected = {"resident": dict.fromkeys((5, 4, 2, 1), 1), "mixed": dict.fromkeys(graphs.mixed.sizes, 1)}
    if num_cpu_blocks:
        expected["streamed"] = dict.fromkeys((5, 4, 1), num_pieces + runner.spec.staging.num_groups + 1)
    assert captured == expected and list(captured["resident"]) == [5, 4, 2, 1]  # the largest first
    resident = graphs.kinds[0]._graphs
    for num_rows in range(1, 6):  # 5 is the largest step
        runner.launch(decode_plan((), num_rows))
    assert {size: graph.num_replays for size, (graph,) in resident.items()} == {5: 1, 4: 2, 2: 1, 1: 1}
    if num_cpu_blocks:
        groups = tuple(StreamedGroup((i,), ((0,), (), (0,))) for i in range(2))
        runner.launch(decode_plan(groups))
        pieces = graphs.kinds[1]._graphs[4]
        num_layers = runner.spec.num_layers
        assert [graph.num_replays for graph in pieces[:num_pieces]] == [1] * num_pieces
        assert sum(graph.num_replays for graph in pieces[num_pieces:]) == 2 * num_layers
    all_graphs = [graph for kind in graphs.kinds for some in kind._graphs.values() for graph in some]
    runner.close()
    assert all(graph.is_reset for graph in all_graphs) and not runner.graphs.kinds


def test_warm_up_multiplies_by_the_router_as_a_step_does() -> None:
    """Regression: its results were in 16 bits, like those of other weights. A step wants fp32, for which cuBLAS has
    kernels of its own.
    """

    class RecordingRouter(Router):
        num_rows: ClassVar[list[int]] = []

        def product_of_many(self, x: torch.Tensor) -> torch.Tensor:
            self.num_rows.append(len(x))
            return super().product_of_many(x)

    experts = ExpertsConfig(
        num_experts=4, num_experts_per_token=2, intermediate_size=16, norm_topk_prob=True, layers=(0, 1)
    )
    layers = torch.nn.ModuleList(RecordingRouter(16, experts, torch.bfloat16) for _ in range(2))
    device, decoder = torch.device("cpu"), SimpleNamespace(layers=layers)
    model: Any = SimpleNamespace(dtype=torch.bfloat16, device=device, model=decoder, mtp=None)
    with measure.warm_up_products(model, num_tokens=8):
        wait_until(lambda: RecordingRouter.num_rows == measure.product_rows(8))
