"""Two ranks on the CPU, one engine: transformers' logits over gloo, a dead worker, Ctrl-C. GPUs: test_multi_gpu."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from checked_engine import WORKS_AHEAD, CheckedLLM, Reference, cache_options, greedy
from cpu_splits import splitting
from dense_model import random_prompt
from integrity import check_scheduler
from processes import is_gone, worker_pids_of
from tiny_models import write_tiny_model
from waiting import LIMIT_S

from nanovllm import LLM, SamplingParams
from nanovllm.errors import EngineError, WorkerDiedError
from nanovllm.executor.base import LaunchedStep
from nanovllm.plan.step_plan import StepPlan

BLOCK = 256
TWO_RANKS = {"tensor_parallel_size": 2}
PROMPTS = [random_prompt(length, seed=length) for length in (1, BLOCK - 1, BLOCK + 1, 5 * BLOCK - 3, 700)]


def assert_nothing_is_left() -> None:
    assert not multiprocessing.active_children()
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))


@pytest.mark.parametrize(
    ("num_gpu_blocks", "others"),
    [
        pytest.param(None, {}, id="all-GPU", marks=pytest.mark.slow),
        pytest.param(3, {"cpu_attention": "on", "internals": splitting(300)}, id="some on the CPU"),
    ],
)
def test_two_ranks_give_the_logits_of_transformers(
    reference: Reference, num_gpu_blocks: int | None, others: dict[str, Any]
) -> None:
    with CheckedLLM(reference, **TWO_RANKS, **cache_options(num_gpu_blocks) | others) as llm:
        llm.answer_and_check(PROMPTS)
        llm.answer_and_check([PROMPTS[3] + [5, 6, 7]])  # a prefix hit
        llm.assert_nothing_left()
    assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gemma4"])
@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_ranks_with_copies_of_the_same_kv_head_give_the_logits_of_transformers(
    tmp_path: Path, architecture: str, num_gpu_blocks: int | None
) -> None:
    """Also with KV on disk, which a second engine reads."""
    sizes: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 1, "max_position_embeddings": 8192}
    reference = Reference(write_tiny_model(tmp_path / "model", architecture, **sizes))
    options = TWO_RANKS | cache_options(num_gpu_blocks) | {"kv_disk_path": str(tmp_path / "disk"), "kv_disk_gb": 1}
    for is_restarted in (False, True):
        with CheckedLLM(reference, **options) as llm:
            llm.answer_and_check([PROMPTS[3]])
            llm.answer_and_check([PROMPTS[3] + [5, 6, 7], PROMPTS[4]])
            llm.assert_nothing_left()
            assert (llm.stats()["num_disk_hit_tokens"] > 0) == is_restarted
    assert_nothing_is_left()


@pytest.mark.slow
def test_two_ranks_edit_and_score_as_one_does(reference: Reference) -> None:
    params = SamplingParams(
        max_tokens=8, seed=1, ignore_eos=True, repetition_penalty=1.3, min_tokens=3, logprobs=2, prompt_logprobs=1
    )
    found = []
    for ranks in ({}, TWO_RANKS):
        options = {"device": "cpu", "internals": WORKS_AHEAD} | cache_options(3) | ranks
        with LLM(str(reference.directory), **options) as llm:
            found.append(llm.generate(PROMPTS, params, use_tqdm=False))
    for one, two in zip(*found, strict=True):
        assert one["token_ids"] == two["token_ids"]
        for key in ("logprobs", "prompt_logprobs"):
            pairs = [(a, b) for a, b in zip(one[key], two[key], strict=True) if a is not None]
            assert all(a.keys() == b.keys() for a, b in pairs)
            for a, b in pairs:
                assert [x.logprob for x in a.values()] == pytest.approx([x.logprob for x in b.values()], abs=1e-4)


@pytest.mark.slow
def test_interrupted_ranks_are_usable_and_a_killed_one_is_an_error(reference: Reference) -> None:
    """Ctrl-C reaches the whole terminal: the worker gets the signal too."""
    llm = LLM(str(reference.directory), device="cpu", **TWO_RANKS, **cache_options(3))
    (worker,) = worker_pids_of(llm.engine.executor)
    expected = llm.generate([PROMPTS[4]], greedy(), use_tqdm=False)[0]["token_ids"]

    is_running, is_pressed = threading.Event(), threading.Event()
    launch, launched = llm.engine.executor.launch, list[object]()

    def launch_and_wait(plan: StepPlan) -> LaunchedStep:
        launched.append(plan)
        if len(launched) == 8:  # the keys are pressed before the last of many steps, however slow the other thread is
            is_running.set()
            assert is_pressed.wait(LIMIT_S)
        return launch(plan)

    def press_ctrl_c() -> None:
        assert is_running.wait(LIMIT_S)
        os.kill(worker, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        is_pressed.set()

    llm.engine.executor.launch = launch_and_wait  # type: ignore[method-assign]
    presser = threading.Thread(target=press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        presser.start()
        llm.generate(PROMPTS[:4], greedy(6000), use_tqdm=False)
    presser.join()
    check_scheduler(llm.scheduler)
    assert llm.is_finished()
    assert llm.generate([PROMPTS[4]], greedy(), use_tqdm=False)[0]["token_ids"] == expected

    llm.add_request(PROMPTS[3], greedy(5000))
    for _ in range(5):
        llm.step()
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 died with signal SIGKILL"):
        while True:
            llm.step()
    with pytest.raises(EngineError):
        llm.step()
    llm.close()
    assert is_gone(worker)
    assert_nothing_is_left()
