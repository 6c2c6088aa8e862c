"""Ranks on real GPUs that Ray has given them: right logits over nccl, also for two engines on one machine."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checked_engine import Reference, cache_options
from gpu_llm import GpuLLM
from offload_workload import BLOCK, prompts_of
from ray_cluster import small_cluster
from tiny_models import write_tiny_model

pytestmark = pytest.mark.multi_gpu

PROMPTS = prompts_of(1, BLOCK + 1, 5 * BLOCK - 3)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    shape = {"num_heads": 8, "num_kv_heads": 4, "max_position_embeddings": 16384}
    return Reference(write_tiny_model(tmp_path_factory.mktemp("tiny"), **shape))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_cluster(num_gpus=torch.cuda.device_count()):
        yield


def two_ranks(reference: Reference, **options: Any) -> GpuLLM:
    return GpuLLM(reference, tensor_parallel_size=2, distributed_executor_backend="ray", **options)


@pytest.mark.parametrize("num_gpu_blocks", [None, 3], ids=["all-GPU", "streamed"])
def test_ranks_on_gpus_from_ray_give_the_logits_of_transformers(
    reference: Reference, num_gpu_blocks: int | None
) -> None:
    with two_ranks(reference, **cache_options(num_gpu_blocks)) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=20)
        llm.assert_nothing_left()


@pytest.mark.multi_gpu(4)
def test_two_engines_of_one_process_have_four_gpus(reference: Reference) -> None:
    """Rank 0 of the second one is not on cuda:0."""
    with two_ranks(reference, **cache_options(None)) as first, two_ranks(reference, **cache_options(3)) as second:
        assert first.device != second.device
        for llm in (first, second):
            llm.answer_and_check(PROMPTS, max_tokens=20)
