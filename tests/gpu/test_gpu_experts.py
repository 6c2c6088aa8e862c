"""Experts in CPU memory on a GPU: computed by the CPU inside graphs, and streamed for steps with many rows.

fp32 answers are compared, logit by logit, with transformers on the CPU (checked_engine.Reference). Simulated streams
and Triton's interpreter are in tests/capabilities/cpu_experts and tests/kernels.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import Reference, cache_options, greedy
from cpu_splits import splitting
from dense_model import random_prompt
from gguf_files import write_gguf
from gpu_llm import GpuLLM
from odd_drafters import drafter_of
from offload_workload import BLOCK, prompts_of, serve_everything
from plain_head import let_head_agree
from quantized_models import FORMATS, write_quantized
from staged_experts import load_experts, make_staging
from tiny_models import EXPERTS, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.capabilities.cpu_experts.job import ExpertJob
from nanovllm.capabilities.cpu_experts.layer import CpuExperts, RankExperts
from nanovllm.capabilities.cpu_experts.staging import ExpertStaging
from nanovllm.engine.setup import Internals
from nanovllm.offload.streams import CudaStream, CudaStreams, Event

pytestmark = pytest.mark.gpu

NONE = {"enable_expert_offload": True, "num_gpu_expert_layers": 0}  # all experts are in CPU memory
HALF = {"enable_expert_offload": True, "num_gpu_expert_layers": 2}
PLACEMENTS = pytest.mark.parametrize("placement", [{}, NONE, HALF], ids=["gpu", "none", "half"])
CACHES = pytest.mark.parametrize("num_gpu_blocks", [None, 3], ids=["all-GPU", "streamed"])
SIZES: dict[str, Any] = {"num_layers": 4, "max_position_embeddings": 8192}
PROMPTS = prompts_of(3 * BLOCK - 5, 40, 1, 2 * BLOCK)
MOST = 64  # rows of a step that the CPU computes
MTP: dict[str, Any] = {"speculation": "mtp", "num_speculative_tokens": 4}


def computing(max_rows: int, **others: Any) -> Internals:
    """The CPU computes steps of up to so many rows, whatever is faster."""
    return Internals(max_cpu_expert_rows=max_rows, **others)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    experts = EXPERTS | {"moe_intermediate_size": 64}  # for two ranks
    return Reference(write_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", experts=experts, **SIZES))


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Recurrent layers, a shared expert, and a draft head that is often right."""
    directory, experts = tmp_path_factory.mktemp("head"), EXPERTS | {"moe_intermediate_size": 64}
    path = write_tiny_model(directory, "qwen3_5_moe", experts=experts, with_mtp=True, **SIZES)
    return Reference(let_head_agree(path, 0.003))


def rank_of(llm: LLM) -> RankExperts:
    rank = llm.runner.model.cpu_experts
    assert isinstance(rank, RankExperts)
    return rank


# -- the right tokens --------------------------------------------------------------------------------------------------


@PLACEMENTS
@CACHES
@pytest.mark.parametrize(("enforce_eager", "link_share"), [(False, 0), (True, 0), (False, 100)])
def test_experts_anywhere_give_the_tokens_of_transformers(
    mixture: Reference, placement: dict[str, Any], num_gpu_blocks: int | None, enforce_eager: bool, link_share: int
) -> None:
    """Prompts are streamed, answers are computed by the CPU. Hits, preemption, an abort."""
    options = cache_options(num_gpu_blocks) | placement
    internals = computing(MOST, expert_link_share=link_share)
    with GpuLLM(mixture, internals=internals, enforce_eager=enforce_eager, **options) as llm:
        on_cpu = [isinstance(layer.mlp.experts, CpuExperts) for layer in llm.runner.model.model.layers]
        assert sum(on_cpu) == (4 - placement["num_gpu_expert_layers"] if placement else 0)
        serve_everything(llm)
        stats = llm.stats()
        if placement:
            assert stats["num_cpu_computed_layers"] > 10
            assert stats["expert_link_share"] == link_share / 256
            num_streamed = stats["num_streamed_expert_layers"]
            assert num_streamed > 4 if placement == NONE else num_streamed == 2  # two layers stay in the two buffers
        assert (llm.num_replays["resident" if num_gpu_blocks is None else "streamed"] > 3) != enforce_eager


def test_graphs_of_one_to_64_rows_and_padding(mixture: Reference) -> None:
    """Requests that end one after the other, so that steps have all numbers of rows."""
    options = cache_options(None) | NONE | {"max_num_seqs": MOST, "num_kvcache_blocks": 80, "speculation": "off"}
    with GpuLLM(mixture, internals=computing(MOST), **options) as llm:
        assert llm.runner.graphs.kinds[0].sizes[-1] == MOST
        prompts = [random_prompt(1 + i % 5, seed=i) for i in range(MOST)]
        ids = [llm.add_request(prompt, greedy(2 + i)) for i, prompt in enumerate(prompts)]
        finished = llm.finish_all()
        for request_id, prompt in zip(ids, prompts, strict=True):
            llm.check(request_id, prompt, finished[request_id])
        assert llm.num_replays["resident"] > 50
        assert {len(plan.sequences) for plan in llm.plans} >= set(range(2, MOST))


@pytest.mark.parametrize("max_rows", [1, 4])
def test_longer_steps_stream_experts_without_graphs(mixture: Reference, max_rows: int) -> None:
    options = cache_options(None) | NONE | {"max_num_seqs": 8, "speculation": "off"}
    with GpuLLM(mixture, internals=computing(max_rows), **options) as llm:
        assert llm.runner.graphs.kinds[0].sizes[-1] == llm.stats()["max_cpu_expert_rows"] == max_rows
        llm.answer_and_check(prompts_of(3, 4, 5, 6, 7, 300), max_tokens=8)
        before = llm.stats()
        llm.answer_and_check(prompts_of(2), max_tokens=8)
        assert llm.stats()["num_cpu_computed_layers"] > before["num_cpu_computed_layers"]


def test_measured_number_of_rows(mixture: Reference) -> None:
    with GpuLLM(mixture, **cache_options(None) | NONE) as llm:
        num_rows = llm.stats()["max_cpu_expert_rows"]
        assert 1 <= num_rows <= MOST and num_rows & (num_rows - 1) == 0
        llm.answer_and_check(PROMPTS, max_tokens=8)


@pytest.mark.parametrize("num_tokens", [1, BLOCK + 1, 2**40])
def test_the_cpu_attends_and_computes_experts(mixture: Reference, num_tokens: int) -> None:
    """The same threads do both, in streamed graphs."""
    options = cache_options(2) | NONE | {"cpu_attention": "on"}
    internals = computing(MOST, cpu_split=splitting(num_tokens).cpu_split)
    with GpuLLM(mixture, internals=internals, **options) as llm:
        assert llm.runner.memory.cpu.kernel is rank_of(llm).kernel
        llm.answer_and_check(PROMPTS, max_tokens=12)
        assert any(any(plan.moves.cpu_spans) for plan in llm.plans) and llm.num_replays["streamed"] > 8


@CACHES
@pytest.mark.parametrize("max_rows", [8, MOST])
def test_steps_that_verify_many_draft_tokens(mixture: Reference, num_gpu_blocks: int | None, max_rows: int) -> None:
    """Up to 64 rows of one sequence, right and wrong. With 8, most of these steps stream experts."""
    with GpuLLM(mixture, **cache_options(None)) as llm:
        answers = [output["token_ids"] for output in llm.answer_and_check(PROMPTS, max_tokens=70)]
    drafter = drafter_of("mixed", PROMPTS, answers)
    internals = computing(max_rows, drafters=(drafter,), always_guesses=True)
    options = cache_options(num_gpu_blocks) | NONE | {"speculation": "auto", "num_speculative_tokens": 63}
    with GpuLLM(mixture, internals=internals, **options) as llm:
        llm.answer_and_check(PROMPTS[:1], max_tokens=70)
        llm.answer_and_check(PROMPTS, max_tokens=70)
        assert max(plan.num_tokens for plan in llm.plans if plan.has_guesses and plan.is_decode) == 64
        assert llm.stats()["num_accepted_guesses"] > 20


@CACHES
@pytest.mark.parametrize("max_rows", [2, MOST])
def test_draft_head_with_experts_in_cpu_memory(with_head: Reference, num_gpu_blocks: int | None, max_rows: int) -> None:
    """It drafts what it drafts with its experts on the GPU."""
    found = []
    for placement in ({}, NONE):
        options = cache_options(num_gpu_blocks) | placement | MTP
        internals = computing(max_rows, always_guesses=True, works_ahead=True)
        with GpuLLM(with_head, internals=internals, **options) as llm:
            llm.answer_and_check(PROMPTS, max_tokens=30)
            stats = llm.stats()
            found.append((stats["num_guesses"], stats["num_accepted_guesses"]))
    (num_guesses, num_accepted), (num_cpu_guesses, num_cpu_accepted) = found
    assert num_accepted > 20 and abs(num_accepted - num_cpu_accepted) <= 0.1 * num_accepted
    assert abs(num_guesses - num_cpu_guesses) <= 0.1 * num_guesses


@pytest.mark.parametrize("speculation", ["prompt_lookup", "resident", "shadow"])
def test_drafters(mixture: Reference, speculation: str) -> None:
    options = cache_options(3) | NONE | {"speculation": speculation}
    with GpuLLM(mixture, internals=computing(MOST, always_guesses=True), **options) as llm:
        llm.answer_and_check([PROMPTS[0] + PROMPTS[0][:300], *PROMPTS[1:]], max_tokens=40)
        assert llm.stats()["num_guesses"] > 0


@pytest.mark.multi_gpu
@CACHES
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_two_ranks(with_head: Reference, num_gpu_blocks: int | None, enforce_eager: bool) -> None:
    options = cache_options(num_gpu_blocks) | NONE | MTP | {"tensor_parallel_size": 2}
    internals = computing(MOST, always_guesses=True)
    with GpuLLM(with_head, internals=internals, enforce_eager=enforce_eager, **options) as llm:
        serve_everything(llm)
        assert llm.stats()["num_streamed_expert_layers"] > 4
    with GpuLLM(with_head, **options) as llm:  # all ranks take the same measured number of rows
        llm.answer_and_check(PROMPTS, max_tokens=8)


# -- formats -----------------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "num_layers": 3}
WIDE_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    return write_tiny_model(directory, "qwen3_moe", experts=WIDE_EXPERTS, max_position_embeddings=2048, **WIDE)


@pytest.mark.parametrize("name", ["awq", "gptq dynamic", "fp8 blocks", "packed 4", "Q4_K Q6_K", "Q8_0 IQ4_XS Q5_K"])
def test_quantized_checkpoints_give_the_tokens_of_their_values(wide: Path, tmp_path: Path, name: str) -> None:
    """In fp32. Formats differ between layers, which take turns in the buffers."""
    if name in FORMATS:
        path, values = write_quantized(wide, tmp_path, name)
    else:
        values = tmp_path / "values"
        path = write_gguf(tmp_path / "x.gguf", wide, types=name.split(), same_values=values)
    reference = Reference(values)
    reference.directory = path
    # With 40 tokens instead of 50, logits are 9e-5 off for Q8_0 IQ4_XS Q5_K, also with all experts on the GPU
    prompts = prompts_of(3 * BLOCK - 5, 50, 1, 2 * BLOCK)
    for max_rows, link_share in ((2, 0), (MOST, 0), (MOST, 128)):
        internals = computing(max_rows, expert_link_share=link_share)
        with GpuLLM(reference, internals=internals, **cache_options(None) | NONE) as llm:
            llm.answer_and_check(prompts, max_tokens=8)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
def test_place_of_the_experts_changes_no_token(wide: Path, quantization: str | None, load_format: str) -> None:
    """In fp32, in which the order of sums hardly matters."""
    answers = []
    for placement in ({}, NONE, NONE | {"num_gpu_expert_layers": 1}):
        options: dict[str, Any] = {"dtype": "float32", "load_format": load_format, "max_num_seqs": 6}
        options |= cache_options(None) | placement | {"quantization": quantization}
        with LLM(str(wide), device="cuda", skip_tokenizer_init=True, internals=computing(MOST), **options) as llm:
            answers.append([each["token_ids"] for each in llm.generate(PROMPTS, greedy(16), use_tqdm=False)])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
def test_logits_in_bf16_are_as_good_as_with_experts_on_the_gpu(wide: Path, quantization: str | None) -> None:
    """The error against experts in fp32, whose choice for some tokens rounding changes, so the mean counts."""
    exact, prompts = None, [random_prompt(100, seed=seed) for seed in range(6)]
    errors = []
    for dtype, placement, max_rows in (
        ("float32", {}, 1),
        ("bfloat16", {}, 1),
        *(("bfloat16", NONE, n) for n in (1, MOST)),
    ):
        options = cache_options(None) | placement | {"dtype": dtype, "quantization": quantization}
        with GpuLLM(Reference(wide), internals=computing(max_rows), **options) as llm:
            logits = []
            for prompt in prompts:
                request_id = llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=6, logit_bias={7: 100.0}))
                llm.finish_all()
                logits.append(llm.rows(request_id, 6))
        if exact is None:
            exact = torch.stack(logits)
        else:
            errors.append((torch.stack(logits) - exact).square().mean().sqrt().item())
    assert max(errors[1:]) < 2 * errors[0], errors


# -- edges: exact while the awaited side is slow, and wrong without the wait -----------------------------------------

SLOW_CYCLES = 4_000_000  # about 2 ms


class SlowCopies(CudaStream):
    """Takes its time before each copy. `drops`: does not wait for products."""

    drops = False

    def copy_rows(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(SLOW_CYCLES)
        super().copy_rows(dst, src)

    def wait(self, event: Event) -> None:
        if not self.drops:
            super().wait(event)


class ImpatientProducts(CudaStream):
    """Does not wait for copies."""

    def wait(self, event: Event) -> None:
        pass


class SlowStreams(CudaStreams):
    """`dropped`: the edge that is left out."""

    def __init__(self, device: torch.device, dropped: str) -> None:
        super().__init__(device)
        self.h2d = SlowCopies(self.h2d.stream)
        self.h2d.drops = dropped == "E16"
        if dropped == "E15":
            self.compute = ImpatientProducts(None)


def staged_weights(staging: ExpertStaging, layers: list[int], slow_products: bool) -> list[list[torch.Tensor]]:
    """Clone the weights of layers where products would read them."""
    found = []
    for layer in layers:
        experts = staging.experts(layer)
        if slow_products:
            torch.cuda._sleep(20 * SLOW_CYCLES)
        found.append([each.data.clone() for each in experts.parameters()])
        staging.multiplied(layer)
    torch.cuda.synchronize()
    return found


def is_right(rank: RankExperts, dropped: str) -> bool:
    layers = [0, 1, 2, 0, 1, 2]
    expected = staged_weights(make_staging(rank), layers, slow_products=False)
    found = staged_weights(make_staging(rank, SlowStreams(rank.device, dropped)), layers, dropped != "E15")
    pairs = (zip(*of_layer, strict=True) for of_layer in zip(expected, found, strict=True))
    return all(torch.equal(*pair) for of_layer in pairs for pair in of_layer)


def test_streamed_experts_are_right_while_copies_and_products_are_slow_and_wrong_without_an_edge(wide: Path) -> None:
    rank = load_experts(wide, device="cuda", dtype=torch.bfloat16, quantization="int4")
    assert is_right(rank, dropped="")
    assert not is_right(rank, dropped="E15")
    assert not is_right(rank, dropped="E16")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_gpu_waits_for_a_slow_cpu(mixture: Reference, enforce_eager: bool) -> None:
    """E17, E18. The threads begin long after the rows have arrived, and work on more after each piece."""
    options = cache_options(None) | NONE
    with GpuLLM(mixture, internals=computing(MOST), enforce_eager=enforce_eager, **options) as llm:
        rank = rank_of(llm)
        assert rank._server is not None
        rank._server.close()  # releases all waiters: from here on, results are those of the last layer
        with pytest.raises(AssertionError, match=r"wrongly|off"):
            llm.answer_and_check(PROMPTS[1:3], max_tokens=6)
    with GpuLLM(mixture, internals=computing(MOST), enforce_eager=enforce_eager, **options) as llm:
        rank = rank_of(llm)
        end_busy = keep_busy(rank)
        try:
            llm.answer_and_check(PROMPTS[1:3], max_tokens=6)
        finally:
            end_busy()


def keep_busy(rank: RankExperts) -> Callable[[], None]:
    """Give the threads other jobs, between which the server's come. Returns a function that ends this."""
    stopping = threading.Event()
    num_chosen = rank.experts.num_experts_per_token
    job = ExpertJob.of_rows(rank.store, MOST, num_chosen, rank.dtype, is_pinned=False)

    def compute() -> None:
        while not stopping.is_set():
            rank._threads.compute_experts(job, 0)
            time.sleep(0.001)

    thread = threading.Thread(target=compute)
    thread.start()

    def end() -> None:
        stopping.set()
        thread.join()

    return end


# -- ends and memory -------------------------------------------------------------------------------------------------


def is_pinned(memory: torch.Tensor) -> bool:
    return bool(memory[:1].is_pinned())


@CACHES
@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_engine_ends_while_a_step_runs(mixture: Reference, num_gpu_blocks: int | None, ends: str) -> None:
    """A step with long prompts is enqueued. Nothing hangs, nothing is left, and another engine starts."""
    options: dict[str, Any] = cache_options(num_gpu_blocks) | NONE | {"dtype": "float32", "max_num_seqs": 4}
    options |= {"device": "cuda", "max_num_batched_tokens": 2000}
    expected: list[list[int]] = []
    for _ in range(2):
        llm = LLM(str(mixture.directory), internals=computing(MOST), **options)
        try:
            expected.append(llm.generate(PROMPTS[:1], greedy(8), use_tqdm=False)[0]["token_ids"])
            memory, rank = rank_of(llm).store.memory, weakref.ref(rank_of(llm))
            assert is_pinned(memory)
            for prompt in PROMPTS:
                llm.add_request(prompt, greedy(500))
            for _ in range(5):
                llm.step()
            if ends == "closed":
                llm.close()
                llm.close()
        finally:
            del llm
        gc.collect()
        assert rank() is None and not is_pinned(memory)
    assert expected[0] == expected[1]


@pytest.mark.alone
def test_memory_stays_within_the_plan() -> None:
    """Layers of Qwen3-30B-A3B in int4, with the longest prompts: what the GPU holds, and what the buffers take."""
    total = torch.cuda.mem_get_info()[1]
    overrides = {"num_hidden_layers": 3}
    options: dict[str, Any] = {"hf_overrides": overrides, "load_format": "dummy", "quantization": "int4"}
    options |= {"gpu_memory_utilization": 0.1, "max_model_len": 8192, "max_num_seqs": 4, "skip_tokenizer_init": True}
    internals = Internals(expert_link_share=128)  # the GPU reads half of the experts in short steps
    with LLM("qwen3-30b-a3b", device="cuda", internals=internals, **options | NONE) as llm:
        staging, link = rank_of(llm).staging, rank_of(llm).link
        assert link is not None, "the GPU reads experts"
        slots = [parameter for experts in link._experts.values() for parameter in experts.parameters()]
        num_bytes = sum(each.nbytes for each in (*staging._arenas, staging._raw, link._raw, *slots))
        assert num_bytes == pytest.approx(llm.plan.memory.expert_staging_bytes, rel=0.01)
        prompts = [random_prompt(length, seed=length) for length in (8000, 3000, 60, 1)]
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        peak = 0
        for prompt in prompts:
            llm.add_request(prompt, params)
        while not llm.is_finished():
            llm.step()
            free, total = torch.cuda.mem_get_info()
            peak = max(peak, total - free)
        assert peak <= 0.1 * total, f"{peak / 2**30:.2f} of {0.1 * total / 2**30:.2f} GiB"
        host_bytes = rank_of(llm).store.memory.nbytes
        assert llm.stats()["cpu_expert_bytes"] == host_bytes == llm.plan.host_expert_bytes
