"""Models with windows on a GPU: rings inside CUDA graphs, sinks, experts with biases, and the error in bf16.

test_gpu_recurrent.py has more tests of states, with a model with windows among its models.
"""

from pathlib import Path

import pytest
from checked_engine import OFFLOAD, Reference, cache_options
from gpu_llm import GpuLLM
from offload_workload import BLOCK, prompts_of, serve_everything
from tiny_models import write_tiny_model

from nanovllm.engine.setup import Internals

pytestmark = pytest.mark.gpu

PROMPTS = prompts_of(3 * BLOCK - 5, 40, BLOCK - 3, 2 * BLOCK)
SIZES = {"num_layers": 4, "max_position_embeddings": 4096}
CACHES = pytest.mark.parametrize("num_gpu_blocks", [None, 3], ids=["all-GPU", "streamed"])
MODELS = pytest.mark.parametrize("architecture", ["gpt_oss", "gemma3", "gemma4", "gemma4_moe"])


@CACHES
@MODELS
def test_everything_at_once(tmp_path: Path, architecture: str, num_gpu_blocks: int | None) -> None:
    """Chunks, hits, preemption, an abort."""
    reference = Reference(write_tiny_model(tmp_path, architecture, **SIZES))
    with GpuLLM(reference, **cache_options(num_gpu_blocks)) as llm:
        serve_everything(llm)
        assert llm.num_replays["resident" if num_gpu_blocks is None else "streamed"] > 3


def test_sinks_in_drafts_and_on_the_cpu(tmp_path: Path) -> None:
    reference = Reference(write_tiny_model(tmp_path, "gpt_oss", **SIZES))
    for speculation, cpu_attention in (("shadow", "off"), ("resident", "on"), ("auto", "on")):
        options = OFFLOAD | {"num_gpu_blocks": 3, "speculation": speculation, "cpu_attention": cpu_attention}
        with GpuLLM(reference, internals=Internals(always_guesses=True), **options) as llm:
            llm.answer_and_check(PROMPTS, max_tokens=40)
            assert llm.stats()["num_accepted_guesses"] > 0


@CACHES
@MODELS
def test_bf16_is_as_good_as_plain_torch(tmp_path: Path, architecture: str, num_gpu_blocks: int | None) -> None:
    directory = write_tiny_model(tmp_path, architecture, **SIZES)
    with GpuLLM(Reference(directory), dtype="bfloat16", **cache_options(num_gpu_blocks)) as llm:
        llm.assert_as_good_as_plain_torch(PROMPTS)
