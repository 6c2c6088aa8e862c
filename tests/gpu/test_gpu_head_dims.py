"""Every head dim through the engine on a GPU: fp32 logits against transformers, bf16 and fp16 as good as plain torch.

Kernels that take power-of-two tiles pad the other head dims; models with one of 80, 96, 112, 160 or 192 passed the gate
and died in Triton's compiler at the first step.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checked_engine import Reference, cache_options
from gpu_llm import GpuLLM
from offload_workload import BLOCK, prompts_of
from tiny_models import write_tiny_model

from nanovllm.checkpoint.model_config import HEAD_DIMS

pytestmark = pytest.mark.gpu

head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model with this head dim, made once."""

    @cache
    def make(head_dim: int) -> Reference:
        directory: Path = tmp_path_factory.mktemp(f"head-dim-{head_dim}")
        return Reference(write_tiny_model(directory, head_dim=head_dim, max_position_embeddings=4096))

    return make


@head_dims
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_fp32_answers_are_those_of_transformers(reference_of: Any, head_dim: int, enforce_eager: bool) -> None:
    """Two slots: the paged call, streamed groups and their merges, in graphs and without."""
    with GpuLLM(reference_of(head_dim), enforce_eager=enforce_eager, **cache_options(2)) as llm:
        llm.answer_and_check(prompts_of(1, BLOCK + 1, 4 * BLOCK - 5))
        assert (llm.num_replays["streamed"] > 0) == (not enforce_eager)
        llm.assert_nothing_left()


@head_dims
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_logits_are_as_good_as_plain_torch(reference_of: Any, head_dim: int, dtype: str) -> None:
    """One long prompt for cuDNN where that is the default, short ones for the paged backend."""
    options = cache_options(None) | {"dtype": dtype, "max_num_batched_tokens": 3000}
    with GpuLLM(reference_of(head_dim), **options) as llm:
        llm.assert_as_good_as_plain_torch(prompts_of(5 * BLOCK + 30, 40, 2 * BLOCK))
        assert llm.num_replays["resident"]


def test_torch_backend_runs_eager_and_is_refused_with_graphs(reference_of: Any) -> None:
    """Its capture in a graph died in an assertion."""
    reference, options = reference_of(16), {"attn_backend": "torch", **cache_options(3)}
    with pytest.raises(ValueError, match=r"attn_backend='torch' cannot run here: .*set enforce_eager=True"):
        GpuLLM(reference, enforce_eager=False, **options)
    with GpuLLM(reference, enforce_eager=True, **options) as llm:
        llm.answer_and_check(prompts_of(1, BLOCK + 1, 4 * BLOCK - 5))
