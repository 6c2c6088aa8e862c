"""The embedding table in pinned CPU memory and the quantized output head, in engines on GPUs, with and without graphs.

fp32 answers are compared, logit by logit, with transformers on the CPU (checked_engine.Reference).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import Reference, cache_options, greedy
from gpu_llm import GpuLLM
from head_values import write_values
from offload_workload import BLOCK, prompts_of
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.layers.packed_weight import PackedWeight

pytestmark = pytest.mark.gpu

PROMPTS = prompts_of(1, BLOCK - 1, BLOCK + 1, 5 * BLOCK - 3, 700, 4 * BLOCK)
SHAPE: dict[str, Any] = {"hidden_size": 128, "num_heads": 8, "num_kv_heads": 4, "max_position_embeddings": 16384}
BOTH: dict[str, Any] = {"embedding_on_cpu": True, "quantize_head": "int8"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), vocab_size=321, **SHAPE)


@pytest.fixture(scope="module")
def reference(plain: Path) -> Reference:
    return Reference(plain)


def reference_with_head(plain: Path, directory: Path) -> Reference:
    """Answers with the values of the head in int8, for engines that load `plain`."""
    reference = Reference(write_values(plain, directory))
    reference.directory = plain
    return reference


@pytest.fixture(scope="module")
def with_head(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_with_head(plain, tmp_path_factory.mktemp("values") / "model")


def assert_table_is_pinned(llm: LLM) -> None:
    embedding = llm.runner.model.model.embed_tokens
    assert embedding._pinned is not None and embedding._pinned.is_pinned()
    assert embedding.weight.is_cuda and torch.equal(embedding.weight.cpu(), embedding._pinned)
    row, embedding._pinned[5] = embedding._pinned[5].clone(), 1
    assert (embedding.weight[5] == 1).all(), "they share memory"
    embedding._pinned[5] = row


@pytest.mark.parametrize("num_gpu_blocks", [None, 24, 3], ids=["all-GPU", "resident", "streamed"])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_embedding_in_cpu_memory_gives_the_tokens_of_transformers(
    reference: Reference, enforce_eager: bool, num_gpu_blocks: int | None
) -> None:
    options = cache_options(num_gpu_blocks) | {"embedding_on_cpu": True}
    with GpuLLM(reference, enforce_eager=enforce_eager, **options) as llm:
        assert_table_is_pinned(llm)
        for prompt in PROMPTS[:4]:
            llm.answer_and_check([prompt], max_tokens=10)
        llm.answer_and_check(PROMPTS, max_tokens=20)
        assert (llm.num_replays["resident"] > 0) != enforce_eager
        llm.assert_nothing_left()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_place_of_the_embedding_changes_no_token(plain: Path, dtype: str, load_format: str) -> None:
    answers = []
    for is_on_cpu in (False, True):
        options = {"dtype": dtype, "load_format": load_format, "embedding_on_cpu": is_on_cpu, "max_num_seqs": 6}
        with LLM(str(plain), device="cuda", skip_tokenizer_init=True, **options) as llm:  # type: ignore[arg-type]
            outputs = llm.generate(PROMPTS, greedy(24), use_tqdm=False)
            answers.append([output["token_ids"] for output in outputs])
            assert llm.model_config.embedding_on_cpu == is_on_cpu
    assert answers[0] == answers[1]


@pytest.mark.parametrize("options", [{"quantize_head": "int8"}, BOTH], ids=["head", "both"])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_quantized_head_gives_the_tokens_of_its_values(
    with_head: Reference, enforce_eager: bool, options: dict[str, Any]
) -> None:
    """In fp32, where the sums of the packed products have the error of fp32."""
    with GpuLLM(with_head, enforce_eager=enforce_eager, **options) as llm:
        assert isinstance(llm.runner.model.lm_head.weight, PackedWeight)
        for prompt in PROMPTS[:4]:
            llm.answer_and_check([prompt], max_tokens=10)
        llm.answer_and_check(PROMPTS, max_tokens=20)
        llm.assert_nothing_left()


def test_tied_tables_give_the_tokens_of_an_embedding_and_a_quantized_head(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", tied=True, **SHAPE)
    reference = reference_with_head(plain, tmp_path / "values")
    with GpuLLM(reference, **BOTH) as llm:
        assert_table_is_pinned(llm)
        llm.answer_and_check(PROMPTS, max_tokens=20)


def test_draft_head_reads_both_tables(tmp_path: Path) -> None:
    sizes = {"num_layers": 4, "hidden_size": 128, "with_mtp": True, "max_position_embeddings": 8192}
    plain = write_tiny_model(tmp_path / "plain", "qwen3_5", **sizes)  # type: ignore[arg-type]
    reference = reference_with_head(plain, tmp_path / "values")
    with GpuLLM(reference, speculation="mtp", num_speculative_tokens=4, **BOTH) as llm:
        llm.answer_and_check(PROMPTS[:4], max_tokens=20)


def test_logits_in_bf16_are_as_good_as_those_of_plain_torch(with_head: Reference, tmp_path: Path) -> None:
    """Against fp32 and the values of the head; plain torch has these values in bf16."""
    values = write_values(with_head.directory, tmp_path / "values")
    reference = Reference(values)
    with GpuLLM(with_head, dtype="bfloat16", **BOTH) as llm:
        llm.reference = reference
        llm.assert_as_good_as_plain_torch(PROMPTS)


def test_prompt_scores_are_those_of_a_cpu(plain: Path) -> None:
    """300 rows at a time are multiplied by unpacked values."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    scores = []
    for device in ("cuda", "cpu"):
        options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, **BOTH}
        with LLM(str(plain), device=device, **options) as llm:
            (output,) = llm.generate([PROMPTS[4]], params, use_tqdm=False)
        found = zip(PROMPTS[4][1:], output["prompt_logprobs"][1:], strict=True)  # type: ignore[index]
        scores.append(torch.tensor([entry[token][0] for token, entry in found]))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("num_gpu_blocks", [None, 3], ids=["all-GPU", "streamed"])
def test_two_ranks_with_both_tables_give_the_tokens_of_transformers(
    with_head: Reference, num_gpu_blocks: int | None
) -> None:
    """The ranks do not divide the vocabulary evenly."""
    options = cache_options(num_gpu_blocks) | {"tensor_parallel_size": 2, **BOTH}
    with GpuLLM(with_head, **options) as llm:
        assert_table_is_pinned(llm)
        llm.answer_and_check(PROMPTS, max_tokens=20)
        llm.assert_nothing_left()
