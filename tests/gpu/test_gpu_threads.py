"""Threads and devices on a GPU: an engine works from whichever thread calls it, on the GPU it was made for."""

import threading
from typing import Any

import pytest
import torch
from checked_engine import Reference, cache_options, greedy, small_staging
from gpu_llm import GpuLLM
from integrity import check_scheduler
from offload_workload import BLOCK, prompts_of
from run_threads import in_threads

from nanovllm import LLM

pytestmark = pytest.mark.gpu

PROMPTS = (5 * BLOCK - 3, 700, BLOCK, 40)
CACHES = [None, 24, 3]
IDS = ["all-GPU", "resident", "streamed"]
GREEDY = greedy(12)
STAGING = small_staging(BLOCK, 2)


def make_llm(reference: Reference, num_gpu_blocks: int | None, **options: Any) -> GpuLLM:
    defaults = cache_options(num_gpu_blocks) | {"max_num_batched_tokens": 2000}
    return GpuLLM(reference, internals=STAGING, **(defaults | options))


def plain_llm(reference: Reference, num_gpu_blocks: int | None, **options: Any) -> LLM:
    """For engines that run at the same time and for many steps. A GpuLLM would keep the logits of all of them."""
    defaults = {"device": "cuda", "dtype": "float32", "max_num_batched_tokens": 2000, "max_num_seqs": 6}
    return LLM(str(reference.directory), internals=STAGING, **(cache_options(num_gpu_blocks) | defaults | options))


@pytest.mark.parametrize("num_gpu_blocks", CACHES, ids=IDS)
def test_steps_from_several_threads_and_streams_give_the_right_logits(
    reference: Reference, num_gpu_blocks: int | None
) -> None:
    """Each step may come from another thread, with a stream of its own as the current one."""
    with make_llm(reference, num_gpu_blocks) as llm:
        ids = [llm.add_request(prompt, GREEDY) for prompt in prompts_of(*PROMPTS)]
        finished: dict[int, Any] = {}

        def step_once() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                finished.update(llm.step().finished)

        while not llm.is_finished():
            in_threads(step_once)
            with torch.cuda.stream(torch.cuda.Stream()):
                finished |= llm.step().finished
        for request_id, prompt in zip(ids, prompts_of(*PROMPTS), strict=True):
            llm.check(request_id, prompt, finished[request_id])
        llm.assert_nothing_left()


def test_engine_serves_while_another_starts_in_another_thread(reference: Reference) -> None:
    """Regression: a capture forbade allocations in all threads, so that a step of the first engine could fail."""
    prompts = prompts_of(*PROMPTS)
    with make_llm(reference, 24) as llm:
        expected = [output["token_ids"] for output in llm.answer_and_check(prompts, max_tokens=20)]
    started = threading.Event()

    def answer(llm: LLM) -> None:
        outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == expected

    def serve(llm: LLM) -> None:
        while not started.is_set():
            answer(llm)

    def start() -> None:
        try:
            with plain_llm(reference, 3) as other:
                answer(other)
        finally:
            started.set()

    with plain_llm(reference, 24, gpu_memory_utilization=0.4, enable_prefix_caching=False) as llm:
        in_threads(lambda: serve(llm), start)
        check_scheduler(llm.scheduler)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("num_gpu_blocks", CACHES, ids=IDS)
def test_second_gpu_stepped_from_another_thread_while_the_first_is_current(
    reference: Reference, num_gpu_blocks: int | None
) -> None:
    """Regression: kernels were launched on the thread's current device: "invalid resource handle"."""
    assert torch.cuda.current_device() == 0
    with make_llm(reference, num_gpu_blocks, device="cuda:1") as llm:
        assert torch.cuda.current_device() == 0
        in_threads(lambda: llm.answer_and_check(prompts_of(*PROMPTS), max_tokens=12))
        llm.answer_and_check(prompts_of(*(n + 1 for n in PROMPTS)), max_tokens=12)
        assert torch.cuda.current_device() == 0
        assert llm.runner.memory.cache[0].device == torch.device("cuda", 1)
        llm.assert_nothing_left()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("num_gpu_blocks", CACHES, ids=IDS)
def test_two_engines_on_two_gpus_stepped_from_two_threads(reference: Reference, num_gpu_blocks: int | None) -> None:
    prompts = prompts_of(*(n + extra for extra in range(4) for n in PROMPTS))
    with make_llm(reference, num_gpu_blocks) as llm:
        expected = [output["token_ids"] for output in llm.answer_and_check(prompts, max_tokens=20)]

    def serve(llm: LLM) -> None:
        for _ in range(3):
            outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected

    with (
        plain_llm(reference, num_gpu_blocks, device="cuda:0") as one,
        plain_llm(reference, num_gpu_blocks, device="cuda:1") as two,
    ):
        in_threads(lambda: serve(one), lambda: serve(two))
