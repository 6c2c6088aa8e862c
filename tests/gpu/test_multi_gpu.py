"""Two and four GPUs, one engine: right logits over nccl, and a worker that dies."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import OFFLOAD, Reference, cache_options, greedy
from gpu_llm import GpuLLM
from offload_workload import BLOCK, prompts_of
from tiny_models import write_tiny_model
from waiting import wait_until

from nanovllm import LLM
from nanovllm.errors import EngineError, WorkerDiedError

pytestmark = pytest.mark.multi_gpu

CONTEXT_BYTES = 256 * 2**20  # less than what a process with a CUDA context holds on its GPU


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    shape = {"num_heads": 8, "num_kv_heads": 4, "max_position_embeddings": 16384}
    return Reference(write_tiny_model(tmp_path_factory.mktemp("tiny"), **shape))


def shared_memory_of_this_process() -> list[Path]:
    return list(Path("/dev/shm").glob(f"*{os.getpid()}*"))


@pytest.mark.parametrize("tensor_parallel_size", [2, pytest.param(4, marks=pytest.mark.multi_gpu(4))])
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize(
    ("num_gpu_blocks", "cpu_attention"),
    [(None, None), (24, "off"), (3, "off"), (3, "on")],
    ids=["all-GPU", "resident", "streamed", "with-CPU"],
)
def test_ranks_give_the_tokens_of_one(
    reference: Reference,
    num_gpu_blocks: int | None,
    cpu_attention: str | None,
    enforce_eager: bool,
    tensor_parallel_size: int,
) -> None:
    """Every logit of rank 0 is transformers'. Staging keeps its size: a spawned rank knows nothing of a patch."""
    prompts = prompts_of(1, BLOCK - 1, BLOCK + 1, 5 * BLOCK - 3, 700, 4 * BLOCK)
    options = cache_options(num_gpu_blocks) | {"tensor_parallel_size": tensor_parallel_size}
    options |= {} if cpu_attention is None else {"cpu_attention": cpu_attention}
    with GpuLLM(reference, enforce_eager=enforce_eager, **options) as llm:
        for prompt in prompts[:4]:
            llm.answer_and_check([prompt], max_tokens=10)
        llm.answer_and_check(prompts, max_tokens=20)
        llm.answer_and_check([prompts[3] + [5, 6, 7]], max_tokens=8)  # a prefix hit
        assert (llm.num_replays["resident"] > 0) != enforce_eager
        assert (llm.num_replays["streamed"] > 0) == (num_gpu_blocks == 3 and not enforce_eager)
        assert any(plan.moves.cpu_spans for plan in llm.plans) == (cpu_attention == "on")
        inboxes = llm.runner.tp.inboxes
        assert (inboxes is not None and inboxes.num_sums[0].item() > 0) == torch.cuda.can_device_access_peer(0, 1)
        llm.assert_nothing_left()
    assert not multiprocessing.active_children() and not shared_memory_of_this_process()


def test_two_ranks_several_groups_a_layer(reference: Reference) -> None:
    """40 blocks through 2 slots: two groups of 8192 tokens each layer, in prefill and in decode."""
    options = OFFLOAD | {"num_gpu_blocks": 2, "num_cpu_blocks": 50, "tensor_parallel_size": 2}
    with GpuLLM(reference, max_num_batched_tokens=512, **options) as llm:
        llm.answer_and_check(prompts_of(40 * BLOCK + 7), max_tokens=8)
        assert max(len(plan.moves.streamed) for plan in llm.plans) == 2 and llm.num_replays["streamed"]


@pytest.mark.parametrize("offload", [False, True])
def test_killed_worker_is_an_error_within_seconds_and_leaves_nothing(reference: Reference, offload: bool) -> None:
    free_bytes = torch.cuda.mem_get_info(1)[0]
    options: dict[str, Any] = cache_options(3 if offload else None)
    options |= {"tensor_parallel_size": 2, "dtype": "float32", "device": "cuda", "max_num_seqs": 4}
    llm = LLM(str(reference.directory), **options)
    (worker,) = multiprocessing.active_children()
    for prompt in prompts_of(3 * BLOCK, 40):
        llm.add_request(prompt, greedy(5000))
    for _ in range(20):
        llm.step()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 died with signal SIGKILL"):
        for _ in range(4000):
            llm.step()
    with pytest.raises(EngineError):
        llm.step()
    llm.close()
    assert not multiprocessing.active_children() and not shared_memory_of_this_process()
    wait_until(lambda: torch.cuda.mem_get_info(1)[0] > free_bytes - CONTEXT_BYTES)
    with LLM(str(reference.directory), **options) as again:  # the GPUs can be used at once
        assert len(again.generate([[1, 2, 3]], greedy(4), use_tqdm=False)[0]["token_ids"]) == 4


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_close_after_a_worker_died_in_a_step_does_not_hang(reference: Reference, enforce_eager: bool) -> None:
    """Regression: closing waited for the GPU first, whose kernels wait forever for a rank that is gone."""
    options: dict[str, Any] = cache_options(None) | {"tensor_parallel_size": 2, "dtype": "float32", "device": "cuda"}
    llm = LLM(str(reference.directory), enforce_eager=enforce_eager, **options)
    (worker,) = multiprocessing.active_children()
    llm.add_request([1, 2, 3], greedy(5000))
    for _ in range(20):
        llm.step()
    torch.cuda.synchronize()  # both ranks have done all steps
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)  # it takes no part in the step that is launched next
    llm.step()
    os.kill(worker.pid, signal.SIGKILL)
    llm.close()
    assert not multiprocessing.active_children() and not shared_memory_of_this_process()
