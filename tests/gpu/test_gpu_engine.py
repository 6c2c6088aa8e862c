"""The engine on a CUDA GPU: graphs, host waits, memory, and offload against the all-GPU path.

fp32 answers are compared, logit by logit, with transformers on the CPU (checked_engine.Reference): engines that both
match it give the same tokens.
"""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checked_engine import OFFLOAD, Reference, cache_options, greedy, small_staging
from dense_model import random_prompt
from gpu_llm import GpuLLM
from integrity import check_scheduler
from offload_workload import BLOCK, prompts_of
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.plan.outputs import RequestOutput
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import StepPlan

pytestmark = pytest.mark.gpu

EDGES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 3 * BLOCK, 5 * BLOCK - 2, 5 * BLOCK, 5 * BLOCK + 1)


# -- CUDA graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_gpu_blocks", [None, 24])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_graphs_batches_around_their_sizes_give_the_tokens_of_eager(
    reference: Reference, enforce_eager: bool, num_gpu_blocks: int | None
) -> None:
    """With 24 slots every block is resident: the same graphs are replayed."""
    options = cache_options(num_gpu_blocks) | {"max_num_seqs": 17, "max_num_batched_tokens": 2000}
    with GpuLLM(reference, enforce_eager=enforce_eager, **options) as llm:
        for num_seqs in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17):
            llm.plans.clear()
            llm.answer_and_check(prompts_of(*range(20, 20 + num_seqs)), max_tokens=5)
            assert sum(plan.is_decode and len(plan.sequences) == num_seqs for plan in llm.plans) >= 3
        assert (llm.num_replays["resident"] >= 11 * 3) == (not enforce_eager)
        assert not llm.num_replays["streamed"]
        llm.assert_nothing_left()


@pytest.mark.parametrize(("group_blocks", "num_groups"), [(1, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5])
def test_streamed_graphs_several_groups_a_layer_give_the_tokens_of_eager(
    reference: Reference, num_seqs: int, group_blocks: int, num_groups: int
) -> None:
    """The answers cross a block edge, so that slots change owner and blocks are copied out between the pieces."""
    prompts = prompts_of(*(5 * BLOCK - 40 + i for i in range(num_seqs)))
    options = OFFLOAD | {"num_gpu_blocks": num_seqs + 1, "max_num_seqs": num_seqs, "max_num_batched_tokens": 2000}
    staging = small_staging(group_blocks * BLOCK, num_groups)
    with GpuLLM(reference, internals=staging, **options) as llm:
        llm.answer_and_check(prompts, max_tokens=50)
        streamed = [plan for plan in llm.plans if plan.is_decode and len(plan.sequences) == num_seqs]
        streamed = [plan for plan in streamed if len(plan.moves.streamed) * 2 > num_groups]  # of two layers
        assert len(streamed) >= 8 and any(plan.moves.offloads for plan in streamed)
        assert llm.num_replays["streamed"] >= 8
        llm.assert_nothing_left()


@pytest.mark.parametrize("num_gpu_blocks", [None, 24, 4], ids=["all-GPU", "resident", "streamed"])
def test_graphs_draw_what_eager_draws(reference: Reference, num_gpu_blocks: int | None) -> None:
    """Tokens pass from graph to graph, and between graphs and the separate launches of prompts and of steps that
    load into slots; rows that draw, that cut and that take the likeliest come and go.
    """
    kinds = ((0.0, 0, 1.0), (0.8, 0, 1.0), (1.5, 0, 1.0), (0.7, 20, 0.9))
    answers = []
    for enforce_eager in (True, False):
        options = cache_options(num_gpu_blocks) | {"enforce_eager": enforce_eager, "max_num_batched_tokens": 600}
        with GpuLLM(reference, internals=small_staging(BLOCK, 2), **options) as llm:
            prompts = prompts_of(3 * BLOCK - 20, 30, 2 * BLOCK + 5, 7, 300, 40, BLOCK)
            finished = {}
            for i, prompt in enumerate(prompts):
                temperature, top_k, top_p = kinds[i % len(kinds)]
                params = SamplingParams(
                    temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=20 + 7 * i, seed=i, ignore_eos=True
                )
                llm.add_request(prompt, params)
                for _ in range(8):
                    finished |= llm.step().finished
            finished |= llm.finish_all()
            answers.append([finished[request_id]["token_ids"] for request_id in sorted(finished)])
            assert (llm.num_replays.total() >= 30) == (not enforce_eager)
    assert answers[0] == answers[1]
    assert [len(answer) for answer in answers[0]] == [20 + 7 * i for i in range(len(prompts))]


# -- the host --------------------------------------------------------------------------------------------------------


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Names of the explicit host waits; torch itself raises at implicit ones."""
    waits: list[str] = []

    def counted(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def wait(*args: Any) -> Any:
            waits.append(f"{owner.__name__}.{name}")
            return original(*args)

        return mock.patch.object(owner, name, wait)

    with (
        counted(torch.cuda, "synchronize"),
        counted(torch.cuda.Stream, "synchronize"),
        counted(torch.cuda.Event, "synchronize"),
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("num_gpu_blocks", [None, 24, 4], ids=["all-GPU", "resident", "streamed"])
def test_decode_step_makes_one_host_wait(reference: Reference, num_gpu_blocks: int | None, enforce_eager: bool) -> None:
    """For the tokens of the step before. Some steps cross a block edge; greedy, sampled and cut rows are mixed."""
    options = cache_options(num_gpu_blocks) | {"enforce_eager": enforce_eager, "max_num_batched_tokens": 2000}
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=60, ignore_eos=True)
        for temperature, top_k, top_p in ((0, 0, 1.0), (0.8, 0, 1.0), (0.7, 20, 0.9))
    ]
    with GpuLLM(reference, internals=small_staging(BLOCK, 2), **options) as llm:
        for prompt, p in zip(prompts_of(5 * BLOCK - 40, 30, 3 * BLOCK - 30), params, strict=True):
            llm.add_request(prompt, p)
        while not (llm.plans and llm.plans[-1].is_decode and len(llm.plans[-1].sequences) == 3):
            llm.step()
        for _ in range(5):
            llm.step()
        num_steps = len(llm.plans)
        with counted_waits() as waits:
            for _ in range(40):
                llm.step()
        plans = llm.plans[num_steps:]
        assert len(plans) == 40 and all(plan.is_decode for plan in plans)
        assert num_gpu_blocks is None or any(plan.moves.offloads for plan in plans)
        assert all(plan.moves.streamed for plan in plans) == (num_gpu_blocks == 4)
        assert waits == ["Event.synchronize"] * 40
        llm.finish_all()


@pytest.mark.parametrize("num_gpu_blocks", [None, 60], ids=["all-GPU", "resident"])
def test_short_chunks_beside_answers_run_as_graphs(reference: Reference, num_gpu_blocks: int | None) -> None:
    """Prompts arrive one, two and nine at a time. Each graph has answers, chunks and padding."""
    options = cache_options(num_gpu_blocks) | {"max_num_seqs": 40, "max_num_batched_tokens": 2000}
    prompts = prompts_of(30, 1, BLOCK - 1, 2, 17, BLOCK, 100, BLOCK + 1, *range(3, 12), 400, 5 * BLOCK - 2)
    arrivals = [1, 2, 1, 1, 2, 1, 9, 1, 1]
    with GpuLLM(reference, **options) as llm:
        ids: list[int] = []
        finished: dict[int, RequestOutput] = {}
        for num_new in arrivals:
            ids += [llm.add_request(prompt, greedy(12)) for prompt in prompts[len(ids) :][:num_new]]
            for _ in range(2):
                finished |= llm.step().finished
        finished |= llm.finish_all()
        for request_id, prompt in zip(ids, prompts, strict=True):
            llm.check(request_id, prompt, finished[request_id])
        with_chunks = [plan for plan in llm.plans if not plan.is_decode]
        in_graphs = [plan for plan in with_chunks if sum(chunk_lens(plan)) <= 1024]
        assert 0 < llm.num_replays["mixed"] == len([plan for plan in in_graphs if len(chunk_lens(plan)) <= 8])
        assert len(in_graphs) < len(with_chunks), "the longest prompt has no graph"


def chunk_lens(plan: StepPlan) -> list[int]:
    """Without sequences of a single token, which come first."""
    return [step.num_tokens for step in plan.sequences if step.num_tokens > 1]


# -- memory ----------------------------------------------------------------------------------------------------------

MAX_HOST_GROWTH_BYTES = 64 * 2**20


def footprint(llm: LLM) -> dict[str, int]:
    """Figures that must not grow with the number of requests served."""
    gc.collect()
    torch.cuda.synchronize()
    stats, scheduler = llm.stats(), llm.scheduler
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "num_allocations": torch.cuda.memory_stats()["allocation.all.current"],
        "num_free_blocks": stats["num_free_cpu_blocks" if llm.config.enable_cpu_offload else "num_free_gpu_blocks"],
        "num_sequences": sum(type(thing) is Sequence for thing in gc.get_objects()),
        "num_known": len(scheduler.sequences) + len(scheduler.waiting) + len(scheduler.running),
        "num_held": len(llm._outbox.content.texts) + len(llm._outbox.content.finished),
        "num_receivers": len(llm.engine._steps.receivers),
    }


def resident_host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("offload", [False, True])
def test_ten_thousand_requests_leave_memory_where_it_was(reference: Reference, offload: bool) -> None:
    rng = random.Random(0)

    def serve(llm: LLM, num_requests: int) -> None:
        lengths = [rng.choices([rng.randint(1, 40), 300, 700], [98, 1, 1])[0] for _ in range(num_requests)]
        prompts = [[rng.randrange(320) for _ in range(length)] for length in lengths]
        params = [SamplingParams(max_tokens=rng.randint(1, 3), ignore_eos=True) for _ in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [p.max_tokens for p in params]
        llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)  # the last step is always the same

    options: dict[str, Any] = {"num_kvcache_blocks": 600}
    if offload:
        options = OFFLOAD | {"num_gpu_blocks": 96, "num_cpu_blocks": 120}
    options |= {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "dtype": "float32", "device": "cuda"}
    with LLM(str(reference.directory), **options) as llm:
        serve(llm, 1000)
        before, host_bytes = footprint(llm), resident_host_bytes()
        serve(llm, 10_000)
        assert footprint(llm) == before
        assert resident_host_bytes() - host_bytes < MAX_HOST_GROWTH_BYTES
        check_scheduler(llm.scheduler)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gpu_memory_does_not_grow_with_the_context() -> None:
    """Qwen3-0.6B shapes, 8 slots of 4096: one prompt of 131,072 tokens against one of 65,536, within 2%. Without
    speculation, whose shadow is as large as the context needs.

    The table of the rotary embedding alone takes 33 MiB more, or 0.6%. A prompt of 40,960 tokens has so few streamed
    parts that it needs no running result in fp32, which takes 128 MiB.
    """
    from benchmarks.common import model_of_length

    peaks = []
    for num_tokens in (65_536, 131_072):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        options: dict[str, Any] = {"kvcache_block_size": 4096, "num_cpu_blocks": num_tokens // 4096}
        options |= {"enable_cpu_offload": True, "num_gpu_blocks": 8, "max_num_seqs": 4, "load_format": "dummy"}
        options |= {"speculation": "off"}
        model = model_of_length("qwen3-0.6b", num_tokens)
        with LLM(model, max_model_len=num_tokens, device="cuda", **options) as llm:
            llm.generate([random_prompt(num_tokens - 8, 150_000)], greedy(8), use_tqdm=False)
        peaks.append(torch.cuda.max_memory_allocated())
        del llm
    assert peaks[1] < 1.02 * peaks[0], f"peaks are {peaks[0]:,} and {peaks[1]:,} bytes"


# -- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_gpu_blocks", [None, 20, 4])
def test_seeded_request_tokens_do_not_depend_on_its_batch(reference: Reference, num_gpu_blocks: int | None) -> None:
    prompt = prompts_of(2 * BLOCK + 20)[0]
    options = cache_options(num_gpu_blocks) | {"max_num_seqs": 17, "max_num_batched_tokens": 700}

    def seeded(seed: int) -> SamplingParams:
        return SamplingParams(temperature=0.8, max_tokens=32, ignore_eos=True, seed=seed)

    with GpuLLM(reference, **options) as llm:
        (alone,) = llm.generate([prompt], seeded(7), use_tqdm=False)
        (other_seed,) = llm.generate([prompt], seeded(8), use_tqdm=False)
        assert len(set(alone["token_ids"])) > 8 and alone["token_ids"] != other_seed["token_ids"]
        for num_before, num_after in ((1, 0), (0, 2), (3, 4), (9, 7)):
            for i in range(num_before + 1 + num_after):
                if i == num_before:
                    request_id = llm.add_request(prompt, seeded(7))
                else:
                    llm.add_request(random_prompt(5 + 9 * i, seed=i), SamplingParams(max_tokens=20, ignore_eos=True))
                if i % 3 == 2:
                    llm.step()
            assert llm.finish_all()[request_id]["token_ids"] == alone["token_ids"], (num_before, num_after)


# -- offload against the all-GPU path ---------------------------------------------------------------------------------

DOCUMENT = random_prompt(3 * BLOCK + 100, seed=99)
QUESTIONS = [DOCUMENT + random_prompt(20, seed=seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("num_gpu_blocks", [None, *range(2, 17)])
def test_any_number_of_slots_gives_the_tokens_of_all_gpu(reference: Reference, num_gpu_blocks: int | None) -> None:
    """One after another, together, prefix hits, preemption, aborts: in one engine, so that each finds a used cache."""
    options = cache_options(num_gpu_blocks) | {"max_num_batched_tokens": 700}
    with GpuLLM(reference, internals=small_staging(2 * BLOCK, 2), **options) as llm:
        for prompt in prompts_of(*EDGES):
            llm.answer_and_check([prompt])
        llm.answer_and_check(prompts_of(*(length + 2 for length in EDGES)), max_tokens=9)
        (first,), rest = llm.answer_and_check(QUESTIONS[:1]), llm.answer_and_check(QUESTIONS[1:])
        assert [output["num_cached_tokens"] for output in (first, *rest)] == [0, 3 * BLOCK, 3 * BLOCK]

        prompts = prompts_of(2 * BLOCK - 5, BLOCK + 7, 4 * BLOCK + 3, 50, 3 * BLOCK - 1)
        ids = [llm.add_request(prompt, greedy(14)) for prompt in prompts]
        finished = {}
        for num_step in range(1000):
            if llm.is_finished():
                break
            if num_step % 4 == 3:
                llm.preempt_next()
            if num_step == 9:
                llm.abort(ids[2])
            finished |= llm.step().finished
            check_scheduler(llm.scheduler)
        assert set(finished) == set(ids) and llm.stats()["num_preemptions"] >= 1
        for request_id, prompt in zip(ids, prompts, strict=True):
            if request_id != ids[2]:
                llm.check(request_id, prompt, finished[request_id])
        llm.answer_and_check([prompts[2]])  # what the aborted one left in the cache is right
        llm.assert_nothing_left()


@pytest.fixture(scope="module")
def wide_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Head dim 128, eight query heads on two kv heads, four layers, weights in bfloat16.

    Four times as wide as the tiny model, so half its weights: else rounding alone turns the logits over.
    """
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 4, "num_heads": 8}
    directory = tmp_path_factory.mktemp("wide")
    write_tiny_model(directory, head_dim=128, max_position_embeddings=8192, dtype=torch.bfloat16, **shape)
    weights = load_file(directory / "model.safetensors")
    halved = {name: weight * (0.5 if "proj" in name else 1) for name, weight in weights.items()}
    save_file(halved, directory / "model.safetensors", metadata={"format": "pt"})
    return Reference(directory)


@pytest.mark.parametrize("num_gpu_blocks", [None, 2, 5])
def test_bf16_logits_are_as_good_as_plain_torch(wide_reference: Reference, num_gpu_blocks: int | None) -> None:
    """Error against fp32 at most twice that of transformers in bf16, over the tokens the engine chose."""
    options = cache_options(num_gpu_blocks) | {"dtype": "bfloat16", "max_num_batched_tokens": 3000}
    with GpuLLM(wide_reference, **options) as llm:
        llm.assert_as_good_as_plain_torch(prompts_of(5 * BLOCK + 30, 8 * BLOCK - 2, 300, 6 * BLOCK))


# -- the embedded model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_retrieval_131072_tokens_every_tenth_of_the_depth_in_bf16(tmp_path: Path) -> None:
    from nanovllm.entrypoints.haystack import build_haystack
    from nanovllm.models.retrieval_model import build_retrieval_model

    num_tokens, max_tokens = 131_072, 16
    options: dict[str, Any] = {"enable_cpu_offload": True, "num_gpu_blocks": 4, "kvcache_block_size": 4096}
    options |= {"num_cpu_blocks": 40, "max_model_len": num_tokens + max_tokens, "enable_prefix_caching": False}
    model = build_retrieval_model(tmp_path / "model", dtype="bfloat16")
    with LLM(str(model), device="cuda", **options) as llm:
        for tenth in range(11):
            passkey = str(random.Random(tenth).randrange(10**4, 10**9))
            prompt = build_haystack(num_tokens, tenth / 10, passkey)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, stop="\n")
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output["num_prompt_tokens"] == num_tokens
            assert output["text"] == f"{passkey}.", f"depth {tenth / 10}"
        assert llm.stats()["num_missed_blocks"] > 0
